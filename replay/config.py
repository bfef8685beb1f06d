"""The section `[replay]` of `pipeline.toml`. Imports no torch."""

from datetime import timedelta
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field, SecretStr, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section

INDEXED = {"similar", "diverse"}
"""Policies of admission and sampling that need the index process, and `model.embedding`."""
COMPARING = {*INDEXED, "distinct", "agreement"}
"""Policies of admission and sampling that need `model.embedding`."""


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


class ReplaySettings(Section):
    """Which events are kept for replay, and how they are sampled."""

    admission: Literal["reservoir", "class-balanced", "recent", "distinct", "diverse"] = "reservoir"
    """Which events are kept: `reservoir` is a uniform sample of all events, weighted by `[schema.weight]` if declared;
    `class-balanced` keeps as many of each class, `recent` more of the newer events, `distinct` no near-duplicates of
    recent events by `model.embedding`, and `diverse` as many of each cluster of it."""
    class_floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The least events that are kept of each class, if there are as many, as a fraction of an equal part of the store:
    0.25 keeps at least 25 of each of ten classes in a store of 1,000. For `reservoir`, `recent` and `distinct`."""
    sampling: Literal["uniform", "class-balanced", "recent", "loss", "agreement", "similar", "diverse"] = "uniform"
    """Which kept events are sampled: `uniform`, as many of each class (`class-balanced`) or cluster (`diverse`), more
    of the newer events (`recent`), more of those with a large loss (`loss`), fewer of those whose label differs
    from their neighbours' in `model.embedding` (`agreement`), those nearest to new events there (`similar`)."""
    half_life: PositiveDuration = timedelta(days=1)
    """For `recent`: the difference in age that halves the probability of an event."""
    capacity: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1_000_000
    """Events to keep, and up to 1/32 more between two evictions."""
    device_bytes: Annotated[ByteSize, Field(ge=0)] = ByteSize(256_000_000)
    """Bytes of the memory tier, 0 for none; without Redis and disk they bound the number of kept events."""
    device_memory: Literal["device", "host"] = "device"
    """Where the memory tier stores rows: on the learner's `device`, or in pinned memory of the `host`, for a GPU whose
    memory the model needs. On a CPU both are the same."""
    redis: RedisSettings | None = None
    """The tier in Redis."""
    disk: DiskSettings | None = None
    """The disk tier; without it and Redis, events are stored in memory and in checkpoints."""

    @property
    def slower(self) -> dict[str, TierSettings]:
        """The sections of the slower tiers that there are, by name."""
        return {name: section for name, section in self if isinstance(section, TierSettings)}

    @model_validator(mode="after")
    def _no_groups_have_a_floor(self) -> Self:
        if self.class_floor and self.admission in ("class-balanced", "diverse"):
            raise ValueError(f'class_floor is for other admissions than "{self.admission}", which has quotas already')
        return self

    @model_validator(mode="after")
    def _there_is_a_tier(self) -> Self:
        if not self.device_bytes and not self.slower:
            raise ValueError("device_bytes = 0 leaves no tier; set replay.disk or replay.redis, or raise device_bytes")
        return self
