"""Whether a version can be rebuilt, and where that starts: at the newest checkpoint before it, or with the stream.

Settings that differ from those of the version are refused, other differences are warnings. What is needed of the
pipeline's state directory is copied into another one. Its files are only read.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.settings.stream import LagPolicySettings
from anabranch.learner.checkpoints.checkpoint_copy import copy_checkpoint, copy_rows
from anabranch.learner.checkpoints.format import Checkpoint, CheckpointManifest, Checkpoints
from anabranch.learner.errors import CheckpointError, MisfitError
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.origin import VersionOrigin
from anabranch.learner.state_dir.undo_file import NAME, UndoRecord, copy_records
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.versions.format import Manifest, other_model, reference_to
from anabranch.learner.versions.origin import code_digests, device_name, packages, settings_of_weights
from anabranch.learner.versions.rebuilt import RebuildStart
from anabranch.learner.versions.tainted import seen_by_checkpoint
from anabranch.replay.erasure.erasure_log import NAME as LOG
from anabranch.replay.erasure.erasure_log import SECRET_FILE

_NEVER = timedelta(days=36_500)
_MOST_KEYS = 5
_ABSENT = object()

log = logging.getLogger(__name__)


class RebuildError(SettingsError):
    """A version cannot be rebuilt: from these settings, checkpoints and stream it would not come out.

    No second attempt succeeds without a change.
    """


def check_settings(deployment: PipelineSettings, schema: str, manifest: Manifest) -> list[str]:
    """Return what about the settings of a version is unknown, one sentence each.

    Args:
        deployment: the settings as they are now.
        schema: digest of the schema as it is now.
        manifest: of the version.

    Raises:
        RebuildError: the settings differ from those of the version, or a rebuild does not support them.
    """
    what = f"version {manifest.number} cannot be rebuilt"
    check_supported(deployment, what)
    if manifest.schema != schema:
        raise RebuildError(
            f"{what}: it was trained under another [schema], or with another tokenizer; restore the old one"
        )
    if (differs := other_model(manifest.model, reference_to(deployment.model))) is not None:
        raise RebuildError(f"{what}: {differs}")
    origin = manifest.origin
    if origin is None:
        return ["the version is of a release that did not record its settings and code: those of now are used"]
    now = settings_of_weights(deployment)
    differ = _differences(origin.settings, now)
    if origin.seed != deployment.seed:
        differ.insert(0, f"seed was {origin.seed}, and is {deployment.seed}")
    if differ:
        more = f"; and {len(differ) - _MOST_KEYS} more" if len(differ) > _MOST_KEYS else ""
        raise RebuildError(
            f"{what}, since settings have changed: {'; '.join(differ[:_MOST_KEYS])}{more}; set them back"
        )
    if added := sorted(now.keys() - origin.settings.keys()):
        return [f"settings that the version's release did not have are as they are now: {', '.join(added)}"]
    return []


def check_supported(deployment: PipelineSettings, what: str) -> None:
    """Raise RebuildError where a rebuild does not support the settings; `what` begins the sentence."""
    learner, teacher = deployment.learner, deployment.model.teacher
    if learner.replicas > 1 or learner.mesh is not None:
        raise RebuildError(
            f"{what}: learner.replicas = {learner.replicas} train together, and a rebuild is one process; their sums "
            "of gradients are rounded in another order"
        )
    if learner.strategy.kind.replays and (primary := deployment.replay.primary) not in (None, "disk"):
        raise RebuildError(
            f"{what}: its stored events are in replay.{primary} alone, which keeps none of an earlier time; "
            "add [replay.disk]"
        )
    if teacher is not None and teacher.version is not None and teacher.version.number is None:
        raise RebuildError(
            f"{what}: model.teacher.version names no number, so that its teacher is not known; write the number"
        )


def changes_since(deployment: PipelineSettings, origin: VersionOrigin | None, device: torch.device) -> list[str]:
    """Return what else has changed since a version was published, one sentence each; the model is built already."""
    if origin is None:
        return []
    changes = []
    for module, digest in code_digests(deployment).items():
        if origin.code.get(module) != digest:
            changes.append(f"the file of module {module} is not the one that the version was made with")
    now = packages()
    for name, version in origin.packages.items():
        if now.get(name) != version:
            changes.append(f"{name} was {version}, and is {now.get(name, 'not installed')}")
    if (name := device_name(device)) != origin.device:
        changes.append(f"the version was trained on {origin.device}, and this is {name}, which rounds in another way")
    return changes


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ; where no other key does, those of `now` alone are of a later release."""
    differ = [key for key in before if before[key] != now.get(key, _ABSENT)]
    if differ:
        differ += now.keys() - before.keys()
    return [f"{key} was {_shown(before, key)}, and is {_shown(now, key)}" for key in sorted(differ)]


def _shown(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key, _ABSENT)
    text = "not there" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def targets(manifest: Manifest) -> dict[TopicPartition, int]:
    """Return the last offset of each partition that was read for a version, with or without its labels."""
    through = {}
    for name, trained in manifest.trained_through.items():
        topic, _, partition = name.rpartition(":")
        offset = trained.offset if manifest.seen_through is None else manifest.seen_through[name]
        through[TopicPartition(topic, int(partition), trained.incarnation)] = offset
    return through


