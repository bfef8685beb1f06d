"""What is done when the stream is faster than training: `[stream.lag_policy]`.

The lag is a time: how long the next event without outcome has been there. It is told by this machine's clock and the
ends that the broker reports about once a second, not by record times: a producer's clock may be off, its records may
have no time, and an old topic that is read from its beginning is no stream that is too fast.
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.config import LagPolicySettings
from ingest.events.block import Array, Outcome, SkipReason
from ingest.events.identity import identity_hash, partition_base
from ingest.reader.cursors import Partition
from learner.stream.ledger import PartitionLedger

_MOST_MARKS = 64
_ASK_SECONDS = 1.0
_SALT = 0x1A6B0A7D
"""Makes the choice of what is trained on while behind independent of what is held out and of what is kept."""

log = logging.getLogger(__name__)


class Arrivals:
    """When the offsets of one partition came: its end at some moments, and a straight line between them.

    What was there at the first look counts from that look on.
    """

    def __init__(self, marks: Sequence[tuple[float, int]] = ()) -> None:
        """Begin with marks of an earlier process: seconds of this one's clock, and the end at that moment."""
        self.marks = list(marks)

    def record(self, moment: float, end: int) -> None:
        """Take note of where the partition ends at a moment, which is later than those before."""
        marks = self.marks
        if len(marks) > 1 and marks[-1][1] == marks[-2][1] == end:
            marks[-1] = (moment, end)
        elif not marks or end >= marks[-1][1]:
            marks.append((moment, end))
        if len(marks) > _MOST_MARKS:
            self.marks = [*marks[:-1:2], marks[-1]]

    def age(self, now: float, position: int) -> float:
        """Return for how many seconds the offset `position` has been there, or 0 when it has not come yet."""
        return max(0.0, now - self.came(position))

    def came(self, position: int) -> float:
        """Return when the offset `position` came, infinity when it has not come yet.

        Marks of what lies before it are let go of.
        """
        after = bisect_right(self.marks, position, key=lambda mark: mark[1])
        if after == len(self.marks):
            return math.inf
        came, end = self.marks[after]
        if after:
            before, known = self.marks[after - 1]
            came = before + (came - before) * (position + 1 - known) / (end - known)
            del self.marks[: after - 1]
        return came


