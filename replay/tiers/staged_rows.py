"""The rows of a plan on their way to the device.

Legend: n rows of a plan, m of them brought later, R bytes of a row.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.row_layout import PackedRows


@dataclass(frozen=True)
class MissingRows:
    """The m rows of a plan that the device does not have: their places among the n, and who they are, `[m]` each."""

    places: NDArray[np.int64]
    slots: NDArray[np.int64]
    identity: NDArray[np.uint64]
    generation: NDArray[np.uint16]
    """Of the slots, when the plan was made."""
    reserved: NDArray[np.int64]
    """Where the first of the m rows, as many as there are places, are to stay in the memory tier."""


class StagedRows:
    """The n rows of a plan.

    What the device has is read before this is made, so that its slots may be written again at once; the rest arrives
    from another thread.
    """

    late: MissingRows | None = None
    _brought_mR: Tensor | None = None
    _arrived: threading.Event | None = None
    _whole: NDArray[np.bool_] | None = None
    _lost: NDArray[np.bool_] | None = None

    def __init__(self, rows_nR: Tensor, late: MissingRows | None = None, *, pinned: bool = False) -> None:
        """Take rows on the device, those of `late` still to be brought; `pinned`: by way of pinned memory."""
        self.n = len(rows_nR)
        self._rows_nR = rows_nR
        self._pinned = pinned
        if late is not None:
            self.late, self._arrived = late, threading.Event()

    def basket(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Return rows on the host and the m places in them that are to be filled; in the thread that brings them."""
        assert self.late is not None
        if self._rows_nR.device.type == "cpu":
            return self._rows_nR, self.late.places
        m = len(self.late.places)
        self._brought_mR = torch.empty((m, self._rows_nR.shape[1]), dtype=torch.uint8, pin_memory=self._pinned)
        return self._brought_mR, np.arange(m)

    def land(self, whole: NDArray[np.bool_], lost: NDArray[np.bool_]) -> None:
        """Say which of the m rows have come and which are lost; the others could not be had now. Ends the wait."""
        assert self._arrived is not None
        assert self.late is not None
        if not whole.all():
            self._whole = np.ones(self.n, np.bool_)
            self._whole[self.late.places[~whole]] = False
        self._lost = lost
        self._arrived.set()

    def wait(self) -> float:
        """Wait until all rows are here, and return the seconds that it took."""
        if self._arrived is None or self.landed:
            return 0.0
        begin = time.perf_counter()
        self._arrived.wait()
        return time.perf_counter() - begin

    def settle(self) -> None:
        """Make sure that the slots of rows that are here may be written again."""

    def clear(self) -> None:
        """Overwrite the rows, once they are here: nobody is to have them."""
        self.wait()
        for rows in (self._rows_nR, self._brought_mR):
            if rows is not None:
                rows.zero_()

    def rows(self, n: int | None = None) -> PackedRows:
        """Return those of the first n rows that came, `[<= n, R]`; on the device, and after `wait`."""
        rows_nR = self._rows_nR
        if self.late is None:
            return rows_nR if n is None or n >= self.n else rows_nR[:n]
        if self._brought_mR is not None:
            where = torch.from_numpy(self.late.places).to(rows_nR.device)
            rows_nR.index_copy_(0, where, self._brought_mR.to(rows_nR.device, non_blocking=True))
        if self._whole is None:
            return rows_nR[:n]
        return rows_nR[torch.from_numpy(np.flatnonzero(self._whole[:n])).to(rows_nR.device)]

    def which(self, n: int | None = None) -> slice | NDArray[np.intp]:
        """Return which of the first n rows came, as an index; after `wait`."""
        return slice(n) if self._whole is None else np.flatnonzero(self._whole[:n])

    @property
    def landed(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._arrived is None or self._arrived.is_set()

    def first_brought(self, n: int) -> Tensor:
        """Return the first n of the m rows as they were brought, for a device that is not the host; once landed."""
        assert self._brought_mR is not None
        return self._brought_mR[:n]

    @property
    def brought(self) -> NDArray[np.bool_]:
        """Which of the m rows came; once landed."""
        assert self.late is not None
        return np.ones(len(self.late.places), np.bool_) if self._whole is None else self._whole[self.late.places]

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Which of the m rows no tier has any more; once landed."""
        assert self._lost is not None
        return self._lost


class LazyRows(StagedRows):
    """The n rows of a plan whose slots keep them for now: they are gathered when they are sampled, or at `settle`.

    Rows gathered ahead have left the processor's cache when the step reads them, and wait for main memory twice;
    gathered when sampled they take the memory of the sample before.
    """

    _gathered: PackedRows | None = None

    def __init__(self, n: int, gather: Callable[[], PackedRows]) -> None:
        """Take what gathers the rows, `[n, R]` on the device; a checkpoint may do so in another thread."""
        self.n = n
        self._gather = gather

    def settle(self) -> None:
        """Gather the rows now, before anything writes one of their slots."""
        self.rows()

    def clear(self) -> None:
        """Let nobody have the rows."""
        self.rows()[...] = 0

    def rows(self, n: int | None = None) -> PackedRows:
        """Return the first n rows, or all, `[<= n, R]` on the device."""
        if self._gathered is None:
            self._gathered = self._gather()
        return self._gathered if n is None or n >= self.n else self._gathered[:n]
