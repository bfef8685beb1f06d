"""The newest checkpoint and version: whole, and of this schema. Their files are read as bytes, so that torch is not
needed."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, check_names, digest_of_file, number_of, read_file
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from ingest.events.schema import Schema
from learner.state_dir.bases import bases_in
from learner.state_dir.folders import MANIFEST
from learner.state_dir.version import ModelReference, other_model, reference_to


class _Manifest(msgspec.Struct):
    """What the manifests of checkpoints and of versions have in common."""

    schema: str
    files: dict[str, str]
    base: str | None = None


class _VersionManifest(msgspec.Struct):
    model: ModelReference


def check_checkpoints(context: CheckContext) -> Iterator[Finding]:
    """Whether the newest checkpoint can be resumed from."""
    yield from _check_newest(context, "checkpoint", "made")


def check_versions(context: CheckContext) -> Iterator[Finding]:
    """Whether the newest version can be served."""
    yield from _check_newest(context, "version", "learned")


def _check_newest(context: CheckContext, what: str, made: str) -> Iterator[Finding]:
    folder = context.config.state_dir / f"{what}s"
    named = [number_of(path.parent.name) for path in folder.glob(f"*/{MANIFEST}")]
    numbers = [number for number in named if number is not None]
    if not numbers:
        yield ok(f"There is no {what} yet.")
        return
    number = max(numbers)
    damage, schema = _damage(folder / str(number), "rank-0/" if what == "checkpoint" else "")
    if damage and not (folder / str(number)).exists():
        yield ok(f"The learner has just replaced {what} {number}.")
    elif damage:
        yield found(
            f"{what}.damaged", f"The newest {what}, {number}, is damaged: {damage}.", path=folder, number=number
        )
    elif schema is not None and schema != Schema(context.config.pipeline.events).digest:
        message = f"The newest {what}, {number}, was {made} under another [schema]."
        yield found(f"{what}.schema", message, path=folder, number=number)
    elif what == "version" and (other := _other_model(context, folder / str(number))) is not None:
        yield found("version.model", f"Serving does not take the newest version, {number}: {other}.")
    else:
        yield ok(f"The newest {what}, {number}, is whole and of this schema.")


def _other_model(context: CheckContext, version: Path) -> str | None:
    """Say how a version's model differs from `[model]`, as serving does; None when it does not."""
    try:
        manifest = decoded(read_file(version / MANIFEST, MOST_BYTES), _VersionManifest)
    except (OSError, DamagedError) as exc:
        return f"{version / MANIFEST} cannot be read: {exc}"
    return other_model(manifest.model, reference_to(context.config.pipeline.model))


def _damage(directory: Path, below: str) -> tuple[str | None, str | None]:
    """Return what is wrong with a directory's files, and the schema's digest that its manifest names.

    All files are in the folder `below` of the directory, "" for none. A checkpoint that has no tensors is of any
    schema.
    """
    try:
        manifest = decoded(read_file(directory / MANIFEST, MOST_BYTES), _Manifest)
        check_names(manifest.files, below)
        for name, digest in manifest.files.items():
            if digest_of_file(directory / name) != digest:
                return f"{name} does not have its digest", manifest.schema
        if manifest.base is not None and not below:  # a learner writes that of its checkpoint again
            bases_in(directory.parents[1]).checked(manifest.base)
    except (OSError, DamagedError) as exc:
        return f"{exc}", None
    return None, manifest.schema if any(name.endswith(".safetensors") for name in manifest.files) else None
