"""The tier `device`: preallocated memory of the learner's device or, where asked for, pinned memory of the host.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.row_layout import LINE, LONG
from replay.tiers.prefault import Pages
from replay.tiers.staged_rows import LazyRows, StagedRows

_BYTES = np.dtype(np.uint8)


class MemoryTier:
    """Rows as words of 8 bytes, which are copied in a third of the time that bytes take.

    Used by one thread, but for `read` of rows that are not written meanwhile, and on the host for `put` into rows that
    nobody reads.
    """

    name = "device"

    def __init__(self, row_bytes: int, slots: int, device: torch.device, *, on_host: bool = False) -> None:
        """Take the memory.

        Args:
            row_bytes: R.
            slots: S.
            device: the learner's, where `gather` brings rows.
            on_host: whether rows lie on the host whatever the device is.

        Raises:
            RuntimeError: there is not so much of it.
        """
        self.slots = slots
        self.slot_bytes = row_bytes
        self.device = device
        self.lies_on = torch.device("cpu") if on_host else device
        """Where the rows are."""
        self._words = _zeros((slots, row_bytes // 8), self.lies_on)
        self._on_host: NDArray[np.int64] | None = self._words.numpy() if self.lies_on.type == "cpu" else None
        self._crosses = device.type == "cuda" and self.lies_on.type == "cpu"
        self._pages: Pages | None = None
        if self._crosses and slots:
            _pin(self._words)
        elif self.lies_on.type == "cpu":
            self._pages = Pages(self._words.data_ptr(), self._words.nbytes)

    def write(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Scatter n rows in one copy."""
        self.put(slots, torch.from_numpy(rows_nR))

    def put(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Scatter n rows, from wherever they are; those on the host for rows on the host wait for no device."""
        if not len(slots):
            return
        words = rows_nR.view(torch.int64)
        if self._pages is not None and not self._pages.asked_for:
            self._pages.reach(int(slots.max() + 1) * self.slot_bytes)
        if self._on_host is not None:
            # Half the time of index_copy_, which checks more.
            self._on_host[slots] = words.numpy(force=True)
            return
        where = torch.from_numpy(slots).to(self.device)
        self._words.index_copy_(0, where, words.to(self.device, non_blocking=True))

    def read(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Gather n rows where they lie; memory keeps what was written."""
        return self._take(slots, pinned=False), np.ones(len(slots), np.bool_)

    def gather(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots, uint8 `[n, R]` on the device; from the host in one copy that nobody waits for."""
        rows_nR = self._take(slots, pinned=self._crosses)
        return rows_nR.to(self.device, non_blocking=True) if self._crosses else rows_nR

    def stage(self, slots: NDArray[np.int64]) -> StagedRows:
        """Return the rows of n slots on their way: those that have to cross to the device set out at once."""
        if self._crosses:
            return StagedRows(self.gather(slots))
        here = self._on_host
        return LazyRows(len(slots), lambda: self.gather(slots) if here is None else self._take_on_host(here, slots))

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite n rows with zeros."""
        self._words.index_fill_(0, torch.from_numpy(slots).to(self.lies_on), 0)

    def close(self) -> None:
        """Let go of the memory."""
        if self._crosses and len(self._words):
            _unpin(self._words)
        if self._pages is not None:
            self._pages.close()
        self._words, self._on_host = self._words.new_empty((0, self.slot_bytes // 8)), None

    def _take(self, slots: NDArray[np.int64], *, pinned: bool) -> Tensor:
        if self._on_host is None:
            return self._words.index_select(0, torch.from_numpy(slots).to(self.device)).view(torch.uint8)
        if pinned:
            words = torch.empty((len(slots), self._words.shape[1]), dtype=torch.int64, pin_memory=True)
            self._take_on_host(self._on_host, slots, words.numpy())
            return words.view(torch.uint8)
        return torch.from_numpy(self._take_on_host(self._on_host, slots))

    def _take_on_host(
        self, words_SW: NDArray[np.int64], slots: NDArray[np.int64], out: NDArray[np.int64] | None = None
    ) -> NDArray[np.uint8]:
        """Gather n rows.

        As fast as index_select of one thread; several wait for each other where cores are scarce. A tenth less than
        into torch's memory: numpy gets the block again that was let go of last, which is in the cache.
        """
        if self.slot_bytes >= LONG:
            # A word of each row first: copies look up their pages and wait for their beginnings one after the other,
            # these loads do so side by side.
            words_SW.reshape(-1).take(slots * words_SW.shape[1], 0, None, "clip")
        return words_SW.take(slots, 0, out, "clip").view(_BYTES)


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return words of 8 bytes; on the host numpy's, who asks for huge pages, with which a gather takes a fifth less.

    They begin with a line of the processor's cache.
    """
    if device.type == "cpu":
        spare_words = LINE // 8
        words = np.zeros(math.prod(shape) + spare_words, np.int64)
        begin = -words.ctypes.data // 8 % spare_words
        return torch.from_numpy(words[begin : begin + math.prod(shape)].reshape(shape))
    return torch.zeros(shape, dtype=torch.int64, device=device)


def _pin(words: Tensor) -> None:
    """Pin memory as it is: what torch's own pinned memory is rounded up to may be twice as much.

    It is never swapped out then, and lacking memory is found at the start.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        raise RuntimeError(f"CUDA cannot pin {words.nbytes} bytes of the host's memory (error {error})")


def _unpin(words: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(words.data_ptr())  # type: ignore[no-untyped-call]
