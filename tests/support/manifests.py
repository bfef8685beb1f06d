"""Manifests of versions."""

from collections.abc import Mapping
from typing import Any

from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Manifest, ModelReference


def manifest_of(
    number: int,
    factory: str = "m:build",
    task: str = "classification",
    args: Mapping[str, Any] | None = None,
    through: Mapping[str, int] | None = None,
    **changes: Any,
) -> Manifest:
    """Return the manifest of version `number`, which is of the step of that number and trained `through` offsets."""
    members: dict[str, Any] = {
        "generation": 1,
        "parent": None,
        "time": 0.0,
        "step": number,
        "schema": "schema",
        "metrics": {},
        "encoders": {},
        "files": {},
        "trained_through": {name: PartitionProgress(offset) for name, offset in (through or {}).items()},
        "model": ModelReference(factory, dict(args or {}), task),
    }
    return Manifest(**members | {"number": number} | changes)
