"""The CUDA stream in which a store reads and writes its device while a step runs, and pinned memory for its copies.

Legend: n rows of a call.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.block import Array

_ALIGNMENT = 16


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy a tensor from pinned memory to a CUDA device; the host does not wait.

    Torch keeps the pinned block until the copy is done. From pageable memory the driver may wait for the stream first,
    or read memory that was reused meanwhile.
    """
    assert host.is_pinned() or not host.numel()  # memory of no bytes is never pinned
    return host.to(device, non_blocking=True)


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return arrays on a CUDA device, as views of one block that is copied at once from pinned memory."""
    ends = list(accumulate(_aligned(array.nbytes) for array in arrays))
    begins = [end - _aligned(array.nbytes) for array, end in zip(arrays, ends, strict=True)]
    block = torch.empty(max(ends[-1], _ALIGNMENT), dtype=torch.uint8, pin_memory=True)
    bytes_ = block.numpy()
    for array, begin in zip(arrays, begins, strict=True):
        bytes_[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = to_device(block, device)[: ends[-1]]
    # One call for all views: each takes microseconds.
    parts = torch.split(there, [end - begin for begin, end in zip(begins, ends, strict=True)])
    return [_shaped(part, array) for part, array in zip(parts, arrays, strict=True)]


def _shaped(part: Tensor, array: Array) -> Tensor:
    """Return the bytes of an array, which filler may follow, with its dtype and shape."""
    if len(part) != array.nbytes:
        part = part[: array.nbytes]
    typed = part.view(_torch_dtype(array.dtype))
    return typed if array.ndim == 1 else typed.view(array.shape)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name for it; numpy takes as long for the name as for a small copy."""
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def in_pieces(work: Callable[[slice], None], n: int, limit: int) -> None:
    """Run `work` on all of n rows, at most `limit` at once, and on fewer where memory runs out.

    Work that ran out of memory is run again, so it must have the same result then.

    Raises:
        RuntimeError: there is no memory for a single row.
    """
    begin = 0
    while begin < n:
        end = min(n, begin + limit)
        try:
            work(slice(begin, end))
        except RuntimeError as exc:
            if not out_of_memory(exc) or end - begin == 1:
                raise
        else:
            begin = end
            continue
        # After the handler, since the error references tensors.
        torch.cuda.empty_cache()
        limit = (end - begin) // 2


class StoreStream:
    """A separate stream on a CUDA device; on another device, work runs where it is called.

    Any thread may call the methods. Work of one stream runs in the order in which it was queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def work(self) -> contextlib.AbstractContextManager[object]:
        """Return the context manager in which work is queued in this stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def upload(self, *arrays: Array) -> list[Tensor]:
        """Return arrays on the device; called within `work`."""
        if self._stream is None:
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        return upload(arrays, self.device)

    def send(self, host: Tensor) -> Tensor:
        """Return a tensor of the host on the device, which is pinned if that is a CUDA device; called within `work`."""
        return host.to(self.device) if self._stream is None else to_device(host, self.device)

    def download(self, rows_nR: Tensor, out_nR: Tensor) -> None:
        """Copy rows of the device into pageable memory by pinned memory, and wait; called within `work`."""
        if self._stream is None:
            out_nR.copy_(rows_nR)
            return
        pinned_nR = torch.empty(rows_nR.shape, dtype=rows_nR.dtype, pin_memory=True)
        pinned_nR.copy_(rows_nR, non_blocking=True)
        self._stream.record_event().synchronize()
        out_nR.copy_(pinned_nR)

    def record(self) -> torch.cuda.Event | None:
        """Return an event after all work queued so far."""
        return None if self._stream is None else self._stream.record_event()

    def hand_over(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        """Return a tensor of this stream for use in the current stream, which waits for `ready`."""
        if self._stream is not None and ready is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(ready)
            tensor.record_stream(now)
        return tensor

    def take(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the current stream for use in this one, which waits for the work on it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(self._stream)
        return tensor

    def follow(self, other: "StoreStream") -> None:
        """Let work queued from now on wait for the work that the other stream has now."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
