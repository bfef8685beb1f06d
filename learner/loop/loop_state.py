"""The state of the training loop between two steps, from which checkpoints and versions are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from anabranch.core.stream_secret import SECRET_FILE
from anabranch.ingest.metrics import IngestMetrics
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.checkpoints.checkpointer import CapturedState, Checkpointer
from anabranch.learner.checkpoints.format import ERASED, EXTENSION, Checkpoint
from anabranch.learner.errors import MisfitError
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.extension import Extension, overriding
from anabranch.learner.loop.erasure import Erasure
from anabranch.learner.loop.replay_feed import ReplayFeed
from anabranch.learner.model.growing.pool import parts_in
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.stream.ledger import Ledger, nothing_waits
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.publisher import Progress, Publisher, Snapshot
from anabranch.replay.metrics import ReplayMetrics


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
    extensions: Sequence[Extension] = ()
    """What attaches to the loop, in the order in which each hook is called."""
    unlabelled: bool = False
    """Whether events without a label are trained on too."""
    secret: str = ""
    """The digest of the secret of the state directory."""


class Stateful(Protocol):
    """A part with a state of plain JSON values."""

    def state(self) -> Any:
        """Return the state between two steps."""

    def restore(self, state: Any, /) -> None:
        """Restore the state of a checkpoint, before the first step."""


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
            "retention": parts.publisher.scoring,
            "replay_feed": parts.replay,
            "batches": batches,
            "lag": parts.lag,
            "gate": parts.publisher.gate.hold,
        }
        self._progress = overriding(parts.extensions, "progress")
        self._extensions = [each for each in parts.extensions if each.name]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint, except the store's part, before the first step.

        Raises:
            CheckpointError: it does not fit.
        """
        parts, state = self._parts, checkpoint.state
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
        for name, part in self._stateful.items():
            part.restore(state[name])
        self.rows_new, self.rows_replay = state["rows"]
        for each in self._extensions:
            if (of_extension := state.get(each.name)) is not None:
                each.restore(of_extension)
            if (events := checkpoint.tensors.get(EXTENSION + each.name)) is not None:
                each.restore_events({name: column.numpy() for name, column in events.items()})
        parts.publisher.skip_published(self.progress(), self.ledger.trained_through)
        parts.trainer.restore_generators(checkpoint.tensors["rng"], state["rng"])

    def capture(self) -> CapturedState:
        """Return a copy of the state for a checkpoint, but for its parts; called between steps."""
        parts = self._parts
        tensors = parts.trainer.tensors() | {"holdout": parts.holdout.tensors()}
        for each in self._extensions:
            if events := each.events():
                tensors[EXTENSION + each.name] = {name: torch.tensor(column) for name, column in events.items()}
        tensors["rng"], rng = parts.trainer.generators()
        facts = {
            **parts.replay.output_shapes,
            ERASED: parts.erasure.excluded_through,
            "secret": parts.secret,
            **{each.name: each.state() for each in self._extensions},
        }
        states = {name: part.state() for name, part in self._stateful.items()}
        rows = self.rows_new, self.rows_replay
        state = {"trainer": parts.trainer.state(), "rng": rng, "rows": rows, **states, **facts}
        return CapturedState(self.steps, tensors, state)

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

    def progress(self, *, last: bool = False) -> Progress:
        """Return what differs between versions: steps, and positions, which held-out and bad events change as well.

        `last`: the learner ends with this version.
        """
        others = tuple(progress(last=last) for progress in self._progress)
        return self.steps, tuple(self.ledger.positions.values()), others

    def snapshot(self) -> Snapshot:
        """Return what a version is made of, with a copy of the weights."""
        parts, read, weights = self._parts, self.ledger.read, self._parts.trainer.snapshot()
        parts.monitor.outcomes.answers = parts.publisher.answering.answers
        return Snapshot(
            step=self.steps,
            weights=weights,
            trained_through=self.ledger.trained_through,
            # They differ where an extension lets events end later than they are read.
            seen_through={name: last for name, (_, last) in read.items()}
            if self.ledger.first_open is not nothing_waits
            else None,
            holdout=parts.holdout.held,
            accuracy_now=parts.monitor.prequential.score.now,
            newly_trained=self.ledger.take_newly_trained(),
            learned_from={name: first for name, (first, _) in read.items()},
            erasures=parts.erasure.excluded_through,
            found=dict(parts.trainer.found),
            parts=parts_in(weights),
            recent=parts.monitor.outcomes.recent or (),
        )
