"""Where a rebuild starts: the newest checkpoint that precedes the version, or the start of the stream.

What is needed of the pipeline's state directory is copied into another one. Its files are only read.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from anabranch.core.failures import away_is_dependency
from anabranch.core.stream_secret import StreamSecret
from ingest.config import LagPolicySettings
from ingest.events.partition import TopicPartition
from learner.build import LearnerSpec
from learner.checkpointing.checkpoint_copy import copy_checkpoint, copy_rows
from learner.errors import CheckpointError, MisfitError
from learner.rebuilding.errors import RebuildError
from learner.state_dir.checkpoint import Checkpoint, CheckpointManifest, Checkpoints
from learner.state_dir.undo_file import NAME, UndoRecord, copy_records
from learner.state_dir.version import Manifest
from learner.stream.partition_ledger import PartitionLedger
from learner.undo.tainted import seen_by_checkpoint
from replay.erasure.erasure_log import NAME as LOG
from replay.erasure.log_file import SECRET_FILE

_NEVER = timedelta(days=36_500)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RebuildStart:
    """Where a rebuild starts.

    Attributes:
        checkpoint: number of the checkpoint; None for the start of the stream.
        step: of the checkpoint, or 0.
        damaged: sentences on newer checkpoints that precede the version, and cannot be used.
    """

    checkpoint: int | None
    step: int
    damaged: Sequence[str] = ()


def targets(manifest: Manifest) -> dict[TopicPartition, int]:
    """Return the last offset of each partition that was read for a version, with or without its labels."""
    through = {}
    for name, trained in manifest.trained_through.items():
        topic, _, partition = name.rpartition(":")
        offset = trained.offset if manifest.seen_through is None else manifest.seen_through[name]
        through[TopicPartition(topic, int(partition), trained.incarnation)] = offset
    return through


def in_scratch(deployment: LearnerSpec, scratch: Path) -> LearnerSpec:
    """Return the settings with another state directory: nothing of the pipeline is written."""
    teacher = deployment.model.teacher
    model = deployment.model
    if teacher is not None and teacher.version is not None and teacher.version.state_dir is None:
        version = teacher.version.model_copy(update={"state_dir": deployment.state_dir})
        model = model.model_copy(update={"teacher": teacher.model_copy(update={"version": version})})
    stream = {"on_gap": "fail", "lag_policy": LagPolicySettings(high=_NEVER)}
    return replace(
        deployment,
        model=model,
        stream=deployment.stream.model_copy(update=stream),
        learner=deployment.learner.model_copy(update={"profile": None, "standby": False}),
        checkpoints=deployment.checkpoints.model_copy(update={"every": _NEVER}),
        replay=deployment.replay.model_copy(update={"redis": None}),  # a cache, whose keys belong to the pipeline
        state_dir=scratch,
        storage=None,
        canary=0.0,
        tracing=None,
        mlflow=None,
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
    found = []
    for number in source.numbers():
        with contextlib.suppress(CheckpointError):
            found.append(source.manifest(number))
    for each in sorted(found, key=lambda each: (each.generation, each.number), reverse=True):
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
