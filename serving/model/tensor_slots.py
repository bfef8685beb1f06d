"""Parameters and buffers on the device which versions fill in turns, so that a swap allocates nothing.

Two slots suffice: one has the served version, the other gets the next. A third is made while requests still hold the
version before, and dropped afterwards. The tensors of a slot keep their addresses, so CUDA graphs stay valid.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.learner.model.embedding import Embeddings
from anabranch.learner.model.trained_set import (
    base_names,
    bound_tensors,
    copy_sharing_base,
    load_trained,
    trained_state,
)
from anabranch.serving.model.graphs import Graphs
from anabranch.serving.model.pieces import BeforePiece, deep_copy

_SPARE = 1
"""Slots that are kept besides those in use."""
_PIECE_BYTES = 1 << 20


class TensorSlot:
    """The parameters and buffers of one version at a time, by name."""

    def __init__(self) -> None:
        self.graphs = Graphs()
        """Captured with these tensors."""
        self._tensors: dict[str, Tensor] = {}
        self._kept: _KeptModule | None = None

    def load(
        self,
        template: nn.Module,
        weights: Mapping[str, Tensor],
        device: torch.device,
        *,
        plainly: bool,
        keep: bool = False,
        before_piece: BeforePiece = bool,
    ) -> nn.Module:
        """Return a copy of `template` on the device with `weights`, in the tensors of the version before.

        Only tensors are taken over: other attributes, and buffers that are not in `weights`, are the template's. Unless
        weights load `plainly`, nothing is taken over, and they are loaded on the CPU. A template with a base is on the
        device, and all copies share its base. `before_piece` is called before each submodule is copied. Raises
        RuntimeError when weights do not fit.

        With `keep` the module itself is used for the next version too, and only weights are copied: for modules on the
        CPU whose forward pass leaves nothing behind. The template is always the same.
        """
        if keep and self._kept is not None and self._kept.fill(weights, before_piece):
            return self._kept.module
        self._kept = None
        if not plainly:
            module = copy_sharing_base(template)
            load_trained(module, weights)
            return module if base_names(template) else module.to(device)
        module = deep_copy(template, dict[int, Any](self._taken_over(template, weights, device)), before_piece)
        if not base_names(template):
            module.to(device)
        before_piece()
        if device.type == "cuda":
            load_trained(module, _uploaded(module, weights))
            torch.cuda.current_stream(device).synchronize()  # requests run in another stream
        else:
            load_trained(module, weights)
        tensors = dict(_tensors(module))
        if [each.data_ptr() for each in tensors.values()] != [each.data_ptr() for each in self._tensors.values()]:
            self.graphs = Graphs()
        self._tensors = tensors
        if keep:
            self._kept = _KeptModule(module, template)
        return module

    def embedding(self, module: nn.Module, capture: Callable[[nn.Module], Embeddings | None]) -> Embeddings | None:
        """Return what captures the embedding of the loaded module; the hooks of a kept module are added once."""
        if self._kept is None:
            return capture(module)
        if not self._kept.embedding:
            self._kept.embedding.append(capture(module))
        return self._kept.embedding[0]

    def _taken_over(
        self, template: nn.Module, weights: Mapping[str, Tensor], device: torch.device
    ) -> dict[int, Tensor]:
        """Return what `copy.deepcopy` is to use for tensors of the template, by their id, where they fit."""
        taken: dict[int, Tensor] = {}
        storages: dict[int, int] = {}
        base = base_names(template)
        for name, own in _tensors(template):
            if name in base:
                taken[id(own)] = own
                continue
            kept = self._tensors.get(name)
            if kept is None or not _fits(kept, own, device):
                continue
            # Tensors that shared memory in the version before, and do not in the template, are not taken over.
            storage = own.untyped_storage().data_ptr()
            if storages.setdefault(kept.untyped_storage().data_ptr(), storage) != storage:
                continue
            taken[id(own)] = kept
            if name not in weights:
                with torch.no_grad():
                    kept.copy_(own)
        return taken


class _KeptModule:
    """The module of one version after the other, on the CPU."""

    def __init__(self, module: nn.Module, template: nn.Module) -> None:
        self.module = module
        self.embedding: list[Embeddings | None] = []
        self._trained = trained_state(module)
        originals, others = dict(_tensors(template)), base_names(template) | self._trained.keys()
        self._others = [(own, originals[name]) for name, own in _tensors(module) if name not in others]
        """Buffers that no version has, and those of the template."""
        registries = [each for part in module.modules() for each in (part._parameters, part._buffers)]
        self._registered = [(each, name, tensor) for each in registries for name, tensor in each.items()]

    def fill(self, weights: Mapping[str, Tensor], before_piece: BeforePiece) -> bool:
        """Copy the weights of a version into the module; return False, and change nothing, unless they are exactly
        those that it trains, and its tensors are those that were loaded."""
        own = self._trained
        if weights.keys() != own.keys() or any(_kind(own[name]) != _kind(value) for name, value in weights.items()):
            return False
        if any(registry.get(name) is not tensor for registry, name, tensor in self._registered):
            return False
        with torch.no_grad():
            for name, value in weights.items():
                before_piece()
                own[name].copy_(value)
            for buffer, original in self._others:
                before_piece()
                buffer.copy_(original)
        return True


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _uploaded(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy weights into the tensors of a module on a CUDA device, and return these instead of the weights.

    A large copy from pageable memory delays the copies of requests until it is done. This copies pieces, by a small
    page-locked buffer. Weights that do not fit their tensor byte by byte are returned as they are.
    """
    own, uploaded = dict(_tensors(module)), dict(weights)
    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    for name, value in weights.items():
        to = own.get(name)
        if to is None or not (to.is_cuda and to.is_contiguous() and value.is_contiguous()):
            continue
        if (to.shape, to.dtype) != (value.shape, value.dtype) or not to.numel():
            continue
        uploaded[name] = to.detach()
        target, source = (each.detach().reshape(-1).view(torch.uint8) for each in (to, value))
        for begin in range(0, len(target), _PIECE_BYTES):
            here = source[begin : begin + _PIECE_BYTES]
            target[begin : begin + len(here)].copy_(buffer[: len(here)].copy_(here))
    return uploaded


