"""The tier `device`: preallocated memory of the learner's device, which is the host's where there is no other.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class MemoryTier:
    """Rows as uint8 `[S, R]` on `device`. Used by one thread, but for `read` of rows that are not written meanwhile."""

    name = "device"

    def __init__(self, row_bytes: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.slot_bytes = row_bytes
        self.device = device
        self._rows_SR = torch.zeros((slots, row_bytes), dtype=torch.uint8, device=device)

    def write(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Scatter n rows in one copy."""
        self.put(slots, torch.from_numpy(rows_nR))

    def put(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Scatter n rows, from wherever they are."""
        where = torch.from_numpy(slots).to(self.device)
        self._rows_SR.index_copy_(0, where, rows_nR.to(self.device, non_blocking=True))

    def read(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Gather n rows; memory keeps what was written."""
        rows_nR = self._rows_SR.index_select(0, torch.from_numpy(slots).to(self.device))
        return rows_nR, np.ones(len(slots), np.bool_)

    def close(self) -> None:
        """Let go of the memory."""
        self._rows_SR = self._rows_SR.new_empty((0, self.slot_bytes))
