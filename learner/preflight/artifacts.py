"""The newest checkpoint and version: whole, and of this schema. Their files are read as bytes, so that torch is not
needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, check_names, digest_of_file, number_of, read_file
from anabranch.core.preflight import Finding, info, ok, problem, warning
from anabranch.ingest.events.schema import Schema
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.versions.format import ModelReference, other_model, reference_to


class _Manifest(msgspec.Struct):
    """What the manifests of checkpoints and of versions have in common."""

    schema: str
    files: dict[str, str]
    base: str | None = None


class _VersionManifest(msgspec.Struct):
    model: ModelReference


class _Newest(NamedTuple):
    """The newest directory that is complete."""

    path: Path
    damage: str | None
    is_of_other_schema: bool


def check_checkpoints(settings: PipelineSettings) -> Iterator[Finding]:
    """Whether the newest checkpoint can be resumed from."""
    newest = _newest(settings, "checkpoint", "rank-0/")
    if isinstance(newest, Finding):
        yield newest
        return
    folder, number = newest.path.parent, newest.path.name
    if newest.damage:
        fix = f"Nothing, when an older checkpoint is whole; else move {folder} away to start again."
        yield warning("checkpoint.damaged", f"The newest checkpoint, {number}, is damaged: {newest.damage}.", fix)
    elif newest.is_of_other_schema:
        fix = f"Put [schema] back, or move {folder} away to start again."
        yield problem("checkpoint.schema", f"The newest checkpoint, {number}, was made under another [schema].", fix)
    else:
        yield ok(f"The newest checkpoint, {number}, is whole and of this schema.")


def check_versions(settings: PipelineSettings) -> Iterator[Finding]:
    """Whether the newest version can be served."""
    newest = _newest(settings, "version", "")
    if isinstance(newest, Finding):
        yield newest
        return
    number = newest.path.name
    if newest.damage:
        fix = f'Nothing, serving takes none such; see "anabranch versions show {number}".'
        yield warning("version.damaged", f"The newest version, {number}, is damaged: {newest.damage}.", fix)
    elif newest.is_of_other_schema:
        fix = "Nothing, when [schema] was changed on purpose: serving waits for newer ones."
        yield info("version.schema", f"The newest version, {number}, was learned under another [schema].", fix)
    elif (other := _other_model(settings, newest.path)) is not None:
        fix = "Put [model] back, or let the learner publish a version of it."
        yield warning("version.model", f"Serving does not take the newest version, {number}: {other}.", fix)
    else:
        yield ok(f"The newest version, {number}, is whole and of this schema.")


def _newest(settings: PipelineSettings, what: str, below: str) -> _Newest | Finding:
    """Examine the newest checkpoint or version; a finding where there is none, or no longer."""
    folder = settings.state_dir / f"{what}s"
    named = [number_of(path.parent.name) for path in folder.glob(f"*/{MANIFEST}")]
    numbers = [number for number in named if number is not None]
    if not numbers:
        return ok(f"There is no {what} yet.")
    path = folder / str(max(numbers))
    damage, schema = _damage(path, below)
    if damage and not path.exists():
        return ok(f"The learner has just replaced {what} {path.name}.")
    return _Newest(path, damage, schema is not None and schema != Schema(settings.events).digest)


def _other_model(settings: PipelineSettings, version: Path) -> str | None:
    """Say how a version's model differs from `[model]`, as serving does; None when it does not."""
    try:
        manifest = decoded(read_file(version / MANIFEST, MOST_BYTES), _VersionManifest)
    except (OSError, DamagedError) as exc:
        return f"{version / MANIFEST} cannot be read: {exc}"
    return other_model(manifest.model, reference_to(settings.model))


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
