"""How far a version is trained, and the format of it in HTTP replies. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec


class PartitionProgress(msgspec.Struct, frozen=True):
    """How far a version is trained on one partition: up to `offset`, inclusive (-1 for none)."""

    offset: int
    incarnation: int = 0
    time_ms: int = 0
    """Timestamp of the last record with an outcome, milliseconds since 1970; 0 for none."""

    def reaches(self, needed: "PartitionProgress") -> bool:
        """Return whether the version is trained as far as another one, or further."""
        return (self.incarnation, self.offset) >= (needed.incarnation, needed.offset)


class NewlyTrained(msgspec.Struct, frozen=True):
    """The events that a version is the first to have been trained on, restarts of the learner included."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    """Number of these events that have a record time."""
    times_ms: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]
    """Quantiles of their record times, in milliseconds since 1970, rising."""


def format_trained_through(trained_through: Mapping[str, PartitionProgress]) -> str:
    """Return the format of HTTP replies: `events:0=4711,events:1=4698`."""
    return format_offsets({name: trained.offset for name, trained in trained_through.items()})


def format_offsets(offsets: Mapping[str, int]) -> str:
    """Return offsets by `topic:partition` in the same format."""
    return ",".join(f"{name}={offset}" for name, offset in sorted(offsets.items()))


def parse_trained_through(text: str) -> dict[str, int]:
    """Parse that format into an offset for each `topic:partition`; raises ValueError."""
    offsets: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z0-9._-]+:\d+)=(-?\d+)\s*", part)
        if match is None:
            raise ValueError(f'{part.strip()!r} is not of the form "topic:partition=offset"')
        offsets[match[1]] = int(match[2])
    return offsets
