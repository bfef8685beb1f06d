"""The rate at which each partition is read, measured from checkpoint to checkpoint."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from learner.stream.ledger import PartitionLedger

_MEMORY_SECONDS = 300.0
"""Time constant of the mean: the weight of a measurement falls to 1/e in this time."""


class Rates:
    """Offsets per second of each partition: an exponentially weighted moving average."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = 0.0
        self._offsets: list[int] = []
        self.now: list[float] = []
        """Rates in the order of the index; each measurement replaces the list."""

    def measure(self, accounts: Sequence[PartitionLedger]) -> None:
        """Add a measurement of the time since the last call."""
        now = self._clock()
        elapsed, self._since = max(1e-3, now - self._since), now
        before = self._seconds * math.exp(-elapsed / _MEMORY_SECONDS)
        self._seconds = before + elapsed
        earlier = [*self._offsets, *(account.start for account in accounts[len(self._offsets) :])]
        self._offsets = [account.position.offset for account in accounts]
        rates = [*self.now, *[0.0] * (len(accounts) - len(self.now))]
        self.now = [
            (rate * before + offset - then) / self._seconds
            for rate, offset, then in zip(rates, self._offsets, earlier, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Return the rates for a checkpoint."""
        return {"offsets_per_second": self.now, "seconds": self._seconds}

    def restore(self, state: Mapping[str, Any], accounts: Sequence[PartitionLedger]) -> None:
        """Restore the rates of a checkpoint, and measure from the positions of `accounts` on."""
        self.now = [float(rate) for rate in state["offsets_per_second"]]
        self._seconds = float(state["seconds"])
        self._offsets, self._since = [account.position.offset for account in accounts], self._clock()