class Stream(Protocol):
    """What the policy looks at and acts on; `ingest.reader.reader.BlockReader` is one."""

    @property
    def told(self) -> float | None:
        """When the broker last told the ends of partitions, by the clock."""
        ...

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of the index that blocks carry."""
        ...

    def pass_over(self) -> None:
        """Go on at the end of every partition."""
        ...


class LagPolicy:
    """Tells whether the learner is behind, and what then becomes of events to train on. Used by the loop's thread.

    It is behind from a lag of `high` on until one of `low`, of the partition that lags most. Held-out events, those
    that are stored without a label and tombstones are treated as ever.
    """

    def __init__(
        self,
        settings: LagPolicySettings,
        seed: int,
        stream: Stream,
        *,
        reads: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """With `reads`, `skip-to-latest` reads and skips what lies before the end: tombstones may be among it."""
        self._settings = settings
        self._seed = seed ^ _SALT
        self._stream = stream
        self._reads = reads
        self._clock = clock
        self._wall = wall
        self._arrivals: list[Arrivals] = []
        self._bases: list[int] = []
        self._ask_at = 0.0
        self._told: float | None = None
        self._came: NDArray[np.float64] = np.empty(0)
        """Of each partition, when its next event without outcome came."""
        self.seconds = 0.0
        """The lag at the last look."""
        self.behind = False

    def look(self, accounts: Sequence[PartitionLedger], moved: Collection[int] = ()) -> None:
        """Take the lag from positions and ends of all partitions, and act on it; called between steps.

        `moved` are the places of those whose position has moved since the last look. All are looked at where the broker
        has told ends since then, which is about once a second.
        """
        now, told = self._clock(), self._stream.told
        if len(accounts) != len(self._came) or told != self._told:
            self._look_at_all(accounts, None if told == self._told else told)
            self._told = told
        else:
            for place in moved:
                self._came[place] = self._arrivals[place].came(accounts[place].position.offset)
        self.seconds = max(0.0, now - float(self._came.min())) if len(self._came) else 0.0
        bound = self._settings.low if self.behind else self._settings.high
        behind = self.seconds > bound.total_seconds() if self.behind else self.seconds >= bound.total_seconds()
        if behind and not self.behind:
            log.warning("%s", self._said())
        elif self.behind and not behind:
            log.info("the learner has caught up with the stream")
        self.behind = behind
        passes = self._settings.action == "skip-to-latest" and not self._reads
        if behind and passes and now >= self._ask_at:
            self._stream.pass_over()
            self._ask_at = now + _ASK_SECONDS

    def _look_at_all(self, accounts: Sequence[PartitionLedger], told: float | None) -> None:
        """Look when the next event of each partition came, with the ends that were `told`, if they are new."""
        self._arrivals += [Arrivals() for _ in accounts[len(self._arrivals) :]]
        for arrivals, account in zip(self._arrivals, accounts, strict=True):
            if account.superseded:
                arrivals.marks.clear()  # what was not read of it is gone, and waits no longer
            elif told is not None:
                arrivals.record(told, account.position.offset + account.pending)
        came = (each.came(account.position.offset) for each, account in zip(self._arrivals, accounts, strict=True))
        self._came = np.fromiter(came, np.float64, len(accounts))

    def settle(self, rows: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return rows with the outcome of those that are not trained on because the learner is behind."""
        if not self.behind or self._settings.action == "train-all":
            return rows
        left = (rows["outcome"] == Outcome.PENDING) & rows["labelled"].astype(np.bool_)
        if self._settings.action == "sample":
            left &= self._left_out(rows)
        stored = self._settings.action == "store-only"
        outcome, reason = rows["outcome"].copy(), rows["reason"].copy()
        outcome[left] = np.uint8(Outcome.STORED_ONLY if stored else Outcome.SKIPPED)
        reason[left] = np.uint8(SkipReason.NONE if stored else SkipReason.BEHIND)
        return {**rows, "outcome": outcome, "reason": reason}

    @property
    def warning(self) -> str | None:
        """One sentence while the learner is behind."""
        return self._said() if self.behind else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a restart knows how long events have been waiting."""
        now, wall = self._clock(), self._wall()
        marks = [[(wall - now + moment, end) for moment, end in each.marks] for each in self._arrivals]
        return {"behind": self.behind, "arrivals": marks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept; the time since then has passed for events too."""
        now, wall = self._clock(), self._wall()
        self.behind = state["behind"]
        self._arrivals = [
            Arrivals([(now - max(0.0, wall - moment), int(end)) for moment, end in marks])
            for marks in state["arrivals"]
        ]

    def _left_out(self, rows: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which rows are not of the sample, which does not depend on when they are read."""
        # A block may be the first of a partition that the last look did not know yet.
        names = [partition.name for partition in self._stream.partitions[len(self._bases) :]]
        self._bases += [partition_base(name) for name in names]
        bases = np.array(self._bases, np.uint64)[rows["partition"]]
        offset, row = rows["offset"].astype(np.int64), rows["row"].astype(np.int32)
        threshold = np.uint64(int(self._settings.fraction * 2**64))
        return np.greater_equal(identity_hash(bases, offset, row, self._seed), threshold)

    def _said(self) -> str:
        action = self._settings.action
        done = {
            "train-all": 'all are trained on still; set stream.lag_policy.action = "sample" or another',
            "sample": f"{self._settings.fraction:g} of them are trained on, and the others skipped",
            "store-only": "they are stored without training on them",
            "skip-to-latest": "they are skipped",
        }[action]
        return f"the stream is faster than training: events wait for {self.seconds:.0f} s, and {done}"
