"""The kinds of slower tiers: ours by name, others by import string."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from anabranch.core.errors import SettingsError
from anabranch.core.users_code import build
from anabranch.replay.settings import TIER, ReplaySettings, TierSettings
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.tiers.disk import DiskTierFactory
from anabranch.replay.tiers.redis_tier import RedisTierFactory
from anabranch.replay.tiers.tier import TierContext, TierFactory

TIERS: dict[str, Callable[[Any, TierContext], TierFactory]] = {
    "redis": RedisTierFactory,
    "disk": DiskTierFactory,
}
"""By the name of their section in `[replay]`, from fast to slow. A factory gets its section, or None.

The slowest tier that a pipeline configures is the primary tier; the others are caches below the memory tier. Those of
`replay.tiers` come first."""


def kinds_of(settings: ReplaySettings, context: TierContext) -> dict[str, TierFactory]:
    """Return all kinds by key of `[replay]`, from fast to slow, also those of ours that are not configured.

    Raises:
        SettingsError: a factory of the user has no such argument, or refuses a value.
    """
    kinds: dict[str, TierFactory] = {}
    for name, section in settings.tiers.items():
        folder = None if context.folder is None else context.folder / name
        arguments = section.model_extra or {}
        kinds[f"tiers.{name}"] = build(
            f"replay.tiers.{name}",
            section.factory,
            TIER.find(section.factory),
            arguments,
            TierSettings(bytes=section.bytes),
            replace(context, name=name, folder=folder, keys=context.keys and f"{context.keys}:{name}"),
        )
    return kinds | {name: kind(getattr(settings, name), context) for name, kind in TIERS.items()}


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
        "put its section of [replay.tiers] back, or start empty by moving the checkpoints away"
    )
