"""What reading and writing rows have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.core.job_thread import JobThread
from replay.payload.clock_cache import ClockCache
from replay.payload.erasure import TierErasure
from replay.payload.lost_rows import LostRows
from replay.tiers.tier import SlowTier, TierStats


@dataclass(eq=False)
class TierPath:
    """The way of rows to or from the tiers. Used by the store's thread; slower tiers are accessed in the I/O thread.

    Attributes:
        slow: the slower tiers, from fast to slow.
        cache: the memory tier.
        io_thread: runs all reads and writes of slower tiers, in order.
        erasure: keeps which slots of slower tiers are stale.
        lost: collects rows that no tier has.
        stats: counts what is read and written.
    """

    slow: Sequence[SlowTier]
    cache: ClockCache
    io_thread: JobThread
    erasure: TierErasure
    lost: LostRows
    stats: TierStats
