"""Erases events from checkpoints and tiers, and compacts the erasure log, in pieces between the steps of a learner."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import DependencyError
from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition, latest_incarnations
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.checkpoints.checkpointer import Checkpointer
from anabranch.learner.checkpoints.erase_checkpoints import Eraser, applied_to_all
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.checkpoints.parts import CheckpointPart
from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.erasure.erasure_log import COMMAND, Applied, ErasureLog, now

_RETRY_SECONDS = 10.0
_PATIENCE_SECONDS = 10.0
"""How long the object store may have erased events before that is a problem."""
_REQUEST_SECONDS = 10.0
"""Between two checkpoints that are made only because the object store has erased events."""
_GATHER_TIMES = 50
"""Records of tombstones are gathered for so many times as long as the last rewrite of the checkpoints took."""
_LONGEST_GATHERING = 60.0
"""Seconds, at most; but at least as long as the rewrite took."""
_ABOVE_ALL = 2**62
"""Above the end of any file."""

Positions = Callable[[], Mapping[TopicPartition, Position]]
"""Returns the first event of each partition without an outcome."""

log = logging.getLogger(__name__)


class ErasedCopies:
    """Copies of checkpoints and log elsewhere, which must not keep erased events either; here there are none."""

    url: str = ""
    """Where they are."""

    def erase_through(self, through: int) -> None:
        """Replace copies that have events of records up to `through`."""

    def has_erased(self, through: int) -> bool:
        """Return whether no copy has such events any more."""
        return True


class BackgroundErasure:
    """Applies the records of an erasure log to files. Used by the loop's thread, between steps.

    Checkpoints are rewritten in the thread that writes them.
    """

    def __init__(
        self,
        written: ErasureLog,
        checkpoints: Checkpoints,
        checkpointer: Checkpointer,
        copies: ErasedCopies | None = None,
        *,
        has_history: bool = False,
    ) -> None:
        """Start with a log that was read.

        Args:
            written: the log.
            checkpoints: the learner's checkpoints.
            checkpointer: its thread rewrites the checkpoints, and its parts have files.
            copies: those in an object store.
            has_history: whether a learner that begins again reads files.
        """
        self.parts = checkpointer.parts
        self._copies = copies or ErasedCopies()
        self._log = written
        self._checkpoints = checkpoints
        self._checkpointer = checkpointer
        self._has_history = has_history
        self._partitions: Sequence[Partition] = ()
        self._positions: Positions = dict
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

    def register_partitions(self, partitions: Sequence[Partition], positions: Positions) -> None:
        """Set the partitions, by their index; `positions` returns the first event of each without an outcome."""
        self._partitions, self._positions = partitions, positions

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
        2. Of each part, erase stale events that a tier could not erase before, and the slots of its file that no
           checkpoint refers to and whose last event is unknown.
        3. Sync its tiers.
        4. Once the object store has none of the events either, append to the log that the records are applied. A crash
           before this repeats all steps.
        """
        self._retry_at = None
        store, holdout, self._store, self._holdout = self._store, self._holdout, 0, 0
        if (done := self._files_through) < self._log.through:
            erased = self._log.erased.copy()
        else:
            erased = ErasedEvents(self._log.since(done)[: through - done])
        files = [(part, part.file) for part in self.parts]
        eraser = Eraser(self._checkpoints, erased, self._checkpointer.keep)
        named, none = dict[str, NDArray[np.int64]](), np.empty(0, np.int64)

        def rewrite() -> None:
            begin = time.monotonic()
            named.update(eraser.run([file.id for _, file in files if file is not None]).named)
            self._rewrite_seconds = time.monotonic() - begin

        error = yield from self._run(rewrite, self.parts)
        for part, file in files:
            if error is None:
                error = yield from self._overwrite(part, named.get(file.id, none) if file is not None else none)
        if error is not None:
            self.count(store, holdout)
            self._fail(error)
            return
        self._removed = self._removed[0] + store, self._removed[1] + holdout
        self._files_through, self._applied_at = through, time.monotonic()
        seconds = self._rewrite_seconds
        self._gather_until = self._applied_at + max(seconds, min(_GATHER_TIMES * seconds, _LONGEST_GATHERING))
        self._copies.erase_through(through)
        self._request_at = max(self._applied_at, self._requested_at + _REQUEST_SECONDS)
        self._confirm()

    def _confirm(self) -> None:
        """Append to the log that records are applied, once the object store has none of their events either."""
        if not self._copies.has_erased(self._files_through):
            self._wait_for_copies()
            return
        store, holdout = self._removed
        try:
            self._log.append(Applied(time=now(), through=self._files_through, store=store, holdout=holdout))
        except OSError as exc:
            self._fail(exc)
            return
        self.through, self._removed, self.problem = self._files_through, (0, 0), None
        self._request_at = None

    def _wait_for_copies(self) -> None:
        """Request the checkpoint that replaces those with erased events in the object store; report a long wait."""
        at = time.monotonic()
        if self._request_at is not None and at >= self._request_at:
            self._checkpointer.request()
            self._request_at, self._requested_at = None, at
        if self._applied_at is not None and at - self._applied_at > _PATIENCE_SECONDS:
            self.problem = (
                f"erased events are still in {self._copies.url}: they go once a checkpoint and erasures.log are there; "
                "training and erasing go on"
            )

    def _fail(self, exc: OSError) -> None:
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        problem = f"erased events cannot be removed everywhere yet: {exc.strerror or exc}"
        if problem != self.problem:
            log.error("%s", problem)
        self.problem = problem

    def _overwrite(self, part: CheckpointPart, named: NDArray[np.int64]) -> Generator[None, None, OSError | None]:
        """Overwrite the rows that no event in use and no checkpoint refers to; yields between the pieces."""
        try:
            yield from part.overwrite(named)
        except OSError as exc:
            return exc
        error = yield from self._run(part.sync)
        return OSError(part.unerased) if error is None and part.unerased is not None else error

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

    def _log_starts(self) -> Mapping[str, int]:
        """Return, by name of the partition, the first offset that may be read again, from Kafka or the reader's ring.

        For an earlier incarnation of a partition this is the log start of the latest one: a learner that begins again
        reads the events of all incarnations under the first name. Rows of files may be read again as long as there is
        a history, also those that are events of topics.
        """
        if self._has_history:
            return {}
        latest, positions = latest_incarnations(partition.name for partition in self._partitions), self._positions()
        starts = {}
        for index, partition in enumerate(self._partitions):
            name = partition.name
            if name.history:
                starts[partition_name(name)] = _ABOVE_ALL
                continue
            last = latest[name.topic, name.partition]
            log_start = self._partitions[last].log_start
            if log_start is not None and name in positions:
                read = positions[name].offset if index == last else log_start
                starts[partition_name(name)] = min(log_start, read)
        return starts

    def _run(
        self, work: Callable[[], object], rewritten: Sequence[CheckpointPart] = ()
    ) -> Generator[None, None, OSError | None]:
        """Run work in the thread that writes checkpoints; yields until it is done, and returns its OSError.

        `rewritten` learn that it has begun, before a checkpoint can begin, which names slots that are used from now on.
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
        for part in rewritten:
            part.begin_overwrite()
        while not results:
            yield
        return results[0]


def _compact(written: ErasureLog, log_starts: Mapping[str, int], checkpoints: Checkpoints) -> None:
    try:
        written.compact(log_starts, applied_to_all(checkpoints, written.through) if log_starts else 0)
    except DependencyError as exc:  # it cannot be read now; the next attempt may succeed
        raise OSError(str(exc)) from exc
