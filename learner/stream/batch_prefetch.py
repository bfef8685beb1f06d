"""Takes the next batch, and starts to copy it to the device, while the device computes a step."""

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from anabranch.core.failures import out_of_memory
from ingest.events.block import Array
from learner.stream.batches import Batch, Batches
from learner.stream.round_robin import RoundRobin

_T = TypeVar("_T")


class BatchPrefetch(Generic[_T]):
    """The batches of the steps, of which the next one may be on the device already. Used by one thread.

    A batch is only taken early if it is full at once, and not from a round robin, whose turn is in checkpoints. It is
    not settled before its step. Events that are erased or removed meanwhile are left out: the rest is copied again. A
    learner that stops drops it.
    """

    def __init__(self, batches: Batches | RoundRobin, copy: Callable[[Mapping[str, Array]], _T]) -> None:
        """Take the batches, and a function that returns columns on the device and does not wait for the copy."""
        self._batches = batches
        self._copy = copy
        self._never = threading.Event()
        self._batch: Batch | None = None
        self._copied: tuple[Mapping[str, Array], _T] | None = None

    def next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, as `Batches.next` does."""
        batch, self._batch = self._batch, None
        return self._batches.next(stop) if batch is None else batch

    def copied(self, columns: Mapping[str, Array]) -> _T:
        """Return the new events of a batch on the device."""
        if self._copied is not None and self._copied[0] is columns:
            copy, self._copied = self._copied[1], None
            return copy
        if self._batch is None:
            self._copied = None  # of a batch of which events were erased meanwhile
        return self._copy(columns)

    def take_next(self) -> None:
        """Take a batch and start to copy it; called while the device computes a step, maybe several times."""
        if self._batch is not None or not isinstance(self._batches, Batches) or not self._batches.is_full():
            return
        self._batch = self._batches.next(self._never)
        if self._batch is None or not self._batch.new:
            return
        try:
            self._copied = self._batch.new, self._copy(self._batch.new)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
