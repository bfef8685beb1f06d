"""Where a version comes from: what a rebuild has to repeat, and what an auditor asks. Imports no torch."""

from collections.abc import Sequence
from typing import Any

import msgspec

UNPUBLISHED: dict[str, Any] = {
    "learner": {"profile", "standby", "stop_timeout", "status"},
    "model": {
        "channels_last": True,
        "teacher": {"url", "token", "ca", "timeout", "request_rows", "retries"},
    },
    "replay": {"redis": {"url"}, "device_memory": True, "tiers": True},
    "stream": {
        "bootstrap_servers": True,
        "dead_letter_topic": True,
        "group_id": True,
        "registry": True,
        "client": True,
        "buffer_bytes": True,
        "properties": True,
        "token": True,
        "on_gap": True,
        "labels": {"bytes"},
        "backfill": {"storage", "files"},
    },
}
"""Settings of these sections on which no weights depend, or that have secrets or paths of a machine. All others are
in the manifest of each version."""
_PUBLISHED = frozenset({"name", "seed", "schema", "gate", "search", *UNPUBLISHED})
_NAMED = ("stream", "backfill", "files")
"""The names of files are published, though not their folders."""


class ResumedFrom(msgspec.Struct, frozen=True):
    """The checkpoint that the learner of a version resumed from."""

    number: int
    step: int


class VersionOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """What a version was made with, besides the stream."""

    seed: int
    settings: dict[str, Any]
    """The settings on which weights depend, by dotted key."""
    code: dict[str, str]
    """SHA-256 of the file of each module that builds the model, or is its task or teacher, or has a class that other
    settings name, by the module's name."""
    packages: dict[str, str]
    """Versions of Python, torch, numpy and Anabranch."""
    device: str
    """The name of the device; of a CPU, `cpu` and its instructions for vectors, such as `cpu AVX512`."""
    found: dict[str, float] = {}
    """The values that `[search]` had found, by key; the model trained with them in place of those of `settings`."""
    resumed_from: ResumedFrom | None
    """None: the learner began at the start of the stream."""


def is_published(location: Sequence[str]) -> bool:
    """Return whether the value of a setting, given by the keys that lead to it, leaves with each version."""
    if location[0] not in _PUBLISHED:
        return False
    if tuple(location[:3]) == _NAMED:
        return True
    left_out: Any = UNPUBLISHED.get(location[0], ())
    for key in location[1:]:
        if key not in left_out:
            return True
        if not isinstance(left_out, dict) or left_out[key] is True:
            return False
        left_out = left_out[key]
    return True
