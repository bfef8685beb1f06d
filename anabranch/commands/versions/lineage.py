"""`anabranch versions lineage`: where a version comes from, as an in-toto statement with SLSA provenance.

The forms are https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1. What these have no field for is in
`anabranchLineage`. What a version of an earlier release does not say is `unknown`. Loads no torch.
"""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from anabranch.command import command, output
from anabranch.commands.versions.show import VersionArgument, Which, parse_which, stored_versions, version_number
from anabranch.config.loader import Config
from anabranch.core.failures import state_errors
from anabranch.core.temporary_files import temporary_folder
from anabranch.learner.errors import VersionError
from anabranch.learner.object_storage.erasure_upload import fetch_erasures
from anabranch.learner.state_dir.folders import BASE_FILE, MANIFEST
from anabranch.learner.state_dir.undo_file import read_undo
from anabranch.learner.versions.format import WEIGHTS, Manifest, Versions
from anabranch.replay.erasure.erasure_log import NAME as LOG
from anabranch.replay.erasure.erasure_log import ErasureLog

UNKNOWN = "unknown"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "urn:anabranch:learned-from-a-stream:1"


@command("anabranch versions lineage 4711 > lineage.json")
def lineage(version: VersionArgument, config: Config) -> None:
    """Print where a version comes from: an in-toto statement with SLSA provenance, which other tools can sign."""
    output(lineage_of(config, parse_which(version)), lambda: None)


def lineage_of(config: Config, which: Which) -> dict[str, Any]:
    """Return the statement on a version whose files have their digests.

    Raises:
        SettingsError: there is no such version any more.
        VersionError: files of the version are missing or damaged.
        DependencyError: a disk or the object store cannot be reached.
    """
    versions, number = stored_versions(config), version_number(config, which)
    with state_errors(f"version {number} cannot be read"):
        return _statement(config, versions, versions.manifest(number))


def _statement(config: Config, versions: Versions, manifest: Manifest) -> dict[str, Any]:
    versions.contents(manifest)
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in _subjects(versions, manifest)],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": _definition(config, versions, manifest),
            "runDetails": _run_details(config, manifest),
            "anabranchLineage": _lineage(config, versions, manifest),
        },
    }


