"""The state that a learner resumes from: the newest undamaged checkpoint, without the events erased since."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.backfill.files import rows_of
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.checkpoints.erase_checkpoints import without_erased
from anabranch.learner.checkpoints.format import ERASED, Age, Checkpoint, Checkpoints, age_of, check_age, newest_age
from anabranch.learner.checkpoints.parts import unpack
from anabranch.learner.errors import CheckpointError, MisfitError
from anabranch.learner.loop.stored_events import check_columns, open_store
from anabranch.learner.model.trained_set import base_digest
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.folders import other_base
from anabranch.learner.state_dir.origin import ResumedFrom
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.train.setup import TrainingSetup
from anabranch.replay.erasure.erasure_log import ErasureLog
from anabranch.replay.segments import Segment
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a learner resumes from, if there is one.

    Attributes:
        checkpoints: all checkpoints.
        found: the number of the checkpoint, and the checkpoint; None if there is none.
        contents: the checkpoint's snapshot of the store.
        segments: the files of the snapshot.
        erased_counts: numbers of events that were erased since, and are left out: of the store, and of the holdout set.
        first: whether no checkpoint names an event of the store, so that its files are not needed.
    """

    checkpoints: Checkpoints
    found: tuple[int, Checkpoint] | None
    contents: StoreSnapshot | None
    segments: Sequence[Segment]
    erased_counts: tuple[int, int]
    first: bool

    @classmethod
    def newest(cls, checkpoints: Checkpoints, written: ErasureLog) -> "ResumePoint":
        """Read the newest undamaged checkpoint; raises CheckpointError when it cannot be used."""
        checkpoints.storage.clean()
        found = checkpoints.newest()
        if found is None:
            return cls(checkpoints, None, None, (), (0, 0), first=True)
        number, complete = found
        check_age(number, complete, written)
        check_base(checkpoints, number, complete)
        checkpoint, erased_counts = without_erased(complete, written.erased)
        contents, segments = unpack(checkpoint) or (None, ())
        return cls(
            checkpoints,
            (number, checkpoint),
            contents,
            segments,
            erased_counts,
            first=checkpoint.begins and checkpoints.numbers() == [number],
        )

    def store(
        self,
        pipeline: PipelineSettings,
        setup: TrainingSetup,
        ranks: int,
        secret: StreamSecret,
        *,
        in_memory: bool = False,
    ) -> Store | None:
        """Build the store for `ranks` ranks, with the checkpoint's events; None when the strategy replays nothing.

        `in_memory`: whether it has no tiers but memory.

        Raises:
            SettingsError: the stored events lack an output that the strategy requires, or the store cannot be built.
            DependencyError: a tier of the store cannot be reached.
        """
        if not setup.strategy.kind.replays:
            return None
        if self.found is not None and self.contents is not None:
            check_columns(*self.found, setup.kept_outputs, pipeline.learner.strategy.name)
        return open_store(pipeline, setup, ranks, secret, self.contents, first=self.first, in_memory=in_memory)

    @property
    def origin(self) -> ResumedFrom | None:
        """What versions name as their checkpoint; None where learning starts at the start of the stream."""
        if self.found is None or self.found[1].begins:
            return None
        number, checkpoint = self.found
        return ResumedFrom(number, checkpoint.step)

    @property
    def applied(self) -> int:
        """The number of the last record of the erasure log that the checkpoint is without."""
        return 0 if self.found is None else int(self.found[1].state.get(ERASED, 0))

    def restore(self, restore: Callable[[Checkpoint], None]) -> None:
        """Restore the checkpoint into a loop by its `restore`, if there is one."""
        if self.found is None:
            log.info("there is no checkpoint in %s: learning starts from the beginning", self.checkpoints.location)
            return
        number, checkpoint = self.found
        restore(checkpoint)
        if checkpoint.begins:
            log.info(
                "checkpoint %d has the start of the stream, and nothing is learned yet: learning starts there",
                number,
            )
        else:
            log.info("going on from checkpoint %d at step %d", number, checkpoint.step)