def in_scratch(deployment: PipelineSettings, scratch: Path) -> PipelineSettings:
    """Return the settings with another state directory: nothing of the pipeline is written."""
    teacher = deployment.model.teacher
    model = deployment.model
    if teacher is not None and teacher.version is not None and teacher.version.state_dir is None:
        version = teacher.version.model_copy(update={"state_dir": deployment.state_dir})
        model = model.model_copy(update={"teacher": teacher.model_copy(update={"version": version})})
    stream = {"on_gap": "fail", "lag_policy": LagPolicySettings(high=_NEVER)}
    return deployment.with_changes(
        model=model,
        stream=deployment.stream.model_copy(update=stream),
        learner=deployment.learner.model_copy(update={"profile": None, "standby": False}),
        checkpoints=deployment.checkpoints.model_copy(update={"every": _NEVER}),
        replay=deployment.replay.model_copy(update={"redis": None}),  # a cache, whose keys belong to the pipeline
        state_dir=scratch,
        storage=None,
        serving=deployment.serving.model_copy(update={"canary": 0.0}),
        gate=deployment.gate.model_copy(update={"live": False}),  # what servers have answered is of other versions
        tracing=None,
        track=None,
    )


def copy_start(
    source: Checkpoints, state_dir: Path, manifest: Manifest, target: Path, *, has_files: bool = False
) -> RebuildStart:
    """Copy the newest intact checkpoint that precedes a version, with the files that it names, the erasures, and what
    was undone before the version.

    Args:
        source: the checkpoints of the pipeline.
        state_dir: the state directory of the pipeline.
        manifest: of the version.
        target: the new state directory.
        has_files: whether files are read before the topics, also in a start at the beginning.

    Raises:
        RebuildError: several ranks trained the version, or it was made after an undo that `undo.json` does not have.
        SettingsError: `undo.json` is damaged.
        DependencyError: a disk cannot be read or written now.
    """
    damaged: list[str] = []
    with away_is_dependency(f"the state of the pipeline cannot be copied to {target}"):
        if (secret := StreamSecret.read(state_dir)) is not None:
            secret.write(target)
        for name in (SECRET_FILE, LOG):  # the secret first: the log needs it
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(state_dir / name, target / name)
        undone = copy_records(state_dir, target, manifest.undone)
        if len(undone) < manifest.undone:
            raise RebuildError(
                f"version {manifest.number} cannot be rebuilt: it was made after undo {manifest.undone}, which {NAME} "
                "in state_dir does not have; put the file back from a backup"
            )
        for candidate in preceding(source, manifest, undone):
            try:
                _copy_checkpoint(source, state_dir, candidate, target)
            except (CheckpointError, FileNotFoundError) as exc:
                damaged.append(f"checkpoint {candidate.number} cannot be used: {exc}")
                log.warning("%s", damaged[-1])
                _clear(target)
            else:
                return RebuildStart(candidate.number, candidate.step, damaged)
        if not has_files:
            _write_beginning(target, source.schema, manifest)
    return RebuildStart(None, 0, damaged)


def preceding(
    source: Checkpoints, manifest: Manifest, undone: Sequence[UndoRecord] = ()
) -> Iterator[CheckpointManifest]:
    """Yield the checkpoints from which the learner of a version came, the newest first; damaged manifests are left out.

    A checkpoint of a later learner than the version's may be of other weights, also at an earlier step. So is one that
    has seen events of `undone`, which the version has not.
    """
    for number in reversed(source.by_age()):
        try:
            each = source.manifest(number)
        except CheckpointError:
            continue
        before = each.generation <= manifest.generation and each.step <= manifest.step
        if before and not each.begins and each.base == manifest.base and _precedes(source, each, manifest, undone):
            yield each


def _precedes(source: Checkpoints, each: CheckpointManifest, manifest: Manifest, undone: Sequence[UndoRecord]) -> bool:
    """Return whether a checkpoint has read no more of the stream than the version, nor of what it has not seen."""
    try:
        source.check(each)
        state = source.open(each)[1]
    except MisfitError:
        return False
    except CheckpointError:
        return True  # whoever reads it reports the damage
    seen = seen_by_checkpoint(state)
    if seen.undone > manifest.undone or seen.tainted_by(undone):
        return False
    through = targets(manifest)
    read = [account for row in state["ledger"] if _is_read(account := PartitionLedger.from_state(row))]
    return all(each.position.offset <= through.get(each.name, each.start - 1) + 1 for each in read)


def _is_read(account: PartitionLedger) -> bool:
    return not account.name.history and account.position.offset > account.start


def _copy_checkpoint(source: Checkpoints, state_dir: Path, manifest: CheckpointManifest, target: Path) -> None:
    number = manifest.number
    state = copy_checkpoint(source, manifest, target, {})
    copied = Checkpoints(target / "checkpoints", source.schema, 0)
    tensors, _ = copied.open(copied.manifest(number))
    if any(name.startswith("rank-") for name in tensors.get("rng", {})):
        raise RebuildError(
            f"checkpoint {number} is of several ranks, whose sums of gradients are rounded in another order than those "
            "of one process; only versions of one rank can be rebuilt"
        )
    copy_rows([state], state_dir, target)
    if number not in source.numbers():
        raise CheckpointError("it was deleted meanwhile, so that its stored events may have been overwritten")


def _clear(target: Path) -> None:
    for name in ("checkpoints", "replay", "labels"):
        shutil.rmtree(target / name, ignore_errors=True)


def _write_beginning(target: Path, schema: str, manifest: Manifest) -> None:
    """Write a checkpoint of the offsets at which the stream began, where they are known."""
    if not manifest.learned_from:
        return
    accounts = []
    for name in targets(manifest):
        start = manifest.learned_from.get(str(name))
        if start is not None:
            accounts.append(PartitionLedger(name, start).state())
    Checkpoints(target / "checkpoints", schema, 0).write(1, Checkpoint(0, {}, {"ledger": accounts}), manifest.time)
