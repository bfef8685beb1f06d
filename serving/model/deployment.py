"""What all versions of a model share: schema, task, device."""

import contextlib
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import failure_of
from anabranch.core.tracing.config import TracingSettings
from ingest.events.schema import Schema
from learner.config import ModelSettings, StrategySettings
from learner.errors import VersionError
from learner.model.device import driver_fault
from learner.model.embedding import Embedding, Embeddings, TaskEmbedding
from learner.model.factory import build_on_device, check_copies, check_model, make_task
from learner.model.task import Embeds, Task
from learner.model.trained_set import base_names, copy_sharing_base, with_base, without_base
from learner.object_storage.config import StorageSettings
from learner.state_dir.bases import Bases, bases_in
from learner.state_dir.manifest_directory import SHOWN
from learner.state_dir.version import Versions
from learner.strategies.registry import build_strategy
from serving.config import PrecisionName
from serving.errors import DeviceError
from serving.model.device import HALF, device_errors
from serving.model.graphs import Capture
from serving.model.tensor_slots import TensorSlot, TensorSlots, loads_plainly
from serving.protocol.tensors import TensorSpec


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
    _shared: "SharedBases" = field(default_factory=lambda: SharedBases(), compare=False, repr=False)

    @property
    def versions(self) -> Versions:
        """The directory into which the learner publishes, or the follower copies."""
        return Versions(self.state_dir / "versions")

    @cached_property
    def task(self) -> Task:
        """The meaning of the model's output."""
        return make_task(self.model.task, self.folder)

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
    def template(self) -> "ModelTemplate":
        """The configured model, built and checked once.

        Raises:
            ModelError: it cannot be built, fails, or its output does not fit the task.
        """
        module = build_on_device(self.model, self.folder, self.device, self.schema)
        with self.autocast():
            shape = check_model(module, self.task, self.schema, self.device)
            build_strategy(self.strategy, self.model, self.task).extend(module, self.model, self.schema, self.device)
            check_copies(module, self.schema, self.device)
        self.embedding_of(copy_sharing_base(module))
        return ModelTemplate(without_base(module.cpu().eval().requires_grad_(False)), shape)

    def template_on(self, base: str | None) -> "ModelTemplate":
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


def pick_device(name: str) -> torch.device:
    """Return the device of that name, for `auto` CUDA where there is one, else the CPU.

    Raises:
        SettingsError: this machine has no such device.
        DependencyError: it has none, on a machine that has NVIDIA's driver: a device may be away for now.
        DeviceError: it has too little memory for now, or fails.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with device_errors():
            device = torch.device(name)
            if device.type == "cuda" and 0 < torch.cuda.device_count() <= (device.index or 0):
                raise SettingsError(
                    f'serving.device = "{name}" is not there: torch sees {torch.cuda.device_count()} CUDA devices'
                )
            return torch.zeros(1, device=device).device
    except DeviceError as exc:
        if _TOO_OLD not in str(exc):
            raise
        raise SettingsError(f'serving.device = "{name}" cannot be used here: {_sentence(exc)}') from exc
    except (RuntimeError, AssertionError) as exc:
        if name.startswith("cuda") and (fault := driver_fault()):
            raise DependencyError(f'serving.device = "{name}": {fault}: {_sentence(exc)}') from exc
        raise SettingsError(f'serving.device = "{name}" cannot be used here: {_sentence(exc)}') from exc


_LONGEST_SENTENCE = 400
_TOO_OLD = "no kernel image"
"""Part of CUDA's sentence about a device for which this build of torch has no code."""


_HIGHEST = -100
"""Priority of a CUDA stream: torch clamps it to the highest of the device."""


@dataclass(frozen=True)
class ModelTemplate:
    """A module on the CPU, which versions copy before they load weights: factories are slow."""

    module: nn.Module
    output_shape: tuple[int, ...]
    warmed: dict[int, set[int]] = field(default_factory=dict)
    """Batch sizes, in rows, that were warmed up, by the number of parts: torch keeps its plans for their shapes."""
    slots: TensorSlots = field(default_factory=TensorSlots)
    """The tensors on the device that versions fill in turns."""

    without_graphs: list[int] = field(default_factory=list)
    """The version with which CUDA graphs were found to be impossible, if they were."""

    @cached_property
    def loads_plainly(self) -> bool:
        """Whether versions may be loaded into the tensors of others."""
        return loads_plainly(self.module)

    def put(self, slot: TensorSlot) -> None:
        """Make a slot free: no run uses its tensors any more."""
        self.slots.put(slot)


class SharedBases:
    """The bases of this process on its device, each in one template that all versions share. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates = weakref.WeakValueDictionary[str, ModelTemplate]()
        """By SHA-256; a version keeps its template."""
        self._latest: ModelTemplate | None = None
        """Kept between two versions."""

    def template_on(self, base: str, without: ModelTemplate, bases: Bases, device: torch.device) -> ModelTemplate:
        """Return the template with a base, on the device; raises as `Deployment.template_on`."""
        with self._lock:
            template = self._templates.get(base)
            if template is None:
                try:
                    module = with_base(without.module, bases.tensors(base), device).to(device)
                except RuntimeError as exc:
                    if failure_of(exc) is not None:
                        raise
                    raise VersionError(f"its base {base[:SHOWN]!r} does not fit [model]: {exc}") from exc
                template = self._templates[base] = ModelTemplate(module, without.output_shape, without.warmed)
            self._latest = template
            return template


def _sentence(exc: BaseException) -> str:
    sentence = " ".join(str(exc).split())[:_LONGEST_SENTENCE]
    return sentence if isinstance(exc, SettingsError) else f"{type(exc).__name__}: {sentence}"
