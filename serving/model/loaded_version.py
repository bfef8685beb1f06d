"""A version in memory: from its directory to a warm module that answers batches.

Legend: B rows of a batch. Arrays are numpy on the host; the module lies on the deployment's device.
"""

import contextlib
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from learner.config import ModelSettings
from learner.errors import ModelError, VersionError
from learner.model.embedding import Embedding, Embeddings, TaskEmbedding
from learner.model.factory import build_model, check_model, forward, make_task
from learner.model.task import Embeds, Task
from learner.state_dir.trained_through import format_trained_through
from learner.state_dir.version import Manifest, Versions, other_model, reference_to
from serving.protocol.codec import EMBEDDING
from serving.protocol.tensors import Array, TensorSpec

_LONGEST_SENTENCE = 400
_MOST_SIZES = 256
_WARM_UP = timedelta(seconds=1)
_WORKS_FOR = timedelta(seconds=1)
_HIGHEST = -100
"""Of the priorities of CUDA streams: torch takes the highest that the device has for any beyond it."""


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
    stream_priority: bool = True
    """Whether a CUDA device is to take serving's work first."""

    @property
    def versions(self) -> Versions:
        """The directory that the learner publishes into."""
        return Versions(self.state_dir / "versions")

    @cached_property
    def task(self) -> Task:
        """The meaning of the model's output."""
        return make_task(self.model.task, self.folder)

    @property
    def embeds(self) -> bool:
        """Whether the model has an embedding: a module of that name, or a task that knows it."""
        return bool(self.model.embedding) or isinstance(self.task, Embeds)

    def embedding_of(self, module: nn.Module) -> Embeddings | None:
        """Listen to a module's embedding; raises ModelError when it has no module of the name in `model.embedding`."""
        if self.model.embedding:
            return Embedding(module, self.model.embedding)
        if isinstance(self.task, Embeds):
            return TaskEmbedding(module, self.task, [feature.name for feature in self.schema.features])
        return None

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the device is given work."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        if self.device.type != "cuda" or not self.stream_priority:
            return None
        return torch.cuda.Stream(self.device, priority=_HIGHEST)  # type: ignore[no-untyped-call]

    def outputs(self) -> list[TensorSpec]:
        """Describe what the task predicts, by trying it on an output of one row."""
        predictions = self.task.predict(torch.zeros((1, *self._output_shape)))
        return [TensorSpec(name, value.numpy().dtype, tuple(value.shape[1:])) for name, value in predictions.items()]

    def check(self) -> None:
        """Build the configured model once; raises ModelError when that fails, before any version exists."""
        assert self._output_shape is not None

    @cached_property
    def pattern(self) -> "_Pattern":
        """The configured model, built and checked once.

        Raises:
            ModelError: it cannot be built, fails, or its output does not fit the task.
        """
        module = build_model(self.model.factory, self.model.args, self.folder).to(self.device)
        shape = check_model(module, self.task, self.schema, self.device)
        self.embedding_of(copy.deepcopy(module))
        return _Pattern(module.cpu().eval().requires_grad_(False), shape)

    @property
    def _output_shape(self) -> tuple[int, ...]:
        """The shape of the configured model's output for one event."""
        return self.pattern.output_shape


@dataclass(frozen=True)
class _Pattern:
    """A module on the CPU whose weights are of no version; versions are copies, since factories take long."""

    module: nn.Module
    output_shape: tuple[int, ...]
    warmed: set[int] = field(default_factory=set)
    """Batches, by rows, that a version has answered: torch keeps what it has planned for their shapes."""


