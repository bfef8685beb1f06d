"""The section `[replay]` of `pipeline.toml`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from ingest.config import Section


class ReplaySettings(Section):
    """What is kept for rehearsal, and how it is drawn."""

    admission: Literal["reservoir"] = "reservoir"
    """Who is kept: `reservoir` is a uniform sample of everything seen, weighted by `[schema.weight]` where declared."""
    sampling: Literal["uniform"] = "uniform"
    """Who is drawn: `uniform` over everything held."""
    capacity: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1_000_000
    """Events to keep."""
    device_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(256_000_000)
    """Bound of the memory tier, on the learner's device; where it is less than `capacity` needs, it decides."""
