"""Buffers that stay on the host, since only the host updates them."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Numbers = NDArray[Any]


class HostState(nn.Module):
    """Buffers that neither move to a device nor change their dtype with the model."""

    def __init__(self, **buffers: Tensor) -> None:
        """Take the buffers by name, on the CPU."""
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def __getitem__(self, name: str) -> Numbers:
        """Return a buffer as an array, which shares its memory."""
        array: Numbers = self.get_buffer(name).numpy()
        return array

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        return self


def write(buffer: Tensor, values: Numbers) -> None:
    """Copy an array into a buffer of its shape, on any device."""
    buffer.copy_(torch.from_numpy(np.asarray(values, order="C")))
