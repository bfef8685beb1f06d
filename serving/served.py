"""A version in memory: from its directory to a warm module that answers batches.

Legend: B rows of a batch. Arrays are numpy on the host; the module lies on the deployment's device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ingest.errors import SettingsError
from ingest.schema import Schema
from learner.config import ModelSettings
from learner.errors import ModelError, VersionError
from learner.model import build_model, check_model, forward, make_task
from learner.task import Task
from learner.trained import format_trained_through
from learner.version import Manifest, Versions
from serving.tensor import Array, TensorSpec

_LONGEST_SENTENCE = 400


@dataclass(frozen=True)
class Deployment:
    """What is served, apart from how.

    Attributes:
        name: the model's name in URLs.
        folder: the folder of `pipeline.toml`; model factories are imported from it.
    """

    name: str
    schema: Schema
    model: ModelSettings
    folder: Path
    state_dir: Path
    device: torch.device

    @property
    def versions(self) -> Versions:
        """The directory that the learner publishes into."""
        return Versions(self.state_dir / "versions")

    @cached_property
    def task(self) -> Task:
        """The meaning of the model's output."""
        return make_task(self.model.task, self.folder)

    def outputs(self) -> list[TensorSpec]:
        """Describe what the task predicts, by trying it on an output of one row."""
        predictions = self.task.predict(torch.zeros((1, *self._output_shape)))
        return [TensorSpec(name, value.numpy().dtype, tuple(value.shape[1:])) for name, value in predictions.items()]

    def check(self) -> None:
        """Build the configured model once; raises ModelError when that fails, before any version exists."""
        assert self._output_shape is not None

    @cached_property
    def _output_shape(self) -> tuple[int, ...]:
        """The shape of the configured model's output for one event."""
        model = build_model(self.model.factory, self.model.args, self.folder).to(self.device)
        return check_model(model, self.task, self.schema, self.device)


class ServedVersion:
    """A loaded version. Immutable: a request that holds it is answered by it, whatever is swapped in meanwhile."""

    def __init__(self, manifest: Manifest, module: nn.Module, deployment: Deployment) -> None:
        self.manifest = manifest
        self.number = manifest.number
        self.name = str(manifest.number)
        self.trained_through = format_trained_through(manifest.trained_through)
        self._module = module
        self._deployment = deployment

    def has_learned(self, offsets: Mapping[str, int]) -> bool:
        """Whether it has learned, on each of these partitions, at least so far."""
        trained = self.manifest.trained_through
        return all(name in trained and trained[name].offset >= offset for name, offset in offsets.items())

    def run(self, features: Mapping[str, Array]) -> dict[str, Array]:
        """Answer a batch: features `[B, *shape]` in, the task's outputs `[B, ...]` out.

        Called by one thread at a time, and by the swap's before anyone else has the version.
        """
        device = self._deployment.device
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(device) for name, array in features.items()}
            predictions = self._deployment.task.predict(forward(self._module, tensors))
            return {name: value.cpu().numpy() for name, value in predictions.items()}

    def zeros(self, rows: int) -> dict[str, Array]:
        """Return features of zeros for `rows` rows."""
        return {
            feature.name: np.zeros((rows, *feature.shape), feature.dtype)
            for feature in self._deployment.schema.features
        }

    def works(self) -> bool:
        """Whether it answers a row of zeros: tells a bad input from a broken model after a failure."""
        try:
            return all(is_finite(array) for array in self.run(self.zeros(1)).values())
        except Exception:  # noqa: BLE001 - the module is the user's code, which may raise anything
            return False


def load_version(deployment: Deployment, manifest: Manifest, max_batch: int) -> ServedVersion:
    """Load a version, check it, and warm it up on batches of 1 and of `max_batch`.

    Raises:
        VersionError: a file lacks its digest, another model than `[model]` names, weights that do not fit, or a module
            that fails on zeros.
    """
    number, reference, configured = manifest.number, manifest.model, deployment.model
    if (reference.factory, reference.task) != (configured.factory, configured.task):
        raise VersionError(
            f"version {number}: it is of {reference.factory} for {reference.task}, "
            f"but [model] names {configured.factory} for {configured.task}"
        )
    weights = deployment.versions.weights(manifest)
    try:
        module = build_model(reference.factory, reference.args, deployment.folder)
        module.load_state_dict(weights, strict=True)
        module = module.to(deployment.device).eval().requires_grad_(False)
        check_model(module, deployment.task, deployment.schema, deployment.device)
        version = ServedVersion(manifest, module, deployment)
        for rows in sorted({1, max_batch}):
            _warm_up(version, rows)
    except Exception as exc:  # the factory and the module are the user's code, which may raise anything
        raise VersionError(f"version {number}: {_sentence(exc)}") from exc
    return version


def pick_device(name: str) -> torch.device:
    """Return the device of that name, for `auto` CUDA where there is one, else the CPU.

    Raises:
        SettingsError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as exc:
        raise SettingsError(f'serving.device = "{name}" cannot be used here: {_sentence(exc)}') from exc


def is_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite; true of arrays that are not floats."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _warm_up(version: ServedVersion, rows: int) -> None:
    for name, array in version.run(version.zeros(rows)).items():
        if len(array) != rows:
            raise ModelError(f"for {rows} rows of zeros, {name} has {len(array)}")
        if not is_finite(array):
            raise ModelError(f"for {rows} rows of zeros, {name} is not finite")


def _sentence(exc: BaseException) -> str:
    sentence = " ".join(str(exc).split())[:_LONGEST_SENTENCE]
    return sentence if isinstance(exc, SettingsError) else f"{type(exc).__name__}: {sentence}"
