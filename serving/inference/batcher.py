"""Dynamic batching: requests that wait at the same time share one run of the model.

All state belongs to the event loop's thread; the one worker thread gets complete batches only. A batch has one
version, with which each of its requests was admitted.

Requests of clients that recently made the model raise are run alone, so that others need no second run.

Legend: B rows of a batch.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from learner.device_sharing.lease import ServerMark
from serving.config import ServingSettings
from serving.errors import BadRequestError, FailedError, RequestError, TooManyRequestsError
from serving.inference.recent_failures import RecentFailures
from serving.model.loaded_version import ServedVersion, is_finite
from serving.protocol.codec import EMBEDDING
from serving.protocol.tensors import Array

log = logging.getLogger("anabranch.serving")

Outputs = dict[str, Array]


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request in the queue or in the worker."""

    version: ServedVersion
    features: Mapping[str, Array]
    rows: int
    since: float
    answer: asyncio.Future[Outputs]
    embed: bool
    peer: Hashable
    outcome: Outputs | RequestError | None = field(default=None)
    raised: bool = field(default=False)
    """Whether the model raised on this input, and not on zeros."""


class _Queue:
    """Waiting requests, the oldest first."""

    def __init__(self) -> None:
        self.rows = 0
        self._requests: deque[_Waiting] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def since(self) -> float:
        """When the oldest request was added."""
        return self._requests[0].since

    def add(self, waiting: _Waiting) -> None:
        self._requests.append(waiting)
        self.rows += waiting.rows

    def remove(self, waiting: _Waiting) -> None:
        """Remove a request if it still waits."""
        with contextlib.suppress(ValueError):
            self._requests.remove(waiting)
            self.rows -= waiting.rows

    def take(self, max_rows: int) -> list[_Waiting]:
        """Remove and return the oldest, and the next ones of its version that fit into a batch of `max_rows`."""
        batch = [self._requests.popleft()]
        rows = batch[0].rows
        while self._requests and self._requests[0].version is batch[0].version:
            if rows + self._requests[0].rows > max_rows:
                break
            batch.append(self._requests.popleft())
            rows += batch[-1].rows
        self.rows -= rows
        return batch


