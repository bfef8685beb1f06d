"""The state of the training loop between two steps, from which checkpoints and versions are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.stream_secret import SECRET_FILE
from ingest.metrics import IngestMetrics
from ingest.reader.reader import BlockReader
from learner.adaptation.stream_monitor import StreamMonitor
from learner.checkpointing.captured_state import CapturedState
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.checkpointing.stateful import Stateful, StatefulPart, restore_states, states_of
from learner.errors import MisfitError
from learner.evaluation.holdout import HoldoutSet
from learner.late_labels import LateLabels
from learner.metrics import LearnerMetrics
from learner.publishing.publisher import Publisher
from learner.publishing.snapshot import Progress, Snapshot
from learner.replay_feed import ReplayFeed
from learner.state_dir.checkpoint import ERASED, Checkpoint
from learner.state_dir.undo_file import NAME, UNDONE
from learner.stream.lag import LagPolicy
from learner.stream.ledger import Ledger
from learner.teacher.feed import TeacherFeed
from learner.training.trainer import Trainer
from learner.undo.undone_events import UndoneEvents
from replay.metrics import ReplayMetrics


@dataclass(frozen=True)
class LoopMetrics:
    """The metrics that the loop updates."""

    ingest: IngestMetrics
    replay: ReplayMetrics
    learner: LearnerMetrics


@dataclass(frozen=True)
class LoopComponents:
    """The parts of the loop; each is used by the loop's thread alone."""

    source: BlockReader
    trainer: Trainer
    monitor: StreamMonitor
    replay: ReplayFeed
    holdout: HoldoutSet
    publisher: Publisher
    checkpointer: Checkpointer
    erasure: Erasure
    lag: LagPolicy
    late: LateLabels | None = None
    """With `[stream.labels]`."""
    teacher: TeacherFeed | None = None
    """With `[model.teacher]`."""
    undone: UndoneEvents = field(default_factory=UndoneEvents)
    secret: str = ""
    """The digest of the secret of the state directory."""


class StepState:
    """Steps, their events, and positions. Used by one thread; any may read."""

    def __init__(self, ledger: Ledger) -> None:
        """Start at step 0; `ledger` has an account for each partition."""
        self.ledger = ledger
        self.steps = 0
        self.rows_new = 0
        self.rows_replay = 0


class LoopState(StepState):
    """The state of a loop and of its parts. Used by the loop's thread; any may read."""

    def __init__(self, parts: LoopComponents, ledger: Ledger, batches: Stateful) -> None:
        """Start at step 0; `batches` builds the batches of the steps."""
        super().__init__(ledger)
        self._parts = parts
        self._stateful: Mapping[str, Stateful] = {
            "ledger": ledger,  # the first, since others refer to its partitions
            "monitor": parts.monitor,
            "retention": StatefulPart(parts.publisher.scoring.state, parts.publisher.scoring.restore),
            "rows": StatefulPart(self._rows, self._restore_rows),
            "replay_feed": parts.replay,
            "batches": batches,
            "lag": parts.lag,
            "gate": parts.publisher.gate.hold,
            "canary": StatefulPart(self._canary, self._restore_canary),
            "late": StatefulPart(self._late, self._restore_late),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint, except the store's part, before the first step.

        Raises:
            CheckpointError: it does not fit.
        """
        parts, state = self._parts, checkpoint.state
        if state.get(UNDONE, 0) > parts.undone.number:
            raise MisfitError(
                f"the checkpoint was made after undo {state[UNDONE]}, which {NAME} in state_dir does not have; put the "
                "file back from a backup, or what was undone would be learned again"
            )
        if state.get("secret", parts.secret) != parts.secret:
            raise MisfitError(
                f"{SECRET_FILE} in state_dir is not the secret that the checkpoint was made with, by which events are "
                "held out and kept; put the file back from a backup, or move the checkpoints away to start again"
            )
        if checkpoint.begins:
            self.ledger.restore(state["ledger"])
            return
        parts.trainer.restore(checkpoint.tensors, state["trainer"])
        parts.holdout.restore(checkpoint.tensors["holdout"])
        self.steps = checkpoint.step
        restore_states(self._stateful, state)
        parts.publisher.skip_published(self.progress(), self.ledger.trained_through)
        parts.trainer.restore_generators(checkpoint.tensors["rng"], state["rng"])

    def capture(self, number: int) -> CapturedState:
        """Return a copy of the state for checkpoint `number`; called between steps."""
        parts = self._parts
        tensors = parts.trainer.tensors() | {"holdout": parts.holdout.tensors()}
        tensors["rng"], rng = parts.trainer.generators()
        facts = {
            **parts.replay.output_shapes,
            ERASED: parts.erasure.excluded_through,
            UNDONE: parts.undone.number,
            "secret": parts.secret,
        }
        state = {"trainer": parts.trainer.state(), "rng": rng, **states_of(self._stateful), **facts}
        store = parts.replay.begin_snapshot(number)
        return CapturedState(self.steps, tensors, state, store)

    def fingerprint(self) -> object:
        """Return a value that changes with the state of a checkpoint: all other state changes only with these."""
        parts = self._parts
        return (
            self.steps,
            self.ledger.state(),
            parts.monitor.drift.state(),
            parts.publisher.scoring.retention,
            parts.erasure.excluded_through,
        )

    def progress(self) -> Progress:
        """Return what differs between versions: steps, and positions, which held-out and bad events change as well."""
        ended = 0 if self._parts.late is None else self._parts.late.search_if_due()
        return self.steps, tuple(self.ledger.positions.values()), ended

    def snapshot(self) -> Snapshot:
        """Return what a version is made of, with a copy of the weights."""
        parts = self._parts
        return Snapshot(
            step=self.steps,
            weights=parts.trainer.snapshot(),
            trained_through=self.ledger.trained_through,
            seen_through=self.ledger.seen_through if parts.late is not None else None,
            holdout=parts.holdout.held,
            accuracy_now=parts.monitor.prequential.mean,
            newly_trained=self.ledger.take_newly_trained(),
            learned_from=self.ledger.starts,
            erasures=parts.erasure.excluded_through,
            found=dict(parts.trainer.found),
        )

    def _late(self) -> dict[str, Any]:
        return {} if self._parts.late is None else self._parts.late.state()

    def _restore_late(self, state: Mapping[str, Any]) -> None:
        if self._parts.late is not None:
            self._parts.late.restore(state)

    def _canary(self) -> dict[str, Any]:
        canary = self._parts.publisher.canary
        return {} if canary is None else canary.state()

    def _restore_canary(self, state: Mapping[str, Any]) -> None:
        if self._parts.publisher.canary is not None:
            self._parts.publisher.canary.restore(state)

    def _rows(self) -> tuple[int, int]:
        return self.rows_new, self.rows_replay

    def _restore_rows(self, rows: Sequence[int]) -> None:
        self.rows_new, self.rows_replay = rows
