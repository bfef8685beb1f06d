"""The state that a learner resumes from: the newest undamaged checkpoint, without the events erased since."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.core.errors import SettingsError
from anabranch.core.stream_secret import StreamSecret
from ingest.backfill.files import rows_of
from ingest.config import StreamSettings
from ingest.transport.shared_ring import MOST_ROWS as MOST_IN_A_BLOCK
from learner.build import LearnerSpec, TrainingSetup
from learner.checkpointing.replay_state import unpack
from learner.checkpointing.without_erased import check_age, without_erased
from learner.config import LearnerSettings
from learner.errors import CheckpointError, MisfitError
from learner.loop import TrainingLoop
from learner.object_storage.fetching import (
    age_of,
    copy_newest,
    discard_partial,
    fetch_checkpoint,
    fetch_file,
    newest_age,
)
from learner.object_storage.opening import HeldStorage
from learner.state_dir.checkpoint import ERASED, RANK, Checkpoint, Checkpoints
from learner.state_dir.manifest_directory import other_base
from learner.state_dir.origin import ResumedFrom
from learner.strategies.examples import OUTPUT, TEACHER, output_fields
from learner.stream.batches import most_stored
from learner.stream.partition_ledger import PartitionLedger
from learner.stream.round_robin import MOST_ROWS as MOST_WAITING
from replay.build import build_store
from replay.checkpoint.segments import Segment
from replay.erasure.erasure_log import ErasureLog
from replay.snapshot import StoreSnapshot
from replay.store import Store
from replay.tiers.disk_files import make_way

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
        checkpoints.clean()
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

    def store(self, deployment: LearnerSpec, bench: TrainingSetup, ranks: int, secret: StreamSecret) -> Store | None:
        """Build the store for `ranks` ranks, with the checkpoint's events; None when the strategy replays nothing.

        Raises:
            SettingsError: the stored events lack an output that the strategy requires, or the store cannot be built.
            DependencyError: a tier of the store cannot be reached.
        """
        strategy = bench.strategy
        if not strategy.replays:
            return None
        if self.found is not None and self.contents is not None:
            check_columns(*self.found, bench.kept_outputs, deployment.learner.strategy.name)
        folder = deployment.state_dir / "replay" / RANK
        if self.first:
            make_way(folder)
        return build_store(
            *(deployment.replay, bench.schema, bench.device, secret.number("replay"), folder, self.contents),
            extra=output_fields(bench.kept_outputs),
            dim=bench.embedding.captured().shape[1] if bench.embedding is not None else None,
            keys=f"{deployment.name}:{RANK}",
            first=self.first,
            step=most_added(deployment.learner, deployment.stream, ranks),
            complete=deployment.complete,
        )

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

    def restore(self, loop: TrainingLoop) -> None:
        """Restore the checkpoint into the loop, if there is one."""
        if self.found is None:
            log.info("there is no checkpoint in %s: learning starts from the beginning", self.checkpoints.location)
            return
        number, checkpoint = self.found
        loop.restore(checkpoint)
        if checkpoint.begins:
            log.info(
                "checkpoint %d has the start of the stream, and nothing is learned yet: learning starts there",
                number,
            )
        else:
            log.info("going on from checkpoint %d at step %d", number, checkpoint.step)


def resume_point(
    checkpoints: Checkpoints,
    written: ErasureLog,
    storage: HeldStorage | None,
    while_waiting: Callable[[], object] = bool,
) -> ResumePoint:
    """Return the newest checkpoint of the state directory and of the object store.

    One that the object store alone has is fetched first, also where that of the state directory is damaged; so are
    files of the state directory that are damaged or missing, rows when they are read. What was fetched by a start that
    was interrupted is used. Raises as `ResumePoint.newest` and `fetch_checkpoint`.
    """
    if storage is None:
        return ResumePoint.newest(checkpoints, written)
    if storage.only:
        copy_newest(storage.checkpoints, checkpoints, while_waiting)
        resumed = ResumePoint.newest(checkpoints, written)
        discard_partial(checkpoints)
        return resumed
    checkpoints.clean()
    checkpoints.fetch_again = functools.partial(
        fetch_file, storage.checkpoints, checkpoints, while_waiting=while_waiting
    )
    resumed = _newest_of_both(checkpoints, written, storage, while_waiting)
    discard_partial(checkpoints)
    return resumed


def _newest_of_both(
    checkpoints: Checkpoints, written: ErasureLog, storage: HeldStorage, while_waiting: Callable[[], object]
) -> ResumePoint:
    fetch_checkpoint(storage.checkpoints, checkpoints, newest_age(checkpoints), while_waiting)
    try:
        resumed = ResumePoint.newest(checkpoints, written)
    except MisfitError:
        raise
    except CheckpointError:  # all checkpoints of the state directory are damaged
        if not fetch_checkpoint(storage.checkpoints, checkpoints, (-1, -1), while_waiting):
            raise
        return ResumePoint.newest(checkpoints, written)
    found = (-1, -1) if resumed.found is None else age_of(checkpoints, resumed.found[0])
    if found < newest_age(checkpoints) and fetch_checkpoint(storage.checkpoints, checkpoints, found, while_waiting):
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


def check_history_is_read(stream: StreamSettings, found: tuple[int, Checkpoint] | None) -> None:
    """Raise SettingsError where a checkpoint has files that are not read to their end, and nobody would read them."""
    if stream.backfill is not None or found is None:
        return
    accounts = [PartitionLedger.from_state(state) for state in found[1].state["ledger"]]
    files = [account for account in accounts if account.name.history]
    unread = [account for account in files if account.position.offset < rows_of(account.mark)]
    if unread:
        raise SettingsError(
            f"checkpoint {found[0]} has {len(unread)} of {len(files)} files of the history that are not read to their "
            "end, and there is no [stream.backfill]; put it back until all are read, or move the checkpoints away to "
            "start again"
        )


def check_columns(number: int, checkpoint: Checkpoint, required: Mapping[str, list[int] | None], strategy: str) -> None:
    """Raise SettingsError unless the stored events of a checkpoint have the outputs that the strategy and the teacher
    require, and no others."""
    teacher = f"{'without' if required[TEACHER] is None else 'with'} [model.teacher]"
    for name, owner, cause in ((OUTPUT, "model", ""), (TEACHER, "teacher", f" {teacher}")):
        stored = checkpoint.state.get(name)
        if stored != required[name]:
            needed, there = (
                f"no output of the {owner}"
                if shape is None
                else f"an output{f' of the {owner}' * (name == TEACHER)} of shape {shape}"
                for shape in (required[name], stored)
            )
            raise SettingsError(
                f'learner.strategy = "{strategy}"{cause} requires {needed} with each stored event, and checkpoint '
                f"{number} has {there}; put back the strategy, model and teacher of the checkpoint, or move the "
                "checkpoints away to start again"
            )


def most_added(learner: LearnerSettings, stream: StreamSettings, ranks: int) -> int:
    """Return the largest number of events that a step of `ranks` ranks adds to the store."""
    trained = learner.batch_size * ranks
    if stream.unlabelled != "store" and stream.lag_policy.action != "store-only":
        return trained
    if learner.deterministic:
        return MOST_WAITING + trained
    return trained + most_stored(trained) + MOST_IN_A_BLOCK
