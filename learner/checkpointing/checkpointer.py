"""Writes checkpoints: state is captured at a step boundary, everything else runs in the background."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from anabranch.core.errors import DependencyError
from anabranch.core.failures import out_of_memory
from anabranch.core.tracing.spans import record
from learner.checkpointing.captured_state import CapturedState, encoded
from learner.checkpointing.checkpoint_pruning import CheckpointPruning
from learner.checkpointing.replay_state import pack
from learner.config import CheckpointSettings
from learner.errors import CheckpointError, CopyMemoryError
from learner.labels.join_segments import PART
from learner.labels.label_join import LabelJoin
from learner.metrics import LearnerMetrics
from learner.runtime.background_worker import BackgroundWorker
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from replay.background_store import BackgroundStore
from replay.checkpoint.segments import Segment
from replay.row_source import RowSource

_POLL_INTERVAL = timedelta(milliseconds=100)
"""Between two calls of `while_waiting` while the first checkpoint is written."""

_MEMORY_PAUSE = timedelta(seconds=5)
"""Time without early checkpoints after one that was skipped for lack of memory."""

log = logging.getLogger(__name__)


class Checkpointer:
    """Writes checkpoints in a background thread, one at a time. Its methods are called by the loop's thread."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: CheckpointSettings,
        background_store: BackgroundStore | None,
        metrics: LearnerMetrics,
        segments: Sequence[Segment] = (),
        check: Callable[[], object] = bool,
        label_join: LabelJoin | None = None,
        after_prune: Callable[[], object] = bool,
        deleting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Take the segments of the restored checkpoint, `check`, which is called before each checkpoint, and
        `after_prune`, which is called after old ones are deleted, within `deleting`."""
        self._checkpoints = checkpoints
        self._every = settings.every.total_seconds()
        self.keep = settings.keep
        """How many checkpoints may name slots of a tier."""
        self._pruning = CheckpointPruning(checkpoints, settings.keep, settings.keep_hourly)
        self._after_prune = after_prune
        self._deleting = deleting
        self._background_store = background_store
        self.label_join = label_join
        """Its events are in each checkpoint."""
        self._metrics = metrics
        self._due = time.monotonic() + self._every
        self._background = BackgroundWorker("checkpointer", check)
        self._in_snapshot = False
        self._segments = self._next_segments = segments
        self._written: object = None
        numbers = checkpoints.numbers()
        self._oldest = min(self._pruning.recent(), default=None)
        """The oldest checkpoint that may still exist, but for those that are kept by the hour, which name no slot of a
        tier; not updated while checkpoints cannot be listed."""
        self.number, self._highest = max(numbers, default=0), checkpoints.highest()
        """The newest checkpoint; numbers only grow."""
        self.time = _time_of(checkpoints, self.number)
        """When it was made, in seconds since 1970; None without a checkpoint, or where its manifest cannot be read."""
        self._problem: str | None = None
        self._short_of_memory = False
        """Whether the last checkpoint that failed did so for lack of memory."""
        self._not_early_before = 0.0
        """When a checkpoint may start early again, by the monotonic clock."""

    @property
    def problem(self) -> str | None:
        """One sentence when the last checkpoint could not be written, or this one takes too long. Any thread may call
        this."""
        return self._background.overdue(self._checkpoints.location, self._every) or self._problem

    def request(self) -> None:
        """Make a checkpoint due: the next `checkpoint` that finds the thread idle starts it."""
        self._due = time.monotonic()

    def is_due(self) -> bool:
        """End the snapshot of a checkpoint that is written; return whether `checkpoint` has something to do.

        A checkpoint starts early when many slots, of the store or of events that wait for labels, wait for checkpoints.
        """
        if self._background.unsettled:
            self.end_snapshot_if_written()
        now, store = time.monotonic(), self._background_store
        if now >= self._due:
            return True
        early = now >= self._not_early_before
        lacks_slots = store is not None and store.lacks_slots(self.keep + 2 if early else 0)
        return lacks_slots or (early and self.label_join is not None and self._join_is_full())

    def checkpoint(
        self,
        capture: Callable[[int], CapturedState],
        fingerprint: Callable[[], object] = object,
        while_waiting: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Start a checkpoint unless one is being written; called when `is_due`.

        When the store has no free slot, this waits for checkpoints to be written and counts the time in the metrics; if
        they cannot be written, the store declines events.

        Args:
            capture: returns a copy of the state for the checkpoint of this number.
            fingerprint: returns a value that is equal as long as the state is the same: no checkpoint is started while
                it equals that of the last checkpoint written.
            while_waiting: called repeatedly during the wait, which may take minutes.
        """
        self.end_snapshot_if_written()
        if not self._background.busy and (time.monotonic() >= self._due or self._many_slots_wait()):
            self._due, now = time.monotonic() + self._every, fingerprint()
            if now != self._written or self._many_slots_wait():
                self._start(capture, now)
        if not self._has_room():
            begin = time.perf_counter()
            self._free_slots(capture, fingerprint, while_waiting)
            self._metrics.checkpoint_stall.inc(time.perf_counter() - begin)

    def _has_room(self) -> bool:
        return self._background_store is None or self._background_store.has_room()

    def _many_slots_wait(self) -> bool:
        """Return whether a checkpoint should start early, since slots are reused only after `keep` more checkpoints."""
        if time.monotonic() < self._not_early_before:
            return False
        store = self._background_store
        return self._join_is_full() or (store is not None and store.many_slots_wait(self.keep + 2))

    def _join_is_full(self) -> bool:
        # Not again at once after a checkpoint that failed: the next is due in time.
        return self.label_join is not None and self._problem is None and self.label_join.needs_checkpoint

    def _free_slots(
        self,
        capture: Callable[[int], CapturedState],
        fingerprint: Callable[[], object],
        while_waiting: Sequence[Callable[[], object]],
    ) -> None:
        """Write checkpoints until the store has free slots; `keep` checkpoints free all slots that can be freed."""
        for _ in range(self.keep + 1):
            self._wait_calling(while_waiting)
            self.end_snapshot_if_written()
            if self._has_room() or self._problem is not None:
                return
            self._start(capture, fingerprint())

    def checkpoint_first(
        self, state: Mapping[str, Any], stop: threading.Event, while_waiting: Sequence[Callable[[], object]]
    ) -> None:
        """Write a checkpoint of the start positions of the stream, if there is no checkpoint, and wait for the disk.

        Args:
            state: of the checkpoint.
            stop: ends the wait.
            while_waiting: called repeatedly during the wait.

        Raises:
            DependencyError: it cannot be written. No data is lost, since training has not started.
        """
        if self.number:
            return
        number = self._highest = self._highest + 1
        captured = encoded(CapturedState(0, {}, state, None))
        self._background.start(lambda: self._write(number, captured, None))
        self._wait_calling(while_waiting, stop)
        self._background.raise_bug()
        if not self._background.busy and self.number != number:
            raise DependencyError(f"{self._problem}; nothing is learned before it is, or a crash would lose it")

    def _wait_calling(self, while_waiting: Sequence[Callable[[], object]], stop: threading.Event | None = None) -> None:
        """Wait until the thread is idle, or `stop` is set, and call functions repeatedly meanwhile."""
        while self._background.busy and (stop is None or not stop.is_set()):
            self._background.wait(Deadline(_POLL_INTERVAL))
            for call in while_waiting if self._background.busy else ():
                call()

    def checkpoint_last(
        self, capture: Callable[[int], CapturedState], deadline: Deadline, fingerprint: Callable[[], object] = object
    ) -> None:
        """Write one more checkpoint, unless the state has not changed, and wait until it is written.

        One that fails for lack of memory is tried once more, since others may have had it for a moment.
        """
        self._background.wait(deadline)
        self.end_snapshot_if_written()
        for attempt in range(2):
            now = fingerprint()
            if self._background.busy or now == self._written or (attempt and not self._short_of_memory):
                return
            self._short_of_memory = False
            self._start(capture, now)
            self._background.wait(deadline)
            self.end_snapshot_if_written()

    def run(self, work: Callable[[], object]) -> bool:
        """Start other work on the checkpoints in the thread that writes them; return False while it is busy."""
        self.end_snapshot_if_written()
        if self._background.busy:
            return False
        self._background.start(work)
        return True

    def wait(self, deadline: Deadline) -> None:
        """Wait until the thread is idle, or the deadline is over."""
        self._background.wait(deadline)
        self.end_snapshot_if_written()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, or the work of `run` is not done."""
        return self._background.busy

    def _start(self, capture: Callable[[int], CapturedState], fingerprint: object) -> None:
        number = self._highest = self._highest + 1  # a number that failed is not used again
        try:
            captured = encoded(capture(number))
        except CopyMemoryError as exc:
            self._skip_for_memory(number, exc)
            return
        if self.label_join is not None:
            captured = replace(captured, labels=self.label_join.snapshots.begin(number))
        self._in_snapshot = True
        self._background.start(lambda: self._write(number, captured, fingerprint))

    def _skip_for_memory(self, number: int, exc: Exception) -> None:
        """Skip a checkpoint for which there is no memory now: training goes on, and earlier checkpoints stay."""
        if not out_of_memory(exc):
            raise exc
        self._short_of_memory, self._not_early_before = True, time.monotonic() + _MEMORY_PAUSE.total_seconds()
        self._problem = f"checkpoint {number} could not be made for lack of memory: {' '.join(str(exc).split())}"
        log.error("%s", self._problem)

    def end_snapshot_if_written(self) -> None:
        """End the snapshots of store and join once the checkpoint is written or has failed, so that slots are reused.

        This reads no file.
        """
        self._background.raise_bug()
        # By one reading of the thread: `is_due` does not call this again once that has ended.
        if self._in_snapshot and not self._background.unsettled:
            self._in_snapshot, written = False, self.number == self._highest
            if self._background_store is not None:
                self._background_store.flush().end_snapshot(self._oldest, written=written)
            if self.label_join is not None:
                self.label_join.snapshots.end(self._oldest, written=written)

    def _write(self, number: int, captured: CapturedState, fingerprint: object) -> None:
        """Write a checkpoint and delete old ones. On a full or read-only disk this checkpoint is skipped: training goes
        on, and earlier checkpoints stay."""
        try:
            begin, now = time.perf_counter(), time.time()
            self._checkpoints.write(number, self._checkpoint(number, captured), now)
            seconds = time.perf_counter() - begin
            self._metrics.checkpoint.observe(seconds)  # not of a failed one: it also counts
            record("checkpoint", seconds, {"anabranch.checkpoint": number, "anabranch.step": captured.step})
            self.number, self.time, self._written = number, now, fingerprint
            self._segments = self._next_segments
            if self._oldest is None:
                self._oldest = number
            with contextlib.suppress(OSError):  # the tier reports it, and the next checkpoint tries again
                if captured.labels is not None:
                    captured.labels.file.mark_named()
                if self._background_store is not None and captured.store is not None:
                    self._background_store.mark_named()
            with self._deleting():  # an undo may need the oldest
                oldest = self._pruning.prune()
            self._after_prune()
            self._oldest = oldest
        except (OSError, CheckpointError) as exc:
            self._short_of_memory = out_of_memory(exc)
            what = (
                f"checkpoint {number} could not be written to"
                if self.number != number
                else "old checkpoints cannot be deleted from"
            )
            self._problem = f"{what} {self._checkpoints.location}: {getattr(exc, 'strerror', None) or exc}"
            log.error("%s", self._problem)  # noqa: TRY400 the sentence is complete
        except (RuntimeError, MemoryError) as exc:
            self._skip_for_memory(number, exc)
        else:
            self._problem = None
        finally:
            self._checkpoints.drop_copies()  # of segments that were merged

    def _oldest_after(self, number: int) -> int:
        """Return the oldest checkpoint that may be restored from its files once this one is written."""
        try:
            return sorted([*self._checkpoints.numbers(), number])[-self.keep :][0]
        except OSError:  # it is reported when old ones are deleted
            return number

    def _checkpoint(self, number: int, captured: CapturedState) -> Checkpoint:
        tensors, state, carried = dict(captured.tensors), dict(captured.state), dict[str, int]()
        rows = dict[str, RowSource]()
        oldest = self._oldest_after(number)
        if self._background_store is not None and captured.store is not None:
            store_state, delta = self._background_store.contents(captured.store, oldest)
            part = pack(store_state, delta, self._segments, self._checkpoints.part, self._checkpoints.rows)
            self._next_segments = part.segments
            tensors, state, carried = {**tensors, **part.tensors}, {**state, "replay": part.state}, {**part.carried}
            rows |= part.rows
        if captured.labels is not None:
            late = captured.labels.pack(self._checkpoints.part, oldest, self._checkpoints.rows)
            tensors, state, carried = (
                {**tensors, **late.tensors},
                {**state, PART: late.state},
                {**carried, **late.carried},
            )
            rows |= late.rows
        return Checkpoint(captured.step, tensors, state, carried, rows)


def _time_of(checkpoints: Checkpoints, number: int) -> float | None:
    try:
        return checkpoints.manifest(number).time
    except (OSError, CheckpointError):
        return None
