"""The ledger: exactly one outcome for each event, and offsets that add up.

    end - start = finished + passed + gaps + removed + pending

Events are counted by outcome; offsets are counted by message, since one may hold many events.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import IDENTITY_COLUMNS, Array, Outcome, SkipReason
from ingest.events.partition import TopicPartition, latest_incarnations
from ingest.events.position import Fingerprint, PartitionFingerprint, Position
from learner.state_dir.report import PartitionReport
from learner.state_dir.trained_through import PartitionProgress
from learner.stream.batches import Span
from learner.stream.record_times import RecordTimes

_MANY = 16
"""Spans that are counted at once: the calls around the arithmetic are what it costs."""


class PartitionLedger:
    """The account of one partition; but for position and mark it is that of what has been counted."""

    def __init__(self, name: TopicPartition, start: int) -> None:
        self.name = name
        self.start = start
        self.position = Position(start)
        self.counted = Position(start)
        """The position up to which it is counted."""
        self.end = start
        self.gaps = 0
        self.removed = 0
        self.passed = 0
        self.time_ms = 0
        self.mark = PartitionFingerprint()
        self.superseded = False
        """Whether the topic was made anew: what was not read of this one is gone."""
        self.outcomes = np.zeros(len(Outcome), np.int64)
        self.skipped = np.zeros(len(SkipReason), np.int64)

    def meet(self, end: int | None, topic_id: str | None) -> None:
        """Note how far the broker is, and the topic's id, where they are known."""
        self.end = max(self.end, end or 0)
        if topic_id is not None and topic_id != self.mark.topic_id:
            self.mark = PartitionFingerprint(topic_id, self.mark.last)

    def state(self) -> dict[str, Any]:
        """The account as JSON values, for a checkpoint."""
        return {
            "topic": self.name.topic,
            "partition": self.name.partition,
            "incarnation": self.name.incarnation,
            "start": self.start,
            "position": [self.position.offset, self.position.row],
            "end": self.end,
            "gaps": self.gaps,
            "removed": self.removed,
            "passed": self.passed,
            "time_ms": self.time_ms,
            "topic_id": self.mark.topic_id,
            "last": None if self.mark.last is None else asdict(self.mark.last),
            "outcomes": {outcome.label: int(self.outcomes[outcome]) for outcome in Outcome},
            "skipped": {reason.label: int(self.skipped[reason]) for reason in SkipReason},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Open the account of a checkpoint again."""
        account = cls(TopicPartition(state["topic"], state["partition"], state["incarnation"]), state["start"])
        account.position = account.counted = Position(*state["position"])
        account.end, account.gaps, account.removed = state["end"], state["gaps"], state["removed"]
        account.passed, account.time_ms = state["passed"], state["time_ms"]
        last = state["last"]
        account.mark = PartitionFingerprint(state["topic_id"], None if last is None else Fingerprint(**last))
        account.outcomes = np.array([state["outcomes"].get(outcome.label, 0) for outcome in Outcome], np.int64)
        account.skipped = np.array([state["skipped"].get(reason.label, 0) for reason in SkipReason], np.int64)
        return account

    @property
    def trained(self) -> PartitionProgress:
        """How far a version that is published now has learned."""
        return PartitionProgress(self.position.offset - 1, self.name.incarnation, self.time_ms)

    @property
    def pending(self) -> int:
        """Offsets without an outcome that are there to be read."""
        return 0 if self.superseded else max(0, self.end - self.position.offset)

    def report(self) -> PartitionReport:
        """The account as numbers that add up."""
        here = self.position.offset
        gone = max(0, self.end - here) - self.pending
        return PartitionReport(
            start=self.start,
            end=max(self.end, here),
            finished=here - self.start - self.gaps - self.passed - self.removed,
            passed=self.passed,
            gaps=self.gaps,
            removed=self.removed + gone,
            pending=self.pending,
            trained_through=here - 1,
            incarnation=self.name.incarnation,
            outcomes=_by_outcome(self.outcomes),
            skipped=_by_reason(self.skipped),
        )


class Ledger:
    """The accounts of all partitions, in the order of the index that blocks carry. Used by one thread."""

    def __init__(self, published: Mapping[str, PartitionProgress] | None = None) -> None:
        """`published` is how far the newest version has learned: events up to there are not learned for the first time.

        That they are learned again at all is because a restart goes on from a checkpoint, which is older.
        """
        self.partitions: list[PartitionLedger] = []
        self._published = published or {}
        self._learned = RecordTimes()
        self._open: list[tuple[Span, Outcome, SkipReason]] = []
        self._moved: set[int] = set()

    def take_up(self, name: TopicPartition, start: int) -> None:
        """Open the account of the partition with the next index."""
        self.partitions.append(PartitionLedger(name, start))
        self._supersede()

    def state(self) -> list[dict[str, Any]]:
        """All accounts as JSON values, in order, for a checkpoint."""
        self.count()
        return [account.state() for account in self.partitions]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Open the accounts of a checkpoint again; must come before any other is opened."""
        assert not self.partitions
        self.partitions = [PartitionLedger.from_state(account) for account in state]
        self._supersede()

    @property
    def positions(self) -> dict[TopicPartition, Position]:
        """The first event without an outcome of each partition, in the order of the index."""
        return {account.name: account.position for account in self.partitions}

    @property
    def marks(self) -> dict[TopicPartition, PartitionFingerprint]:
        """What each partition is known again by, in the order of the index."""
        return {account.name: account.mark for account in self.partitions}

    def advance(self, span: Span, outcome: Outcome, reason: SkipReason = SkipReason.NONE) -> None:
        """Settle a span: the rows of the batch get `outcome`, other pending rows were stored only.

        Positions and marks move at once; the rest follows with `count`, at the latest when somebody looks.

        Raises:
            AssertionError: offsets go backwards: a bug, never a user's fault.
        """
        self._open.append((span, outcome, reason))
        self._moved.update(span.positions)
        for index in {*span.removed, *span.passed}:  # seldom any
            gone = span.removed.get(index, 0) + span.passed.get(index, 0)
            offset = span.columns["offset"][span.columns["partition"] == index]
            assert not len(offset) or offset[0] >= self.partitions[index].position.offset + gone
        for index, position in span.positions.items():
            assert position.offset >= self.partitions[index].position.offset
            self.partitions[index].position = position
        for index, last in span.last.items():
            account = self.partitions[index]
            account.mark = PartitionFingerprint(account.mark.topic_id, last)

    def take_moved(self) -> set[int]:
        """Return the places of the partitions whose position has moved since this was last called."""
        moved, self._moved = self._moved, set()
        return moved

    @property
    def full(self) -> bool:
        """Whether so many spans wait that they should be counted."""
        return len(self._open) >= _MANY

    def count(self) -> None:
        """Count what was settled since the last time.

        Raises:
            AssertionError: a row has got a second outcome or offsets go backwards: a bug, never a user's fault.
        """
        taken, self._open = self._open, []
        if not taken:
            return
        spans = [span for span, *_ in taken]
        columns = {name: np.concatenate([span.columns[name] for span in spans]) for name in IDENTITY_COLUMNS}
        trained = np.concatenate([span.trained for span in spans])
        sizes = [len(span.trained) for span in spans]
        outcome = np.repeat(np.array([outcome for _, outcome, _ in taken], np.uint8), sizes)
        reason = np.repeat(np.array([reason for *_, reason in taken], np.uint8), sizes)
        left = np.where(columns["outcome"] == Outcome.PENDING, np.uint8(Outcome.STORED_ONLY), columns["outcome"])
        settled = np.where(trained, outcome, left)
        reasons = np.where(trained, reason, columns["reason"])
        moved = {index for span in spans for index in span.positions}
        for index in moved:
            account, mine = self.partitions[index], columns["partition"] == index
            removed = sum(span.removed.get(index, 0) for span in spans)
            passed = sum(span.passed.get(index, 0) for span in spans)
            offset, row = columns["offset"][mine], columns["row"][mine]
            assert not len(offset) or (offset[0], row[0]) >= (account.counted.offset, account.counted.row)
            finished = int(np.count_nonzero(np.less(_distinct(offset, row), account.position.offset)))
            gaps = account.position.offset - account.counted.offset - removed - passed - finished
            assert gaps >= 0
            account.gaps += gaps
            account.removed += removed
            account.passed += passed
            account.counted = account.position
            account.outcomes += np.bincount(settled[mine], minlength=len(Outcome))
            account.skipped += np.bincount(reasons[mine], minlength=len(SkipReason))
            if len(offset):
                account.time_ms = int(columns["time_ms"][mine][-1])
        learned = trained & (outcome == Outcome.TRAINED) & self._first(columns, moved)
        self._learned.add(columns["time_ms"][learned].astype(np.int64))

    def _first(self, columns: Mapping[str, Array], partitions: Iterable[int]) -> NDArray[np.bool_]:
        """Return which rows, of the given partitions, are in no version yet, and have a record time."""
        first: NDArray[np.bool_] = np.greater(columns["time_ms"], 0)
        for index in partitions if self._published else ():
            name = self.partitions[index].name
            published = self._published.get(str(name))
            if published is not None and published.incarnation == name.incarnation:
                first &= np.not_equal(columns["partition"], index) | np.greater(columns["offset"], published.offset)
        return first

    def take_learned(self) -> RecordTimes:
        """Return the record times of the events that were learned for the first time since this was last called."""
        self.count()
        learned, self._learned = self._learned, RecordTimes()
        return learned

    @property
    def trained_through(self) -> dict[str, PartitionProgress]:
        """How far all partitions are learned, by `topic:partition`."""
        self.count()
        return {str(account.name): account.trained for account in self.partitions}

    @property
    def outcomes(self) -> dict[str, int]:
        """Events by outcome, over all partitions."""
        self.count()
        totals = sum((account.outcomes for account in self.partitions), np.zeros(len(Outcome), np.int64))
        return _by_outcome(totals)

    @property
    def skipped(self) -> dict[str, int]:
        """Skipped events by reason, over all partitions."""
        self.count()
        totals = sum((account.skipped for account in self.partitions), np.zeros(len(SkipReason), np.int64))
        return _by_reason(totals)

    def reports(self) -> Mapping[str, PartitionReport]:
        """The accounts as numbers that add up, by `topic:partition`; `topic#incarnation:partition` where it is gone."""
        self.count()
        return {
            f"{name.topic}#{name.incarnation}:{name.partition}" if account.superseded else str(name): account.report()
            for account in self.partitions
            for name in [account.name]
        }

    def _supersede(self) -> None:
        there = set(latest_incarnations(account.name for account in self.partitions).values())
        for place, account in enumerate(self.partitions):
            account.superseded = place not in there


def _distinct(offset: Array, row: Array) -> Array:
    """Return the different ones of a partition's offsets, which never fall; nor do the rows of one."""
    rising = np.greater(offset[1:], offset[:-1])
    if rising.all():
        return offset
    assert (rising | (np.equal(offset[1:], offset[:-1]) & np.greater(row[1:], row[:-1]))).all()
    return np.unique(offset)


def _by_outcome(counts: NDArray[np.int64]) -> dict[str, int]:
    return {outcome.label: int(counts[outcome]) for outcome in Outcome if outcome is not Outcome.PENDING}


def _by_reason(counts: NDArray[np.int64]) -> dict[str, int]:
    return {reason.label: int(counts[reason]) for reason in SkipReason if counts[reason] and reason}
