"""The kinds of slower tiers by name: a new one is a class in a file of its own, and one line here."""

from collections.abc import Callable, Iterable
from typing import Any

from anabranch.core.errors import SettingsError
from replay.config import ReplaySettings
from replay.snapshot import StoreSnapshot
from replay.tiers.disk import DiskTierFactory
from replay.tiers.redis_tier import RedisTierFactory
from replay.tiers.tier import TierContext, TierFactory

TIERS: dict[str, Callable[[Any, TierContext], TierFactory]] = {
    "redis": RedisTierFactory,
    "disk": DiskTierFactory,
}
"""By the name of their section in `[replay]`, which they are made with or None, from fast to slow: of those that a
pipeline configures the last is the primary tier, and the others are caches below the memory tier."""


def kinds_of(settings: ReplaySettings, site: TierContext) -> dict[str, TierFactory]:
    """Return all kinds by name, from fast to slow, also those that are not configured."""
    return {name: kind(getattr(settings, name), site) for name, kind in TIERS.items()}


def kind_with(contents: StoreSnapshot | None, kinds: Iterable[TierFactory]) -> TierFactory | None:
    """Return the kind of the tier that has the payload of a checkpoint; None where the checkpoint has it, or there is
    none.

    Raises:
        SettingsError: no kind is.
    """
    if contents is None or (file := contents.standing.file) is None:
        return None
    for kind in kinds:
        if kind.owns(file):
            return kind
    raise SettingsError(
        f"the replay contents of checkpoint {contents.standing.checkpoint} are in a tier of a kind that is not there, "
        f"{file.name}; "
        "go on with the release that has it, or begin anew by moving the checkpoints away"
    )
