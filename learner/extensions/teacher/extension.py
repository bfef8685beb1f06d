"""Feeds a teacher's outputs into the steps: asks in the background, waits within a bound, and goes on without.

Legend: N new events of a batch.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Histogram
from typing_extensions import override

from anabranch.core.backoff import Backoff
from anabranch.core.job_thread import JobThread
from anabranch.ingest.events.block import Array, SkipReason
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.errors import TeacherError
from anabranch.learner.extension import Extension
from anabranch.learner.model.examples import TEACHER
from anabranch.learner.status.report import TeacherReport
from anabranch.learner.stream.batch import Batch

_FIRST_RETRY, _LONGEST_RETRY = timedelta(seconds=1), timedelta(seconds=30)

log = logging.getLogger(__name__)


_LARGEST = 1e15
"""The square of a larger number is infinite in float32: one answer would spoil a step."""


def without_unusable(output_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a teacher's outputs, `[N, ...]`, with NaN for each event whose output is not finite or is too large."""
    usable_N = (np.abs(output_N.reshape(len(output_N), -1)) < _LARGEST).all(axis=1)
    return np.where(usable_N.reshape(-1, *[1] * (output_N.ndim - 1)), output_N, np.float32(np.nan))


class Teacher:
    """Returns outputs for events. `answer` is called by background threads, by `threads` of them at once at most."""

    name: str
    """What messages call it, such as `the teacher at http://models:8000`."""
    threads: int
    """How many rounds may be answered at once; 0: the thread of the steps asks itself."""
    timeout: timedelta | None
    """Longest time of an answer for each step of a round; None: a round waits until the answer is there."""

    def answer(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the outputs for N events, `[N, *output]`, NaN where there is none that can be learned from.

        Raises:
            TeacherError: there is none for any of them.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is being asked; it fails soon."""


class TeacherRequest:
    """The events of a batch, of which a teacher is asked the outputs."""

    def __init__(self, columns: Mapping[str, Array], steps: int, until: float | None, *, is_trial: bool) -> None:
        """Take the number of steps, and `until`, when they wait no longer; `is_trial`: no step waits at all."""
        self.columns = columns
        self.steps = steps
        self.until = until
        self.is_trial = is_trial
        self.done = threading.Event()
        self.is_given_up = False
        """Whether no step will use the outputs."""
        self.output_N: NDArray[np.float32] | None = None
        """The outputs once it is done; None: there are none."""


class TeacherFeed(Extension):
    """A teacher at the side of the loop. Used by the loop's thread, save where said otherwise.

    After a failure the teacher counts as away: the events of steps are not sent to it, except those of one batch after
    a back-off, for which no step waits. Its answer ends that. It is away, too, once each thread may be at a batch for
    which no step waits any more: no more batches than threads are kept of those.
    """

    def __init__(
        self,
        teacher: Teacher,
        shape: tuple[int, ...],
        duration: Histogram,
        step_size: int,
        *,
        unlabelled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nothing yet.

        Args:
            teacher: closed by `close`.
            shape: of the output for one event.
            duration: observes how long the teacher takes for the events of a step.
            step_size: events of a full step.
            unlabelled: whether events without a label are trained on, by the teacher's output alone.
            clock: for tests.
        """
        self._teacher = teacher
        self._shape = shape
        self._step_size = step_size
        self.unlabelled = unlabelled
        self._clock = clock
        self._threads = [JobThread(f"teacher-{index}") for index in range(teacher.threads)]
        self._next_thread = 0
        self._requests: dict[int, TeacherRequest] = {}
        self._given_up = 0
        """How many requests without a step that waits are in the threads."""
        self._rows: Counter[str] = Counter()
        self._waited = 0.0
        self._duration = duration
        self._lock = threading.Lock()
        self._backoff = Backoff(_FIRST_RETRY, _LONGEST_RETRY)
        self._failure: str | None = None
        self._retry_at = 0.0

    @property
    @override
    def warning(self) -> str | None:
        failure = self._failure
        if failure is None:
            return None
        skipped = ", and those without one are skipped, counted as untaught" * self.unlabelled
        return f"{failure}; until it answers again events are learned from by their labels alone{skipped}"

    @override
    def report(self) -> Mapping[str, Any]:
        rows, is_up = dict(self._rows), self._failure is None
        return {"teacher": TeacherReport(name=self._teacher.name, up=is_up, rows=rows, waited_seconds=self._waited)}

    @override
    def foresee(self, columns: Mapping[str, Array]) -> None:
        """Begin to ask about the new events of a batch, unless the teacher is away."""
        if self._threads:
            self._begin(columns)

    @override
    def take(self, batch: Batch, partitions: Sequence[Partition]) -> Batch:
        """Add the column of the teacher's outputs to the new events of a batch, NaN where there is none.

        Waits for them within the teacher's time. Events without a label and without an output leave the batch, skipped.
        """
        request = self._requests.pop(id(batch.new), None)
        if not batch.new:
            return batch
        rows = len(batch)
        if request is None:
            request = self._begin(batch.new)
        output_N, result = self._received(request)
        if output_N is None:
            output_N = np.full((rows, *self._shape), np.nan, np.float32)
        batch.new[TEACHER] = output_N
        known_N = np.isfinite(output_N.reshape(rows, -1)).all(axis=1)
        known = int(np.count_nonzero(known_N))
        self._rows["answered"] += known
        self._rows[result] += rows - known
        untaught_N = ~known_N & ~batch.new["labelled"].astype(np.bool_)
        if untaught_N.any():
            batch.skip(untaught_N, SkipReason.UNTAUGHT)
        return batch

    @override
    def close(self) -> None:
        self._teacher.close()
        for thread in self._threads:
            thread.close()

    def _begin(self, columns: Mapping[str, Array]) -> TeacherRequest | None:
        now, timeout = self._clock(), self._teacher.timeout
        with self._lock:
            is_trial = self._failure is not None
            if is_trial and now < self._retry_at:
                return None
            given_up = self._given_up
            if is_trial and given_up < len(self._threads):  # one at a time
                self._retry_at = float("inf")
        if self._threads and given_up >= len(self._threads):
            self._fail(f"{self._teacher.name} is still at {given_up} batches for which no step waits any more")
            return None
        steps = -(-len(columns["offset"]) // self._step_size)
        until = None if timeout is None else now + steps * timeout.total_seconds()
        request = TeacherRequest(columns, steps, until, is_trial=is_trial)
        if not self._threads:
            self._run(request)
            return request
        self._requests[id(columns)] = request
        self._threads[self._next_thread].submit(lambda: self._run(request))
        self._next_thread = (self._next_thread + 1) % len(self._threads)
        return request

    def _received(self, request: TeacherRequest | None) -> tuple[NDArray[np.float32] | None, str]:
        """Return the outputs for a request, None without any, and the result that events without one are counted as."""
        if request is None:
            return None, "unasked"
        begin = self._clock()
        if request.is_trial:
            left: float | None = 0.0
        else:
            left = None if request.until is None else max(0.0, request.until - begin)
        in_time = request.done.wait(left)
        self._waited += self._clock() - begin
        for thread in self._threads:
            thread.raise_bug()
        if not in_time:
            self._give_up(request)
            return None, "late"
        return request.output_N, "failed" if request.output_N is None else "unusable"

    def _give_up(self, request: TeacherRequest) -> None:
        with self._lock:
            if not request.done.is_set():
                request.is_given_up = True
                self._given_up += 1

    def _run(self, request: TeacherRequest) -> None:
        """Ask the teacher; called by a background thread, or by that of the loop where there is none."""
        begin = self._clock()
        try:
            with self._lock:
                is_needed = request.is_trial or (self._failure is None and not request.is_given_up)
            if is_needed:
                request.output_N = self._teacher.answer(request.columns)
                self._duration.observe((self._clock() - begin) / request.steps)
                self._succeed()
        except TeacherError as exc:
            self._fail(str(exc))
        finally:
            with self._lock:
                self._given_up -= request.is_given_up
                request.done.set()

    def _succeed(self) -> None:
        with self._lock:
            was_away, self._failure = self._failure is not None, None
            self._backoff.reset()
        if was_away:
            log.info("%s answers again", self._teacher.name)

    def _fail(self, sentence: str) -> None:
        with self._lock:
            was_away, self._failure = self._failure is not None, sentence
            self._retry_at = self._clock() + self._backoff.next()
        if not was_away:
            log.warning("%s", self.warning)
