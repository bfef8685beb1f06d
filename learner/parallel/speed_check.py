"""Times one fixed matrix product on a device, and with ranks a collective, in some milliseconds at a step boundary."""

import itertools
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from anabranch.core.failures import out_of_memory

_REPEATS = 10
_SIZE, _SIZE_CPU = 2048, 128
_WARM_SECONDS = 0.05
"""Work on a CUDA device before it is timed."""


def time_product(device: torch.device) -> float:
    """Return the seconds of a matrix product on the device: the least of some, since requests may use it meanwhile.

    Raises RuntimeError if memory runs out, as `out_of_memory` says.
    """
    left = _matrix(device)
    out = torch.empty_like(left)
    if device.type == "cuda":
        # An idle device lowers its clocks, and needs some work to raise them.
        end = time.perf_counter() + _WARM_SECONDS
        while time.perf_counter() < end:
            torch.mm(left, left, out=out)
            torch.cuda.synchronize(device)
    return _least_seconds(device, lambda: torch.mm(left, left, out=out))


def product_or_nan(device: torch.device) -> float:
    """Return the same, or NaN where memory runs out: other ranks wait for an answer."""
    try:
        return time_product(device)
    except RuntimeError as exc:
        if not out_of_memory(exc):
            raise
        return math.nan


def time_collective(device: torch.device) -> float:
    """Return the seconds of an all-reduce over all ranks. Called by every rank, after a product on each.

    The matrix that is reduced has the memory that the product has released.
    """
    reduced = _matrix(device)
    return _least_seconds(device, lambda: dist.all_reduce(reduced, op=dist.ReduceOp.MAX))


def _matrix(device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.ones((_SIZE_CPU, _SIZE_CPU), device=device)
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.ones((_SIZE, _SIZE), dtype=dtype, device=device)


def _least_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the least seconds of some runs, by the device's clock where it is a CUDA device."""
    work()  # loads what the first run needs
    if device.type != "cuda":
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()  # at a step boundary, every ten minutes
    return min(float(one.elapsed_time(other)) for one, other in itertools.pairwise(events)) / 1000
