"""Clients whose requests recently made the model raise: their requests are batched alone."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from datetime import timedelta

_LASTS = timedelta(seconds=10)
_MOST = 4096
"""Peers: the most connections that a process has."""


class RecentFailures:
    """The peers added in the last ten seconds, 4096 of them at most. Not thread-safe.

    A peer is anything that names a connection, such as address and port; None names none and is never added.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[Hashable, float] = OrderedDict()
        """The first to expire first."""

    def __contains__(self, peer: Hashable) -> bool:
        return bool(self._until) and self._until.get(peer, float("-inf")) > self._clock()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, peer: Hashable) -> None:
        """Add a peer, or renew it; remove expired peers, and the oldest if there are too many."""
        if peer is None:
            return
        now = self._clock()
        self._until[peer] = now + _LASTS.total_seconds()
        self._until.move_to_end(peer)
        while len(self._until) > _MOST or next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
