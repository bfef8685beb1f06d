"""The tier `device`: preallocated memory on the learner's device or, if configured, pinned memory of the host.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from replay.row_layout import LINE, LONG
from replay.tiers.prefault import Pages
from replay.tiers.staged_rows import LazyRows, StagedRows
from replay.tiers.tier import Tier

_BYTES = np.dtype(np.uint8)


class MemoryTier(Tier):
    """Rows as words of 8 bytes, which are copied in a third of the time that bytes take.

    Used by one thread, with two exceptions: any thread may `read` rows that are not written meanwhile, and on the host
    any thread may `put` rows that no thread reads.
    """

    name = "device"

    def __init__(self, row_bytes: int, slots: int, device: torch.device, *, on_host: bool = False) -> None:
        """Allocate the memory.

        Args:
            row_bytes: R.
            slots: S.
            device: the learner's, to which `gather` copies rows.
            on_host: whether rows are stored on the host, whatever the device is.

        Raises:
            RuntimeError: there is not enough memory.
        """
        self.slots = slots
        self.slot_bytes = row_bytes
        self.device = device
        self.storage = torch.device("cpu") if on_host else device
        """The device that stores the rows."""
        self._words = _zeros((slots, row_bytes // 8), self.storage)
        self._host_words: NDArray[np.int64] | None = self._words.numpy() if self.storage.type == "cpu" else None
        self._copies_to_gpu = device.type == "cuda" and self.storage.type == "cpu"
        self._pages: Pages | None = None
        if self._copies_to_gpu and slots:
            _pin(self._words)
        elif self.storage.type == "cpu":
            self._pages = Pages(self._words.data_ptr(), self._words.nbytes)

    @override
    def write(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        self.put(slots, torch.from_numpy(rows_nR))

    def put(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Scatter n rows from any device; a copy from host to host does not wait for a device."""
        if not len(slots):
            return
        words = rows_nR.view(torch.int64)
        if self._pages is not None and not self._pages.all_requested:
            self._pages.request_ahead(int(slots.max() + 1) * self.slot_bytes)
        if self._host_words is not None:
            # Takes half the time of index_copy_, which checks more.
            self._host_words[slots] = words.numpy(force=True)
            return
        where = torch.from_numpy(slots).to(self.device)
        self._words.index_copy_(0, where, words.to(self.device, non_blocking=True))

    @override
    def read(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        return self._gather(slots, pinned=False), np.ones(len(slots), np.bool_)

    def gather(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots, uint8 `[n, R]` on the device; a copy from the host is asynchronous."""
        rows_nR = self._gather(slots, pinned=self._copies_to_gpu)
        return rows_nR.to(self.device, non_blocking=True) if self._copies_to_gpu else rows_nR

    def stage(self, slots: NDArray[np.int64]) -> StagedRows:
        """Return the rows of n slots as the rows of a plan; a copy from the host to the device starts at once."""
        if self._copies_to_gpu:
            return StagedRows(self.gather(slots))
        words = self._host_words
        return LazyRows(len(slots), lambda: self.gather(slots) if words is None else self._gather_on_host(words, slots))

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        self._words.index_fill_(0, torch.from_numpy(slots).to(self.storage), 0)

    @override
    def close(self) -> None:
        if self._copies_to_gpu and len(self._words):
            _unpin(self._words)
        if self._pages is not None:
            self._pages.close()
        self._words, self._host_words = self._words.new_empty((0, self.slot_bytes // 8)), None

    def _gather(self, slots: NDArray[np.int64], *, pinned: bool) -> Tensor:
        if self._host_words is None:
            return self._words.index_select(0, torch.from_numpy(slots).to(self.device)).view(torch.uint8)
        if pinned:
            words = torch.empty((len(slots), self._words.shape[1]), dtype=torch.int64, pin_memory=True)
            self._gather_on_host(self._host_words, slots, words.numpy())
            return words.view(torch.uint8)
        return torch.from_numpy(self._gather_on_host(self._host_words, slots))

    def _gather_on_host(
        self, words_SW: NDArray[np.int64], slots: NDArray[np.int64], out: NDArray[np.int64] | None = None
    ) -> NDArray[np.uint8]:
        """Gather n rows.

        As fast as index_select with one thread; several threads wait for each other where cores are scarce. Into
        torch's memory it would take a tenth longer: numpy reuses the block that was freed last, which is in the cache.
        """
        if self.slot_bytes >= LONG:
            # Load one word of each row first: these loads overlap, while copies wait for each page and for the first
            # line of each row in turn.
            words_SW.reshape(-1).take(slots * words_SW.shape[1], 0, None, "clip")
        return words_SW.take(slots, 0, out, "clip").view(_BYTES)


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeroed words of 8 bytes; on the host from numpy, whose huge pages save a fifth of a gather.

    They begin at a line of the processor's cache.
    """
    if device.type == "cpu":
        spare_words = LINE // 8
        words = np.zeros(math.prod(shape) + spare_words, np.int64)
        begin = -words.ctypes.data // 8 % spare_words
        return torch.from_numpy(words[begin : begin + math.prod(shape)].reshape(shape))
    return torch.zeros(shape, dtype=torch.int64, device=device)


def _pin(words: Tensor) -> None:
    """Pin existing memory: torch rounds its own pinned allocations up to as much as twice the size.

    Pinned memory is never swapped out, and a lack of memory is detected at the start.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        raise RuntimeError(f"CUDA cannot pin {words.nbytes} bytes of the host's memory (error {error})")


def _unpin(words: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(words.data_ptr())  # type: ignore[no-untyped-call]
