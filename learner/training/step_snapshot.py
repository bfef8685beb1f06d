"""Snapshots of what a pass changes besides gradients: the model's buffers and torch's random generators."""

import copy
from typing import Self

import torch
from torch import Tensor, nn

_Owner = dict[str, Tensor | None]


class StepSnapshot:
    """Copies of a model's buffers and of torch's RNG state on the CPU and one device, to undo or retry passes.

    The set of modules is fixed; their buffers may be added, removed and rebound.
    """

    def __init__(self, owners: list[_Owner], device: torch.device) -> None:
        """Copy the buffers of `owners`, on the device, and the RNG state."""
        self._buffers = [
            (owner, name, buffer, buffer.clone())
            for owner in owners
            for name, buffer in owner.items()
            if buffer is not None
        ]
        self._device = device
        self._copy_rng()

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
        for owner, name, buffer, value in self._buffers:
            owner[name] = buffer.detach().copy_(value) if buffer.shape == value.shape else value.clone()

    def non_finite_buffers(self) -> list[Tensor]:
        """Return for each floating-point buffer whether a value that was finite no longer is, as a bool scalar."""
        lost = []
        for owner, name, _, value in self._buffers:
            now = owner.get(name)
            if now is not None and now.is_floating_point() and now.shape == value.shape:
                lost.append((value.isfinite() & ~now.isfinite()).any())
        return lost


class Snapshots:
    """Takes snapshots of one model on one device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._owners = [module._buffers for module in model.modules()]
        self._device = device

    def take(self) -> StepSnapshot:
        """Return a snapshot of the current state."""
        return StepSnapshot(self._owners, self._device)
