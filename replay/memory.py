"""The tier `device`: preallocated memory of the learner's device, which is the host's where there is no other.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class MemoryTier:
    """Rows as words of 8 bytes on `device`, which are copied in a third of the time that bytes take.

    Used by one thread, but for `read` of rows that are not written meanwhile.
    """

    name = "device"

    def __init__(self, row_bytes: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.slot_bytes = row_bytes
        self.device = device
        self._words = _zeros((slots, row_bytes // 8), device)

    def write(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Scatter n rows in one copy."""
        self.put(slots, torch.from_numpy(rows_nR))

    def put(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Scatter n rows, from wherever they are."""
        if not len(slots):
            return
        words = rows_nR.view(torch.int64)
        if self.device.type == "cpu":
            # Half the time of index_copy_, which checks more.
            self._words.numpy()[slots] = words.numpy(force=True)
            return
        where = torch.from_numpy(slots).to(self.device)
        self._words.index_copy_(0, where, words.to(self.device, non_blocking=True))

    def read(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Gather n rows; memory keeps what was written."""
        return self.gather(slots), np.ones(len(slots), np.bool_)

    def gather(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots, uint8 `[n, R]` on the device."""
        if self.device.type == "cpu":
            # As fast as index_select of one thread; several wait for each other where cores are scarce.
            words = torch.empty((len(slots), self._words.shape[1]), dtype=torch.int64)
            np.take(self._words.numpy(), slots, axis=0, out=words.numpy(), mode="clip")
            return words.view(torch.uint8)
        return self._words.index_select(0, torch.from_numpy(slots).to(self.device)).view(torch.uint8)

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite n rows with zeros."""
        self._words.index_fill_(0, torch.from_numpy(slots).to(self.device), 0)

    def close(self) -> None:
        """Let go of the memory."""
        self._words = self._words.new_empty((0, self.slot_bytes // 8))


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return words of 8 bytes; on the host numpy's, who asks for huge pages, with which a gather takes a fifth less."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.int64))
    return torch.zeros(shape, dtype=torch.int64, device=device)
