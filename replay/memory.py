"""The tier `device`: preallocated tensors on the learner's device, which is host memory where there is no other.

One packed row an event, so that a draw is one gather however many fields the schema has.

Legend: S slots, R bytes of a row, n rows of a call.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.block import Array

_ALIGNMENT = 8
"""Fields begin on multiples of the largest item size, so that a row can be viewed as any dtype."""


class MemoryTier:
    """Rows as uint8 `[S, R]` on `device`."""

    name = "device"

    def __init__(
        self, payload: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]], slots: int, device: torch.device
    ) -> None:
        self._layout: dict[str, tuple[int, int, np.dtype[np.generic], tuple[int, ...]]] = {}
        place = 0
        for name, (dtype, shape) in payload.items():
            size = dtype.itemsize * int(np.prod(shape))
            self._layout[name] = (place, place + size, dtype, shape)
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.slots = slots
        self.row_bytes = place
        self._device = device
        self._rows_SR = torch.zeros((slots, place), dtype=torch.uint8, device=device)

    @staticmethod
    def row_bytes_of(payload: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]]) -> int:
        """Return the bytes of one event, without making a tier."""
        sizes = (dtype.itemsize * int(np.prod(shape)) for dtype, shape in payload.values())
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

    def put(self, slots: NDArray[np.int64], columns: Mapping[str, Array]) -> None:
        """Pack n events on the host and scatter them in one copy."""
        rows = np.zeros((len(slots), self.row_bytes), np.uint8)
        for name, (begin, end, dtype, _) in self._layout.items():
            column = np.ascontiguousarray(columns[name], dtype)
            rows[:, begin:end] = column.reshape(len(slots), -1).view(np.uint8)
        where = torch.from_numpy(slots).to(self._device)
        self._rows_SR.index_copy_(0, where, torch.from_numpy(rows).to(self._device))

    def get(self, slots: NDArray[np.int64]) -> dict[str, Tensor]:
        """Gather n rows, and view the fields in them: no copy but the gather."""
        rows_nR = self._rows_SR.index_select(0, torch.from_numpy(slots).to(self._device))
        columns: dict[str, Tensor] = {}
        for name, (begin, end, dtype, shape) in self._layout.items():
            field = rows_nR[:, begin:end].view(_TORCH[dtype.name])
            columns[name] = field.reshape(len(slots), *shape)
        return columns

    def rows(self, slots: NDArray[np.int64]) -> Tensor:
        """Gather n packed rows to the CPU."""
        return self._rows_SR.index_select(0, torch.from_numpy(slots).to(self._device)).cpu()

    def put_rows(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Scatter n packed rows."""
        where = torch.from_numpy(slots).to(self._device)
        self._rows_SR.index_copy_(0, where, rows_nR.to(self._device))

    def close(self) -> None:
        """Let go of the memory."""
        self._rows_SR = self._rows_SR.new_empty((0, self.row_bytes))


_TORCH = {
    np.dtype(name).name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
}
