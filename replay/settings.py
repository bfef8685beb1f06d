"""The section `[replay]` of `pipeline.toml`. Imports no torch."""

from datetime import timedelta
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, ConfigDict, Field, SecretStr, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section, written
from anabranch.core.users_code import NamedClass

INDEXED = {"similar", "diverse"}
"""Policies of admission and sampling that need the index process, and `model.embedding`."""
_COMPARING = {*INDEXED, "distinct", "agreement"}
SAMPLING = NamedClass(
    "replay.sampling",
    ("uniform", "class-balanced", "recent", "loss", "agreement", "similar", "diverse"),
    "anabranch.samplers",
    "anabranch.replay.sampling.base:Sampler",
)
ADMISSION = NamedClass(
    "replay.admission",
    ("reservoir", "class-balanced", "recent", "distinct", "diverse"),
    "anabranch.admissions",
    "anabranch.replay.reservoir.admission:Admission",
)
TIER = NamedClass("replay.tiers.NAME.factory", (), "anabranch.tiers", "anabranch.replay.tiers.tier:TierFactory")
_TierName = Annotated[
    str, written("(?!(device|redis|disk)$)[a-z][a-z0-9_-]*", "lower-case letters and digits, and no name of our tiers")
]


def sampling_compares(name: str) -> bool:
    """Return whether a sampler needs `model.embedding`; a class of the user says so by `uses_embeddings`."""
    return name in _COMPARING if name in SAMPLING.names else bool(SAMPLING.find(name).uses_embeddings)


def admission_compares(name: str) -> bool:
    """Return whether an admission policy needs `model.embedding`, as no class of the user does."""
    return name in _COMPARING


def _url(value: SecretStr) -> SecretStr:
    if urlsplit(value.get_secret_value()).scheme not in ("redis", "rediss", "unix"):
        raise ValueError("write redis://HOST:PORT/DB, rediss://... for TLS, or unix://PATH")
    return value


_TierBytes = Annotated[ByteSize, Field(ge=4096)]


class TierSettings(Section):
    """A tier below the memory tier."""

    bytes: _TierBytes
    """Bytes that the events may take there."""


class RedisSettings(TierSettings):
    """The tier in Redis or Valkey: a cache of the disk tier or, without that, the primary tier."""

    url: Annotated[SecretStr, AfterValidator(_url)]
    """`redis://[USER:PASSWORD@]HOST:PORT/DB`, `rediss://...?ssl_ca_certs=/path/ca.pem` for TLS, or `unix://PATH`; never
    printed."""
    bytes: _TierBytes
    """Memory that the events may take there, keys and all; less than the server's `maxmemory`."""


class DiskSettings(TierSettings):
    """The disk tier: a file below `state_dir` with all stored events; the other tiers are its caches."""

    bytes: _TierBytes
    """Size of the file; its space is allocated at the start."""


class CustomTierSettings(TierSettings):
    """A tier that is a class of yours: a cache of the next slower tier, or the primary tier without Redis and disk.

    Those of several sections are ordered from fast to slow, and are faster than Redis and disk."""

    model_config = ConfigDict(extra="allow")

    factory: Annotated[str, TIER]
    """`my_code:MyTierFactory`, or an entry point; further keys are its keyword arguments."""


class ReplaySettings(Section):
    """Which events are kept for replay, and how they are sampled."""

    admission: Annotated[str, ADMISSION] = "reservoir"
    """Which events are kept: `reservoir` is a uniform sample of all events, weighted by `[schema.weight]` if declared;
    `class-balanced` keeps as many of each class, `recent` more of the newer events, `distinct` no near-duplicates of
    recent events by `model.embedding`, and `diverse` as many of each cluster of it. `my_code:MyAdmission` is your own
    class."""
    admission_args: dict[str, Any] = {}
    """Keyword arguments of your admission policy."""
    class_floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of an equal part of the store that is reserved for each class: 0.25 keeps at least 25 events of each of
    ten classes in a store of 1,000, if there are as many. For `reservoir`, `recent` and `distinct`."""
    sampling: Annotated[str, SAMPLING] = "uniform"
    """Which kept events are sampled: `uniform`, as many of each class (`class-balanced`) or cluster (`diverse`), more
    of the newer events (`recent`), more of those with a large loss (`loss`), fewer of those whose label differs
    from their neighbours' in `model.embedding` (`agreement`), those nearest to new events there (`similar`).
    `my_code:MySampler` is your own class."""
    sampling_args: dict[str, Any] = {}
    """Keyword arguments of your sampler."""
    half_life: PositiveDuration = timedelta(days=1)
    """For `recent`: the difference in age that halves the probability of an event."""
    capacity: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1_000_000
    """Events to keep, and up to 1/32 more between two evictions."""
    device_bytes: Annotated[ByteSize, Field(ge=0)] = ByteSize(256_000_000)
    """Bytes of the memory tier, 0 for none; without Redis and disk they bound the number of kept events."""
    device_memory: Literal["device", "host"] = "device"
    """Where the memory tier stores rows: on the learner's `device`, or in pinned memory of the `host`, for a GPU with
    little free memory."""
    tiers: dict[_TierName, CustomTierSettings] = {}
    """Tiers that are classes of yours, by name, their label in metrics."""
    redis: RedisSettings | None = None
    """The tier in Redis."""
    disk: DiskSettings | None = None
    """The disk tier; without it and Redis, events are stored in memory and in checkpoints."""

    @property
    def slower(self) -> dict[str, TierSettings]:
        """The sections of the slower tiers that there are, by key, from fast to slow."""
        custom: dict[str, TierSettings] = {f"tiers.{name}": section for name, section in self.tiers.items()}
        return custom | {name: section for name, section in self if isinstance(section, TierSettings)}

    @property
    def primary(self) -> str | None:
        """The key of the tier that has all events; None where that is the memory tier."""
        return next(reversed(self.slower), None)

    @model_validator(mode="after")
    def _no_groups_have_a_floor(self) -> Self:
        if self.class_floor and self.admission not in ("reservoir", "recent", "distinct"):
            raise ValueError(f'class_floor is for other admissions than "{self.admission}", which has quotas already')
        return self

    @model_validator(mode="after")
    def _arguments_are_for_other_classes(self) -> Self:
        for key, setting in (("sampling", SAMPLING), ("admission", ADMISSION)):
            if getattr(self, f"{key}_args") and (name := getattr(self, key)) in setting.names:
                raise ValueError(f'{key}_args are for your own class, and {key} = "{name}" takes none')
        return self

    @model_validator(mode="after")
    def _there_is_a_tier(self) -> Self:
        if not self.device_bytes and not self.slower:
            raise ValueError("device_bytes = 0 leaves no tier; set replay.disk or replay.redis, or raise device_bytes")
        return self
