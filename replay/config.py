"""The section `[replay]` of `pipeline.toml`. Imports no torch."""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from ingest.config import Section
from ingest.units import PositiveDuration

COMPARING = {"similar", "diverse"}
"""Policies of admission and sampling that need `model.embedding`."""


class DiskSettings(Section):
    """The disk tier: a file below `state_dir` that holds everything stored, with the memory tier as its cache."""

    bytes: Annotated[ByteSize, Field(ge=4096)]
    """Size of the file; its space is taken at the start."""


class ReplaySettings(Section):
    """What is kept for rehearsal, and how it is drawn."""

    admission: Literal["reservoir", "class-balanced", "recent", "diverse"] = "reservoir"
    """Who is kept: `reservoir` is a uniform sample of everything seen, weighted by `[schema.weight]` where declared;
    `class-balanced` has as many of each class, `recent` more of what is young, `diverse` as many of each cluster of
    `model.embedding`."""
    sampling: Literal["uniform", "class-balanced", "recent", "loss", "similar", "diverse"] = "uniform"
    """Who is drawn of what is held: `uniform`, as many of each class or of each cluster (`diverse`), more of what is
    young (`recent`), more of what had a large loss (`loss`), what is nearest to new events in `model.embedding`
    (`similar`)."""
    half_life: PositiveDuration = timedelta(days=1)
    """For `recent`: an event that is so much older is half as likely."""
    capacity: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1_000_000
    """Events to keep, and up to 1/32 more between two clearings."""
    device_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(256_000_000)
    """Bound of the memory tier, on the learner's device; without a disk tier it also bounds what can be kept."""
    disk: DiskSettings | None = None
    """The disk tier; without it, what is kept lies in memory and in cuts."""
