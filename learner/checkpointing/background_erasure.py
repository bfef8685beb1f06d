"""Erases events from checkpoints and tiers, and compacts the erasure log, in pieces between the steps of a learner."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import DependencyError
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erase_checkpoints import Eraser
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoints
from replay.background_store import BackgroundStore
from replay.erasure.erased_events import ErasedEvents
from replay.erasure.erasure_log import ErasureLog, now
from replay.erasure.log_file import Applied

_SLOTS_AT_ONCE = 4096
_RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


class BackgroundErasure:
    """Applies the records of an erasure log to files. Used by the loop's thread, between steps.

    Checkpoints are rewritten in the thread that writes them.
    """

    def __init__(
        self,
        written: ErasureLog,
        checkpoints: Checkpoints,
        folder: Path,
        background_store: BackgroundStore | None,
        checkpointer: Checkpointer,
        log_starts: Callable[[], Mapping[str, int]],
    ) -> None:
        """Take what `Erasure` takes, and `log_starts`, which returns by partition the first offset that may be read."""
        self._log = written
        self._checkpoints = checkpoints
        self._folder = folder
        self._background_store = background_store
        self._checkpointer = checkpointer
        self._log_starts = log_starts
        self._store = self._holdout = 0
        self._work: Iterator[None] | None = None
        self._retry_at: float | None = None
        """When the work that has failed is tried again; None where none has failed."""
        self.through = written.through
        """The number of the last record that is applied everywhere."""
        self.problem: str | None = None
        """One sentence when a checkpoint or a tier cannot be erased."""

    def count(self, store: int, holdout: int) -> None:
        """Count events that were removed from the store and the holdout set, for the log."""
        self._store, self._holdout = self._store + store, self._holdout + holdout

    def advance(self, through: int) -> None:
        """Do the next piece of work; `through`: the last record that is applied to the store and the holdout set."""
        if self._work is None and (self._retry_at is None or time.monotonic() >= self._retry_at):
            if self.through < through:
                self._work = self._erase(through) if not self._checkpointer.busy else None
            elif self._log.is_long:
                self._work = self._compact()
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None

    def finish(self, through: int, deadline: Deadline) -> None:
        """Apply all records up to `through` before the deadline; the next start applies the rest."""
        while self.through < through and deadline.left > 0 and self._retry_at is None:
            self.advance(through)
            self._checkpointer.wait(deadline)

    def _erase(self, through: int) -> Iterator[None]:
        """Erase the events of records up to `through` from checkpoints and tiers; yields between the pieces.

        1. Rewrite the checkpoints, in the thread that writes them: later checkpoints do not have the events.
        2. Erase stale events that a tier could not erase before, and the slots of the disk tier that no checkpoint
           refers to and whose last event is unknown.
        3. Sync the tiers, then append to the log that the records are applied. A crash before this repeats all steps.
        """
        self._retry_at = None
        store, holdout, self._store, self._holdout = self._store, self._holdout, 0, 0
        if self.through < self._log.through:
            erased = self._log.erased.copy()
        else:
            erased = ErasedEvents(self._log.since(self.through)[: through - self.through])
        file = self._background_store.flush().tiers.file if self._background_store is not None else None
        current = file.id if file is not None else None
        eraser, named = Eraser(self._checkpoints, self._folder, erased), dict[str, NDArray[np.int64]]()
        error = yield from self._run(lambda: named.update(eraser.run(current).named))
        if self._background_store is not None and error is None:
            yield from _erase_slots(self._background_store, named.get(current or "", np.empty(0, np.int64)))
            tiers = self._background_store.flush().tiers
            error = yield from self._run(tiers.sync)
            if error is None and tiers.unerased:
                error = OSError(tiers.problem or "a tier could not be reached")
        try:
            if error is not None:
                raise error
            self._log.append(Applied(time=now(), through=through, store=store, holdout=holdout))
        except OSError as exc:
            self.count(store, holdout)
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            problem = f"erased events cannot be removed everywhere yet: {exc.strerror or exc}"
            if problem != self.problem:
                log.error("%s", problem)  # noqa: TRY400 the sentence is complete
            self.problem = problem
            return
        self.through, self.problem = through, None

    def _compact(self) -> Iterator[None]:
        """Rewrite the log without the records that are no longer needed."""
        self._retry_at = None
        written, log_starts = self._log.copy(), self._log_starts()
        error = yield from self._run(lambda: _compact(written, log_starts, self._checkpoints))
        if error is not None:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            log.warning("%s cannot be compacted yet: %s", self._log.path, error)
        else:
            self._log.refresh()

    def _run(self, work: Callable[[], object]) -> Generator[None, None, OSError | None]:
        """Run work in the thread that writes checkpoints; yields until it is done, and returns its OSError."""
        results: list[OSError | None] = []

        def run() -> None:
            try:
                work()
            except OSError as exc:
                results.append(exc)
            else:
                results.append(None)

        while not self._checkpointer.run(run):
            yield
        while not results:
            yield
        return results[0]


def _erase_slots(background_store: BackgroundStore, named: NDArray[np.int64]) -> Iterator[None]:
    """Erase stale events of tiers, and the slots of unknown events that are not `named`; yields between the pieces."""
    is_named = np.zeros(background_store.flush().tiers.slots, np.bool_)
    is_named[named] = True
    first = 0
    while background_store.flush().tiers.erase_stale(first, _SLOTS_AT_ONCE):
        first += _SLOTS_AT_ONCE
        yield
    while background_store.flush().erase_unknown(is_named, _SLOTS_AT_ONCE):
        yield


def _compact(written: ErasureLog, log_starts: Mapping[str, int], checkpoints: Checkpoints) -> None:
    try:
        written.compact(log_starts, checkpoints.clean_of(written.through) if log_starts else 0)
    except DependencyError as exc:  # it cannot be read now; the next attempt may succeed
        raise OSError(str(exc)) from exc
