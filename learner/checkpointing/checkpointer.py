"""Makes checkpoints: a snapshot at a step boundary, everything else in the background."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
from torch import Tensor

from anabranch.core.errors import DependencyError
from learner.checkpointing.replay_state import pack
from learner.config import CheckpointSettings
from learner.errors import CheckpointError
from learner.metrics import LearnerMetrics
from learner.runtime.background_worker import BackgroundWorker
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from replay.background_store import BackgroundStore
from replay.checkpoint.capture import CapturedStore
from replay.checkpoint.segments import Segment

_FIRST_CHECKPOINT_LOOK = timedelta(milliseconds=100)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedState:
    """All that a checkpoint is made from, copied at one step boundary; `held` is the store's part, read in the
    background."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    """Plain values; encoded before the next step, so that nothing of them may change."""
    held: CapturedStore | None


class Checkpointer:
    """Writes checkpoints in a thread of its own, one at a time. Its methods are called by the loop's thread."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: CheckpointSettings,
        background_store: BackgroundStore | None,
        metrics: LearnerMetrics,
        segments: Sequence[Segment] = (),
        check: Callable[[], object] = bool,
    ) -> None:
        """Take the segments of the checkpoint that the store went on from, if it did, and what is called before each
        checkpoint."""
        self._checkpoints = checkpoints
        self._every = settings.every.total_seconds()
        self._keep = settings.keep
        self._background_store = background_store
        self._metrics = metrics
        self._due = time.monotonic() + self._every
        self._background = BackgroundWorker("checkpointer", check)
        self._holding = False
        self._segments = self._next_segments = segments
        self._written: object = None
        numbers = checkpoints.numbers()
        self._oldest = min(numbers, default=None)
        """The oldest checkpoint that may be there: an older one does not come back, and one that cannot be listed may
        stay."""
        self.number, self._highest = max(numbers, default=0), checkpoints.highest()
        """The newest checkpoint; numbers only grow."""
        self.time = _time_of(checkpoints, self.number)
        """When it was made, in seconds since 1970; None when there is none, or it does not say."""
        self.asked = False
        """Whether a checkpoint that was asked for has not begun yet."""
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """One sentence when the last checkpoint could not be written, or this one takes too long. Any thread may
        ask."""
        return self._background.overdue(self._checkpoints.path, self._every) or self._problem

    def ask(self) -> None:
        """Let the next `checkpoint_if_due` begin a checkpoint, or as soon as the one that is being written is done."""
        self._due, self.asked = time.monotonic(), True

    def checkpoint_if_due(self, take: Callable[[int], CapturedState], standing: Callable[[], object] = object) -> None:
        """Begin a checkpoint when one is due; one that falls due while another is written waits for it.

        `standing` returns what tells one moment from the next: while it equals that of the last checkpoint that this
        learner wrote, none is begun.

        A store whose slots wait for checkpoints gets one early when many do. When it runs out of slots to fill, this
        waits for checkpoints, and says so in the metrics, unless they cannot be written: then the store declines
        events.
        """
        self.end_if_written()
        if not self._background.busy and (time.monotonic() >= self._due or self._many_slots_wait()):
            self._due, now = time.monotonic() + self._every, standing()
            if now != self._written or self._many_slots_wait():
                self._begin(take, now)
        if self._background_store is not None and not self._background_store.has_room():
            begin = time.perf_counter()
            self._free_slots(self._background_store, take, standing)
            self._metrics.checkpoint_stall.inc(time.perf_counter() - begin)

    def _many_slots_wait(self) -> bool:
        """Whether it is time for a checkpoint that lets the store write slots again, after `keep` more."""
        return (
            self._background_store is not None
            and self._background_store.slots_waiting * (self._keep + 2) > self._background_store.spare
        )

    def _free_slots(
        self, background_store: BackgroundStore, take: Callable[[int], CapturedState], standing: Callable[[], object]
    ) -> None:
        """Write checkpoints until the store has slots to fill; `keep` checkpoints free all that can be freed."""
        for _ in range(self._keep + 1):
            self._background.wait()
            self.end_if_written()
            if background_store.has_room() or self._problem is not None:
                return
            self._begin(take, standing())

    def checkpoint_first(
        self, state: Mapping[str, Any], stop: threading.Event, while_waiting: Sequence[Callable[[], object]]
    ) -> None:
        """Write a checkpoint that only says where the stream is begun, where there is no checkpoint, and wait until it
        is durable.

        Args:
            state: of the checkpoint.
            stop: ends the waiting.
            while_waiting: all called again and again while this waits.

        Raises:
            DependencyError: it cannot be written. Nothing is lost by that, since nothing is learned yet.
        """
        if self.number:
            return
        number = self._highest = self._highest + 1
        moment = _encoded(CapturedState(0, {}, state, None))
        self._background.start(lambda: self._write(number, moment, None))
        while self._background.busy and not stop.is_set():
            self._background.wait(Deadline(_FIRST_CHECKPOINT_LOOK))
            for call in while_waiting:
                call()
        self._background.raise_bug()
        if not self._background.busy and self.number != number:
            raise DependencyError(f"{self._problem}; nothing is learned before it is, or a crash would lose it")

    def checkpoint_last(
        self, take: Callable[[int], CapturedState], deadline: Deadline, standing: Callable[[], object] = object
    ) -> None:
        """Write one more checkpoint, unless nothing has changed, and wait until it is written."""
        self._background.wait(deadline)
        self.end_if_written()
        if not self._background.busy and (now := standing()) != self._written:
            self._begin(take, now)
            self._background.wait(deadline)
            self.end_if_written()

    def run(self, work: Callable[[], object]) -> bool:
        """Begin to do something else with the checkpoints, in the thread that writes them; False while it is busy."""
        self.end_if_written()
        if self._background.busy:
            return False
        self._background.start(work)
        return True

    def wait(self, deadline: Deadline) -> None:
        """Wait until what was begun is done, or the deadline is over."""
        self._background.wait(deadline)
        self.end_if_written()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is written, or what `run` was given is done."""
        return self._background.busy

    def _begin(self, take: Callable[[int], CapturedState], standing: object) -> None:
        number = self._highest = self._highest + 1  # a number that failed is not used again
        moment = _encoded(take(number))
        self.asked = False
        self._holding = self._background_store is not None
        self._background.start(lambda: self._write(number, moment, standing))

    def end_if_written(self) -> None:
        """Let the store write slots again once the checkpoint is written, or has failed; looks at no file."""
        if not self._background.busy and self._holding and self._background_store is not None:
            self._holding = False
            self._background_store.flush().end_snapshot(self._oldest, written=self.number == self._highest)
        self._background.raise_bug()

    def _write(self, number: int, moment: CapturedState, standing: object) -> None:
        """Write and prune. A full or read-only disk costs this checkpoint, never the training nor the checkpoints
        before."""
        try:
            begin, now = time.perf_counter(), time.time()
            self._checkpoints.write(number, self._checkpoint(moment), now)
            self._metrics.checkpoint.observe(
                time.perf_counter() - begin
            )  # not of one that failed: the count is of whole checkpoints
            self.number, self.time, self._written = number, now, standing
            self._segments = self._next_segments
            if self._oldest is None:
                self._oldest = number
            if self._background_store is not None and moment.held is not None:
                with contextlib.suppress(OSError):  # the tier says so, and the next checkpoint tries again
                    self._background_store.mark_named()
            self._checkpoints.prune(self._keep)
            self._oldest = min(self._checkpoints.numbers(), default=None)
        except (OSError, CheckpointError) as exc:
            what = (
                f"checkpoint {number} could not be written to"
                if self.number != number
                else "old checkpoints cannot be deleted from"
            )
            self._problem = f"{what} {self._checkpoints.path}: {getattr(exc, 'strerror', None) or exc}"
            log.error("%s", self._problem)  # noqa: TRY400 the sentence says all
        else:
            self._problem = None

    def _checkpoint(self, moment: CapturedState) -> Checkpoint:
        if self._background_store is None or moment.held is None:
            return Checkpoint(moment.step, moment.tensors, moment.state)
        standing, change = self._background_store.contents(moment.held)
        part = pack(standing, change, self._segments, self._checkpoints.part)
        self._next_segments = part.segments
        tensors, state = {**moment.tensors, **part.tensors}, {**moment.state, "replay": part.state}
        return Checkpoint(moment.step, tensors, state, part.carried)


def _encoded(moment: CapturedState) -> CapturedState:
    """Return a moment with its state encoded: what it was taken from may change while the tensors are written."""
    state = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in moment.state.items()}
    return replace(moment, state=state)


def _time_of(checkpoints: Checkpoints, number: int) -> float | None:
    try:
        return checkpoints.manifest(number).time
    except (OSError, CheckpointError):
        return None
