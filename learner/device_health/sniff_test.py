"""The sniff test: times one fixed matrix product on each device, and with ranks a collective.

A device that fails often slows down first. The test runs at a step boundary, every ten minutes, and takes some
milliseconds.
"""

import itertools
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from anabranch.core.failures import out_of_memory

_REPEATS = 10
_SIZE, _SIZE_CPU = 2048, 128
COLLECTIVE = "collective"
"""Name of the time that all ranks have together."""
_WARM_SECONDS = 0.05
"""Work on a CUDA device before it is timed."""
_KEPT = 50
_FEWEST = 5
"""Results that a device needs before it is compared with them."""
_IN_A_ROW = 3
"""Tests in a row in which a device has to be slow: one alone may have shared the device with requests."""
_AGAIN = timedelta(seconds=10)
"""Time until a test is repeated in which a device was slow."""

log = logging.getLogger(__name__)


class SniffTest:
    """Compares the times of a test with those of earlier tests, and of other ranks. Used by the loop's thread."""

    def __init__(self, measure: Callable[[], Mapping[str, float]], deviation: float) -> None:
        """Take what measures, by name in seconds, and from which fraction above the median a time is slow."""
        self._measure = measure
        self._deviation = deviation
        self._before: dict[str, deque[float]] = {}
        self._slow: dict[str, int] = {}
        self.seconds: Mapping[str, float] = {}
        """The times of the last test."""
        self.warning: str | None = None
        """One sentence when a device was slow three times in a row. Any thread may read it."""

    def run(self) -> timedelta | None:
        """Run the test; return when to repeat it, or None when all is as usual."""
        try:
            self.seconds = self._measure()
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            return None  # it is run again when it is due
        slow = slow_ones(self.seconds, self._before, self._deviation)
        self._slow = {name: self._slow.get(name, 0) + 1 for name in slow}
        for name, seconds in self.seconds.items():
            if name not in slow:
                self._before.setdefault(name, deque(maxlen=_KEPT)).append(seconds)
        named = [f"{name} by {slow[name]:.0%}" for name, count in self._slow.items() if count >= _IN_A_ROW]
        before, self.warning = self.warning, f"the sniff test is slow: {', '.join(named)}" if named else None
        if self.warning is not None and before is None:
            log.warning("%s", self.warning)
        return _AGAIN if slow and not named else None


def slow_ones(
    seconds: Mapping[str, float], before: Mapping[str, Sequence[float]], deviation: float
) -> dict[str, float]:
    """Return by how much the slow ones are above the median, as a fraction: of their earlier times, or of the ranks."""
    ranks = [time for name, time in seconds.items() if name != COLLECTIVE]
    found = {}
    for name, now in seconds.items():
        medians = [statistics.median(before[name])] if len(before.get(name, ())) >= _FEWEST else []
        if name != COLLECTIVE and len(ranks) > 1:
            medians.append(statistics.median(ranks))
        excess = max((now / median - 1 for median in medians), default=0.0)
        if excess > deviation:
            found[name] = excess
    return found


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
