"""The action when the stream is faster than training: `[stream.lag_policy]`.

The lag is a time: how long the next event without outcome has waited. It is measured with this machine's clock and the
broker's end offsets, which are reported about once a second. Record times are not used: a producer's clock may be off,
records may have no time, and reading an old topic from its beginning does not mean that the stream is too fast.
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.core.host_clock import HOST_CLOCK
from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.events.identity import identity_hash, keyed_hash, partition_base
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import LagPolicySettings
from anabranch.learner.stream.batch import trainable
from anabranch.learner.stream.partition_ledger import PartitionLedger

_MOST_MARKS = 64
_ASK_SECONDS = 1.0
"""Makes the sample independent of the choice of held-out events and of kept events."""

log = logging.getLogger(__name__)


class Arrivals:
    """Estimates when the offsets of one partition arrived: interpolates linearly between its end offsets at some times.

    Offsets before the first end count as arrived at the time of that end.
    """

    def __init__(self, marks: Sequence[tuple[float, int]] = ()) -> None:
        """Start with the marks of an earlier process: time by this process's clock in seconds, and end offset."""
        self.marks = list(marks)

    def record(self, at: float, end: int) -> None:
        """Record the end offset of the partition at a time `at`, later than all before."""
        marks = self.marks
        if len(marks) > 1 and marks[-1][1] == marks[-2][1] == end:
            marks[-1] = (at, end)
        elif not marks or end >= marks[-1][1]:
            marks.append((at, end))
        if len(marks) > _MOST_MARKS:
            self.marks = [*marks[:-1:2], marks[-1]]

    def age(self, now: float, position: int) -> float:
        """Return the seconds since the offset `position` arrived; 0 when it has not arrived."""
        return max(0.0, now - self.arrival_time(position))

    def arrival_time(self, position: int) -> float:
        """Return when the offset `position` arrived, infinity when it has not; deletes the marks of earlier offsets."""
        after = bisect_right(self.marks, position, key=lambda mark: mark[1])
        if after == len(self.marks):
            return math.inf
        arrival, end = self.marks[after]
        if after:
            earlier, earlier_end = self.marks[after - 1]
            arrival = earlier + (arrival - earlier) * (position + 1 - earlier_end) / (end - earlier_end)
            del self.marks[: after - 1]
        return arrival


