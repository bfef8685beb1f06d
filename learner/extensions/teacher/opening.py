"""Builds the teacher that `[model.teacher]` names."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Feature, Schema
from anabranch.learner.errors import ModelError, TeacherError, VersionError
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.evaluate.scoring import output_of_each
from anabranch.learner.extensions.teacher.endpoint import EndpointTeacher
from anabranch.learner.extensions.teacher.extension import Teacher, without_unusable
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.factory import build_on_device, forward, sample
from anabranch.learner.model.task import Task
from anabranch.learner.model.trained_set import load_trained, with_base
from anabranch.learner.settings.model import ModelSettings, TeacherSettings, TeacherVersion
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import Versions, other_model, reference_to

_ROWS = 3


class ModuleTeacher(Teacher):
    """A teacher in this process: a frozen module on the device of the steps, which takes the named features.

    It runs in evaluation mode and in chunks, before each of which it yields to requests. A step waits until its events
    are through: that is compute like the step's own, and ends. On CUDA it runs on a stream of the lowest priority.
    """

    timeout: timedelta | None = None

    def __init__(
        self, name: str, module: nn.Module, features: Sequence[str], shape: Sequence[int], chunks: Chunks
    ) -> None:
        self.name = name
        # Two threads must not launch work on Metal at once.
        self.threads = 0 if chunks.device.type == "mps" else 1
        self._module = module.eval().requires_grad_(False)
        self._features = features
        self._shape = shape
        self._chunks = chunks

    @override
    def answer(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        try:
            with self._chunks.on_stream():
                output_N = output_of_each(self._module, self._features, columns, self._shape, self._chunks)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            output_N = None
        if output_N is None:  # after the handler, since the error references tensors
            raise TeacherError(f"{self.name} has too little memory on {self._chunks.device}")
        output_N = without_unusable(output_N)
        if np.isnan(output_N.reshape(len(output_N), -1)).any(axis=1).all():
            raise TeacherError(
                f"{self.name} raises, or returns numbers that are not finite, for {len(output_N)} events"
            )
        return output_N


def open_teacher(
    settings: TeacherSettings,
    model: ModelSettings,
    schema: Schema,
    task: Task,
    shape: tuple[int, ...],
    device: torch.device,
    step_size: int,
    *,
    folder: Path,
    state_dir: Path,
    before_chunk: Callable[[], object] = bool,
    deterministic: bool = False,
) -> Teacher:
    """Return the teacher; one with `url` is not asked anything yet.

    Args:
        settings: `[model.teacher]`.
        model: `[model]`.
        schema: of the events.
        task: the meaning of the student's output, and of the teacher's.
        shape: of the student's output for one event, which the teacher's has too.
        device: of the steps.
        step_size: new events of a full step of all ranks.
        folder: the config's, which paths are relative to.
        state_dir: of this pipeline.
        before_chunk: called before each chunk of a module's work on the device; waits while requests need it.
        deterministic: whether the same events have to be answered in the same chunks.

    Raises:
        ModelError: the module cannot be built, fails, or its output does not have the shape.
        VersionError: there is no such version, or it is damaged or of another model.
    """
    names = settings.features or [feature.name for feature in schema.features]
    features = [feature for feature in schema.features if feature.name in names]
    if settings.url is not None:
        return EndpointTeacher(settings, features, task, shape, step_size, folder)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if settings.version is not None:
            name, module = _of_version(settings.version, model, schema, features, device, folder, state_dir)
        else:
            assert settings.factory is not None
            name = f"the teacher {settings.factory}"
            module = _built(
                ModelSettings(factory=settings.factory, args=settings.args), folder, device, "model.teacher"
            )
    _check_module(module, name, schema, features, task, shape, device)
    try:
        precision = choose_precision(settings.precision, device)
    except SettingsError as exc:
        raise SettingsError(str(exc).replace("learner.precision", "model.teacher.precision")) from exc
    chunks = Chunks(device, precision, before_chunk, fixed=deterministic)
    return ModuleTeacher(name, module, [feature.name for feature in features], shape, chunks)


def _built(model: ModelSettings, folder: Path, device: torch.device, key: str) -> nn.Module:
    try:
        return build_on_device(model, folder, device)
    except ModelError as exc:
        raise ModelError(str(exc).replace("model.", f"{key}.")) from exc


def _of_version(
    version: TeacherVersion,
    model: ModelSettings,
    schema: Schema,
    features: Sequence[Feature],
    device: torch.device,
    folder: Path,
    state_dir: Path,
) -> tuple[str, nn.Module]:
    """Return what messages call a version, and its module with its weights."""
    path = (state_dir if version.state_dir is None else folder / version.state_dir) / "versions"
    versions = Versions(path)
    number = version.number or versions.state().serving
    if number is None:
        raise VersionError(
            f"model.teacher.version: no version in {path} is served yet; name one with model.teacher.version.number, "
            "or let its pipeline serve one first"
        )
    manifest = versions.manifest(number)
    own = model
    if version.factory is not None:
        own = ModelSettings(factory=version.factory, args=version.args, task=model.task, adapter=version.adapter)
    refusal = other_model(manifest.model, reference_to(own))
    if refusal is not None:
        raise VersionError(
            f"model.teacher.version: version {number} in {path} is not of this model: {refusal}; set factory, args and "
            "adapter of model.teacher.version to those of its pipeline"
        )
    for feature in features:
        if manifest.encoders.get(feature.name) != schema.encoders.get(feature.name):
            raise VersionError(
                f"model.teacher.version: version {number} in {path} has another encoder of {feature.name} than "
                f"schema.features.{feature.name}.encode; use the same, or leave the feature out of "
                "model.teacher.features"
            )
    if manifest.parts:
        raise VersionError(
            f"model.teacher.version: version {number} in {path} has grown to {manifest.parts} parts, which a teacher "
            "cannot have; name one of a pipeline with another strategy"
        )
    module = _built(own, folder, device, "model.teacher.version" if version.factory is not None else "model")
    try:
        if manifest.base is not None:
            module = with_base(module, bases_in(path.parent).tensors(manifest.base), device)
        load_trained(module, versions.weights(manifest))
    except RuntimeError as exc:
        raise VersionError(
            f"model.teacher.version: version {number} in {path} does not fit its factory: {in_one_line(exc)}"
        ) from exc
    return f"the teacher, version {number} of {path}", module


def _check_module(
    module: nn.Module,
    name: str,
    schema: Schema,
    features: Sequence[Feature],
    task: Task,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Raise ModelError unless the module returns outputs that fit the task, of the student's shape."""
    zeros = sample(schema, _ROWS, device)
    taken = {feature.name: zeros[feature.name] for feature in features}
    try:
        with torch.inference_mode():
            output_B = forward(module.eval(), taken)
            task.check(output_B, schema.label, _ROWS)
    except Exception as exc:  # the user's own code may raise anything
        given = ", ".join(f"{one.name} {[_ROWS, *one.column_shape]} torch.{one.dtype}" for one in features)
        sentence = str(exc).replace("model.factory: ", "") if isinstance(exc, ModelError) else in_one_line(exc)
        raise ModelError(
            f"model.teacher: {name} fails on {given}: {sentence}; model.teacher.features names what it takes"
        ) from exc
    if tuple(output_B.shape[1:]) != shape:
        raise ModelError(
            f"model.teacher: {name} returns {list(output_B.shape[1:])} for an event, and the model that learns from it "
            f"{list(shape)}; they have to be alike"
        )
