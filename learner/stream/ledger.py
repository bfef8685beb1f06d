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
"""Spans that are counted at once: calls of numpy cost more than their arithmetic."""


class PartitionLedger:
    """The account of one partition: position and mark as of the last span, all else as of the last `count`."""

    def __init__(self, name: TopicPartition, start: int) -> None:
        self.name = name
        self.start = start
        self.position = Position(start)
        self.counted = Position(start)
        """The position up to which outcomes are counted."""
        self.end = start
        self.gaps = 0
        self.removed = 0
        self.passed = 0
        self.time_ms = 0
        self.mark = PartitionFingerprint()
        self.superseded = False
        """Whether the topic was created again: what was not read of this incarnation is gone."""
        self.outcomes = np.zeros(len(Outcome), np.int64)
        self.skipped = np.zeros(len(SkipReason), np.int64)

    def update_end(self, end: int | None, topic_id: str | None) -> None:
        """Set the broker's end offset and the topic's id, where they are known."""
        self.end = max(self.end, end or 0)
        if topic_id is not None and topic_id != self.mark.topic_id:
            self.mark = PartitionFingerprint(topic_id, self.mark.last)

    def state(self) -> dict[str, Any]:
        """Return the account as JSON values, for a checkpoint."""
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
        """Return an account from its state in a checkpoint."""
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
        """How far a version that is published now is trained."""
        return PartitionProgress(self.position.offset - 1, self.name.incarnation, self.time_ms)

    @property
    def pending(self) -> int:
        """Number of offsets without an outcome that can still be read."""
        return 0 if self.superseded else max(0, self.end - self.position.offset)

    def report(self) -> PartitionReport:
        """Return the numbers of the account, which add up."""
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
        """Take `published`, how far the newest version is trained: training on events up to there is a repetition.

        It happens after a restart, which resumes from a checkpoint that is older than the version.
        """
        self.partitions: list[PartitionLedger] = []
        self._published = published or {}
        self._learned = RecordTimes()
        self._open: list[tuple[Span, Outcome, SkipReason]] = []
        self._moved: set[int] = set()

    def add_partition(self, name: TopicPartition, start: int) -> None:
        """Open the account of the partition with the next index, at offset `start`."""
        self.partitions.append(PartitionLedger(name, start))
        self._supersede()

    def state(self) -> list[dict[str, Any]]:
        """Return all accounts as JSON values, in order, for a checkpoint."""
        self.count()
        return [account.state() for account in self.partitions]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the accounts of a checkpoint, before any partition is added."""
        assert not self.partitions
        self.partitions = [PartitionLedger.from_state(account) for account in state]
        self._supersede()

    @property
    def positions(self) -> dict[TopicPartition, Position]:
        """The first event without an outcome of each partition, in the order of the index."""
        return {account.name: account.position for account in self.partitions}

    @property
    def marks(self) -> dict[TopicPartition, PartitionFingerprint]:
        """The fingerprint of each partition, by which a restart recognizes it, in the order of the index."""
        return {account.name: account.mark for account in self.partitions}

    def advance(self, span: Span, outcome: Outcome, reason: SkipReason = SkipReason.NONE) -> None:
        """Settle a span: the rows of the batch get `outcome`, other pending rows were stored only.

        Positions and marks move at once; counts follow with `count`, which every property that needs them calls.

        Raises:
            AssertionError: offsets decrease, which is a bug.
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
        """Return the indices of the partitions whose position has moved since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    @property
    def full(self) -> bool:
        """Whether enough spans wait to be counted."""
        return len(self._open) >= _MANY

    def count(self) -> None:
        """Count the spans that were settled since the last call.

        Raises:
            AssertionError: a row gets a second outcome, or offsets decrease, which is a bug.
        """
        uncounted, self._open = self._open, []
        if not uncounted:
            return
        spans = [span for span, *_ in uncounted]
        columns = {name: np.concatenate([span.columns[name] for span in spans]) for name in IDENTITY_COLUMNS}
        trained = np.concatenate([span.trained for span in spans])
        sizes = [len(span.trained) for span in spans]
        outcome = np.repeat(np.array([outcome for _, outcome, _ in uncounted], np.uint8), sizes)
        reason = np.repeat(np.array([reason for *_, reason in uncounted], np.uint8), sizes)
        left = np.where(columns["outcome"] == Outcome.PENDING, np.uint8(Outcome.STORED_ONLY), columns["outcome"])
        settled = np.where(trained, outcome, left)
        reasons = np.where(trained, reason, columns["reason"])
        moved = {index for span in spans for index in span.positions}
        for index in moved:
            account, own = self.partitions[index], columns["partition"] == index
            removed = sum(span.removed.get(index, 0) for span in spans)
            passed = sum(span.passed.get(index, 0) for span in spans)
            offset, row = columns["offset"][own], columns["row"][own]
            assert not len(offset) or (offset[0], row[0]) >= (account.counted.offset, account.counted.row)
            finished = int(np.count_nonzero(np.less(_distinct(offset, row), account.position.offset)))
            gaps = account.position.offset - account.counted.offset - removed - passed - finished
            assert gaps >= 0
            account.gaps += gaps
            account.removed += removed
            account.passed += passed
            account.counted = account.position
            account.outcomes += np.bincount(settled[own], minlength=len(Outcome))
            account.skipped += np.bincount(reasons[own], minlength=len(SkipReason))
            if len(offset):
                account.time_ms = int(columns["time_ms"][own][-1])
        learned = trained & (outcome == Outcome.TRAINED) & self._first(columns, moved)
        self._learned.add(columns["time_ms"][learned].astype(np.int64))

    def _first(self, columns: Mapping[str, Array], partitions: Iterable[int]) -> NDArray[np.bool_]:
        """Return which rows have a record time, and are in no version yet; all are of the given partitions."""
        first: NDArray[np.bool_] = np.greater(columns["time_ms"], 0)
        for index in partitions if self._published else ():
            name = self.partitions[index].name
            published = self._published.get(str(name))
            if published is not None and published.incarnation == name.incarnation:
                first &= np.not_equal(columns["partition"], index) | np.greater(columns["offset"], published.offset)
        return first

    def take_newly_trained(self) -> RecordTimes:
        """Return the record times of events that were trained on for the first time since the last call."""
        self.count()
        learned, self._learned = self._learned, RecordTimes()
        return learned

    @property
    def trained_through(self) -> dict[str, PartitionProgress]:
        """How far training is on all partitions, by `topic:partition`."""
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
        """Return the numbers of all accounts, by `topic:partition`, or `topic#incarnation:partition` if superseded."""
        self.count()
        return {
            f"{name.topic}#{name.incarnation}:{name.partition}" if account.superseded else str(name): account.report()
            for account in self.partitions
            for name in [account.name]
        }

    def _supersede(self) -> None:
        latest = set(latest_incarnations(account.name for account in self.partitions).values())
        for index, account in enumerate(self.partitions):
            account.superseded = index not in latest


def _distinct(offset: Array, row: Array) -> Array:
    """Return the distinct offsets of a partition; offsets, and rows of the same offset, are ascending."""
    rising = np.greater(offset[1:], offset[:-1])
    if rising.all():
        return offset
    assert (rising | (np.equal(offset[1:], offset[:-1]) & np.greater(row[1:], row[:-1]))).all()
    return np.unique(offset)


def _by_outcome(counts: NDArray[np.int64]) -> dict[str, int]:
    return {outcome.label: int(counts[outcome]) for outcome in Outcome if outcome is not Outcome.PENDING}


def _by_reason(counts: NDArray[np.int64]) -> dict[str, int]:
    return {reason.label: int(counts[reason]) for reason in SkipReason if counts[reason] and reason}
