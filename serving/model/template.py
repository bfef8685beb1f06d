"""The modules that versions copy before they load weights: that of the settings, and one for each base in use."""

import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from anabranch.core.failures import failure_of
from anabranch.learner.errors import VersionError
from anabranch.learner.model.trained_set import with_base
from anabranch.learner.state_dir.bases import Bases
from anabranch.learner.state_dir.folders import SHOWN
from anabranch.serving.model.tensor_slots import TensorSlot, TensorSlots, loads_plainly


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
