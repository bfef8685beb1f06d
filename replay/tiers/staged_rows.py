"""The rows of a plan while they are read.

Legend: n rows of a plan, m of them that the device does not have yet, R bytes of a row.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from replay.row_layout import PackedRows


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
    _read_mR: Tensor | None = None
    _done: threading.Event | None = None
    _valid: NDArray[np.bool_] | None = None
    _lost: NDArray[np.bool_] | None = None

    def __init__(self, rows_nR: Tensor, missing: MissingRows | None = None, *, pinned: bool = False) -> None:
        """Take rows on the device; those of `missing` are still to be read, into pinned memory if `pinned`."""
        self.n = len(rows_nR)
        self._rows_nR = rows_nR
        self._pinned = pinned
        if missing is not None:
            self.missing, self._done = missing, threading.Event()

    def target(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Return rows on the host and the m positions in them to read into. Called by the thread that reads them."""
        assert self.missing is not None
        if self._rows_nR.device.type == "cpu":
            return self._rows_nR, self.missing.positions
        m = len(self.missing.positions)
        self._read_mR = torch.empty((m, self._rows_nR.shape[1]), dtype=torch.uint8, pin_memory=self._pinned)
        return self._read_mR, np.arange(m)

    def complete(self, valid: NDArray[np.bool_], lost: NDArray[np.bool_]) -> None:
        """Set which of the m rows are valid and which are lost, and end the wait; the others could not be read now."""
        assert self._done is not None
        assert self.missing is not None
        if not valid.all():
            self._valid = np.ones(self.n, np.bool_)
            self._valid[self.missing.positions[~valid]] = False
        self._lost = lost
        self._done.set()

    def wait(self) -> float:
        """Wait until all rows have arrived, and return the seconds waited."""
        if self._done is None or self.arrived:
            return 0.0
        begin = time.perf_counter()
        self._done.wait()
        return time.perf_counter() - begin

    def materialize(self) -> None:
        """Copy rows that are still in their slots, so that the slots may be written again."""

    def clear(self) -> None:
        """Overwrite the rows, once they have arrived."""
        self.wait()
        for rows in (self._rows_nR, self._read_mR):
            if rows is not None:
                rows.zero_()

    def rows(self, n: int | None = None) -> PackedRows:
        """Return the valid ones of the first n rows, or of all, `[<= n, R]` on the device; call `wait` before."""
        rows_nR = self._rows_nR
        if self.missing is None:
            return rows_nR if n is None or n >= self.n else rows_nR[:n]
        if self._read_mR is not None:
            where = torch.from_numpy(self.missing.positions).to(rows_nR.device)
            rows_nR.index_copy_(0, where, self._read_mR.to(rows_nR.device, non_blocking=True))
        if self._valid is None:
            return rows_nR[:n]
        return rows_nR[torch.from_numpy(np.flatnonzero(self._valid[:n])).to(rows_nR.device)]

    def which(self, n: int | None = None) -> slice | NDArray[np.intp]:
        """Return which of the first n rows are valid, as an index; call `wait` before."""
        return slice(n) if self._valid is None else np.flatnonzero(self._valid[:n])

    @property
    def arrived(self) -> bool:
        """Whether all rows have arrived."""
        return self._done is None or self._done.is_set()

    def first_read(self, n: int) -> Tensor:
        """Return the first n of the m rows in host memory, of a tier on another device; once they have arrived."""
        assert self._read_mR is not None
        return self._read_mR[:n]

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which of the m rows are valid; once they have arrived."""
        assert self.missing is not None
        return (
            np.ones(len(self.missing.positions), np.bool_)
            if self._valid is None
            else self._valid[self.missing.positions]
        )

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Which of the m rows no tier has any more; once they have arrived."""
        assert self._lost is not None
        return self._lost


class LazyRows(StagedRows):
    """The n rows of a plan that stay in their slots until they are sampled, or until `materialize`.

    Rows gathered ahead would have left the processor's cache when the step reads them. Rows gathered when sampled reuse
    the memory of the previous sample.
    """

    _gathered: PackedRows | None = None

    def __init__(self, n: int, gather: Callable[[], PackedRows]) -> None:
        """Take a function that gathers the rows, `[n, R]` on the device; a checkpoint may call it in another thread."""
        self.n = n
        self._gather = gather

    @override
    def materialize(self) -> None:
        self.rows()

    @override
    def clear(self) -> None:
        self.rows()[...] = 0

    @override
    def rows(self, n: int | None = None) -> PackedRows:
        if self._gathered is None:
            self._gathered = self._gather()
        return self._gathered if n is None or n >= self.n else self._gathered[:n]
