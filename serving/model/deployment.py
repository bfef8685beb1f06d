"""What all versions of a model share: schema, task, device."""

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from anabranch.core.tracing.settings import TracingSettings
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.errors import VersionError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.embedding import Embedding, Embeddings, TaskEmbedding
from anabranch.learner.model.factory import build_on_device, check_copies, check_model, make_task
from anabranch.learner.model.task import Embeds, Task
from anabranch.learner.model.trained_set import base_names, copy_sharing_base, without_base
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.versions.format import Versions
from anabranch.serving.model.device import HALF
from anabranch.serving.model.graphs import Capture
from anabranch.serving.model.template import ModelTemplate, SharedBases
from anabranch.serving.protocol.tensors import TensorSpec
from anabranch.serving.settings import PrecisionName

_HIGHEST = -100
"""Priority of a CUDA stream: torch clamps it to the highest of the device."""


@dataclass(frozen=True)
class Deployment:
    """A model that is served: its name, schema, settings and device.

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
    """Whether a CUDA device runs serving's work first."""
    device_problem: str | None = None
    """One sentence when the CPU computes on a machine that seems to have a GPU."""
    precision: PrecisionName = "fp32"
    """Arithmetic of the model; see `use_precision`."""
    capture: Capture | None = None
    """Captures runs as CUDA graphs; None: they are not captured."""
    strategy: StrategySettings = field(default_factory=StrategySettings)
    """`learner.strategy`, which may add to the model what it trains."""
    storage: StorageSettings | None = None
    """The object store that versions come from; None: they come from the learner of `state_dir`."""
    fleet: StorageSettings | None = None
    """The object store to which servers of other hosts may report; None: there is none."""
    tracing: TracingSettings | None = None
    """`[tracing]`; None: nothing is traced."""
    source: StreamSettings | None = None
    """`[stream]`, by which `[serving.stream]` reads and decodes; None where nothing is read."""
    _shared: SharedBases = field(default_factory=SharedBases, compare=False, repr=False)

    @property
    def versions(self) -> Versions:
        """The directory into which the learner publishes, or the follower copies."""
        return Versions(self.state_dir / "versions")

    @cached_property
    def task(self) -> Task:
        """The meaning of the model's output."""
        return make_task(self.model.task, self.folder)

    @property
    def classes(self) -> int | None:
        """The classes of which a version answers the probabilities, by which it may decide; None for other tasks."""
        return self.schema.label.one_of if self.model.task == "classification" else None

    @property
    def embeds(self) -> bool:
        """Whether the model has an embedding: a module of that name, or a task that computes it."""
        return bool(self.model.embedding) or isinstance(self.task, Embeds)

    def embedding_of(self, module: nn.Module) -> Embeddings | None:
        """Capture a module's embedding; raises ModelError when it has no module of the name in `model.embedding`."""
        if self.model.embedding:
            return Embedding(module, self.model.embedding)
        if isinstance(self.task, Embeds):
            return TaskEmbedding(module, self.task, [feature.name for feature in self.schema.features])
        return None

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which work for the device is launched."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of the model's forward pass."""
        if self.precision not in HALF:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=HALF[self.precision])

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
    def template(self) -> ModelTemplate:
        """The configured model, built and checked once.

        Raises:
            ModelError: it cannot be built, fails, or its output does not fit the task.
        """
        module = build_on_device(self.model, self.folder, self.device, self.schema)
        with self.autocast():
            shape = check_model(module, self.task, self.schema, self.device)
            strategy = build_strategy(self.strategy, self.model, self.task)
            module = strategy.convert(module, ModelContext(self.device, self.schema, self.model.embedding))
            check_copies(module, self.schema, self.device)
        self.embedding_of(copy_sharing_base(module))
        return ModelTemplate(without_base(module.cpu().eval().requires_grad_(False)), shape)

    def template_on(self, base: str | None) -> ModelTemplate:
        """Return the template of versions that name this base, which is read once while a version uses it.

        Raises:
            VersionError: the base is missing, damaged, or not that of the configured model.
            OSError: it cannot be read for now.
        """
        if base is None:
            if base_names(self.template.module):
                raise VersionError("it names no base, and the model of [model] has frozen weights")
            return self.template
        return self._shared.template_on(base, self.template, bases_in(self.state_dir), self.device)

    @property
    def _output_shape(self) -> tuple[int, ...]:
        """The shape of the configured model's output for one event."""
        return self.template.output_shape
