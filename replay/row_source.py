"""Rows that are read in parts: those of a whole store may not fit into memory.

Legend: n rows of a source, m of a call, R bytes of a row.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

ReadSlots = Callable[[NDArray[np.int64], NDArray[np.uint64]], tuple[Tensor, NDArray[np.bool_]]]
"""Reads the rows of m slots for the events of these identities, as `Tier.read`."""

log = logging.getLogger(__name__)


class RowSource(Protocol):
    """n rows."""

    @property
    def row_bytes(self) -> int:
        """R."""
        ...

    def __len__(self) -> int: ...

    def read(self, positions: NDArray[np.intp], /) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return the rows at ascending positions `[m]`, uint8 `[m, R]` on the host, and which are valid, bool `[m]`.

        The bytes of other rows are undefined. Raises OSError when none can be read.
        """
        ...


class TierRows(RowSource):
    """The rows of events in slots of a tier."""

    def __init__(
        self, row_bytes: int, slots: NDArray[np.int64], identity: NDArray[np.uint64], read_slots: ReadSlots
    ) -> None:
        """Take R, the slots and identities of the events, `[n]`, and what reads them, in any thread."""
        self._row_bytes = row_bytes
        self._slots, self._identity = slots, identity
        self._read_slots = read_slots

    @property
    @override
    def row_bytes(self) -> int:
        return self._row_bytes

    def __len__(self) -> int:
        return len(self._slots)

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        return self._read_slots(self._slots[positions], self._identity[positions])


class TensorRows(RowSource):
    """The rows of a tensor, uint8 `[n, R]` on the host."""

    def __init__(self, rows_nR: Tensor) -> None:
        self._rows_nR = rows_nR

    @property
    @override
    def row_bytes(self) -> int:
        return self._rows_nR.shape[1]

    def __len__(self) -> int:
        return len(self._rows_nR)

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        return self._rows_nR[torch.from_numpy(positions)], np.ones(len(positions), np.bool_)


class EitherRows(RowSource):
    """The rows of a source, and those that are not valid there from another one."""

    def __init__(self, first: RowSource, second: RowSource) -> None:
        """Take two sources of the same events."""
        self._first, self._second = first, second
        self._logged = False

    @property
    @override
    def row_bytes(self) -> int:
        return self._first.row_bytes

    def __len__(self) -> int:
        return len(self._first)

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        rows_mR, valid = self._first.read(positions)
        if not valid.all():
            valid, missing = valid.copy(), np.flatnonzero(~valid)
            others, found = self._second.read(positions[missing])
            rows_mR.numpy()[missing[found]] = others.numpy()[found]
            valid[missing[found]] = True
            if not self._logged and not found.all():
                self._logged = True
                log.warning("rows of stored events cannot be read: a host without this tier will lack their events")
        return rows_mR, valid


class JoinedRows(RowSource):
    """Some rows of several sources, one after the other."""

    def __init__(self, row_bytes: int, parts: Sequence[tuple[RowSource, NDArray[np.intp]]]) -> None:
        """Take sources, each with the ascending positions of its rows that count."""
        self._row_bytes = row_bytes
        self._parts = parts
        self._ends = np.cumsum([len(positions) for _, positions in parts], dtype=np.intp)

    @property
    @override
    def row_bytes(self) -> int:
        return self._row_bytes

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        # numpy copies by this thread alone: torch would wait for others of a busy machine.
        rows_mR = np.empty((len(positions), self._row_bytes), np.uint8)
        valid = np.zeros(len(positions), np.bool_)
        if not len(positions):
            return torch.from_numpy(rows_mR), valid
        first, last = np.searchsorted(self._ends, positions[[0, -1]], side="right").tolist()
        begin = int(self._ends[first - 1]) if first else 0
        for (source, of_source), end in zip(self._parts[first : last + 1], self._ends[first : last + 1], strict=True):
            part = slice(*np.searchsorted(positions, [begin, end]).tolist())
            if part.start < part.stop:
                rows, valid[part] = source.read(of_source[positions[part] - begin])
                if valid[part].all() and part.stop - part.start == len(positions):
                    return rows, valid
                if valid[part].any():
                    rows_mR[part] = rows.numpy()
            begin = end
        return torch.from_numpy(rows_mR), valid
