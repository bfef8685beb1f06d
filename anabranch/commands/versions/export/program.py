"""`versions export --format`: a version as a program that answers without Anabranch, by itself or in a package.

The program is traced by `torch.export`: it takes the schema's features in their order, `[B, *shape]` with any B of at
least 1, and returns what the task predicts, as serving does. Strings are ids already.
"""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.commands.versions.export.folder import new_folder
from anabranch.commands.versions.export.packages import write_card, write_mlflow, write_triton
from anabranch.commands.versions.show import Which, stored_versions, version_number
from anabranch.config.loader import Config
from anabranch.config.pipeline import Pipeline
from anabranch.core.atomic_files import write_durably
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Feature, Schema
from anabranch.learner.model.answers import Answers
from anabranch.learner.model.factory import forward
from anabranch.learner.model.task import Task
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.versions.format import Manifest
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from anabranch.serving.protocol.tensors import Array
from anabranch.serving.rollout.eligibility import misfit, requirements_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ProgramFormat = Literal["onnx", "program", "mlflow", "triton"]

_ONNX_FILE, _TORCH_FILE = "model.onnx", "model.pt2"
_ONNX = ("onnx", "onnxruntime", "onnxscript")
_EXPORTERS = ("torch.onnx", "onnx_ir", "onnxscript")
_CHECKED = (1, 2, 7, 64)
"""Rows of the batches that are compared with served answers."""
_TOLERANCE = 1e-5
"""Largest difference between two answers, absolute for numbers below 1 and relative above."""
_ONE_FILE = 1_500_000_000
"""Bytes of weights above which ONNX keeps them in a second file: Protobuf ends at 2 GiB."""


@dataclass(frozen=True)
class ExportedVersion:
    """What was written.

    Attributes:
        manifest: of the version.
        file: the program, relative to the folder.
        rows: how many answers were compared with those of the version.
        difference: the largest between two numbers, as `_TOLERANCE` counts it.
    """

    manifest: Manifest
    file: str
    rows: int
    difference: float


class ServedProgram(nn.Module):
    """A served version: features in the order of the schema in, its answers out."""

    def __init__(self, module: nn.Module, task: Task, names: Sequence[str], answers: Answers | None) -> None:
        super().__init__()
        self.module = module
        self.answers = answers
        self._task = task
        self.names = tuple(names)

    def forward(self, *features: Tensor) -> dict[str, Tensor]:
        """Return the answers for `[B, *shape]` each, by name."""
        output = forward(self.module, dict(zip(self.names, features, strict=True)))
        predictions = self._task.predict(output)
        return dict(predictions) if self.answers is None else self.answers.answer(predictions)


def export_program(config: Config, which: Which, folder: Path, form: ProgramFormat) -> ExportedVersion:
    """Write a version as a program into a new folder, with its manifest, and compare its answers with served ones.

    Raises:
        SettingsError: there is no such version, it is of another model or schema than the config's, its model cannot be
            traced, the program answers otherwise, an extra is missing, or the folder cannot be written.
        VersionError: files of the version are missing or damaged.
    """
    is_onnx = form == "onnx" or (form == "triton" and not _missing_onnx())
    if form == "onnx" and (missing := _missing_onnx()):
        raise SettingsError(
            f'--format onnx needs {" and ".join(missing)}: pip install "anabranch[onnx]"; --format program needs no '
            "extra"
        )
    opened = open_version(config, which, form)
    version, number, name = opened.version, opened.version.number, config.pipeline.name
    inputs = version.zeros(1)
    outputs = version.run(inputs)
    program = ServedProgram(version.module, opened.deployment.task, list(inputs), version.answers)
    model = Path(name) / str(number) if form == "triton" else Path()
    file = model / (_ONNX_FILE if is_onnx else _TORCH_FILE)
    with new_folder(folder) as temporary:
        (temporary / model).mkdir(parents=True, exist_ok=True)
        with _quiet():
            traced = _traced(program, _tensors(opened.batches[1]), number)
            answers = _written(traced, temporary / file, version, is_onnx=is_onnx)
            difference = opened.difference(answers)
        usage = f"`torch.export.load('{file}').module()` takes the features below, in this order."
        if form == "mlflow":
            write_mlflow(temporary, name, number, inputs, outputs)
            usage = "`mlflow.pyfunc.load_model(folder).predict(rows)` takes a frame, or arrays by name."
        elif form == "triton":
            write_triton(temporary / name, name, inputs, outputs, is_onnx=is_onnx)
            usage = "`tritonserver --model-repository folder` serves it."
        elif is_onnx:
            usage = f"`onnxruntime.InferenceSession('{file}')` takes the features below by name."
        opened.write_facts(temporary, f"{usage} Strings are ids, as `encoders` of `{MANIFEST}` says.")
    return ExportedVersion(opened.manifest, str(file), opened.rows, difference)