def resume_point(checkpoints: Checkpoints, written: ErasureLog, fetch_newer: Callable[[Age], bool]) -> ResumePoint:
    """Return the newest checkpoint of the state directory and of the object store.

    `fetch_newer` fetches the newest checkpoint that the object store alone has, if it is newer than an age, and returns
    whether it has: also where that of the state directory is damaged. Raises as `ResumePoint.newest` and `fetch_newer`.
    """
    fetch_newer(newest_age(checkpoints))
    try:
        resumed = ResumePoint.newest(checkpoints, written)
    except MisfitError:
        raise
    except CheckpointError:  # all checkpoints of the state directory are damaged
        if not fetch_newer((-1, -1)):
            raise
        return ResumePoint.newest(checkpoints, written)
    found = (-1, -1) if resumed.found is None else age_of(checkpoints, resumed.found[0])
    if found < newest_age(checkpoints) and fetch_newer(found):
        return ResumePoint.newest(checkpoints, written)
    return resumed


def check_base(checkpoints: Checkpoints, number: int, checkpoint: Checkpoint) -> None:
    """Raise MisfitError where a checkpoint was trained on other frozen weights than the model has."""
    other = other_base(checkpoints.manifest(number).base, checkpoints.base)
    if other is not None and not checkpoint.begins:
        raise MisfitError(
            f"checkpoint {number} in {checkpoints.location} {other}; put the pretrained weights and [model.adapter] "
            "back, or what else has changed them (learner.strategy, seed, a release of torch, transformers or peft); "
            f"or begin again by moving {checkpoints.location} away"
        )


def try_newest(
    state_dir: Path,
    stream: StreamSettings,
    setup: TrainingSetup,
    restore: Callable[[Mapping[str, Mapping[str, Tensor]], Mapping[str, Any]], object],
) -> None:
    """Restore the trainer of a setup from the newest checkpoint, without a learner; change nothing on the disk.

    One that is of another schema, or damaged, or has just been replaced by a learner is left alone.

    Raises:
        SettingsError: it is of another model, optimizer, strategy or release, or `[stream]` would not go on with it.
    """
    checkpoints = Checkpoints(state_dir / "checkpoints", setup.schema.digest, 0)
    checkpoints.base = base_digest(setup.model)
    try:
        manifest = checkpoints.latest()
        if manifest is None or manifest.begins or manifest.schema != setup.schema.digest:
            return
        checkpoint = Checkpoint(manifest.step, *checkpoints.open(manifest))
    except (CheckpointError, OSError):
        return
    checkpoints.check(manifest)
    check_base(checkpoints, manifest.number, checkpoint)
    if setup.strategy.kind.replays and "replay" in checkpoint.tensors:
        check_columns(manifest.number, checkpoint, setup.kept_outputs, setup.settings.strategy.name)
    if "ledger" in checkpoint.state:
        check_stream(stream, (manifest.number, checkpoint))
    with contextlib.suppress(OSError, DamagedError):
        restore(checkpoint.tensors, checkpoint.state["trainer"])


def check_stream(stream: StreamSettings, found: tuple[int, Checkpoint] | None) -> None:
    """Raise SettingsError where a checkpoint has what `[stream]` would not go on with.

    It has files that are not read to their end, or events that wait for labels, and the section is gone.
    """
    if found is None:
        return
    accounts = [PartitionLedger.from_state(state) for state in found[1].state["ledger"]]
    waiting = sum(account.waiting for account in accounts)
    if waiting and stream.labels is None:
        raise SettingsError(
            f"checkpoint {found[0]} has {waiting} events that wait for their labels, and there is no [stream.labels]; "
            "put it back, or move the checkpoints away to start again"
        )
    files = [account for account in accounts if account.name.history]
    unread = [account for account in files if account.position.offset < rows_of(account.mark)]
    if unread and stream.backfill is None:
        raise SettingsError(
            f"checkpoint {found[0]} has {len(unread)} of {len(files)} files of the history that are not read to their "
            "end, and there is no [stream.backfill]; put it back until all are read, or move the checkpoints away to "
            "start again"
        )
