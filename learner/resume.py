"""The state that a learner resumes from: the newest undamaged checkpoint, without the events erased since."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.transport.shared_ring import MOST_ROWS as MOST_IN_A_BLOCK
from learner.build import LearnerSpec, TrainingSetup
from learner.checkpointing.replay_state import unpack
from learner.checkpointing.without_erased import check_age, without_erased
from learner.config import LearnerSettings
from learner.loop import TrainingLoop
from learner.state_dir.checkpoint import RANK, Checkpoint, Checkpoints
from learner.strategies.examples import OUTPUT, output_field
from learner.stream.batches import most_stored
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
        less: numbers of events that were erased since, and are left out: of the store, and of the holdout set.
        first: whether no checkpoint names an event of the store, so that its files are not needed.
    """

    checkpoints: Checkpoints
    found: tuple[int, Checkpoint] | None
    contents: StoreSnapshot | None
    segments: Sequence[Segment]
    less: tuple[int, int]
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
        checkpoint, less = without_erased(complete, written.erased)
        contents, segments = unpack(checkpoint) or (None, ())
        return cls(
            checkpoints,
            (number, checkpoint),
            contents,
            segments,
            less,
            first=checkpoint.begins and checkpoints.numbers() == [number],
        )

    def store(self, deployment: LearnerSpec, bench: TrainingSetup, ranks: int) -> Store | None:
        """Build the store for `ranks` ranks, with the checkpoint's events; None when the strategy replays nothing.

        Raises:
            SettingsError: the stored events lack an output that the strategy requires, or the store cannot be built.
            DependencyError: a tier of the store cannot be reached.
        """
        strategy = bench.strategy
        if not strategy.replays:
            return None
        columns = output_field(bench.output_shape) if strategy.keeps_output else {}
        if self.found is not None and self.contents is not None:
            check_columns(*self.found, list(bench.output_shape) if columns else None, deployment.learner.strategy.name)
        folder = deployment.state_dir / "replay" / RANK
        if self.first:
            make_way(folder)
        return build_store(
            *(deployment.replay, bench.schema, bench.device, deployment.seed, folder, self.contents),
            extra=columns,
            dim=bench.embedding.captured().shape[1] if bench.embedding is not None else None,
            keys=f"{deployment.name}:{RANK}",
            first=self.first,
            step=most_added(deployment.learner, deployment.stream, ranks),
        )

    def restore(self, loop: TrainingLoop) -> None:
        """Restore the checkpoint into the loop, if there is one."""
        if self.found is None:
            log.info("there is no checkpoint in %s: learning starts from the beginning", self.checkpoints.path)
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


def check_columns(number: int, checkpoint: Checkpoint, required: list[int] | None, strategy: str) -> None:
    """Raise SettingsError unless the stored events of a checkpoint have the output that the strategy requires, or none
    if it requires none."""
    stored = checkpoint.state.get(OUTPUT)
    if stored != required:
        raise SettingsError(
            f'learner.strategy = "{strategy}" requires {_output(required)} with each stored event, and checkpoint '
            f"{number} has {_output(stored)}; put back the strategy and model of the checkpoint, or move the "
            "checkpoints away to start again"
        )


def _output(shape: list[int] | None) -> str:
    return "no output of the model" if shape is None else f"an output of shape {shape}"


def most_added(learner: LearnerSettings, stream: StreamSettings, ranks: int) -> int:
    """Return the largest number of events that a step of `ranks` ranks adds to the store."""
    trained = learner.batch_size * ranks
    if stream.unlabelled != "store" and stream.lag_policy.action != "store-only":
        return trained
    if learner.deterministic:
        return MOST_WAITING + trained
    return trained + most_stored(trained) + MOST_IN_A_BLOCK