@dataclass(frozen=True)
class OpenedVersion:
    """A version of the config's model and schema, in memory on the CPU, and random rows to compare answers with.

    Attributes:
        config: of the pipeline.
        deployment: what answers.
        manifest: of the version.
        version: it.
        batches: features of some rows each.
    """

    config: Config
    deployment: Deployment
    manifest: Manifest
    version: ServedVersion
    batches: Sequence[Mapping[str, Array]]

    def difference(self, answers: Callable[[Mapping[str, Array]], Mapping[str, Array]]) -> float:
        """Return the largest difference from the version's answers; raises SettingsError if it is too large."""
        number = self.manifest.number
        return max(_difference(answers(batch), self.version.run(batch), number) for batch in self.batches)

    def difference_of(self, module: nn.Module) -> float:
        """Return the same of a module that answers from what it outputs."""
        program = ServedProgram(module, self.deployment.task, list(self.batches[0]), None)

        def answers(batch: Mapping[str, Array]) -> Mapping[str, Array]:
            with torch.no_grad():
                return {name: value.numpy() for name, value in program(*_tensors(batch)).items()}

        return self.difference(answers)

    @property
    def rows(self) -> int:
        """How many answers are compared."""
        return sum(_CHECKED)

    def write_facts(self, folder: Path, usage: str) -> None:
        """Write the manifest and the model card; `usage` says how the folder is loaded."""
        versions, number = self.deployment.versions, self.manifest.number
        write_durably(folder / MANIFEST, [versions.folder(number).read(MANIFEST)])
        write_card(folder, self.config.pipeline, self.manifest, versions.verdict(number), self.version.zeros(1), usage)


def open_version(config: Config, which: Which, form: str) -> OpenedVersion:
    """Load a version to export it; raises as `export_program`."""
    pipeline = config.pipeline
    _check_exportable(pipeline, form)
    versions = stored_versions(config)
    number = version_number(config, which)
    manifest = versions.manifest(number)
    if manifest.parts:
        raise SettingsError(
            f"version {number} cannot be exported as {form}: its model chooses one of {manifest.parts} parts for each "
            "event in Python; take --format safetensors"
        )
    schema = Schema(pipeline.events)
    if sentence := misfit(manifest, requirements_of(schema, pipeline.model)):
        raise SettingsError(f"version {number} cannot be exported as {form}: {sentence}")
    deployment = Deployment(
        name=pipeline.name,
        schema=schema,
        model=pipeline.model,
        folder=config.folder,
        state_dir=config.state_dir,
        device=torch.device("cpu"),
    )
    version = load_version(deployment, manifest, max(_CHECKED))
    generator = np.random.default_rng(0)
    return OpenedVersion(config, deployment, manifest, version, [_rows(schema, rows, generator) for rows in _CHECKED])


def _check_exportable(pipeline: Pipeline, form: str) -> None:
    storage, adapter = pipeline.storage, pipeline.model.adapter
    if storage is not None and storage.mode == "only" and pipeline.serving.versions_from == "state_dir":
        raise SettingsError(
            f'--format {form} reads state_dir, which has no versions with storage.mode = "only"; run it on a host that '
            'serves them, with serving.versions_from = "storage", or take --format safetensors'
        )
    if adapter is not None and adapter.base_precision == "nf4":
        raise SettingsError(
            f'--format {form} cannot hold weights of 4 bits, and model.adapter.base_precision = "nf4"; '
            "take --format safetensors"
        )


