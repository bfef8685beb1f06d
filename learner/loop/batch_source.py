"""The batches of the rounds: of the stream, or of an extension, such as events that have waited for their labels."""

import threading
from collections import deque
from collections.abc import Callable, Mapping

from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.block import Array
from anabranch.learner.extension import NextBatch, overriding
from anabranch.learner.loop.loop_state import LoopComponents
from anabranch.learner.model.examples import Examples
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.batches import Batches, BlockSource
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.stream.round_robin import RoundRobin
from anabranch.learner.train.trainer import overlaps

_FORESEEN = 4
"""Batches on which others begin work before their round: an answer over the network takes longer than a round."""


class BatchSource:
    """Returns the batches of the rounds. Used by the loop's thread.

    Where the host can work while the device computes, the next batch is taken early, and copied to the device. Where an
    extension begins work on new events, several are taken early, and copied at their step. A batch is only taken early
    if blocks that were polled before have a full step of it, and not from a round robin, whose turn is in checkpoints.
    It is not settled before its step. Events that are erased or removed meanwhile are left out: the rest is copied
    again. A learner that stops drops it.

    Attributes:
        batches: builds those of the stream; its state is part of checkpoints.
        next: returns the next batch, or None when there is none for now; takes the event that ends the wait.
        copied: returns the new events of a batch on the device.
    """

    def __init__(self, settings: LearnerSettings, parts: LoopComponents, step_size: int, ledger: Ledger) -> None:
        """Take the number of new events of a step over all ranks, and the positions of the partitions."""
        self._ledger = ledger
        source: BlockSource = parts.source
        for wrap in overriding(parts.extensions, "source"):
            source = wrap(source)
        self.batches = (
            RoundRobin(source, step_size, self._settled, unlabelled=parts.unlabelled)
            if settings.deterministic
            else Batches(
                source,
                step_size,
                settings.max_delay,
                parts.lag,
                most_late=next(iter(overriding(parts.extensions, "most_late")), None),
                unlabelled=parts.unlabelled,
            )
        )
        self._foresee = overriding(parts.extensions, "foresee")
        self._copy = parts.trainer.examples
        self._ahead: deque[Batch] = deque()
        self._copied: tuple[Mapping[str, Array], Examples] | None = None
        overlapping = overlaps(parts.trainer.device)
        if overlapping:
            parts.trainer.runner.before_wait = self.take_next
        of_stream: NextBatch = self.batches.next
        self.copied: Callable[[Mapping[str, Array]], Examples] = self._copy
        if overlapping or self._foresee:
            of_stream, self.copied = self._next, self._copied_early
        self.next = of_stream
        if hooks := overriding(parts.extensions, "next"):
            self.next = lambda stop: hooks[0](parts.source, stop, of_stream, self.batches.round)

    def take_next(self) -> None:
        """Take batches and start work on them; called while the device computes a step, maybe several times."""
        while len(self._ahead) < (_FORESEEN if self._foresee else 1):
            if not isinstance(self.batches, Batches) or (batch := self.batches.next_arrived()) is None:
                return
            self._ahead.append(batch)
            if not batch.new:
                continue
            for begin in self._foresee:
                begin(batch.new)
            if not self._foresee:
                try:
                    self._copied = batch.new, self._copy(batch.new)
                except RuntimeError as exc:
                    if not out_of_memory(exc):
                        raise

    def _next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, which may have been taken early."""
        if self._ahead:
            batch: Batch | None = self._ahead.popleft()
        elif (batch := self.batches.next(stop)) is not None and batch.new:
            for begin in self._foresee:
                begin(batch.new)
        if self._foresee:
            self.take_next()
        return batch

    def _copied_early(self, columns: Mapping[str, Array]) -> Examples:
        """Return the new events of a batch on the device, where they may be already."""
        if self._copied is not None and self._copied[0] is columns:
            copy, self._copied = self._copied[1], None
            return copy
        if not self._ahead:
            self._copied = None  # of a batch of which events were erased meanwhile
        return self._copy(columns)

    def _settled(self, index: int) -> int:
        """Return the first offset of a partition without outcome."""
        accounts = self._ledger.partitions
        return accounts[index].position.offset if index < len(accounts) else 0
