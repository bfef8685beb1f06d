"""The tier `device`: preallocated memory on the learner's device or, if configured, pinned memory of the host.

Work on a device is queued in the store's stream. Out of memory, it continues in pieces, or on the host.

Legend: S slots, R bytes of a row, n rows of a call, W words of a row.
"""

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.block import Array
from anabranch.replay.row_layout import LINE, LONG
from anabranch.replay.tiers.staged_rows import LazyRows, MissingRows, StagedRows
from anabranch.replay.tiers.store_stream import StoreStream, in_pieces
from anabranch.replay.tiers.tier import Tier

_WRITTEN_BYTES = 16_000_000
"""Most bytes of the rows that are copied to the device at once."""
_READ_BYTES = 64_000_000
"""Most bytes of the rows that are gathered for the host at once."""


class DeviceRows:
    """S rows as words of 8 bytes. `read` may be called by any thread, for rows that are not written meanwhile."""

    def __init__(self, row_bytes: int, slots: int, stream: StoreStream) -> None:
        """Allocate the rows, all zero; raises RuntimeError when there is not enough memory."""
        self._row_bytes = row_bytes
        self._stream = stream
        self._reader = StoreStream(stream.device)
        with stream.work():
            self.words = torch.zeros((slots, row_bytes // 8), dtype=torch.int64, device=stream.device)

    def put(self, slots: NDArray[np.int64], words_nW: Tensor) -> None:
        """Scatter n rows, int64 `[n, W]`, from any device."""

        def put_part(part: slice) -> None:
            with self._stream.work():
                if words_nW.device.type == "cpu":
                    where, words = self._stream.upload(slots[part], words_nW[part].numpy())
                else:
                    (where,), words = self._stream.upload(slots[part]), words_nW[part]
                self.words.index_copy_(0, where, words)

        if words_nW.device.type != "cpu":
            self._stream.take(words_nW)
        in_pieces(put_part, len(slots), max(1, _WRITTEN_BYTES // self._row_bytes))

    def send(self, slots: NDArray[np.int64]) -> Tensor | None:
        """Return n slots on the device, for `gather`; None where it has no memory for them."""
        try:
            with self._stream.work():
                (where,) = self._stream.upload(slots)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            return None
        return where

    def gather(self, slots: NDArray[np.int64] | Tensor) -> Tensor:
        """Return the rows of n slots, which may be on the device, uint8 `[n, R]`, for use in the store's stream."""
        with self._stream.work():
            where = slots if isinstance(slots, Tensor) else self._stream.upload(slots)[0]
            return self.words.index_select(0, where).view(torch.uint8)

    def read(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots on the host, uint8 `[n, R]`; does not wait for writes queued after the call."""
        rows_nR = torch.empty((len(slots), self._row_bytes), dtype=torch.uint8)

        def read_part(part: slice) -> None:
            with self._reader.work():
                (where,) = self._reader.upload(slots[part])
                self._reader.download(self.words.index_select(0, where).view(torch.uint8), rows_nR[part])

        self._reader.follow(self._stream)
        in_pieces(read_part, len(slots), max(1, _READ_BYTES // self._row_bytes))
        return rows_nR

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite the rows of n slots with zeros."""

        def erase_part(part: slice) -> None:
            with self._stream.work():
                (where,) = self._stream.upload(slots[part])
                self.words.index_fill_(0, where, 0)

        in_pieces(erase_part, len(slots), max(1, len(slots)))


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
            device: the learner's, to which `copy` and `stage` bring rows.
            on_host: whether rows are stored on the host, whatever the device is.

        Raises:
            RuntimeError: there is not enough memory.
        """
        self.slots = slots
        self.slot_bytes = row_bytes
        self.device = device
        self.storage = torch.device("cpu") if on_host else device
        """The device that stores the rows."""
        self.stream = None if is_host(device) else StoreStream(device)
        """In which rows are written and gathered; None where the device is the host."""
        self.by_host = on_host or self.stream is None
        """Whether the host stores the rows."""
        self._rows = DeviceRows(row_bytes, slots, self.stream) if self.stream is not None and not on_host else None
        self.gathers_ahead = self._rows is not None
        """Whether the rows of `stage` stay in slots of a device until `prefetch`."""
        self._words = self._rows.words if self._rows is not None else _zeros((slots, row_bytes // 8))
        self._host_words: NDArray[np.int64] | None = self._words.numpy() if self._rows is None else None
        self._copies_to_gpu = device.type == "cuda" and on_host
        self._pages: Pages | None = None
        if self._copies_to_gpu and slots:
            _pin(self._words)
        elif self._rows is None:
            self._pages = Pages(self._words.data_ptr(), self._words.nbytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the learner's device; 0 where rows are stored on the host of a CUDA device."""
        return 0 if self._copies_to_gpu else self.slots * self.slot_bytes

    @override
    def write(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        self.put(slots, torch.from_numpy(rows_nR))

    def put(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Scatter n rows from any device; a copy from the host does not wait for a device."""
        if not len(slots):
            return
        words = rows_nR.view(torch.int64)
        if self._pages is not None and not self._pages.all_requested:
            self._pages.request_ahead(int(slots.max() + 1) * self.slot_bytes)
        if self._host_words is not None:
            # Takes half the time of index_copy_, which checks more.
            self._host_words[slots] = words.numpy(force=True)
            return
        assert self._rows is not None
        self._rows.put(slots, words)

    @override
    def read(self, slots: NDArray[np.int64], _identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        return self._read(slots), np.ones(len(slots), np.bool_)

    def stage_each(self, slots: NDArray[np.int64], sizes: Sequence[int]) -> list[StagedRows]:
        """Return the rows of n slots as those of plans of these sizes; slots of a device are sent to it at once."""
        begins = np.cumsum([0, *sizes]).tolist()
        parts = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
        where = None if self._rows is None or not len(slots) else self._rows.send(slots)
        return [self.stage(slots[part], None if where is None else where[part]) for part in parts]

    def stage(self, slots: NDArray[np.int64], where: Tensor | None = None) -> StagedRows:
        """Return the rows of n slots as the rows of a plan; a copy from the host to the device starts at once.

        `where`: the slots on the device, if they are there.
        """
        if (rows := self._rows) is not None:
            return LazyRows(slots, lambda slots: rows.gather(slots), lambda slots: rows.read(slots), self.stream, where)
        if self.stream is not None:
            return self.copy(slots)
        assert self._host_words is not None
        return LazyRows(slots, partial(self._gather_on_host, self._host_words), self._read)

    def copy(self, slots: NDArray[np.int64], missing: MissingRows | None = None) -> StagedRows:
        """Return a copy of the rows of n slots as the rows of a plan.

        It is on the host where the device has no memory for it, until the plan is sampled. The rows of `missing` are
        still to be read; any slots may be named for them.
        """
        all_missing = missing is not None and len(missing.positions) == len(slots)
        return StagedRows(self._gather_or_read(slots, all_missing=all_missing), missing, self.stream)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return arrays of the host on the device, in one copy, for work that is queued later."""
        if self.stream is None:
            return [torch.from_numpy(array) for array in arrays]
        with self.stream.work():
            tensors = self.stream.upload(*arrays)
        ready = self.stream.record()
        return [self.stream.hand_over(tensor, ready) for tensor in tensors]

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        if self._rows is not None:
            self._rows.erase(slots)
        else:
            self._words.index_fill_(0, torch.from_numpy(slots), 0)

    @override
    def close(self) -> None:
        if self._copies_to_gpu and len(self._words):
            _unpin(self._words)
        if self._pages is not None:
            self._pages.close()
        self._words, self._host_words = self._words.new_empty((0, self.slot_bytes // 8)), None
        if self._rows is not None:
            self._rows.words = self._words

    def _read(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots on the host."""
        if self._rows is not None:
            return self._rows.read(slots)
        assert self._host_words is not None
        return torch.from_numpy(self._gather_on_host(self._host_words, slots))

    def _gather(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots on a device that is not the host, in the store's stream."""
        if self._rows is not None:
            return self._rows.gather(slots)
        assert self._host_words is not None
        assert self.stream is not None
        words = torch.empty((len(slots), self._words.shape[1]), dtype=torch.int64, pin_memory=self._copies_to_gpu)
        self._gather_on_host(self._host_words, slots, words.numpy())
        with self.stream.work():
            return self.stream.send(words).view(torch.uint8)

    def _gather_or_read(self, slots: NDArray[np.int64], *, all_missing: bool) -> Tensor:
        """Return the rows of n slots on the device, or on the host where the device has no memory for them.

        `all_missing`: their values do not matter.
        """
        shape = len(slots), self.slot_bytes
        if self.stream is None:
            return torch.empty(shape, dtype=torch.uint8) if all_missing else self._read(slots)
        try:
            if not all_missing:
                return self._gather(slots)
            with self.stream.work():
                return torch.empty(shape, dtype=torch.uint8, device=self.device)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
        torch.cuda.empty_cache()
        return torch.empty(shape, dtype=torch.uint8) if all_missing else self._read(slots)

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


def is_host(device: torch.device) -> bool:
    """Return whether a device has the host's memory."""
    return device.type == "cpu"


def _zeros(shape: tuple[int, int]) -> Tensor:
    """Return zeroed words of 8 bytes on the host, from numpy, whose huge pages save a fifth of a gather.

    They begin at a line of the processor's cache.
    """
    spare_words = LINE // 8
    words = np.zeros(math.prod(shape) + spare_words, np.int64)
    begin = -words.ctypes.data // 8 % spare_words
    return torch.from_numpy(words[begin : begin + math.prod(shape)].reshape(shape))


def _pin(words: Tensor) -> None:
    """Pin existing memory: torch rounds its own pinned allocations up to as much as twice the size.

    Pinned memory is never swapped out, and a lack of memory is detected at the start.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        raise RuntimeError(f"CUDA cannot pin {words.nbytes} bytes of the host's memory (error {error})")


def _unpin(words: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(words.data_ptr())  # type: ignore[no-untyped-call]


_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: creates pages as a write does, and leaves their contents unchanged."""
_AHEAD_BYTES = 8_000_000
_PORTION_BYTES = 2 << 20
_PAGE = 4096


class Pages:
    """The pages of a block of memory that is written roughly in ascending order.

    If the system cannot create pages ahead, or the memory is small, each page is created when it is written.
    """

    def __init__(self, address: int, size: int) -> None:
        """Take `size` bytes from an address on, which must stay allocated until `close`."""
        self._begin = -(-address // _PAGE) * _PAGE
        self._end = (address + size) // _PAGE * _PAGE
        self._requested = self._begin
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if sys.platform == "linux" and self._end - self._begin > _PORTION_BYTES:
            self._thread = threading.Thread(target=self._create, name="pages", daemon=True)
            self._thread.start()
            self.request_ahead(0)

    @property
    def all_requested(self) -> bool:
        """Whether no page is left to request."""
        return self._thread is None or self._requested == self._end

    def request_ahead(self, size: int) -> None:
        """Have the pages created that follow the first `size` bytes, which are written next. Any thread may call it."""
        end = min(self._end, self._begin + size + _AHEAD_BYTES)
        # In portions, so that a writer does not wake the thread each time.
        if end > self._requested + _PORTION_BYTES or end == self._end:
            with self._changed:
                self._requested = max(end, self._requested)
                self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the last portion is created."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _create(self) -> None:
        # The module mmap would keep the GIL during the call.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        created = self._begin
        while created < self._end:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or created < self._requested)  # noqa: B023 called at once
            if self._closed or madvise(created, min(_PORTION_BYTES, self._end - created), _POPULATE_WRITE):
                return
            created += _PORTION_BYTES
