"""The section `[replay]` of `pipeline.toml`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from ingest.config import Section


class DiskSettings(Section):
    """The disk tier: a file below `state_dir` that holds everything stored, with the memory tier as its cache."""

    bytes: Annotated[ByteSize, Field(ge=4096)]
    """Size of the file; its space is taken at the start."""


class ReplaySettings(Section):
    """What is kept for rehearsal, and how it is drawn."""

    admission: Literal["reservoir"] = "reservoir"
    """Who is kept: `reservoir` is a uniform sample of everything seen, weighted by `[schema.weight]` where declared."""
    sampling: Literal["uniform"] = "uniform"
    """Who is drawn: `uniform` over everything held."""
    capacity: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1_000_000
    """Events to keep, and up to 1/32 more between two clearings."""
    device_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(256_000_000)
    """Bound of the memory tier, on the learner's device; without a disk tier it also bounds what can be kept."""
    disk: DiskSettings | None = None
    """The disk tier; without it, what is kept lies in memory and in cuts."""
