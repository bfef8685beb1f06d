"""The file with the rows of a segment: written and read in parts, since they may not fit into memory.

It is a safetensors file with `rows`, uint8 `[n, R]`, and `valid`, bool `[n]`: a row that could not be read when the
file was written is not valid.

Legend: n rows of a file, m of a call, R bytes of a row.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.failures import DamagedError
from anabranch.learner.errors import CheckpointError
from anabranch.learner.state_dir.safetensors_file import Piece, TensorFile, header_of
from anabranch.replay.row_source import EitherRows, JoinedRows, RowSource
from anabranch.replay.segments import Segment

_PART_BYTES = 2**20
"""Bytes that are read at once: steps wait while numpy copies them."""

_GAP_BYTES = 2**16
"""Bytes between two rows that are not read with them."""

log = logging.getLogger(__name__)


def row_pieces(rows: RowSource) -> Iterator[Piece]:
    """Yield the file of rows, which are read one part at a time; raises OSError when they cannot be read."""
    count, size = len(rows), rows.row_bytes
    # `valid` follows the rows: it is complete once they are read.
    yield header_of({"rows": (torch.uint8, [count, size]), "valid": (torch.bool, [count])})
    valid, step = np.zeros(count, np.bool_), max(1, _PART_BYTES // max(1, size))
    for begin in range(0, count, step):
        part = slice(begin, min(count, begin + step))
        rows_mR, valid[part] = rows.read(np.arange(part.start, part.stop))
        content = rows_mR.numpy()
        content[~valid[part]] = 0  # what else is there may be the row of an erased event
        yield content.reshape(-1).data
    yield valid.view(np.uint8).data


class RowsFile(RowSource):
    """The rows of a file."""

    def __init__(self, path: Path) -> None:
        """Read which are valid; raises DamagedError for another kind of file, and OSError."""
        self._file = TensorFile(path)
        try:
            self._valid = self._file["valid"].numpy()
            self._count, self._row_bytes = self._file.shape("rows")
        except (KeyError, ValueError) as exc:
            raise DamagedError(f"{path} has no rows") from exc
        if self._valid.shape != (self._count,):
            raise DamagedError(f"{path} has {self._count} rows, and marks of {len(self._valid)}")

    @property
    @override
    def row_bytes(self) -> int:
        return self._row_bytes

    def __len__(self) -> int:
        return self._count

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        if not len(positions):
            return torch.zeros((0, self._row_bytes), dtype=torch.uint8), np.zeros(0, np.bool_)
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):
            return self._file.part("rows", first, last + 1), self._valid[positions]
        rows_mR = np.empty((len(positions), self._row_bytes), np.uint8)
        # In parts, and none that is far from the one before is read.
        far = np.diff(positions, prepend=first) * self._row_bytes > _GAP_BYTES
        part = np.cumsum(far) + (positions - first) * self._row_bytes // _PART_BYTES
        for at in np.split(np.arange(len(positions)), np.flatnonzero(np.diff(part)) + 1):
            begin, end = int(positions[at[0]]), int(positions[at[-1]]) + 1
            rows_mR[at] = self._file.part("rows", begin, end).numpy()[positions[at] - begin]
        return torch.from_numpy(rows_mR), self._valid[positions]


class LazyRowsFile(RowSource):
    """The rows of a file that is opened and verified once they are read; those of a damaged file are lost."""

    def __init__(self, open_file: Callable[[], RowsFile]) -> None:
        """`open_file` raises CheckpointError for a damaged file."""
        self._open_file = open_file
        self._file: RowsFile | None = None
        self._damaged = False

    @property
    @override
    def row_bytes(self) -> int:
        return 0 if (file := self._opened()) is None else file.row_bytes

    def __len__(self) -> int:
        return 0 if (file := self._opened()) is None else len(file)

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        if (file := self._opened()) is None or not len(positions) or positions[-1] >= len(file):
            return torch.zeros((len(positions), 0), dtype=torch.uint8), np.zeros(len(positions), np.bool_)
        return file.read(positions)

    def _opened(self) -> RowsFile | None:
        if self._file is None and not self._damaged:
            try:
                self._file = self._open_file()
            except CheckpointError as exc:
                log.error("%s; going on without the events that were stored in it", exc)  # noqa: TRY400
                self._damaged = True
        return self._file


class ErasedRows(RowSource):
    """The rows of a source without those of erased events, which are not valid."""

    def __init__(self, rows: RowSource, erased: NDArray[np.bool_]) -> None:
        """`erased`: which of its n events are erased."""
        self._rows, self._erased = rows, erased

    @property
    @override
    def row_bytes(self) -> int:
        return self._rows.row_bytes

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def read(self, positions: NDArray[np.intp]) -> tuple[Tensor, NDArray[np.bool_]]:
        rows_mR, valid = self._rows.read(positions)
        return rows_mR, valid & ~self._erased[positions]


LoadRows = Callable[[int, str], RowsFile]
"""Opens a part of a checkpoint with rows, by the checkpoint's number and the part; raises CheckpointError."""


def with_earlier(
    fresh: RowSource,
    merged: Mapping[str, Segment],
    base: int | None,
    load_rows: LoadRows | None,
) -> RowSource:
    """Return the rows of a new segment, from the earlier checkpoint where they are not valid.

    Args:
        fresh: the rows, of which the first are those of `merged`.
        merged: the segments of checkpoint `base` that the new one has, in order, by the part of their rows.
        base: number of the checkpoint.
        load_rows: opens its rows.
    """
    parts: list[tuple[RowSource, NDArray[np.intp]]] = []
    if base is not None and load_rows is not None:
        for part, segment in merged.items():
            file = LazyRowsFile(functools.partial(load_rows, base, part))
            parts.append((file, np.flatnonzero(segment.live)))
    return EitherRows(fresh, JoinedRows(fresh.row_bytes, parts))