class LagPolicy:
    """Detects that the learner is behind, and applies the action to events to train on. Used by the loop's thread.

    The learner is behind from a lag of `high` until a lag of `low`, on the partition that lags most. The action does
    not change held-out events, events that are stored without a label, and tombstones.
    """

    def __init__(
        self,
        settings: LagPolicySettings,
        seed: int,
        stream: BlockReader,
        *,
        reads: bool = False,
        unlabelled: bool = False,
        only_full: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = HOST_CLOCK.now,
    ) -> None:
        """`seed`: 128 secret bits, which choose the events of a sample. With `reads`, `skip-to-latest` reads the events
        that it skips: there may be tombstones among them.

        `unlabelled`: whether events without a label are trained on too; `only_full`: whether steps wait for full
        batches, so that events may wait on a slow stream too.
        """
        self._unlabelled = unlabelled
        self._only_full = only_full
        self._settings = settings
        self._seed = seed
        self._stream = stream
        self._reads = reads
        self._clock = clock
        self._wall = wall
        self._arrivals: list[Arrivals] = []
        self._bases: list[int] = []
        self._ask_at = 0.0
        self._ends_time: float | None = None
        self._arrival_times: NDArray[np.float64] = np.empty(0)
        """When the next event without outcome of each partition arrived."""
        self.seconds = 0.0
        """The lag as of the last update."""
        self.behind = False

    def update(self, accounts: Sequence[PartitionLedger], moved: Collection[int] = ()) -> None:
        """Measure the lag from positions and end offsets, and act on it; called between steps.

        `moved` are the indices of partitions whose position has moved since the last call. All partitions are measured
        when the broker has reported end offsets since then, about once a second.
        """
        if self._stream.reads_history:
            # Nobody waits for rows of files, and what arrives meanwhile waits from the switch to the topics on.
            self.seconds, self.behind = 0.0, False
            return
        now, ends_time = self._clock(), self._stream.ends_time
        if len(accounts) != len(self._arrival_times) or ends_time != self._ends_time:
            self._update_all(accounts, None if ends_time == self._ends_time else ends_time)
            self._ends_time = ends_time
        else:
            for index in moved:
                self._arrival_times[index] = self._arrivals[index].arrival_time(accounts[index].position.offset)
        self.seconds = max(0.0, now - float(self._arrival_times.min())) if len(self._arrival_times) else 0.0
        bound = self._settings.low if self.behind else self._settings.high
        behind = self.seconds > bound.total_seconds() if self.behind else self.seconds >= bound.total_seconds()
        if behind and not self.behind:
            log.warning("%s", self._sentence())
        elif self.behind and not behind:
            log.info("the learner has caught up with the stream")
        self.behind = behind
        passes = self._settings.action == "skip-to-latest" and not self._reads
        if behind and passes and now >= self._ask_at:
            self._stream.pass_over()
            self._ask_at = now + _ASK_SECONDS

    def _update_all(self, accounts: Sequence[PartitionLedger], ends_time: float | None) -> None:
        """Measure all partitions; `ends_time` is when end offsets were reported, None when they are not new."""
        self._arrivals += [Arrivals() for _ in accounts[len(self._arrivals) :]]
        for arrivals, account in zip(self._arrivals, accounts, strict=True):
            if account.name.history or not account.read:
                arrivals.marks.clear()  # nobody waits for rows of files, or for what nobody reads
            elif ends_time is not None:
                arrivals.record(ends_time, account.position.offset + account.pending)
        pairs = zip(self._arrivals, accounts, strict=True)
        times = (arrivals.arrival_time(account.position.offset) for arrivals, account in pairs)
        self._arrival_times = np.fromiter(times, np.float64, len(accounts))

    def settle(self, rows: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the rows; while behind, events to train on get the outcome of the action.

        An event that waits for its label is skipped when it comes, and stored only when its label has come.
        """
        if not self.behind or self._settings.action == "train-all":
            return rows
        affected = trainable(rows, unlabelled=self._unlabelled)
        if self._settings.action != "store-only":
            affected |= rows["outcome"] == Outcome.WAITING
        if self._settings.action == "sample":
            affected &= self._not_sampled(rows)
        stored = self._settings.action == "store-only"
        outcome, reason = rows["outcome"].copy(), rows["reason"].copy()
        outcome[affected] = np.uint8(Outcome.STORED_ONLY if stored else Outcome.SKIPPED)
        reason[affected] = np.uint8(SkipReason.NONE if stored else SkipReason.BEHIND)
        return {**rows, "outcome": outcome, "reason": reason}

    @property
    def stores_only(self) -> bool:
        """Whether events to train on are stored without training on them now."""
        return self.behind and self._settings.action == "store-only"

    @property
    def warning(self) -> str | None:
        """One sentence while the learner is behind."""
        return self._sentence() if self.behind else None

    def state(self) -> dict[str, Any]:
        """Return the arrival times for a checkpoint, in seconds since 1970."""
        now, wall = self._clock(), self._wall()
        marks = [[(wall - now + at, end) for at, end in arrivals.marks] for arrivals in self._arrivals]
        return {"behind": self.behind, "arrivals": marks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the arrival times of a checkpoint: events have also waited since then."""
        now, wall = self._clock(), self._wall()
        self.behind = state["behind"]
        self._arrivals = [
            Arrivals([(now - max(0.0, wall - at), int(end)) for at, end in marks]) for marks in state["arrivals"]
        ]

    def _not_sampled(self, rows: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which rows are not in the sample, bool `[N]`: a function of the event's identity and the secret."""
        # A block may be the first of a partition that was added since the last update.
        names = [partition.name for partition in self._stream.partitions[len(self._bases) :]]
        self._bases += [partition_base(name) for name in names]
        bases = np.array(self._bases, np.uint64)[rows["partition"]]
        offset, row = rows["offset"].astype(np.int64), rows["row"].astype(np.int32)
        threshold = np.uint64(int(self._settings.fraction * 2**64))
        return np.greater_equal(keyed_hash(identity_hash(bases, offset, row), self._seed), threshold)

    def _sentence(self) -> str:
        if self._only_full:
            return (
                f"events wait for {self.seconds:.0f} s: for a full batch, which learner.deterministic needs, "
                "or because the stream is faster than training"
            )
        action = self._settings.action
        done = {
            "train-all": 'all are trained on still; set stream.lag_policy.action = "sample" or another',
            "sample": f"{self._settings.fraction:g} of them are trained on, and the others skipped",
            "store-only": "they are stored without training on them",
            "skip-to-latest": "they are skipped",
        }[action]
        return f"the stream is faster than training: events wait for {self.seconds:.0f} s, and {done}"
