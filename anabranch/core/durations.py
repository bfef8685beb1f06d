"""Durations and sizes as `pipeline.toml` writes them."""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ByteSize, PlainSerializer

__all__ = ["ByteSize", "Duration", "PositiveDuration", "format_duration", "parse_duration"]

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")


def parse_duration(value: object) -> timedelta:
    """Read `"250ms"`, `"30s"`, `"10m"`, `"2h"` or `"1d"`; a bare number is refused, since it hides its unit."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('write a duration as a number and a unit (ms, s, m, h, d), such as "30s"')
    try:
        return timedelta(seconds=float(match[1]) * _UNITS[match[2]])
    except OverflowError:
        raise ValueError("is longer than a duration can be") from None


def format_duration(value: timedelta) -> str:
    """Write a duration in the largest unit that leaves a whole number, as in `pipeline.toml`."""
    for unit, scale in reversed(_UNITS.items()):
        count, rest = divmod(value, timedelta(seconds=scale))
        if count and not rest:
            return f"{count}{unit}"
    return f"{value.total_seconds() * 1000:g}ms"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration, json_schema_input_type=str),
    PlainSerializer(format_duration, return_type=str),
]


def _longer_than_nothing(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("must be longer than 0s")
    return value


PositiveDuration = Annotated[Duration, AfterValidator(_longer_than_nothing)]