class ServedVersion:
    """A loaded version. Immutable: a request that holds it is answered by it, whatever is swapped in meanwhile."""

    def __init__(self, manifest: Manifest, module: nn.Module, deployment: Deployment) -> None:
        self.manifest = manifest
        self.number = manifest.number
        self.name = str(manifest.number)
        self.trained_through = format_trained_through(manifest.trained_through)
        self._module = module
        self._embedding = deployment.embedding_of(module)
        self._deployment = deployment
        self._works, self._works_until = True, float("-inf")

    def has_learned(self, offsets: Mapping[str, int]) -> bool:
        """Whether it has learned, on each of these partitions, at least so far."""
        trained = self.manifest.trained_through
        return all(name in trained and trained[name].offset >= offset for name, offset in offsets.items())

    def run(self, features: Mapping[str, Array], embed: bool = False) -> dict[str, Array]:
        """Answer a batch: features `[B, *shape]` in, the task's outputs `[B, ...]` out, with the embedding if `embed`.

        Called by one thread at a time, and by the swap's before anyone else has the version. The embedding is float32
        `[B, D]`; the deployment says whether there is one.
        """
        device = self._deployment.device
        with torch.inference_mode(), self._deployment.stream():
            tensors = {name: torch.from_numpy(array).to(device) for name, array in features.items()}
            if embed and self._embedding is not None:
                self._embedding.listen()
            predictions = self._deployment.task.predict(forward(self._module, tensors))
            if embed and self._embedding is not None:
                predictions = {**predictions, EMBEDDING: self._embedding.heard()}
            return {name: value.cpu().numpy() for name, value in predictions.items()}

    def zeros(self, rows: int) -> dict[str, Array]:
        """Return features of zeros for `rows` rows, or of what is nearest to zero where that is not allowed."""
        return {
            feature.name: np.full((rows, *feature.shape), feature.filler, feature.dtype)
            for feature in self._deployment.schema.features
        }

    def works(self) -> bool:
        """Whether it answers a row of zeros: tells a bad input from a broken model after a failure.

        Tried once a second at most: bad inputs may come often.
        """
        now = time.monotonic()
        if now >= self._works_until:
            self._works_until = now + _WORKS_FOR.total_seconds()
            self._works = self._answers_zeros()
        return self._works

    def _answers_zeros(self) -> bool:
        try:
            return all(is_finite(array) for array in self.run(self.zeros(1)).values())
        except Exception:  # noqa: BLE001 - the module is the user's code, which may raise anything
            return False


def load_version(deployment: Deployment, manifest: Manifest, max_batch: int) -> ServedVersion:
    """Load a version, check it, and warm it up on batches of 1 and of `max_batch`, the first on all sizes between too.

    What torch plans for a shape it keeps for the versions to come. A large model's first version does not wait until
    all sizes are warm: they go on with the next ones.

    Raises:
        VersionError: a file lacks its digest, another model than `[model]` names, weights that do not fit, or a module
            that fails on zeros.
    """
    number = manifest.number
    if (other := other_model(manifest.model, reference_to(deployment.model))) is not None:
        raise VersionError(f"version {number}: {other}")
    weights = deployment.versions.weights(manifest)
    try:
        pattern = deployment.pattern
        module = copy.deepcopy(pattern.module)
        module.load_state_dict(weights, strict=True)
        version = ServedVersion(manifest, module.to(deployment.device), deployment)
        _warm_up(version, 1)
        _warm_up(version, max_batch)
        _warm_up_sizes(version, max_batch, pattern.warmed)
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


def _warm_up_sizes(version: ServedVersion, max_batch: int, warmed: set[int]) -> None:
    """Warm up on the sizes that no version has been warmed up on, as far as the time for it goes."""
    end = time.monotonic() + _WARM_UP.total_seconds()
    for rows in range(2, min(max_batch, _MOST_SIZES)):
        if rows not in warmed:
            _warm_up(version, rows)
            warmed.add(rows)
            if time.monotonic() > end:
                return


def _warm_up(version: ServedVersion, rows: int) -> None:
    for name, array in version.run(version.zeros(rows)).items():
        if len(array) != rows:
            raise ModelError(f"for {rows} rows of zeros, {name} has {len(array)}")
        if not is_finite(array):
            raise ModelError(f"for {rows} rows of zeros, {name} is not finite")


def _sentence(exc: BaseException) -> str:
    sentence = " ".join(str(exc).split())[:_LONGEST_SENTENCE]
    return sentence if isinstance(exc, SettingsError) else f"{type(exc).__name__}: {sentence}"
