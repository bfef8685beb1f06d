"""The rows of a memory tier on a device that is not the host, and the rows of plans that stay there.

All work is queued in the store's stream. Out of memory, it continues in pieces, or on the host.

Legend: S slots, R bytes of a row, n rows of a call, W words of a row.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from replay.row_layout import PackedRows
from replay.tiers.staged_rows import StagedRows
from replay.tiers.store_stream import StoreStream, in_pieces

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

    def gather(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows of n slots, uint8 `[n, R]`, for use in the store's stream."""
        with self._stream.work():
            (where,) = self._stream.upload(slots)
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


class LazyDeviceRows(StagedRows):
    """The n rows of a plan that stay in their slots on a device until they are sampled, or until `materialize`."""

    _stream: StoreStream

    def __init__(self, n: int, gather: Callable[[], Tensor], read: Callable[[], Tensor], stream: StoreStream) -> None:
        """Take functions that return the rows, uint8 `[n, R]`: on the device in the store's stream, and on the host."""
        self.n = n
        self._gather = gather
        self._read = read
        self._stream = stream
        self._gathered: Tensor | None = None
        self._on_host: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    @override
    def materialize(self) -> None:
        """Copy the rows; to the host where the device has no memory for them."""
        if not self.prefetch() and self._on_host is None:
            torch.cuda.empty_cache()
            self._on_host = self._read()

    @override
    def prefetch(self) -> bool:
        try:
            self._on_device()
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            return False
        return True

    @override
    def clear(self) -> None:
        if self._on_host is not None:
            self._on_host.zero_()
        if self._gathered is not None:
            with self._stream.work():
                self._gathered.zero_()
                self._ready = self._stream.record()

    @override
    def rows(self, n: int | None = None) -> PackedRows:
        rows_nR = self._stream.hand_over(self._on_device(), self._ready)
        return rows_nR if n is None or n >= self.n else rows_nR[:n]

    @override
    def host_copy(self) -> Tensor:
        if self._gathered is not None:
            return super().host_copy()
        return self._read() if self._on_host is None else self._on_host.clone()

    @override
    def _on_device(self) -> Tensor:
        if self._gathered is None:
            with self._stream.work():
                gathered = self._gather() if self._on_host is None else self._stream.upload(self._on_host.numpy())[0]
                self._ready = self._stream.record()
            self._gathered = gathered
        return self._gathered
