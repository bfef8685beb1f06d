"""The rows of a plan while they are read.

Legend: n rows of a plan, m of them that the device does not have yet, R bytes of a row.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from anabranch.replay.row_layout import PackedRows
from anabranch.replay.tiers.store_stream import StoreStream


@dataclass(frozen=True)
class MissingRows:
    """The m rows of a plan that the device does not have: their positions among the n, and their events, `[m]` each."""

    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    identity: NDArray[np.uint64]
    generation: NDArray[np.uint16]
    """Of the slots when the plan was made."""
    reserved: NDArray[np.int64]
    """Positions in the memory tier for the first of the m rows, `[<= m]`."""


class StagedRows:
    """The n rows of a plan.

    Rows that the device has are copied before this is created, so that their slots may be written again at once.
    Another thread reads the m missing rows.
    """

    missing: MissingRows | None = None
    _stream: StoreStream | None = None
    _target: tuple[Tensor, NDArray[np.int64]] | None = None
    """Rows on the host, and the m positions in them that are read."""
    _merged = False
    """Whether the rows on the device include those that were read on the host."""
    _ready: torch.cuda.Event | None = None
    _done: threading.Event | None = None
    _valid: NDArray[np.bool_] | None = None
    lost: NDArray[np.bool_] = np.empty(0, np.bool_)
    """Which of the m rows no tier has any more; once they have arrived."""

    def __init__(self, rows_nR: Tensor, missing: MissingRows | None = None, stream: StoreStream | None = None) -> None:
        """Take the rows; those of `missing` are still to be read.

        Args:
            rows_nR: on the device, or on the host where they are copied to the device when they are sampled.
            missing: which are to be read.
            stream: in which `rows_nR` is written on the device; None: the device is the host.
        """
        self.n = len(rows_nR)
        self._rows_nR = rows_nR
        self._stream = stream
        if stream is not None:
            self._ready = stream.record()
        if missing is not None:
            self.missing, self._done = missing, threading.Event()

    def target(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Return rows on the host and the m positions in them to read into. Called by the thread that reads them."""
        assert self.missing is not None
        if self._rows_nR.device.type == "cpu":
            self._target, self._merged = (self._rows_nR, self.missing.positions), True
        else:
            m, row_bytes = len(self.missing.positions), self._rows_nR.shape[1]
            pinned = self._rows_nR.device.type == "cuda"
            self._target = torch.empty((m, row_bytes), dtype=torch.uint8, pin_memory=pinned), np.arange(m)
        return self._target

    def complete(self, valid: NDArray[np.bool_], lost: NDArray[np.bool_]) -> None:
        """Set which of the m rows are valid and which are lost, and end the wait; the others could not be read now."""
        assert self._done is not None
        assert self.missing is not None
        if not valid.all():
            self._valid = np.ones(self.n, np.bool_)
            self._valid[self.missing.positions[~valid]] = False
        self.lost = lost
        self._done.set()

    def wait(self) -> float:
        """Wait until all rows have arrived, and return the seconds waited."""
        if self._done is None or self.arrived:
            return 0.0
        begin = time.perf_counter()
        self._done.wait()
        return time.perf_counter() - begin

    def prefetch(self) -> bool:
        """Copy rows that are in slots of a device, in the store's stream; return whether there was memory for them."""
        return True

    def materialize(self) -> None:
        """Copy rows that are still in their slots, so that the slots may be written again."""

    def clear(self) -> None:
        """Overwrite the rows, once they have arrived."""
        self.wait()
        if self._target is not None:
            self._target[0].zero_()
        with contextlib.nullcontext() if self._stream is None else self._stream.work():
            self._rows_nR.zero_()

    def rows(self, n: int | None = None) -> PackedRows:
        """Return the valid ones of the first n rows, or of all, `[<= n, R]` on the device; call `wait` before."""
        if self._stream is not None:
            with self._stream.work():
                rows_nR = self._valid_of(self._on_device(), n)
                ready = self._ready if self._valid is None else self._stream.record()
            return self._stream.hand_over(rows_nR, ready)
        return self._valid_of(self._rows_nR, n)

    def host_copy(self) -> Tensor:
        """Return a copy of the valid rows on the host; call `wait` before. Any thread may call it."""
        if self._stream is None:
            return self._valid_of(self._rows_nR, None).clone()
        with self._stream.work():
            rows_nR = self._valid_of(self._on_device(), None)
            copy_nR = torch.empty(rows_nR.shape, dtype=torch.uint8)
            self._stream.download(rows_nR, copy_nR)
        return copy_nR

    def _on_device(self) -> Tensor:
        """Return the n rows on the device; called within the stream's `work`."""
        assert self._stream is not None
        rows_nR = self._rows_nR  # another thread may bring it to the device at the same time
        if rows_nR.device.type != self._stream.device.type:
            (rows_nR,) = self._stream.upload(rows_nR.numpy())
            self._ready = self._stream.record()
            self._rows_nR = rows_nR  # after the event that its readers wait for
        elif self._target is not None and not self._merged:
            assert self.missing is not None
            (where,) = self._stream.upload(self.missing.positions)
            self._rows_nR.index_copy_(0, where, self._stream.send(self._target[0]))
            self._merged, self._ready = True, self._stream.record()
        return rows_nR

    def _valid_of(self, rows_nR: Tensor, n: int | None) -> Tensor:
        """Return the valid ones of the first n rows."""
        if self._valid is None:
            return rows_nR if n is None or n >= self.n else rows_nR[:n]
        which = np.flatnonzero(self._valid[:n])
        if self._stream is None:
            return rows_nR[torch.from_numpy(which)]
        return rows_nR.index_select(0, self._stream.upload(which)[0])

    def which(self, n: int | None = None) -> slice | NDArray[np.intp]:
        """Return which of the first n rows are valid, as an index; call `wait` before."""
        return slice(n) if self._valid is None else np.flatnonzero(self._valid[:n])

    @property
    def arrived(self) -> bool:
        """Whether all rows have arrived."""
        return self._done is None or self._done.is_set()

    def read_rows(self, which: NDArray[np.intp]) -> Tensor:
        """Return some of the m rows on the host, by their indices; once they have arrived."""
        assert self._target is not None
        rows_NR, positions = self._target
        return rows_NR[torch.from_numpy(positions[which])]

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which of the m rows are valid; once they have arrived."""
        assert self.missing is not None
        return (
            np.ones(len(self.missing.positions), np.bool_)
            if self._valid is None
            else self._valid[self.missing.positions]
        )


class LazyRows(StagedRows):
    """The n rows of a plan that stay in their slots until they are sampled, or until `materialize`.

    Rows gathered ahead would have left the processor's cache when the step reads them. Rows gathered when sampled reuse
    the memory of the previous sample. On a device, `prefetch` gathers them one step ahead.
    """

    _gathered: PackedRows | None = None
    _on_host: Tensor | None = None
    """The rows, where the device had no memory for them."""

    def __init__(
        self,
        slots: NDArray[np.int64],
        gather: Callable[[NDArray[np.int64] | Tensor], PackedRows],
        read: Callable[[NDArray[np.int64]], Tensor],
        stream: StoreStream | None = None,
        where: Tensor | None = None,
    ) -> None:
        """Take functions that return the rows of slots, uint8 `[n, R]`.

        Args:
            slots: of the rows.
            gather: on the device, in the stream if there is one.
            read: on the host; a checkpoint may call it in another thread.
            stream: of the device; None: the device is the host.
            where: the slots on the device, where they were sent to it before.
        """
        self.n = len(slots)
        self._where = where
        self._slots = slots
        self._gather = gather
        self._read = read
        self._stream = stream

    @override
    def materialize(self) -> None:
        """Copy the rows; to the host where the device has no memory for them."""
        if not self.prefetch() and self._on_host is None:
            torch.cuda.empty_cache()
            self._on_host = self._read(self._slots)

    @override
    def prefetch(self) -> bool:
        try:
            self._gathered_rows()
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
            with contextlib.nullcontext() if self._stream is None else self._stream.work():
                self._gathered[...] = 0
                if self._stream is not None:
                    self._ready = self._stream.record()

    @override
    def rows(self, n: int | None = None) -> PackedRows:
        rows_nR = self._gathered_rows()
        if self._stream is not None:
            rows_nR = self._stream.hand_over(torch.as_tensor(rows_nR), self._ready)
        return rows_nR if n is None or n >= self.n else rows_nR[:n]

    @override
    def host_copy(self) -> Tensor:
        if self._gathered is None:
            return self._read(self._slots) if self._on_host is None else self._on_host.clone()
        if self._stream is None:
            return torch.as_tensor(self._gathered).clone()
        return super().host_copy()

    @override
    def _on_device(self) -> Tensor:
        return torch.as_tensor(self._gathered_rows())

    def _gathered_rows(self) -> PackedRows:
        if self._gathered is None:
            if self._stream is None:
                self._gathered = self._gather(self._slots)
            else:
                with self._stream.work():
                    on_host = self._on_host
                    slots = self._slots if self._where is None else self._where
                    gathered = self._gather(slots) if on_host is None else self._stream.upload(on_host.numpy())[0]
                    self._ready = self._stream.record()
                self._gathered = gathered
        return self._gathered

    @property
    def _in_slots(self) -> bool:
        return self._gathered is None and self._on_host is None

    @staticmethod
    def gather_all(staged: Sequence[StagedRows], counts: Sequence[int | None]) -> PackedRows | None:
        """Return the first rows of each of some plans, as many as `counts` says: those in their slots by one gather.

        None where each plan has to return its own: where another tier has read rows, or, on the host, copied them.
        """
        lazy = [rows for rows in staged if isinstance(rows, LazyRows)]
        waiting = [(rows, n) for rows, n in zip(lazy, counts, strict=False) if rows._in_slots]
        if len(lazy) < len(staged) or not waiting or (lazy[0]._stream is None and len(waiting) < len(lazy)):
            return None
        first, slots = waiting[0][0], [rows._slots[:n] for rows, n in waiting]
        where = None
        if first._stream is not None:
            sent = [rows._where[:n] for rows, n in waiting if rows._where is not None]
            with first._stream.work():
                where = torch.cat(sent) if len(sent) == len(waiting) else None
        together = LazyRows(np.concatenate(slots), first._gather, first._read, first._stream, where).rows()
        if len(waiting) == len(lazy):
            return together
        parts = iter(torch.split(torch.as_tensor(together), [*map(len, slots)]))
        in_order = zip(lazy, counts, strict=True)
        return torch.cat([next(parts) if rows._in_slots else torch.as_tensor(rows.rows(n)) for rows, n in in_order])
