"""The kinds of slower tiers by name: a new one is a class in a file of its own, and one line here."""

from collections.abc import Callable, Iterable
from typing import Any

from anabranch.core.errors import SettingsError
from replay.config import ReplaySettings
from replay.snapshot import StoreSnapshot
from replay.tiers.disk_factory import DiskTierFactory
from replay.tiers.redis_tier import RedisTierFactory
from replay.tiers.tier import TierContext, TierFactory

TIERS: dict[str, Callable[[Any, TierContext], TierFactory]] = {
    "redis": RedisTierFactory,
    "disk": DiskTierFactory,
}
"""By the name of their section in `[replay]`, from fast to slow. A factory gets its section, or None.

The slowest tier that a pipeline configures is the primary tier; the others are caches below the memory tier."""


def kinds_of(settings: ReplaySettings, context: TierContext) -> dict[str, TierFactory]:
    """Return all kinds by name, from fast to slow, also those that are not configured."""
    return {name: kind(getattr(settings, name), context) for name, kind in TIERS.items()}


def kind_with(contents: StoreSnapshot | None, kinds: Iterable[TierFactory]) -> TierFactory | None:
    """Return the kind of the tier that has the payload of a checkpoint; None if that has it, or there is none.

    Raises:
        SettingsError: the tier is of an unknown kind.
    """
    if contents is None or (file := contents.state.file) is None:
        return None
    for kind in kinds:
        if kind.owns(file):
            return kind
    raise SettingsError(
        f"the replay contents of checkpoint {contents.state.checkpoint} are in a tier of an unknown kind, {file.name}; "
        "go on with the release that has it, or start empty by moving the checkpoints away"
    )
