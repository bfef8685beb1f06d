"""Copies between host and device, one each way for a batch: arrays of a batch share one block of bytes.

A copy costs the host some 20 us, whatever its size, and one from pageable memory waits for the device.

Legend: B rows of a batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.serving.protocol.tensors import Array

_ALIGNMENT = 16
"""Bytes; a multiple of each element's size."""


@dataclass(frozen=True)
class ByteRange:
    """The part of a block that one array fills."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.begin + self.dtype.itemsize * math.prod(self.shape)

    def of(self, block: Tensor) -> Tensor:
        """Return the array in a block of bytes, as a view."""
        return block[self.begin : self.end].view(self.dtype).view(self.shape)


def pinned_block(size: int, device: torch.device) -> Tensor:
    """Return a block of bytes on the host; pinned if `device` is a CUDA device, so that copies need no detour."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def ranges_of(arrays: Mapping[str, Array]) -> dict[str, ByteRange]:
    """Return where arrays are in one block, in order."""
    ranges: dict[str, ByteRange] = {}
    begin = 0
    for name, array in arrays.items():
        ranges[name] = ByteRange(begin, torch.from_numpy(array[:0]).dtype, array.shape)
        begin = -(-ranges[name].end // _ALIGNMENT) * _ALIGNMENT
    return ranges


def size_of(ranges: Mapping[str, ByteRange]) -> int:
    """Return the bytes of a block."""
    return max(part.end for part in ranges.values())


def to_device(features: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """Return features `[B, ...]` on the device: by one copy, or on the CPU by none."""
    if device.type in ("cpu", "mps"):
        return {name: torch.from_numpy(array).to(device) for name, array in features.items()}
    ranges = ranges_of(features)
    host = pinned_block(size_of(ranges), device)
    for name, array in features.items():
        ranges[name].of(host).numpy()[...] = array
    block = torch.empty_like(host, device=device)
    block.copy_(host, non_blocking=True)  # torch keeps a pinned block until its copy has ended
    return {name: part.of(block) for name, part in ranges.items()}


def joined(outputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, ByteRange]]:
    """Return outputs in one block of bytes on their device, and where each is; the largest elements are first."""
    ranges: dict[str, ByteRange] = {}
    begin = 0
    for name, value in sorted(outputs.items(), key=lambda item: -item[1].dtype.itemsize):
        ranges[name] = ByteRange(begin, value.dtype, tuple(value.shape))
        begin = ranges[name].end
    block = torch.cat([outputs[name].reshape(-1).view(torch.uint8) for name in ranges])
    return block, {name: ranges[name] for name in outputs}


def to_host(outputs: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return outputs on the host, by one copy; waits until they are computed."""
    for value in outputs.values():
        if not value.is_cuda:
            return {name: value.cpu().numpy() for name, value in outputs.items()}
    return block_to_host(*joined(outputs))


def block_to_host(block: Tensor, ranges: Mapping[str, ByteRange]) -> dict[str, Array]:
    """Return the arrays of a block on the host, by one copy; waits until they are computed."""
    host = pinned_block(len(block), block.device)
    host.copy_(block, non_blocking=True)
    if block.is_cuda:
        torch.cuda.current_stream(block.device).synchronize()
    return {name: part.of(host).numpy() for name, part in ranges.items()}
