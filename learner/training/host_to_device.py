"""Copies columns from the host to the learner's device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ingest.events.block import Array
from replay.tiers.store_stream import upload


class Transfer:
    """Copies columns to the device. On CUDA in one copy, from pinned memory in a separate stream: no host wait.

    Used by one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, columns: Sequence[Array]) -> list[Tensor]:
        """Return the columns on the device; work that is queued later sees them, and the columns may change at once."""
        if self._stream is None:
            return [torch.from_numpy(column).to(self._device) for column in columns]
        with torch.cuda.stream(self._stream):
            there = upload(columns, self._device)
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(self._stream)
        there[0].record_stream(now)  # all are views of one block
        return there
