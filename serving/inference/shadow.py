"""The shadow: a version that is not served answers a fraction of the live requests too, and answers are compared.

The candidate is the newest version that is newer than the served one and not about to be served: it failed, waits for
its verdict, or a rollout command withholds it. It answers in a separate thread, after the client has its answer and
while no live request runs; requests that cannot be compared soon are dropped. Its failures are reported and affect no
request.

Legend: B rows of a request.
"""

import contextlib
import dataclasses
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Self

import msgspec
import numpy as np

from anabranch.core.failures import Failure, failure_of
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.errors import VersionError
from anabranch.learner.versions.format import WEIGHTS
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from anabranch.serving.protocol.tensors import Array
from anabranch.serving.reporting.report import ShadowReport
from anabranch.serving.rollout.eligibility import misfit, requirements_of
from anabranch.serving.rollout.load_retry import Retries, may_pass

log = logging.getLogger("anabranch.serving")

_MOST_WAITING = 4
_PATIENCE = timedelta(milliseconds=100)
"""Longest time that a request waits until no live request runs."""
_POLL_IDLE = timedelta(milliseconds=2)
_POLL_CANDIDATES = timedelta(seconds=1)
_KEEP = timedelta(seconds=10)
"""Least time before a newer candidate replaces one."""
_LONGEST_END = timedelta(seconds=1)
_PREDICTION = "prediction"


@dataclasses.dataclass(frozen=True)
class _AnsweredRequest:
    """A request with the answers that the client got."""

    version: ServedVersion
    features: Mapping[str, Array]
    answers: Mapping[str, Array]
    since: float


