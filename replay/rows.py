"""One packed row an event, so that a draw is one gather however many fields the schema has.

Legend: n rows of a call, R bytes of a row.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.block import Array

_ALIGNMENT = 8
"""Fields begin on multiples of the largest item size, so that a row can be viewed as any dtype."""

Fields = Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""Columns by name, each with its dtype and the shape of one event's."""


class RowLayout:
    """Where each field of the payload lies in a row of `row_bytes`.

    Fields lie in the order of their names: cuts hold rows, and a schema whose features change places is the same one.
    """

    def __init__(self, payload: Fields) -> None:
        self._fields: dict[str, tuple[int, int, np.dtype[np.generic], torch.dtype, tuple[int, ...]]] = {}
        place = 0
        for name, (dtype, shape) in sorted(payload.items()):
            size = dtype.itemsize * int(np.prod(shape))
            self._fields[name] = (place, place + size, dtype, getattr(torch, dtype.name), shape)
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.row_bytes = place

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that a row holds."""
        return tuple(self._fields)

    def pack(self, columns: Mapping[str, Array], which: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Copy what n events have in columns `[N, ...]`, those in the places `which`, into rows, uint8 `[n, R]`."""
        rows_nR = np.zeros((len(which), self.row_bytes), np.uint8)
        for name, (begin, end, dtype, _, _) in self._fields.items():
            column = np.ascontiguousarray(columns[name], dtype)
            rows_nR[:, begin:end] = column.reshape(len(column), -1).view(np.uint8)[which]
        return rows_nR

    def unpack(self, rows_nR: Tensor) -> dict[str, Tensor]:
        """View the fields in rows, each `[n, ...]`: nothing is copied."""
        columns: dict[str, Tensor] = {}
        for name, (begin, end, _, dtype, shape) in self._fields.items():
            columns[name] = rows_nR[:, begin:end].view(dtype).reshape(len(rows_nR), *shape)
        return columns
