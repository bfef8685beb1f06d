"""What is registered of a version: its lineage as tags, its numbers as metrics, and where it is."""

import hashlib
import re

import msgspec

from learner.state_dir.version import WEIGHTS, Manifest, Verdict

_LONGEST_TAG = 4_000
"""Characters; MLflow refuses longer values."""
_UNUSABLE = re.compile(r"[^\w\-. /:]")
"""Characters that MLflow refuses in names of metrics."""


class Registration(msgspec.Struct, frozen=True):
    """A version to register."""

    number: int
    identity: str
    """The same for the same version at each attempt, and for no other version of any pipeline."""
    step: int
    time: float
    """When it was published, in seconds since 1970."""
    tags: dict[str, str]
    metrics: dict[str, float]


def registration_of(name: str, manifest: Manifest, verdict: Verdict | None) -> Registration:
    """Return what is registered of a version of the pipeline `name`."""
    weights = manifest.files[WEIGHTS]
    identity = hashlib.sha256(f"{name}/{manifest.number}/{manifest.generation}/{weights}".encode()).hexdigest()
    model = hashlib.sha256(msgspec.json.encode(manifest.model, order="deterministic")).hexdigest()
    tags = {
        "pipeline": name,
        "version": str(manifest.number),
        "identity": identity,
        "generation": str(manifest.generation),
        "parent": "" if manifest.parent is None else str(manifest.parent),
        "step": str(manifest.step),
        "trained_through": ",".join(f"{at}={each.offset}" for at, each in sorted(manifest.trained_through.items())),
        "seen_through": ",".join(f"{at}={offset}" for at, offset in sorted((manifest.seen_through or {}).items())),
        "rows": "" if manifest.learned is None else str(manifest.learned.rows),
        "schema_sha256": manifest.schema,
        "model_factory": manifest.model.factory,
        "model_sha256": model,
        "weights_sha256": weights,
        "base_sha256": manifest.base or "",
        "verdict": "" if verdict is None else verdict.verdict,
        "verdict_reasons": "" if verdict is None else "; ".join(verdict.reasons),
    }
    numbers = {} if verdict is None else {f"gate.{key}": value for key, value in verdict.numbers.items()}
    return Registration(
        number=manifest.number,
        identity=identity,
        step=manifest.step,
        time=manifest.time,
        tags={f"anabranch.{key}": value[:_LONGEST_TAG] for key, value in tags.items() if value},
        metrics={_UNUSABLE.sub("_", key): value for key, value in {**manifest.metrics, **numbers}.items()},
    )