class Batcher:
    """Collects requests into batches and runs them in its worker thread; a context manager inside a running loop.

    A batch leaves when it is full, or when its first request has waited `max_delay`, and the worker is free. A request
    with more than `max_batch` rows is a batch by itself, run in pieces.

    A request of a peer that has recently made the model raise is a batch by itself too. Such requests take turns with
    shared batches that are due.
    """

    def __init__(self, settings: ServingSettings, on_error: Callable[[BaseException], None], mark: ServerMark) -> None:
        """`on_error` gets the exception that ended the worker, in its thread; `mark` reports load to the learner."""
        self._max_batch = settings.max_batch
        self._max_queue = settings.max_queue
        self._max_delay = settings.max_delay.total_seconds()
        self._on_error = on_error
        self._mark = mark
        self._shared = _Queue()
        self._alone = _Queue()
        self._ran_alone = False
        """Whether the last batch was a request that is run alone."""
        self._failures = RecentFailures()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.SimpleQueue[list[_Waiting] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="serving-model", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._batches.put(None)
        self._worker.join()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs. Thread-safe."""
        return not (self._busy or self._shared or self._alone)

    async def predict(
        self,
        version: ServedVersion,
        features: Mapping[str, Array],
        rows: int,
        embed: bool = False,
        peer: Hashable = None,
    ) -> Outputs:
        """Answer a request by `version`, with the embedding if `embed`; cancelling removes it from the queue.

        `peer` names the connection of the request, if known.

        Raises:
            TooManyRequestsError: the queue has no room for its rows.
            BadRequestError: the model fails on this input, or its outputs for it are not finite.
            FailedError: the model fails on every input.
        """
        waiting_rows = self._shared.rows + self._alone.rows
        if waiting_rows + rows > self._max_queue:
            raise TooManyRequestsError(f"{waiting_rows} rows wait already; at most {self._max_queue} may wait")
        waiting = _Waiting(version, features, rows, self._loop.time(), self._loop.create_future(), embed, peer)
        queue = self._alone if peer in self._failures else self._shared
        queue.add(waiting)
        try:
            with self._mark.waiting():
                self._consider()
                return await waiting.answer
        except asyncio.CancelledError:
            queue.remove(waiting)
            raise

    def _consider(self) -> None:
        """Start a batch now, later, or once the worker is free."""
        if self._busy:
            return
        is_due = bool(self._shared) and (
            self._shared.rows >= self._max_batch or self._loop.time() >= self._shared.since + self._max_delay
        )
        if self._alone and not (is_due and self._ran_alone):
            self._start(self._alone)
        elif is_due:
            self._start(self._shared)
        elif self._shared and self._timer is None:
            self._timer = self._loop.call_at(self._shared.since + self._max_delay, self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        if not self._busy and self._shared:
            self._start(self._shared)

    def _start(self, queue: _Queue) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ran_alone = queue is self._alone
        self._busy = True
        self._mark.run()
        self._batches.put(queue.take(0 if self._ran_alone else self._max_batch))

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        self._busy = False
        self._mark.rest()
        for waiting in batch:
            if waiting.raised:
                self._failures.add(waiting.peer)
            if waiting.answer.done():
                continue  # cancelled meanwhile
            if isinstance(waiting.outcome, RequestError):
                waiting.answer.set_exception(waiting.outcome)
            else:
                assert waiting.outcome is not None
                waiting.answer.set_result(waiting.outcome)
        self._consider()

    def _work(self) -> None:
        """Run batches until the end; the body of the worker thread."""
        try:
            while (batch := self._batches.get()) is not None:
                _run(batch, self._max_batch)
                self._loop.call_soon_threadsafe(self._answer, batch)
                del batch  # otherwise it keeps its version in memory until the next batch
        except Exception as exc:
            log.exception("the model's thread ended")
            self._on_error(exc)


def _run(batch: Sequence[_Waiting], max_batch: int) -> None:
    """Set the outcome of each request; one that makes the model raise does not affect the others.

    Such requests are found by bisection. Each of n requests costs at most one run, and the search `2 * log2(n) + 3`
    more. If so many raise that bisection saves no runs, the rest is run one by one.
    """
    if _try(batch, max_batch):
        return
    failing, spare = [batch], 2 * len(batch).bit_length()
    while failing:
        group = failing.pop()
        size = (len(group) + 1) // 2 if spare >= 2 else 1
        parts = [group[start : start + size] for start in range(0, len(group), size)]
        for part in parts:
            spare -= 1
            if _try(part, max_batch):
                spare += len(part)
            else:
                failing.append(part)


def _try(batch: Sequence[_Waiting], max_batch: int) -> bool:
    """Run a batch, and return whether each request has its outcome: not if the model raises on several together."""
    version = batch[0].version
    embed = any(waiting.embed for waiting in batch)
    try:
        outputs = _run_in_pieces(version, _joined(batch), sum(waiting.rows for waiting in batch), max_batch, embed)
    except Exception as exc:  # noqa: BLE001 - the module is the user's code, which may raise anything
        if len(batch) > 1:
            return False
        batch[0].outcome = _failure(version, exc)
        batch[0].raised = isinstance(batch[0].outcome, BadRequestError)
        return True
    finite = all(is_finite(array) for array in outputs.values())
    start = 0
    for waiting in batch:
        own = {
            name: array[start : start + waiting.rows]
            for name, array in outputs.items()
            if waiting.embed or not embed or name != EMBEDDING
        }
        start += waiting.rows
        waiting.outcome = own if finite or all(map(is_finite, own.values())) else _not_finite(version)
    return True


def _joined(batch: Sequence[_Waiting]) -> dict[str, Array]:
    """Concatenate the features; a copy also for one request, since torch requires writable memory."""
    return {name: np.concatenate([waiting.features[name] for waiting in batch]) for name in batch[0].features}


def _run_in_pieces(
    version: ServedVersion, features: Mapping[str, Array], rows: int, max_batch: int, embed: bool
) -> Outputs:
    if rows <= max_batch:
        return version.run(features, embed)
    pieces = [
        version.run({name: array[start : start + max_batch] for name, array in features.items()}, embed)
        for start in range(0, rows, max_batch)
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _failure(version: ServedVersion, exc: Exception) -> RequestError:
    if version.works():
        return BadRequestError(f"the model fails on this input: {type(exc).__name__}: {str(exc).partition(chr(10))[0]}")
    log.error("version %d fails on every input", version.number, exc_info=exc)
    return FailedError(f"version {version.number} fails on every input")


def _not_finite(version: ServedVersion) -> BadRequestError:
    return BadRequestError(f"version {version.number} has no finite prediction for this input")
