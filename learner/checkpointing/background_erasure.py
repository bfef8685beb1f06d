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
from learner.labels.label_join import LabelJoin
from learner.object_storage.mirror import Mirror
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoints
from replay.background_store import BackgroundStore
from replay.erasure.erased_events import ErasedEvents
from replay.erasure.erasure_log import COMMAND, ErasureLog, now
from replay.erasure.log_file import Applied

_SLOTS_AT_ONCE = 4096
_RETRY_SECONDS = 10.0
_PATIENCE_SECONDS = 10.0
"""How long the object store may have erased events before that is a problem."""
_REQUEST_SECONDS = 10.0
"""Between two checkpoints that are made only because the object store has erased events."""
_GATHER_TIMES = 50
"""Records of tombstones are gathered for so many times as long as the last rewrite of the checkpoints took."""
_LONGEST_GATHERING = 60.0
"""Seconds, at most; but at least as long as the rewrite took."""

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


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
        mirror: Mirror | None = None,
    ) -> None:
        """Take what `Erasure` takes, and `log_starts`, which returns by partition the first offset that may be read."""
        self._mirror = mirror
        self._log = written
        self._checkpoints = checkpoints
        self._folder = folder
        self._background_store = background_store
        self._checkpointer = checkpointer
        self._log_starts = log_starts
        self._store = self._holdout = 0
        self._files_through = written.through
        """The number of the last record that is applied to all files of this host."""
        self._removed = 0, 0
        """Events that records between `through` and `_files_through` removed from the store and the holdout set."""
        self._applied_at: float | None = None
        """Since when records are applied to files, and not everywhere, by the monotonic clock."""
        self._request_at: float | None = None
        """When a checkpoint is requested for the object store; None where none is needed."""
        self._requested_at = float("-inf")
        self._rewrite_seconds = 0.0
        self._gather_until = float("-inf")
        """Until when records of tombstones are gathered, by the monotonic clock. None of their events is used any more
        meanwhile, and they do not count as erased yet."""
        self._gathered = 0
        """The last record that was examined since, none of which is a command's."""
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

    def start_over(self) -> None:
        """Apply all records again: files may have their events."""
        self.through = self._files_through = 0

    def advance(self, through: int) -> bool:
        """Do the next piece of work, and return whether there is more.

        `through`: the last record that is applied to the store and the holdout set.
        """
        if self._work is None and (self._retry_at is None or time.monotonic() >= self._retry_at):
            if self._files_through < through:
                self._work = self._erase(through) if not self._checkpointer.busy and self._is_due(through) else None
            elif self.through < through:
                self._confirm()
            elif self._log.is_long:
                self._work = self._compact()
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None
        return self._work is not None or self.through < through

    def finish(self, through: int, deadline: Deadline) -> None:
        """Apply all records up to `through` to files before the deadline; the next start applies the rest."""
        while self._files_through < through and deadline.left > 0 and self._retry_at is None:
            self._gather_until = float("-inf")
            self.advance(through)
            self._checkpointer.wait(deadline)

    def _is_due(self, through: int) -> bool:
        """Return whether the files are to be rewritten now: at once for a command, which waits for it."""
        if time.monotonic() >= self._gather_until or self._files_through < self._log.through:
            return True
        first = max(self._files_through, self._gathered)
        self._gathered = through
        return any(record.by == COMMAND for record in self._log.since(first)[: through - first])

    def _erase(self, through: int) -> Iterator[None]:
        """Erase the events of records up to `through` from checkpoints and tiers; yields between the pieces.

        1. Rewrite the checkpoints, in the thread that writes them: later checkpoints do not have the events.
        2. Erase stale events that a tier could not erase before, and the slots of the disk tier that no checkpoint
           refers to and whose last event is unknown; likewise the payload of events that waited for labels.
        3. Sync the tiers.
        4. Once the object store has none of the events either, append to the log that the records are applied. A crash
           before this repeats all steps.
        """
        self._retry_at = None
        store, holdout, self._store, self._holdout = self._store, self._holdout, 0, 0
        if (done := self._files_through) < self._log.through:
            erased = self._log.erased.copy()
        else:
            erased = ErasedEvents(self._log.since(done)[: through - done])
        file = self._background_store.flush().tiers.file if self._background_store is not None else None
        join, none = self._checkpointer.label_join, np.empty(0, np.int64)
        current = [each.id for each in (file, join.file if join is not None else None) if each is not None]
        eraser = Eraser(self._checkpoints, self._folder, erased, self._checkpointer.keep)
        named = dict[str, NDArray[np.int64]]()
        # Checkpoints that begin from now on name slots that the join uses now, or writes from now on.
        begun = join.begin_overwrite if join is not None else _nothing

        def rewrite() -> None:
            begin = time.monotonic()
            named.update(eraser.run(current).named)
            self._rewrite_seconds = time.monotonic() - begin

        error = yield from self._run(rewrite, begun)
        if self._background_store is not None and error is None:
            yield from _erase_slots(self._background_store, named.get(file.id, none) if file is not None else none)
            tiers = self._background_store.flush().tiers
            error = yield from self._run(tiers.sync)
            if error is None and tiers.unerased:
                error = OSError(tiers.problem or "a tier could not be reached")
        if join is not None and error is None:
            error = yield from self._overwrite(join, named.get(join.file.id, none))
        if error is not None:
            self.count(store, holdout)
            self._fail(error)
            return
        self._removed = self._removed[0] + store, self._removed[1] + holdout
        self._files_through, self._applied_at = through, time.monotonic()
        seconds = self._rewrite_seconds
        self._gather_until = self._applied_at + max(seconds, min(_GATHER_TIMES * seconds, _LONGEST_GATHERING))
        if self._mirror is not None:
            self._mirror.erase(through)
            self._request_at = max(self._applied_at, self._requested_at + _REQUEST_SECONDS)
        self._confirm()

    def _confirm(self) -> None:
        """Append to the log that records are applied, once the object store has none of their events either."""
        if self._mirror is not None and not self._mirror.has_erased(self._files_through):
            self._wait_for_mirror()
            return
        store, holdout = self._removed
        try:
            self._log.append(Applied(time=now(), through=self._files_through, store=store, holdout=holdout))
        except OSError as exc:
            self._fail(exc)
            return
        self.through, self._removed, self.problem = self._files_through, (0, 0), None
        self._request_at = None

    def _wait_for_mirror(self) -> None:
        """Request the checkpoint that replaces those with erased events in the object store; report a long wait."""
        at = time.monotonic()
        if self._request_at is not None and at >= self._request_at:
            self._checkpointer.request()
            self._request_at, self._requested_at = None, at
        if self._mirror is not None and self._applied_at is not None and at - self._applied_at > _PATIENCE_SECONDS:
            self.problem = (
                f"erased events are still in {self._mirror.url}: they go once a checkpoint and erasures.log are there; "
                "training and erasing go on"
            )

    def _fail(self, exc: OSError) -> None:
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        problem = f"erased events cannot be removed everywhere yet: {exc.strerror or exc}"
        if problem != self.problem:
            log.error("%s", problem)
        self.problem = problem

    def _overwrite(self, join: LabelJoin, named: NDArray[np.int64]) -> Generator[None, None, OSError | None]:
        """Overwrite the payload that no event of a join and no checkpoint refers to; yields between the pieces."""
        join.payload.spare(named)
        try:
            while join.payload.overwrite(_SLOTS_AT_ONCE):
                yield
        except OSError as exc:
            return exc
        return (yield from self._run(join.payload.sync))

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

    def _run(
        self, work: Callable[[], object], begun: Callable[[], object] = _nothing
    ) -> Generator[None, None, OSError | None]:
        """Run work in the thread that writes checkpoints; yields until it is done, and returns its OSError.

        `begun` is called by this thread once the work has begun, before a checkpoint can begin.
        """
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
        begun()
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
