"""Packs each event into one row, so that a sample is one gather, however many fields the schema has.

Legend: N events of a block, n rows of a call, R bytes of a row, F bytes of a field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.ingest.events.block import Array

PackedRows = Tensor | NDArray[np.uint8]
"""n rows, uint8 `[n, R]`: a tensor, or on the host an array, which is viewed as columns in half the time."""

_ALIGNMENT = 8
"""Fields begin at multiples of the largest item size, so that a row can be viewed as any dtype."""
LONG = 1024
"""From this row size in bytes on, memory bandwidth decides how long a copy takes."""
LINE = 64
"""Bytes of a cache line. Long rows are padded to whole lines, which saves a twentieth of a copy."""

Fields = Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""Columns by name, each with its dtype and the shape of one event's."""


@dataclass(frozen=True)
class _Field:
    begin: int
    end: int
    room: int
    dtype: np.dtype[np.generic]
    torch_dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class RowLayout:
    """The position of each field of the payload in a row of `row_bytes`.

    Fields are sorted by name, so that rows in checkpoints do not depend on the order of features in the schema.
    """

    def __init__(self, payload: Fields) -> None:
        self._fields: dict[str, _Field] = {}
        offset = 0
        for name, (dtype, shape) in sorted(payload.items()):
            size = dtype.itemsize * int(np.prod(shape))
            room = -(-size // _ALIGNMENT) * _ALIGNMENT
            strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
            torch_dtype = getattr(torch, dtype.name)
            self._fields[name] = _Field(offset, offset + size, room, dtype, torch_dtype, tuple(shape), strides)
            offset += room
        if offset >= LONG and offset % LINE:
            name, last = self._fields.popitem()
            room = last.room - offset % -LINE
            self._fields[name] = replace(last, room=room)
            offset = last.begin + room
        self._dtypes = {field.torch_dtype for field in self._fields.values()}
        self.row_bytes = offset
        self._record = np.dtype(
            {
                "names": list(self._fields),
                "formats": [(field.dtype, field.shape) for field in self._fields.values()],
                "offsets": [field.begin for field in self._fields.values()],
                "itemsize": offset,
            }
        )

    @property
    def fields(self) -> Fields:
        """The columns that a row holds."""
        return {name: (field.dtype, field.shape) for name, field in self._fields.items()}

    def pack(
        self, columns: Mapping[str, Array], which: NDArray[np.intp], out: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Copy the n events at the positions `which` of columns `[N, ...]` into rows, uint8 `[n, R]`, or into `out`."""
        rows_nR = np.empty((len(which), self.row_bytes), np.uint8) if out is None else out
        total = len(columns[next(iter(self._fields))])
        # Usually these are all events, in order: selecting them first would copy everything twice.
        every = len(which) == total and np.array_equal(which, np.arange(total))
        for name, field in self._fields.items():
            column = np.ascontiguousarray(columns[name], field.dtype)
            bytes_NF = column.reshape(len(column), -1).view(np.uint8)
            rows_nR[:, field.begin : field.end] = bytes_NF if every else bytes_NF.take(which, axis=0)
            rows_nR[:, field.end : field.begin + field.room] = 0
        return rows_nR

    def unpack(self, rows_nR: PackedRows) -> dict[str, Tensor]:
        """View the fields in rows, each `[n, ...]`, without a copy."""
        if not isinstance(rows_nR, np.ndarray) and rows_nR.is_cpu:
            rows_nR = rows_nR.numpy()
        if isinstance(rows_nR, np.ndarray):
            # Takes a third of the time of strided views.
            records = np.ndarray(len(rows_nR), self._record, rows_nR)
            return {name: torch.from_numpy(records[name]) for name in self._fields}
        n, views = len(rows_nR), {dtype: rows_nR.view(dtype) for dtype in self._dtypes}
        columns: dict[str, Tensor] = {}
        for name, field in self._fields.items():
            view, size = views[field.torch_dtype], field.dtype.itemsize
            strides = (self.row_bytes // size, *field.strides)
            begin = view.storage_offset() + field.begin // size
            columns[name] = view.as_strided((n, *field.shape), strides, begin)
        return columns