def _subjects(versions: Versions, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the path in `state_dir` and the SHA-256 of each file of a version."""
    prefix = f"versions/{manifest.number}"
    for name, digest in manifest.files.items():
        yield f"{prefix}/{name}", digest
    content = versions.folder(manifest.number).read(MANIFEST)
    yield f"{prefix}/{MANIFEST}", hashlib.sha256(content).hexdigest()
    if manifest.base is not None:
        yield f"bases/{manifest.base}/{BASE_FILE}", manifest.base


def _definition(config: Config, versions: Versions, manifest: Manifest) -> dict[str, Any]:
    origin = manifest.origin
    return {
        "buildType": _BUILD_TYPE,
        "externalParameters": {
            "pipeline": config.pipeline.name,
            "seed": UNKNOWN if origin is None else origin.seed,
            "settings": UNKNOWN if origin is None else origin.settings,
            "schema": manifest.schema,
            "model": msgspec.to_builtins(manifest.model),
        },
        "internalParameters": {"device": UNKNOWN if origin is None else origin.device},
        "resolvedDependencies": [
            *_ranges(versions, manifest),
            *({"name": f"module {name}", "digest": {"sha256": each}} for name, each in _code(manifest).items()),
            *({"uri": f"pkg:{_purl(name)}@{each}"} for name, each in _packages(manifest).items()),
            *_models(config, manifest),
        ],
    }


def _code(manifest: Manifest) -> dict[str, str]:
    return {} if manifest.origin is None else manifest.origin.code


def _packages(manifest: Manifest) -> dict[str, str]:
    return {} if manifest.origin is None else manifest.origin.packages


def _purl(name: str) -> str:
    return "generic/python" if name == "python" else f"pypi/{name}"


def _ranges(versions: Versions, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the offsets of each partition that a version has learned, and which of them its parent had not."""
    parent = next(itertools.islice(_chain(versions, manifest), 1, None), None)
    before = parent.trained_through if isinstance(parent, Manifest) else {}
    for name, trained in manifest.trained_through.items():
        topic, _, partition = name.rpartition(":")
        first = UNKNOWN if manifest.learned_from is None else manifest.learned_from.get(name, UNKNOWN)
        known = before.get(name)
        same = known is not None and known.incarnation == trained.incarnation
        yield {
            "name": name,
            "uri": f"kafka:{topic}/{partition}",
            "annotations": {
                "incarnation": trained.incarnation,
                "first_offset": first,
                "last_offset": trained.offset,
                "first_offset_after_parent": known.offset + 1 if known is not None and same else first,
            },
        }


def _models(config: Config, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the base of the version, and the version that was its teacher."""
    if manifest.base is not None:
        yield {"name": "base of the model", "digest": {"sha256": manifest.base}}
    settings = {} if manifest.origin is None else manifest.origin.settings
    teacher = config.pipeline.model.teacher
    number = settings.get("model.teacher.version.number")
    if number is None or teacher is None or teacher.version is None:
        return
    folder = teacher.version.state_dir
    path = config.state_dir if folder is None else config.folder / folder
    with suppress(VersionError, OSError):
        files = Versions(path / "versions").manifest(number).files
        yield {"name": f"teacher, version {number}", "digest": {"sha256": files[WEIGHTS]}}


def _run_details(config: Config, manifest: Manifest) -> dict[str, Any]:
    return {
        "builder": {
            "id": "urn:anabranch:learner",
            "version": {"anabranch": _packages(manifest).get("anabranch", UNKNOWN)},
        },
        "metadata": {
            "invocationId": f"{config.pipeline.name}/generation/{manifest.generation}",
            "finishedOn": _moment(manifest.time),
        },
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _lineage(config: Config, versions: Versions, manifest: Manifest) -> dict[str, Any]:
    verdict = versions.verdict(manifest.number)
    applied = manifest.erasures
    return {
        "version": manifest.number,
        "step": manifest.step,
        "manifest_format": manifest.format,
        "parents": list(_parents(versions, manifest)),
        "gate": None if verdict is None else msgspec.to_builtins(verdict),
        "metrics": manifest.metrics,
        "erasures": {
            "records_applied": UNKNOWN if applied is None else applied,
            "records_since": UNKNOWN if applied is None else max(0, _erasures(config) - applied),
        },
        "undone": list(_undone(config, manifest)),
    }


def _erasures(config: Config) -> int:
    """Return how many records of erasures there are, on this host or in the object store that other hosts use."""
    storage = config.pipeline.storage
    with temporary_folder("anabranch-lineage-") as folder:
        logs = [ErasureLog(config.state_dir / LOG), ErasureLog(folder / LOG)]
        if storage is not None and storage.mode == "only":
            fetch_erasures(storage.bucket, folder)
        for log in logs:
            log.refresh()
        return max(log.count for log in logs)


def _undone(config: Config, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the undos so far: their offsets, and whether the version was made without them."""
    for record in read_undo(config.state_dir):
        yield {
            "undo": record.number,
            "time": _moment(record.time),
            "applied": record.number <= manifest.undone,
            "ranges": {
                name: [list(pair) for pair in zip(each.firsts, each.lasts, strict=True)]
                for name, each in record.ranges.items()
            },
        }


def _parents(versions: Versions, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the version's own entry, then its parents, the newest first, as far as their manifests are there."""
    for each in _chain(versions, manifest):
        if isinstance(each, int):
            yield {"version": each, "generation": UNKNOWN, "step": UNKNOWN, "sha256": UNKNOWN}
            return
        resumed = UNKNOWN if each.origin is None else msgspec.to_builtins(each.origin.resumed_from)
        yield {
            "version": each.number,
            "generation": each.generation,
            "step": each.step,
            "sha256": each.files.get(WEIGHTS, UNKNOWN),
            "learner_resumed_from_checkpoint": resumed,
        }


def _chain(versions: Versions, manifest: Manifest) -> Iterator[Manifest | int]:
    """Yield a version and the versions before it whose weights it continues; at last the number of one that is gone.

    A manifest names the version before it as its parent, which a learner that resumed from a checkpoint may have left
    out: those of other learners after the step of that checkpoint.
    """
    yield manifest
    child = each = manifest
    while each.parent is not None and each.parent < each.number:  # manifests have no digest, and may name any parent
        number = each.parent
        try:
            each = versions.manifest(number)
        except VersionError:
            yield number
            return
        if _continues(child, each):
            yield each
            child = each


def _continues(child: Manifest, parent: Manifest) -> bool:
    if child.origin is None or child.generation == parent.generation:
        return True
    resumed = child.origin.resumed_from
    return resumed is not None and parent.step <= resumed.step