class TensorSlots:
    """The slots of a model. Any thread may use them, also the garbage collector.

    Versions on one base share them, whether they are served or in the shadow.
    """

    def __init__(self) -> None:
        self._free: deque[TensorSlot] = deque()
        self.taken = 0
        """How often a slot was taken."""

    def take(self) -> TensorSlot:
        """Return a free slot, or an empty one."""
        self.taken += 1
        try:
            return self._free.popleft()
        except IndexError:
            return TensorSlot()

    def put(self, slot: TensorSlot) -> None:
        """Make a slot free: no run uses its tensors any more."""
        if len(self._free) < _SPARE:
            self._free.append(slot)


def loads_plainly(module: nn.Module) -> bool:
    """Return whether loading weights copies them into parameters and buffers, and does nothing else.

    User code that takes part in loading may replace tensors, or compute other attributes from them. An attribute that
    is a view of a parameter or buffer would stay behind in the template.
    """
    if _has_views(module):
        return False
    return not any(
        each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        or type(each).set_extra_state is not nn.Module.set_extra_state
        or any(_is_overridden(type(each), method) for method in ("load_state_dict", "_load_from_state_dict"))
        for each in module.modules()
    )


def _has_views(module: nn.Module) -> bool:
    """Return whether an attribute shares the memory of a parameter or buffer without being it."""
    named = [tensor for _, tensor in _tensors(module) if tensor.numel()]
    own, memory = set(map(id, named)), {tensor.untyped_storage().data_ptr() for tensor in named}
    return any(
        id(tensor) not in own and tensor.untyped_storage().data_ptr() in memory for tensor in bound_tensors(module)
    )


def _is_overridden(kind: type[nn.Module], method: str) -> bool:
    owner = next(base for base in kind.__mro__ if method in vars(base))
    return not owner.__module__.startswith("torch.")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _fits(kept: Tensor, own: Tensor, device: torch.device) -> bool:
    return (
        type(kept) is type(own)
        and kept.device in (device, own.device)  # some buffers stay on the host
        and (kept.shape, kept.dtype, kept.layout) == (own.shape, own.dtype, own.layout)
        and kept.stride() == own.stride()
    )