class Shadow:
    """Compares a candidate's answers with the served ones; a context manager around its thread."""

    def __init__(
        self,
        deployment: Deployment,
        fraction: float,
        max_batch: int,
        metrics: ServingMetrics,
        served: Callable[[], ServedVersion | None],
        is_idle: Callable[[], bool],
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to compare; entering the context starts the thread, unless `fraction` is 0.

        `served` returns the served version, `is_idle` whether no live request runs; both are thread-safe. At most
        `max_batch` rows of a request are compared. `on_error` gets the error by which the device was lost.
        """
        # The model that versions are copied from is used by one thread at a time.
        self._deployment = dataclasses.replace(deployment, stream_priority=False, capture=None)
        self._requirements = requirements_of(deployment.schema, deployment.model)
        self._fraction = fraction
        self._max_batch = max_batch
        self._metrics = metrics
        self._served = served
        self._is_idle = is_idle
        self._on_error = on_error
        self._requests: queue.Queue[_AnsweredRequest | None] = queue.Queue(_MOST_WAITING)
        self._candidate: ServedVersion | None = None
        self._report: ShadowReport | None = None
        self._unusable: set[int] = set()
        self._retries = Retries(clock)
        self._clock = clock
        self._seen: dict[int, float] = {}
        """When a version was first seen, by the monotonic clock."""
        self._poll_due = self._keep_until = 0.0
        self._random = random.Random()  # noqa: S311 which requests are compared is no secret
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="serving-shadow", daemon=True)

    def __enter__(self) -> Self:
        if self._fraction:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._requests.put_nowait(None)
            self._thread.join(_LONGEST_END.total_seconds())  # a candidate that hangs does not delay the end

    @property
    def report(self) -> ShadowReport | None:
        """Results of the candidate; None without one."""
        return self._report

    def chooses(self) -> bool:
        """Return whether to compare a request. Called by the event loop's thread."""
        return self._fraction > 0 and self._random.random() < self._fraction

    def add(self, version: ServedVersion, features: Mapping[str, Array], answers: Mapping[str, Array]) -> None:
        """Enqueue features `[B, *shape]` of a request and its answers `[B, ...]`, or drop them; returns at once."""
        try:
            self._requests.put_nowait(_AnsweredRequest(version, features, answers, self._clock()))
        except queue.Full:
            self._count_dropped(len(next(iter(answers.values()))))

    def _work(self) -> None:
        """Poll for candidates and compare, until the end; the body of the thread."""
        try:
            while not self._stopping:
                self._poll()
                try:
                    request = self._requests.get(timeout=_PATIENCE.total_seconds())
                except queue.Empty:
                    continue
                if request is not None and self._candidate is not None:
                    self._compare(request, self._candidate)
        except BaseException as exc:  # the top of a thread
            log.exception("the shadow's thread ended; requests are answered as before")
            if failure_of(exc) is Failure.DEVICE:
                self._on_error(exc)

    def _poll(self) -> None:
        now, served = self._clock(), self._served()
        if self._report is not None and served is not None and self._report.version <= served.number:
            self._candidate, self._report, self._keep_until = None, None, 0.0
        if served is None or now < max(self._poll_due, self._keep_until):
            return
        self._poll_due = now + _POLL_CANDIDATES.total_seconds()
        newest = self._candidate.number if self._candidate else served.number
        try:
            numbers = self._deployment.versions.numbers()
        except OSError as exc:  # the swap reports it too
            log.warning("the shadow cannot list the versions: %s", exc)
            return
        self._seen = {number: self._seen.get(number, now) for number in numbers}
        self._retries.keep(lambda number: number in numbers)
        left_out = self._unusable | self._deployment.versions.stale(numbers)
        for number in reversed(numbers):
            if number <= newest:
                return
            if number in left_out or self._retries.waits(number):
                continue
            if self._is_candidate(number, now) and self._take(number):
                return

    def _is_candidate(self, number: int, now: float) -> bool:
        """Return whether a version stays unserved: others are about to be swapped in."""
        versions = self._deployment.versions
        try:
            if versions.folder(number).stamp(WEIGHTS) is None:  # they were not copied from the object store
                return False
            verdict = versions.verdict(number)
        except (VersionError, OSError):
            return False
        failed = verdict is not None and verdict.verdict == "fail"
        return failed or now - self._seen[number] >= _POLL_CANDIDATES.total_seconds()

    def _take(self, number: int) -> bool:
        try:
            manifest = self._deployment.versions.manifest(number)
            if (reason := misfit(manifest, self._requirements)) is not None:
                raise VersionError(f"version {number}: {reason}")
            if self._retries.reason_of(number) is not None:
                free_cached_memory(self._deployment.device)
            self._candidate = load_version(self._deployment, manifest, self._max_batch)
        except (VersionError, OSError, RuntimeError, MemoryError) as exc:
            self._fail(number, str(exc), permanently=not may_pass(exc))
            return False
        self._retries.remove(number)
        self._report = ShadowReport(version=number)
        self._keep_until = self._clock() + _KEEP.total_seconds()
        log.info("version %d answers %g of the requests in the shadow", number, self._fraction)
        return True

    def _compare(self, request: _AnsweredRequest, candidate: ServedVersion) -> None:
        name = _PREDICTION if _PREDICTION in request.answers else next(iter(request.answers))
        answer = request.answers[name][: self._max_batch]
        if request.version is candidate:
            return
        while not self._is_idle():
            if self._clock() - request.since > _PATIENCE.total_seconds() or self._stopping:
                self._count_dropped(len(answer))
                return
            time.sleep(_POLL_IDLE.total_seconds())
        try:
            # A copy, since torch requires writable memory.
            features = {key: array[: self._max_batch].copy() for key, array in request.features.items()}
            disagreement = _disagreement(answer, candidate.run(features)[name])
        except Exception as exc:  # the module is the user's code, which may raise anything
            if failure_of(exc) is Failure.DEVICE:
                raise
            why = f"version {candidate.number}: {type(exc).__name__}: {exc}"
            self._fail(candidate.number, why, permanently=failure_of(exc) in (None, Failure.DAMAGED))
            return
        self._metrics.shadowed("compared", len(answer), disagreement)
        report = self._report or ShadowReport(version=candidate.number)
        rows = report.rows + len(answer)
        mean = report.disagreement or 0.0
        self._report = msgspec.structs.replace(
            report, rows=rows, disagreement=mean + (disagreement - mean * len(answer)) / rows
        )

    def _count_dropped(self, rows: int) -> None:
        if self._report is not None and self._candidate is not None:
            self._metrics.shadowed("dropped", rows)

    def _fail(self, number: int, why: str, *, permanently: bool) -> None:
        """Give up a candidate, permanently or until its retry is due."""
        log.warning("the shadow gives up a candidate: %s", why)
        if permanently:
            self._unusable = {number, *(other for other in self._unusable if other > number - 1000)}
        else:
            self._retries.failed(number, why)
        self._candidate, self._keep_until = None, 0.0
        self._report = ShadowReport(version=number, failed=why)


def _disagreement(answer: Array, other: Array) -> float:
    """Return how many of B rows have another prediction; for numbers, the sum of the rows' absolute differences."""
    if answer.shape != other.shape:
        raise ValueError(f"it answers in the shape {other.shape} where {answer.shape} was served")
    rows = len(answer)
    if answer.dtype.kind == "f":
        return float(np.abs(np.subtract(answer, other)).reshape(rows, -1).mean(axis=1, dtype=np.float64).sum())
    return float((answer != other).reshape(rows, -1).any(axis=1).sum())
