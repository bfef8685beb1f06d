"""The batches of the steps: of the stream, or of events that have waited for their labels."""

import threading

from learner.config import LearnerSettings
from learner.loop_parts.loop_state import LoopComponents
from learner.stream.batch import Batch
from learner.stream.batch_prefetch import BatchPrefetch
from learner.stream.batches import PATIENCE, Batches
from learner.stream.ledger import Ledger
from learner.stream.round_robin import RoundRobin
from learner.undo.undone_events import WithoutUndone


class BatchSource:
    """Returns the batches of the steps. Used by the loop's thread.

    Attributes:
        batches: builds those of the stream; its state is part of checkpoints.
        prefetch: takes those of the next steps early, where the host can work while the device computes, or a teacher
            is asked.
        next: returns the next batch, or None when there is none for now; takes the event that ends the wait.
        copied: returns the new events of a batch on the device.
    """

    def __init__(self, settings: LearnerSettings, parts: LoopComponents, step_size: int, ledger: Ledger) -> None:
        """Take the number of new events of a step over all ranks, and the positions of the partitions."""
        self._parts = parts
        self._ledger = ledger
        unlabelled = parts.teacher is not None and parts.teacher.unlabelled
        source = WithoutUndone(parts.source, parts.undone) if parts.undone.records else parts.source
        self.batches = (
            RoundRobin(source, step_size, self._settled, unlabelled=unlabelled)
            if settings.deterministic
            else Batches(
                *(source, step_size, settings.max_delay, parts.lag),
                most_late=None if parts.late is None else parts.late.most_rows,
                unlabelled=unlabelled,
            )
        )
        ask = None if parts.teacher is None else parts.teacher.ask
        self.prefetch = BatchPrefetch(self.batches, parts.trainer.examples, ask)
        self._of_stream, self.copied = self.batches.next, parts.trainer.examples
        if parts.trainer.set_before_wait(self.prefetch.take_next) or ask is not None:
            self._of_stream, self.copied = self.prefetch.next, self.prefetch.copied
        self.next = self._of_stream if parts.late is None else self._decided_or_next

    def _decided_or_next(self, stop: threading.Event) -> Batch | None:
        """Return events that have waited for their labels, if enough have them, or else the next ones of the stream."""
        late, source = self._parts.late, self._parts.source
        assert late is not None
        late.advance(source.partitions, source.ends_time)
        source.hold(late.ahead)
        decided = late.take(source.partitions)
        if decided is None and late.full:
            late.make_room()
            stop.wait(PATIENCE.total_seconds())  # for checkpoints, which let its space be used again
            return None
        return self._of_stream(stop) if decided is None else decided

    def _settled(self, index: int) -> int:
        """Return the first offset of a partition without outcome."""
        accounts = self._ledger.partitions
        return accounts[index].position.offset if index < len(accounts) else 0
