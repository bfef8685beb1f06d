"""The contract of an extension: whatever the loop can run without attaches here, and nowhere else.

`learner.assembly` builds the extensions in one tuple, whose order is the order in which each hook is called. A hook
that no extension overrides costs nothing in a step: `overriding` leaves it out.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.block import Array
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.checkpoints.part_formats import Covers
from anabranch.learner.checkpoints.parts import CheckpointPart
from anabranch.learner.evaluate.holdout import HoldoutRows
from anabranch.learner.evaluate.stream_monitor import Scored
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.batches import BlockSource
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.train.step_result import StepResult

NextBatch = Callable[[threading.Event], Batch | None]
"""Returns the next batch, or None when there is none for now; takes the event that ends the wait."""


class Extension:
    """Runs along with the loop. The loop's thread calls the hooks, save where one says otherwise."""

    name: ClassVar[str] = ""
    """Under which checkpoints have the state, and reports the extension's own numbers."""

    part: CheckpointPart | None = None
    """What checkpoints have of it besides `state`: events, tensors and rows, which are packed in the background."""

    def attach(self, ledger: Ledger) -> None:
        """Take the ledger of the loop; called once, before anything is restored."""

    # The events of a round.

    def source(self, source: BlockSource) -> BlockSource:
        """Return what the blocks of the stream are read from; called once."""
        return source

    def most_late(self, steps: int) -> int:
        """Return how many waiting events and labels a batch of the stream has for a round of some steps, at most.

        One extension at most overrides this; without it, the stream has none.
        """
        raise NotImplementedError

    def foresee(self, columns: Mapping[str, Array]) -> None:
        """Begin work on the new events of a round, some rounds before they are trained on."""

    def next(self, source: BlockReader, stop: threading.Event, of_stream: NextBatch, steps: int) -> Batch | None:
        """Return the batch of the next round of `steps` steps at most, from the extension or `of_stream(stop)`.

        None when there is none for now. One extension at most overrides this.
        """
        return of_stream(stop)

    def put_back(self) -> None:
        """Take back the batch that `next` has returned: no step of it was taken, and nothing is settled."""

    def take(self, batch: Batch, partitions: Sequence[Partition]) -> Batch:
        """Return the events of a round of steps, before it. A crash after it repeats the round."""
        return batch

    def before_round(self, batch: Batch, partitions: Sequence[Partition]) -> Batch:
        """Return the events of a round, once it has none that are erased; repeated where the device has no memory."""
        return batch

    def scored(self, batch: Batch) -> Scored | None:
        """Return the scores of those events of a round whose label is known, from before it, with those of baselines.

        None: these are the scores of the steps' own predictions. One extension at most overrides this.
        """
        return None

    def trained(self, batch: Batch, result: StepResult) -> None:
        """Learn of a step that was finite, before its outcomes are settled; `batch` may have its new events alone."""

    def settle(self, batch: Batch) -> None:
        """Learn that the outcomes of a batch are settled: from here on versions and checkpoints include it.

        Events of a step that was not finite have left it, skipped.
        """

    def progress(self, *, last: bool = False) -> object:
        """Return what differs between versions besides steps and positions; `last`: the learner ends with this one."""
        return None

    # Between two steps.

    def run_if_due(self) -> None:
        """Do what is due; called after each round, and while the loop waits for the disk."""

    # Checkpoints, and what is erased.

    def state(self) -> Any:
        """Return the state for a checkpoint, between two steps: plain JSON values, or None."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the state of a checkpoint, before the first step; not called where it has none."""

    def events(self) -> Mapping[str, Array]:
        """Return what it keeps of single events, for a checkpoint: columns, with `partition`, `offset` and `key_hash`.

        Whatever erases events from checkpoints, in any process, removes their rows from these columns.
        """
        return {}

    def restore_events(self, events: Mapping[str, Array]) -> None:
        """Restore the events of a checkpoint, before the first step; not called where it has none."""

    def erase(self, covers: Covers) -> int:
        """Remove the events that an erasure covers, and return how many there were.

        Raises:
            OSError: they cannot be removed from the disk yet: `problem` says so, and this is called again.
        """
        return 0

    # What is said about it. Any thread may ask.

    @property
    def problem(self) -> str | None:
        """One sentence while it does not work as it should."""
        return None

    @property
    def warning(self) -> str | None:
        """One sentence on what it works around."""
        return None

    @property
    def problems(self) -> Sequence[str]:
        """All of these sentences, where there may be several."""
        return [] if self.problem is None else [self.problem]

    @property
    def warnings(self) -> Sequence[str]:
        """All of these sentences, where there may be several."""
        return [] if self.warning is None else [self.warning]

    def report(self) -> Mapping[str, Any]:
        """Return values of the learner's report by field; any other key is the extension's own, with a Struct."""
        return {}

    # Versions.

    def published(self, number: int) -> None:
        """Learn that a version was published. Called by the publisher's thread."""

    def needed_versions(self) -> set[int] | None:
        """Return the versions that must not be deleted; None while that is unknown, and then none is.

        Called by the threads of the publisher and of uploads.
        """
        return set()

    def monitor(self, rows: HoldoutRows) -> None:
        """Judge the versions that serve, besides the gate, on the events that are held out now.

        Called by the publisher's thread, about once a second.

        Raises:
            OSError: a verdict cannot be written now; this is called again.
        """

    # The end.

    def finish(self, deadline: Deadline) -> None:
        """Complete what is under way, before the deadline; the last step has ended, and its checkpoint is written."""

    def close(self) -> None:
        """Release what the extension holds; called also after an error."""


def overriding(extensions: Sequence[Extension], hook: str) -> list[Any]:
    """Return the bound hooks of the extensions that override a hook, in their order."""
    return [getattr(each, hook) for each in extensions if getattr(type(each), hook) is not getattr(Extension, hook)]
