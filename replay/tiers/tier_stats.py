"""What the tiers of a store have done so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from replay.tiers.tier import Tier


@dataclass
class TierStats:
    """Running totals. Those of the memory tier are counted by who has the store, those of others by the courier.

    Attributes:
        read: rows that were read for draws, by tier.
        missed: rows that a cache was to have and had not, by tier.
        moved: bytes by tier and direction, `read` or `written`.
        stall_seconds: time that steps have waited, for a tier or for what the store had to do before.
    """

    read: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    stall_seconds: float = 0.0

    @classmethod
    def of(cls, tiers: Sequence[Tier]) -> "TierStats":
        """Return totals of nothing."""
        names = [tier.name for tier in tiers]
        return cls(
            dict.fromkeys(names, 0),
            dict.fromkeys(names[:-1], 0),
            {(name, direction): 0 for name in names for direction in ("read", "written")},
        )
