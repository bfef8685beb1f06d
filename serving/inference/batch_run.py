"""One run of a batch: joins its requests, and finds those on which the model fails.

Legend: B rows of a batch.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch

from anabranch.core.failures import Failure, failure_of
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.serving.errors import BadRequestError, FailedError, RequestError, UnavailableError
from anabranch.serving.model.loaded_version import ServedVersion, is_finite
from anabranch.serving.protocol.codec import EMBEDDING
from anabranch.serving.protocol.tensors import Array

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import RequestSpan

log = logging.getLogger("anabranch.serving")

Outputs = dict[str, Array]

_REPORT_SHORTAGE = timedelta(minutes=1)
"""How long a lack of memory is reported."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
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
    span: "RequestSpan | None" = None
    """The request's span; None if it is not traced."""


class BatchRunner:
    """Runs batches on the device of their version. Used by one thread; another may read `problem`.

    A batch that runs out of memory is run again in pieces of half the size, down to one row.
    """

    def __init__(self, max_batch: int, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_batch` is the number of rows of the largest run."""
        self._max_batch = max_batch
        self._device = device
        self._clock = clock
        self._shortage: tuple[float, str] = float("-inf"), ""

    @property
    def problem(self) -> str | None:
        """One sentence if memory ran out in the last minute."""
        when, sentence = self._shortage
        return sentence if self._clock() - when < _REPORT_SHORTAGE.total_seconds() else None

    def run(self, batch: Sequence[QueuedRequest]) -> None:
        """Set the outcome of each request; one that makes the model raise does not affect the others.

        Such requests are found by bisection. Each of n requests costs at most one run, and the search
        `2 * log2(n) + 3` more. If so many raise that bisection saves no runs, the rest is run one by one.

        Raises:
            Exception: the device is lost. The process has to end.
        """
        if self._try(batch):
            return
        failing, spare = [batch], 2 * len(batch).bit_length()
        while failing:
            group = failing.pop()
            size = (len(group) + 1) // 2 if spare >= 2 else 1
            parts = [group[start : start + size] for start in range(0, len(group), size)]
            for part in parts:
                spare -= 1
                if self._try(part):
                    spare += len(part)
                else:
                    failing.append(part)

    def _try(self, batch: Sequence[QueuedRequest]) -> bool:
        """Run a batch; return whether each request has its outcome: not if the model raises on several together."""
        version = batch[0].version
        embed = any(request.embed for request in batch)
        try:
            outputs = self._outputs(version, _joined(batch), sum(request.rows for request in batch), embed)
        except Exception as exc:
            if failure_of(exc) is Failure.DEVICE:
                raise
            if len(batch) > 1:
                return False
            batch[0].outcome = self._failure(batch[0], exc)
            batch[0].raised = isinstance(batch[0].outcome, BadRequestError) or self._takes_all_memory(batch[0], exc)
            return True
        finite = all(is_finite(array) for array in outputs.values())
        start = 0
        for request in batch:
            own = {
                name: array[start : start + request.rows]
                for name, array in outputs.items()
                if request.embed or not embed or name != EMBEDDING
            }
            start += request.rows
            request.outcome = own if finite or all(map(is_finite, own.values())) else _not_finite(version)
        return True

    def _outputs(self, version: ServedVersion, features: Mapping[str, Array], rows: int, embed: bool) -> Outputs:
        """Run the model, in ever smaller pieces while memory does not suffice."""
        most = min(rows, self._max_batch)
        while True:
            try:
                return _run_in_pieces(version, features, rows, most, embed)
            except Exception as exc:
                if most == 1 or failure_of(exc) is not Failure.MEMORY:
                    raise
            # After the except clause: its exception keeps the tensors of the failed run.
            most //= 2
            self._free_memory()
            self._report(f"{rows} rows were run {most} at a time")

    def _failure(self, request: QueuedRequest, exc: Exception) -> RequestError:
        version = request.version
        try:
            if failure_of(exc) is not Failure.MEMORY:
                if version.works():
                    sentence = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
                    return BadRequestError(f"the model fails on this input: {sentence}")
                log.error("version %d fails on every input", version.number, exc_info=exc)
                return FailedError(f"version {version.number} fails on every input")
        except Exception as other:
            if failure_of(other) is not Failure.MEMORY:
                raise
        self._free_memory()
        self._report(f"a request of {request.rows} rows was answered 503")
        return UnavailableError("the model has too little memory for now; try again")

    def _takes_all_memory(self, request: QueuedRequest, exc: Exception) -> bool:
        """Return whether a row of it alone runs out of memory while a row of zeros does not."""
        try:
            return failure_of(exc) is Failure.MEMORY and request.version.works()
        except Exception as other:
            if failure_of(other) is not Failure.MEMORY:
                raise
            return False

    def _free_memory(self) -> None:
        """Free what a model has left in cycles, which a server collects seldom, and what torch caches."""
        gc.collect()
        free_cached_memory(self._device)

    def _report(self, what: str) -> None:
        sentence = f"the model ran out of memory in the last minute: {what}"
        if self.problem != sentence:
            log.warning("%s", sentence)
        self._shortage = self._clock(), sentence


def _joined(batch: Sequence[QueuedRequest]) -> dict[str, Array]:
    """Concatenate the features; a copy also for one request, since torch requires writable memory."""
    return {name: np.concatenate([request.features[name] for request in batch]) for name in batch[0].features}


def _run_in_pieces(
    version: ServedVersion, features: Mapping[str, Array], rows: int, max_rows: int, embed: bool
) -> Outputs:
    if rows <= max_rows:
        return version.run(features, embed)
    pieces = [
        version.run({name: array[start : start + max_rows] for name, array in features.items()}, embed)
        for start in range(0, rows, max_rows)
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _not_finite(version: ServedVersion) -> BadRequestError:
    return BadRequestError(f"version {version.number} has no finite prediction for this input")
