"""Takes the next batches, and starts to copy them or to ask a teacher about them, while a step is computed."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from anabranch.core.failures import out_of_memory
from ingest.events.block import Array
from learner.stream.batch import Batch
from learner.stream.batches import Batches
from learner.stream.round_robin import RoundRobin

_ASKED_AHEAD = 4
"""Batches that a teacher is asked about before their step: an answer over the network takes longer than a step."""

_T = TypeVar("_T")


class BatchPrefetch(Generic[_T]):
    """The batches of the steps, of which the next one may be on the device already. Used by one thread.

    A batch is only taken early if it is full at once, and not from a round robin, whose turn is in checkpoints. It is
    not settled before its step. Events that are erased or removed meanwhile are left out: the rest is copied again. A
    learner that stops drops it.

    With a teacher several batches are taken early, and copied with its outputs at their step.
    """

    def __init__(
        self,
        batches: Batches | RoundRobin,
        copy: Callable[[Mapping[str, Array]], _T],
        ask: Callable[[Mapping[str, Array]], object] | None = None,
    ) -> None:
        """Take the batches, and a function that returns columns on the device and does not wait for the copy.

        `ask` is called with the new events of each batch once it is taken, and does not wait for answers; None: there
        is no teacher.
        """
        self._batches = batches
        self._copy = copy
        self._ask = ask
        self._never = threading.Event()
        self._ahead: deque[Batch] = deque()
        self._copied: tuple[Mapping[str, Array], _T] | None = None

    def next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, as `Batches.next` does."""
        if self._ahead:
            batch: Batch | None = self._ahead.popleft()
        elif (batch := self._batches.next(stop)) is not None and batch.new and self._ask is not None:
            self._ask(batch.new)
        if self._ask is not None:
            self.take_next()
        return batch

    def copied(self, columns: Mapping[str, Array]) -> _T:
        """Return the new events of a batch on the device."""
        if self._copied is not None and self._copied[0] is columns:
            copy, self._copied = self._copied[1], None
            return copy
        if not self._ahead:
            self._copied = None  # of a batch of which events were erased meanwhile
        return self._copy(columns)

    def take_next(self) -> None:
        """Take batches and start to copy or to ask; called while the device computes a step, maybe several times."""
        while len(self._ahead) < (1 if self._ask is None else _ASKED_AHEAD):
            if not isinstance(self._batches, Batches) or not self._batches.is_full():
                return
            batch = self._batches.next(self._never)
            if batch is None:
                return
            self._ahead.append(batch)
            if not batch.new:
                continue
            if self._ask is not None:
                self._ask(batch.new)
                continue
            try:
                self._copied = batch.new, self._copy(batch.new)
            except RuntimeError as exc:
                if not out_of_memory(exc):
                    raise
