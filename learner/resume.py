"""What a learner goes on from: the newest checkpoint that is whole, without what was erased since."""

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
    """What there is of an earlier life.

    Attributes:
        checkpoints: where checkpoints lie.
        found: the number of the checkpoint that is gone on from, and the checkpoint; None where learning begins anew.
        contents: what it has of the store.
        segments: the parts that those lie in.
        less: events that it has and that are erased by now: of the store, and of the holdout set.
        first: whether no checkpoint names anything that a store has left.
    """

    checkpoints: Checkpoints
    found: tuple[int, Checkpoint] | None
    contents: StoreSnapshot | None
    segments: Sequence[Segment]
    less: tuple[int, int]
    first: bool

    @classmethod
    def newest(cls, checkpoints: Checkpoints, written: ErasureLog) -> "ResumePoint":
        """Read the newest checkpoint that is whole; raises CheckpointError where it cannot be used."""
        checkpoints.clean()
        found = checkpoints.newest()
        if found is None:
            return cls(checkpoints, None, None, (), (0, 0), first=True)
        number, whole = found
        check_age(number, whole, written)
        checkpoint, less = without_erased(whole, written.erased)
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
        """Compose the store of so many ranks, with what the checkpoint has of it; None where nothing is replayed.

        Raises:
            SettingsError: the stored events lack what the strategy wants of them, or the store cannot be had.
            DependencyError: it cannot be had for now.
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
            step=most_offered(deployment.learner, deployment.stream, ranks),
        )

    def restore(self, loop: TrainingLoop) -> None:
        """Have the loop go on from the checkpoint, if there is one."""
        if self.found is None:
            log.info("there is no checkpoint in %s: learning begins anew", self.checkpoints.path)
            return
        number, checkpoint = self.found
        loop.restore(checkpoint)
        if checkpoint.begins:
            log.info(
                "checkpoint %d says where the stream is begun, and nothing is learned yet: learning begins there",
                number,
            )
        else:
            log.info("going on from checkpoint %d at step %d", number, checkpoint.step)


def check_columns(number: int, checkpoint: Checkpoint, wanted: list[int] | None, strategy: str) -> None:
    """Raise SettingsError unless the events that a checkpoint has stored have the output that the strategy wants, or
    none."""
    before = checkpoint.state.get(OUTPUT)
    if before != wanted:
        raise SettingsError(
            f'learner.strategy = "{strategy}" wants {_output(wanted)} kept with each stored event, and checkpoint '
            f"{number} has {_output(before)}; put back the strategy and model of the checkpoint, or begin anew by "
            "moving the checkpoints away"
        )


def _output(shape: list[int] | None) -> str:
    return "no output of the model" if shape is None else f"an output of shape {shape}"


def most_offered(learner: LearnerSettings, stream: StreamSettings, ranks: int) -> int:
    """Return how many events a step of so many ranks trains on and stores without it, at most."""
    trained = learner.batch_size * ranks
    if stream.unlabelled != "store" and stream.lag_policy.action != "store-only":
        return trained
    if learner.deterministic:
        return MOST_WAITING + trained
    return trained + most_stored(trained) + MOST_IN_A_BLOCK
