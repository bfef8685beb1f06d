"""Writes checkpoints, and deletes old ones: state is captured at a step boundary, the rest runs in the background."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram
from torch import Tensor

from anabranch.core.errors import DependencyError
from anabranch.core.failures import out_of_memory
from anabranch.core.host_clock import HOST_CLOCK
from anabranch.core.job_thread import BackgroundWorker
from anabranch.core.shutdown import Deadline
from anabranch.core.tracing.spans import record
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.checkpoints.part_formats import FORMATS
from anabranch.learner.checkpoints.parts import CapturedPart, CheckpointPart, PackedPart
from anabranch.learner.errors import CheckpointError, CopyMemoryError
from anabranch.learner.settings.learner import CheckpointSettings
from anabranch.learner.state_dir.folders import last_of_hours
from anabranch.replay.row_source import RowSource

_POLL_INTERVAL = timedelta(milliseconds=100)
"""Between two calls of `while_waiting` while the first checkpoint is written."""

_MEMORY_PAUSE = timedelta(seconds=5)
"""Time without early checkpoints after one that was skipped for lack of memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedState:
    """The input of a checkpoint, copied at one step boundary, but for the parts that are packed in the background."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    """Plain values, which are encoded before the next step can change them."""


class CheckpointPruning:
    """Keeps the newest checkpoints, and the last one of each hour. Used by one thread."""

    def __init__(self, checkpoints: Checkpoints, keep: int, hours: int = 0) -> None:
        """Take the settings `keep` and `keep_hourly`."""
        self._checkpoints = checkpoints
        self._keep, self._keep_hourly = keep, hours
        self._hours: dict[int, int | None] = {}
        """The hour of each checkpoint beyond the newest, as `_hour_of` returns it: each is read once."""

    def prune(self) -> int | None:
        """Delete all but the newest checkpoints, and the last one of each of the newest hours before.

        Of those, one whose rows are in a tier alone is deleted too: the tier reuses their slots. Returns the oldest of
        the newest.
        """
        by_age = self._checkpoints.by_age()
        recent = self._recent(by_age)
        older = [number for number in by_age if number not in recent]
        hourly = self._hourly(older)
        for number in older:
            if number not in hourly:
                self._checkpoints.delete(number)
                self._checkpoints.refused.discard(number)
        return min(recent, default=None)

    def recent(self) -> set[int]:
        """Return the newest checkpoints, whose slots a tier may not reuse.

        Those that `Checkpoints.newest` refused do not count: there are `keep` others.
        """
        return self._recent(self._checkpoints.by_age())

    def _recent(self, by_age: Sequence[int]) -> set[int]:
        recent, kept = set[int](), 0
        for number in reversed(by_age):
            if kept < self._keep:
                recent.add(number)
            kept += number not in self._checkpoints.refused
        return recent

    def names_slots(self, number: int) -> bool:
        """Return whether a checkpoint needs slots of a tier: not one beyond the newest that has the rows."""
        return number in self.recent() or self._hour_of(number) is None

    def _hourly(self, numbers: Sequence[int]) -> set[int]:
        """Return the last complete checkpoint of each of the newest hours; `numbers` are by age."""
        before, hours = self._hours, self._keep_hourly
        self._hours = {}
        for number in numbers if hours else ():
            with contextlib.suppress(CheckpointError):  # nothing can return to it
                self._hours[number] = before[number] if number in before else self._hour_of(number)
        known = {number: hour for number, hour in self._hours.items() if hour is not None}
        return last_of_hours(known, hours, HOST_CLOCK.now())

    def _hour_of(self, number: int) -> int | None:
        """Return the hour since 1970 in which a checkpoint was written; None where a tier alone has its rows."""
        manifest = self._checkpoints.manifest(number)
        state = self._checkpoints.state(manifest)
        return int(manifest.time // 3600) if all(part.has_rows(state) for part in FORMATS) else None


class Checkpointer:
    """Writes checkpoints in a background thread, one at a time. Its methods are called by the loop's thread."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: CheckpointSettings,
        duration: Histogram,
        stall: Counter,
        parts: Sequence[CheckpointPart] = (),
        check: Callable[[], object] = bool,
        after_prune: Callable[[], object] = bool,
        deleting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Write the next checkpoint when it is due.

        Args:
            checkpoints: the directory.
            settings: `[checkpoints]`.
            duration: observes how long each takes to write, in seconds.
            stall: counts the seconds that steps wait for one.
            parts: what is packed in the background.
            check: called before each checkpoint.
            after_prune: called after old checkpoints are deleted.
            deleting: held while they are.
        """
        self._checkpoints = checkpoints
        self._every = settings.every.total_seconds()
        self.keep = settings.keep
        """How many checkpoints may name slots of a tier."""
        self._pruning = CheckpointPruning(checkpoints, settings.keep, settings.keep_hourly)
        self._after_prune = after_prune
        self._deleting = deleting
        self.parts = parts
        self._duration, self._stall = duration, stall
        self._due = time.monotonic() + self._every
        self._background = BackgroundWorker("checkpointer", check)
        self._in_snapshot = False
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

        A checkpoint starts early when many slots of a part wait for checkpoints.
        """
        if self._background.unsettled:
            self.end_snapshot_if_written()
        return time.monotonic() >= self._due or self._starts_early() or not self._all_have_room()

    def checkpoint(
        self,
        capture: Callable[[], CapturedState],
        fingerprint: Callable[[], object] = object,
        while_waiting: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Start a checkpoint unless one is being written; called when `is_due`.

        When a part has no free slot, this waits for checkpoints to be written and counts the time; if
        they cannot be written, the store declines events.

        Args:
            capture: returns a copy of the state.
            fingerprint: returns a value that is equal as long as the state is the same: no checkpoint is started while
                it equals that of the last checkpoint written.
            while_waiting: called repeatedly during the wait, which may take minutes.
        """
        self.end_snapshot_if_written()
        if not self._background.busy and (time.monotonic() >= self._due or self._starts_early()):
            self._due, now = time.monotonic() + self._every, fingerprint()
            if now != self._written or self._starts_early():
                self._start(capture, now)
        if not self._all_have_room():
            begin = time.perf_counter()
            self._free_slots(capture, fingerprint, while_waiting)
            self._stall.inc(time.perf_counter() - begin)

    def _all_have_room(self) -> bool:
        return all(part.has_room() for part in self.parts)

    def _starts_early(self) -> bool:
        """Return whether a checkpoint should start early, since slots are reused only after `keep` more checkpoints."""
        if time.monotonic() < self._not_early_before:
            return False
        if any(part.many_slots_wait(self.keep + 2) for part in self.parts):
            return True
        # Not again at once after a checkpoint that failed: the next is due in time.
        return self._problem is None and any(part.is_full() for part in self.parts)

    def _free_slots(
        self,
        capture: Callable[[], CapturedState],
        fingerprint: Callable[[], object],
        while_waiting: Sequence[Callable[[], object]],
    ) -> None:
        """Write checkpoints until all parts have free slots; `keep` checkpoints free all slots that can be freed."""
        for _ in range(self.keep + 1):
            self._wait_calling(while_waiting)
            self.end_snapshot_if_written()
            if self._all_have_room() or self._problem is not None:
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
        captured = _encoded(CapturedState(0, {}, state))
        self._background.start(lambda: self._write(number, captured, (), None))
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
        self, capture: Callable[[], CapturedState], deadline: Deadline, fingerprint: Callable[[], object] = object
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

    def _start(self, capture: Callable[[], CapturedState], fingerprint: object) -> None:
        number = self._highest = self._highest + 1  # a number that failed is not used again
        try:
            captured = _encoded(capture())
        except CopyMemoryError as exc:
            self._skip_for_memory(number, exc)
            return
        parts = [part.capture(number) for part in self.parts]
        self._in_snapshot = True
        self._background.start(lambda: self._write(number, captured, parts, fingerprint))

    def _skip_for_memory(self, number: int, exc: Exception) -> None:
        """Skip a checkpoint for which there is no memory now: training goes on, and earlier checkpoints stay."""
        if not out_of_memory(exc):
            raise exc
        self._short_of_memory, self._not_early_before = True, time.monotonic() + _MEMORY_PAUSE.total_seconds()
        self._problem = f"checkpoint {number} could not be made for lack of memory: {' '.join(str(exc).split())}"
        log.error("%s", self._problem)

    def end_snapshot_if_written(self) -> None:
        """End the snapshots of all parts once the checkpoint is written or has failed, so that slots are reused.

        This reads no file.
        """
        self._background.raise_bug()
        # By one reading of the thread: `is_due` does not call this again once that has ended.
        if self._in_snapshot and not self._background.unsettled:
            self._in_snapshot, written = False, self.number == self._highest
            for part in self.parts:
                part.end(self._oldest, written=written)

    def _write(self, number: int, captured: CapturedState, parts: Sequence[CapturedPart], fingerprint: object) -> None:
        """Write a checkpoint and delete old ones. On a full or read-only disk this checkpoint is skipped: training goes
        on, and earlier checkpoints stay."""
        try:
            begin, now = time.perf_counter(), time.time()
            self._checkpoints.write(number, self._checkpoint(number, captured, parts), now)
            seconds = time.perf_counter() - begin
            self._duration.observe(seconds)  # not of a failed one: it also counts
            record("checkpoint", seconds, {"anabranch.checkpoint": number, "anabranch.step": captured.step})
            self.number, self.time, self._written = number, now, fingerprint
            if self._oldest is None:
                self._oldest = number
            for part in parts:
                with contextlib.suppress(OSError):  # the tier reports it, and the next checkpoint tries again
                    part.mark_named()
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
            self._checkpoints.storage.drop_copies()  # of segments that were merged

    def _oldest_after(self, number: int) -> int:
        """Return the oldest checkpoint that may be restored from its files once this one is written."""
        try:
            return sorted([*self._checkpoints.numbers(), number])[-self.keep :][0]
        except OSError:  # it is reported when old ones are deleted
            return number

    def _checkpoint(self, number: int, captured: CapturedState, parts: Sequence[CapturedPart]) -> Checkpoint:
        oldest = self._oldest_after(number)
        packed = [part.pack(self._checkpoints, oldest) for part in parts]
        return complete(captured.step, captured.tensors, captured.state, packed)


def complete(
    step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], packed: Sequence[PackedPart]
) -> Checkpoint:
    """Return a checkpoint of tensors and plain values, and of parts that were packed."""
    tensors, state, carried, rows = dict(tensors), dict(state), dict[str, int](), dict[str, RowSource]()
    for part in packed:
        tensors |= part.tensors
        state[part.name] = part.state
        carried |= part.carried
        rows |= part.rows
    return Checkpoint(step, tensors, state, carried, rows)


def _encoded(captured: CapturedState) -> CapturedState:
    """Return captured state with its values encoded, since their sources change while the tensors are written."""
    state = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in captured.state.items()}
    return replace(captured, state=state)


def _time_of(checkpoints: Checkpoints, number: int) -> float | None:
    try:
        return checkpoints.manifest(number).time
    except (OSError, CheckpointError):
        return None