def _missing_onnx() -> list[str]:
    return [name for name in _ONNX if find_spec(name) is None]


def _traced(program: ServedProgram, features: Sequence[Tensor], number: int) -> "ExportedProgram":
    """Trace a program for any number of rows."""
    rows = torch.export.Dim("rows", min=1)
    try:
        with torch.no_grad():
            return torch.export.export(
                program.eval(), tuple(features), dynamic_shapes={"features": tuple({0: rows} for _ in features)}
            )
    except Exception as exc:  # the module is the user's code, which may raise anything
        raise SettingsError(
            f"version {number} cannot be exported as a program: torch.export cannot trace the model, such as where "
            f"values of the input decide what is computed: {_first_line(exc)}"
        ) from exc


def _written(program: "ExportedProgram", path: Path, version: ServedVersion, *, is_onnx: bool) -> Any:
    """Write a program, and return a function from features to answers that runs what was written."""
    names = list(version.zeros(1))
    if not is_onnx:
        torch.export.save(program, path)
        module = torch.export.load(path).module()
        return lambda batch: {name: value.numpy() for name, value in module(*_tensors(batch)).items()}
    import onnxruntime

    outputs = list(version.run(version.zeros(1)))
    try:
        converted = torch.onnx.export(program, dynamo=True, input_names=names, output_names=outputs, verbose=False)
        assert converted is not None
        size = sum(value.nbytes for value in program.state_dict.values())
        converted.save(path, external_data=size > _ONE_FILE)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as exc:  # operators that ONNX lacks, or that the runtime refuses, in as many forms as there are
        raise SettingsError(
            f"version {version.number} cannot be exported to ONNX; try --format program: {_first_line(exc)}"
        ) from exc
    return lambda batch: dict(zip(outputs, session.run(outputs, dict(batch)), strict=True))


def _difference(found: Mapping[str, Array], expected: Mapping[str, Array], number: int) -> float:
    """Return the largest difference between answers; raises SettingsError above `_TOLERANCE`."""
    largest = 0.0
    for name, value in expected.items():
        other = np.asarray(found[name])
        if other.shape != value.shape:
            raise SettingsError(f"the export of version {number} answers {name} {other.shape} instead of {value.shape}")
        same = other == value
        if value.dtype.kind != "f":
            largest = largest if same.all() else math.inf
            continue
        a, b = other.astype(np.float64), value.astype(np.float64)
        with np.errstate(invalid="ignore"):  # equal infinities have no difference
            relative = np.where(same, 0, np.abs(a - b) / np.maximum(1, np.abs(b)))
        largest = max(largest, float(relative.max(initial=0)))
    if not largest <= _TOLERANCE:
        raise SettingsError(
            f"the export of version {number} answers otherwise than the version, by {largest:.2g}; nothing was written"
        )
    return largest


def _rows(schema: Schema, rows: int, generator: np.random.Generator) -> dict[str, Array]:
    """Return random features of `rows` events that the schema allows: floats of variance 1, and any id of a string."""
    return {feature.name: _column(feature, (rows, *feature.column_shape), generator) for feature in schema.features}


def _column(feature: Feature, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    kind = feature.dtype.kind
    if kind == "f":
        return feature.within(generator.standard_normal(shape)).astype(feature.dtype)
    if feature.encoder is not None:
        return generator.integers(0, feature.encoder.size, shape).astype(feature.dtype)
    if kind == "b":
        return generator.random(shape) < 1 / 2
    # Integers may be indices: between the bounds, or the filler alone.
    if feature.max is None:
        return np.full(shape, feature.filler, feature.dtype)
    return generator.integers(int(feature.filler), int(feature.max), shape, endpoint=True).astype(feature.dtype)


def _tensors(batch: Mapping[str, Array]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in batch.values()]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' log off the terminal."""
    loggers = [logging.getLogger(name) for name in _EXPORTERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _first_line(exc: BaseException) -> str:
    lines = [line for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else ''}"
