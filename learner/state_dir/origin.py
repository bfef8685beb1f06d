"""Where a version comes from: what a rebuild has to repeat, and what an auditor asks. Imports no torch."""

from typing import Any

import msgspec


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
    """SHA-256 of the file of each module that builds the model, or is its task or teacher, by the module's name."""
    packages: dict[str, str]
    """Versions of Python, torch, numpy and Anabranch."""
    device: str
    """The name of the device; of a CPU, `cpu` and its instructions for vectors, such as `cpu AVX512`."""
    found: dict[str, float] = {}
    """The values that `[search]` had found, by key; the model trained with them in place of those of `settings`."""
    resumed_from: ResumedFrom | None
    """None: the learner began at the start of the stream."""
