"""Copies columns from the host to the learner's device."""

import torch
from torch import Tensor

from ingest.events.block import Array


class Transfer:
    """Copies columns to the device. On CUDA by pinned memory and a separate stream: the host does not wait.

    Used by one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, column: Array) -> Tensor:
        """Return a column on the device; work that is queued later sees it."""
        host = torch.from_numpy(column)
        if self._stream is None:
            return host.to(self._device)
        with torch.cuda.stream(self._stream):
            # Torch keeps the pinned memory until the copy is done; the column may change at once.
            there = host.pin_memory().to(self._device, non_blocking=True)
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(self._stream)
        there.record_stream(now)
        return there
