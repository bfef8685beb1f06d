"""Snapshots of what a pass changes besides gradients: the model's buffers and torch's random generators."""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Self

import torch
from torch import Tensor, nn

from anabranch.learner.model.features.learned import changed_in_passes

_Owner = dict[str, Tensor | None]


class StepSnapshot:
    """Copies of a model's buffers and of torch's RNG state on the CPU and one device, to undo or retry passes.

    The set of modules is fixed; their buffers may be added, removed and rebound. All operations take every buffer of
    one dtype in one call, since on a device each call costs more than its work.
    """

    def __init__(self, owners: Sequence[_Owner], device: torch.device) -> None:
        """Take the mappings that have the buffers of each module; `update` copies them."""
        self._owners = owners
        self._device = device
        self._named: list[tuple[_Owner, str, Tensor]] = []
        """Where each buffer was found, and the tensor itself."""
        self._values: list[Tensor] = []
        """The copy of each buffer. Their memory is used again as long as the model has the same buffers."""
        self._shapes: list[torch.Size] = []
        self._judged: list[int] = []
        """The indices of floating-point buffers that have values."""
        self._partly_finite: set[int] = set()
        """Of those, the ones to compare element by element: they had values that are not finite, such as a mask."""

    def update(self) -> Self:
        """Copy the buffers and the RNG state as they are now."""
        self._copy_rng()
        self.copy_buffers()
        return self

    def copy_buffers(self) -> None:
        """Copy the buffers as they are now. Where the model has the same ones as before, nothing is allocated."""
        if not self._named and not any(self._owners):
            return  # the usual model without buffers
        before = [buffer for _, _, buffer in self._named]
        self._named = [
            (owner, name, buffer) for owner in self._owners for name, buffer in owner.items() if buffer is not None
        ]
        buffers = [buffer for _, _, buffer in self._named]
        shapes = [buffer.shape for buffer in buffers]
        if len(buffers) != len(before) or not all(map(is_, buffers, before)) or shapes != self._shapes:
            self._shapes = []  # until the allocation, which may run out of memory
            self._values = [torch.empty_like(buffer) for buffer in buffers]
            self._judged = [i for i, buffer in enumerate(buffers) if buffer.is_floating_point() and buffer.numel()]
            self._shapes = shapes
        with torch.no_grad():
            _copy(self._values, buffers)

    def with_current_rng(self) -> Self:
        """Return a snapshot of the same buffers, and of the RNG state as it is now."""
        other = copy.copy(self)
        other._copy_rng()
        return other

    def _copy_rng(self) -> None:
        self._rng = torch.get_rng_state()
        cuda = self._device.type == "cuda"
        self._cuda_rng: Tensor | None = torch.cuda.get_rng_state(self._device) if cuda else None

    def restore(self) -> None:
        """Restore the buffers and the RNG state."""
        self.restore_buffers()
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng, self._device)

    def restore_buffers(self) -> None:
        """Restore the values of the buffers, including those that the model has rebound."""
        same_shape = []
        for index, ((owner, name, buffer), value) in enumerate(zip(self._named, self._values, strict=False)):
            if buffer.shape != value.shape:
                owner[name] = value.clone()
            else:
                owner[name] = buffer.detach() if buffer.requires_grad else buffer
                same_shape.append(index)
        with torch.no_grad():
            _copy([self._named[index][2] for index in same_shape], [self._values[index] for index in same_shape])

    def restore_buffers_where(self, skipped: Tensor) -> None:
        """Restore the values of the buffers if `skipped`, a bool scalar on their device, is true; the host does not
        wait for it. The model must have bound no other buffers."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for (_, _, buffer), value in zip(self._named, self._values, strict=True):
            by_dtype.setdefault(buffer.dtype, []).append((buffer, value))
        with torch.no_grad():
            for pairs in by_dtype.values():  # three calls for all buffers of a dtype
                now, before = (torch.cat([each.reshape(-1) for each in column]) for column in zip(*pairs, strict=True))
                kept = torch.split_with_sizes(torch.where(skipped, before, now), [each.numel() for each, _ in pairs])
                values = [value.view(buffer.shape) for value, (buffer, _) in zip(kept, pairs, strict=True)]
                torch._foreach_copy_([buffer for buffer, _ in pairs], values)

    def _current(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the judged buffers that the model has now, unless their shape or dtype is another one."""
        for index in self._judged:
            owner, name, _ = self._named[index]
            now = owner.get(name)
            if now is not None and now.is_floating_point() and now.shape == self._values[index].shape:
                yield index, now

    def magnitude(self) -> Tensor | None:
        """Return the largest magnitude in the floating-point buffers, a scalar; None for a model that has none.

        If it is finite, then no value was lost. If it is not, `lost_finite` compares the buffers element by element.
        """
        if not self._judged:
            return None
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for index, now in self._current():
            if index in self._partly_finite:
                now = torch.where(self._values[index].isfinite(), now, 0.0)
            by_dtype.setdefault(now.dtype, []).append(now)
        largest = [torch.stack(torch._foreach_norm(tensors, math.inf)).amax() for tensors in by_dtype.values()]
        if len(largest) == 1:
            return largest[0]
        return (
            torch.stack([each.float() for each in largest]).amax() if largest else torch.zeros((), device=self._device)
        )

    def lost_finite(self) -> Tensor:
        """Return whether any value of a floating-point buffer was finite and no longer is, a bool scalar."""
        lost = [(self._values[index].isfinite() & ~now.isfinite()).any() for index, now in self._current()]
        return torch.stack(lost).any() if lost else torch.zeros((), dtype=torch.bool, device=self._device)

    def expect_non_finite(self) -> None:
        """Let later snapshots of the same buffers ignore the values that are not finite in this one.

        Waits for the device; called once for a model that has such buffers.
        """
        judged = self._judged
        if not judged:
            return  # of another stage of a pipeline
        finite = torch.stack([self._values[index].isfinite().all() for index in judged]).tolist()
        self._partly_finite.update(index for index, is_finite in zip(judged, finite, strict=True) if not is_finite)


class Snapshots:
    """Takes snapshots of one model on one device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._owners = [module._buffers for module in changed_in_passes(model)]
        self._device = device
        self._of_step = StepSnapshot(self._owners, device)
        self._spare: list[StepSnapshot] = []

    def of_step(self) -> StepSnapshot:
        """Return a snapshot of the current state, which is valid until the next call: that uses its memory again."""
        return self._of_step.update()

    def kept(self) -> StepSnapshot:
        """Return a snapshot of the current state, whose memory no other one uses."""
        snapshot = StepSnapshot(self._owners, self._device)
        snapshot._partly_finite = self._of_step._partly_finite
        return snapshot.update()

    @contextlib.contextmanager
    def taken(self) -> Iterator[StepSnapshot]:
        """Yield a snapshot of the current state, whose memory later ones use again; such blocks may be nested."""
        snapshot = self._spare.pop() if self._spare else StepSnapshot(self._owners, self._device)
        snapshot.update()
        try:
            yield snapshot
        finally:
            self._spare.append(snapshot)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes, in one call a dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_dtype.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for group in by_dtype.values():
        torch._foreach_copy_(*group)
