"""Dynamic batching: requests that wait at the same time share one run of the model.

All state belongs to the event loop's thread; the one worker thread gets complete batches only. A batch has one
version, with which each of its requests was admitted.

Requests of clients that recently made the model raise are run alone, so that others need no second run.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Self

import torch

from anabranch.learner.device.lease import ServerMark
from anabranch.serving.errors import RequestError, TooManyRequestsError, UnavailableError
from anabranch.serving.inference.batch_run import BatchRunner, Outputs, QueuedRequest
from anabranch.serving.inference.request_tracing import batch_span, request_span
from anabranch.serving.model.device import use_device
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.protocol.tensors import Array
from anabranch.serving.settings import ServingSettings

log = logging.getLogger("anabranch.serving")

_CPU = torch.device("cpu")


_FAILURE_LASTS = timedelta(seconds=10)
_MOST_FAILURES = 4096
"""Peers: the most connections that a process has."""


class RecentFailures:
    """The peers added in the last ten seconds, 4096 of them at most. Not thread-safe.

    A peer is anything that names a connection, such as address and port; None names none and is never added.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[Hashable, float] = OrderedDict()
        """The first to expire first."""

    def __contains__(self, peer: Hashable) -> bool:
        return bool(self._until) and self._until.get(peer, float("-inf")) > self._clock()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, peer: Hashable) -> None:
        """Add a peer, or renew it; remove expired peers, and the oldest if there are too many."""
        if peer is None:
            return
        now = self._clock()
        self._until[peer] = now + _FAILURE_LASTS.total_seconds()
        self._until.move_to_end(peer)
        while len(self._until) > _MOST_FAILURES or next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


class _Queue:
    """Waiting requests, the oldest first."""

    def __init__(self) -> None:
        self.rows = 0
        self._requests: deque[QueuedRequest] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def since(self) -> float:
        """When the oldest request was added."""
        return self._requests[0].since

    def add(self, waiting: QueuedRequest) -> None:
        self._requests.append(waiting)
        self.rows += waiting.rows

    def remove(self, waiting: QueuedRequest) -> bool:
        """Remove a request if it still waits; return whether it did."""
        try:
            self._requests.remove(waiting)
        except ValueError:
            return False
        self.rows -= waiting.rows
        return True

    def take(self, max_rows: int) -> list[QueuedRequest]:
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

    def clear(self) -> list[QueuedRequest]:
        """Remove and return all."""
        requests = list(self._requests)
        self._requests.clear()
        self.rows = 0
        return requests


class Batcher:
    """Collects requests into batches and runs them in its worker thread; a context manager inside a running loop.

    A batch leaves when it is full, or when its first request has waited `max_delay`, and the worker is free. A request
    with more than `max_batch` rows is a batch by itself, run in pieces.

    A request of a peer that has recently made the model raise is a batch by itself too. Such requests take turns with
    shared batches that are due.
    """

    def __init__(
        self,
        settings: ServingSettings,
        on_error: Callable[[BaseException], None],
        mark: ServerMark,
        device: torch.device = _CPU,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Prepare; entering the context starts the worker.

        Args:
            settings: sizes and times.
            on_error: gets the exception that ended the worker, in its thread.
            mark: reports load to the learner.
            device: on which versions run.
            waited: gets the time that requests have waited when they leave the queue, in seconds times rows.
        """
        self._max_batch = settings.max_batch
        self._max_queue = settings.max_queue
        self._max_delay = settings.max_delay.total_seconds()
        self._on_error = on_error
        self._mark = mark
        self._device = device
        self._waited = waited
        self._runner = BatchRunner(settings.max_batch, device)
        self._ended = False
        """Whether an error has ended the worker: no request can be answered any more."""
        self._left = False
        """Whether the context was left: a run that ended then has no request, and the mark is gone."""
        self._shared = _Queue()
        self._alone = _Queue()
        self._ran_alone = False
        """Whether the last batch was a request that is run alone."""
        self._failures = RecentFailures()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.SimpleQueue[list[QueuedRequest] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="serving-model", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._batches.put(None)
        self._worker.join()
        self._left = True

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs. Thread-safe."""
        return not (self._busy or self._shared or self._alone)

    @property
    def problem(self) -> str | None:
        """One sentence about a lack of memory; None without one. Thread-safe."""
        return self._runner.problem

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
            UnavailableError: memory does not suffice for now, or the worker has ended.
        """
        if self._ended:
            raise _ended()
        waiting_rows = self._shared.rows + self._alone.rows
        if waiting_rows + rows > self._max_queue:
            raise TooManyRequestsError(f"{waiting_rows} rows wait already; at most {self._max_queue} may wait")
        waiting = QueuedRequest(version, features, rows, self._loop.time(), self._loop.create_future(), embed, peer)
        waiting.span = request_span.get()
        queue = self._alone if peer in self._failures else self._shared
        queue.add(waiting)
        try:
            with self._mark.waiting():
                self._consider()
                return await waiting.answer
        except asyncio.CancelledError:
            if queue.remove(waiting):
                self._count([waiting])
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
        batch = queue.take(0 if self._ran_alone else self._max_batch)
        self._batches.put(batch)
        self._count(batch)

    def _count(self, left: Sequence[QueuedRequest]) -> None:
        """Count how long requests that have left the queue were in it."""
        now = self._loop.time()
        self._waited(sum(request.rows * (now - request.since) for request in left))

    def _answer(self, batch: Sequence[QueuedRequest]) -> None:
        if self._left:
            return
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

    def _refuse(self, batch: Sequence[QueuedRequest]) -> None:
        """Answer the requests of a batch, and all that wait, with 503: the worker has ended."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        for request in (*batch, *self._shared.clear(), *self._alone.clear()):
            if not request.answer.done():
                request.answer.set_exception(_ended())

    def _work(self) -> None:
        """Run batches until the end; the body of the worker thread."""
        batch: list[QueuedRequest] | None = []
        try:
            use_device(self._device)
            while (batch := self._batches.get()) is not None:
                with batch_span(batch):
                    self._runner.run(batch)
                self._loop.call_soon_threadsafe(self._answer, batch)
                batch = []  # otherwise it keeps its version in memory until the next batch
        except BaseException as exc:  # the top of a thread
            log.exception("the model's thread ended")
            self._on_error(exc)
            self._loop.call_soon_threadsafe(self._refuse, batch or [])


def _ended() -> UnavailableError:
    return UnavailableError("the model's thread has ended after an error; this server is about to start again")
