"""The ledger: exactly one outcome for each event, and offsets that add up.

    end - start = finished + passed + gaps + removed + pending

Events are counted by outcome; offsets are counted by message, since one may hold many events. An event that waits for
its label has the outcome `waiting`, and a second one when it ends, in a separate account:

    waiting now + ended = events with the outcome `waiting`
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from anabranch.ingest.backfill.files import rows_of
from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition, latest_incarnations
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.learner.status.report import PartitionReport
from anabranch.learner.stream.batch import Decided, Span
from anabranch.learner.stream.partition_ledger import PartitionLedger, by_outcome, by_reason
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import PartitionProgress

_MANY = 64
"""Spans that are counted at once: calls of numpy cost more than their arithmetic."""
_COUNTED = ("partition", "offset", "row", "time_ms", "outcome", "reason")


@dataclass
class Total:
    """The sum of the accounts of files, and of the first offsets that have not ended."""

    account: PartitionLedger
    files: int = 0
    first_open: int = 0

    def add(self, account: PartitionLedger, first_open: int | None) -> None:
        """Add the account of a file, given the first event that has not ended."""
        total, here = self.account, account.position.offset
        self.files += 1
        total.end += max(account.end, here)
        if here == account.start:
            return
        self.first_open += here if first_open is None else min(here, first_open)
        total.position = Position(total.position.offset + here)
        total.gaps += account.gaps
        total.removed += account.removed
        total.passed += account.passed
        total.outcomes += account.outcomes
        total.skipped += account.skipped
        total.waited += account.waited
        total.waited_skipped += account.waited_skipped

    def report(self) -> PartitionReport:
        """Return the numbers of the sum, which add up as those of a file do."""
        report = self.account.report(self.first_open)
        return msgspec.structs.replace(report, files=self.files, history=self.account.name.history)

    def copy(self) -> "Total":
        """Return a copy that can be added to."""
        account = PartitionLedger.from_state(self.account.state())
        return Total(account, self.files, self.first_open)


@dataclass
class FileTotals:
    """Sums the accounts of files; those that cannot change any more are added once."""

    _read: dict[str, Total] = field(default_factory=dict)
    _left: list[int] = field(default_factory=list)
    """The indexes of files that may change."""
    _seen: int = 0

    def sums(self, accounts: Sequence[PartitionLedger], first_open: Mapping[int, int]) -> dict[str, Total]:
        """Return the total of each pass, by its topic; `first_open` are the first offsets that wait, by index."""
        self._left += [at for at in range(self._seen, len(accounts)) if accounts[at].name.history]
        self._seen = len(accounts)
        left = []
        for at in self._left:
            account = accounts[at]
            if account.position.offset == account.start or not _has_ended(account) or at in first_open:
                left.append(at)
            else:
                _add(self._read, account, None)
        self._left = left
        sums = {topic: total.copy() for topic, total in self._read.items()}
        for at in left:
            _add(sums, accounts[at], first_open.get(at))
        return sums


def _add(sums: dict[str, Total], account: PartitionLedger, first_open: int | None) -> None:
    name = account.name
    if name.topic not in sums:
        sums[name.topic] = Total(PartitionLedger(TopicPartition(name.topic, 0, 0, name.history), 0))
    sums[name.topic].add(account, first_open)


def _has_ended(account: PartitionLedger) -> bool:
    """Return whether a file is read, and none of its events waits."""
    here = account.position
    if here.offset < account.end or account.counted != here or account.waiting or account.mark.topic_id is None:
        return False
    return here.offset >= rows_of(account.mark)


def nothing_waits() -> Mapping[int, int]:
    """Return the first open offsets of a stream whose events end where they are read: none."""
    return {}


class Ledger:
    """The accounts of all partitions, in the order of the index that blocks carry. Used by one thread."""

    def __init__(self, published: Mapping[str, PartitionProgress] | None = None, rows: Counter | None = None) -> None:
        """Start without partitions.

        Args:
            published: how far the newest version is trained: training on events up to there is a repetition. It happens
                after a restart, which resumes from a checkpoint that is older than the version.
            rows: counts the events by outcome since the start of this process.
        """
        self.partitions: list[PartitionLedger] = []
        self._published = published or {}
        self._learned = RecordTimes()
        self._open: list[Span] = []
        self.moved: set[int] = set()
        """The indices of the partitions whose position has moved since the lag was measured."""
        self._rows = rows
        self.totals = LedgerTotals(self)
        self.first_open: Callable[[], Mapping[int, int]] = nothing_waits
        """Returns, by index of the partition, the first offset of an event or label that waits. Set by an extension
        whose events end later than they are read, and that counts in this ledger: each needs the other."""
        self.ended = 0
        """Number of events that have ended after they waited, since the start of the process."""

    def add_partition(self, name: TopicPartition, start: int) -> None:
        """Open the account of the partition with the next index, at offset `start`."""
        self.partitions.append(PartitionLedger(name, start))
        self._register()

    def state(self) -> list[dict[str, Any]]:
        """Return all accounts as JSON values, in order, for a checkpoint."""
        self.count()
        return [account.state() for account in self.partitions]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the accounts of a checkpoint, before any partition is added."""
        assert not self.partitions
        self.partitions = [PartitionLedger.from_state(account) for account in state]
        self._register()

    @property
    def positions(self) -> dict[TopicPartition, Position]:
        """The first event without an outcome of each partition, in the order of the index."""
        return {account.name: account.position for account in self.partitions}

    @property
    def marks(self) -> dict[TopicPartition, PartitionFingerprint]:
        """The fingerprint of each partition, by which a restart recognizes it, in the order of the index."""
        return {account.name: account.mark for account in self.partitions}

    def advance(self, span: Span) -> None:
        """Settle a span: the rows of the batch were trained on, other pending rows were stored only.

        Positions and marks move at once; counts follow with `count`, which every property that needs them calls.

        Raises:
            AssertionError: offsets decrease, which is a bug.
        """
        self._open.append(span)
        self.moved.update(span.positions)
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
        if len(self._open) >= _MANY:
            self.count()

    def end(self, decided: Decided) -> None:
        """Count how events ended that have waited for their label."""
        span, ended = decided.span, decided.ended
        reasons = np.where(span.trained, np.uint8(SkipReason.NONE), span.columns["reason"])
        self._count_ended(span.columns["partition"][ended], decided.ends[ended], reasons[ended])
        learned = span.trained & np.greater(span.columns["time_ms"], 0)
        self._learned.add(span.columns["time_ms"][learned].astype(np.int64))

    def end_erased(self, partition: NDArray[np.int32]) -> int:
        """Count waiting events that were erased, one for each index of a partition; return how many."""
        skipped, erased = (np.full(len(partition), value, np.uint8) for value in (Outcome.SKIPPED, SkipReason.ERASED))
        self._count_ended(partition, skipped, erased)
        return len(partition)

    def _count_ended(self, partition: Array, outcome: NDArray[np.uint8], reason: Array) -> None:
        self.ended += len(partition)
        for index in np.unique(partition).tolist():
            account, own = self.partitions[index], partition == index
            account.waited += np.bincount(outcome[own], minlength=len(Outcome))
            account.waited_skipped += np.bincount(reason[own], minlength=len(SkipReason))

    def count(self) -> None:
        """Count the spans that were settled since the last call.

        Raises:
            AssertionError: a row gets a second outcome, or offsets decrease, which is a bug.
        """
        spans, self._open = self._open, []
        if not spans:
            return
        columns = {name: np.concatenate([span.columns[name] for span in spans]) for name in _COUNTED}
        trained = np.concatenate([span.trained for span in spans])
        left = np.where(columns["outcome"] == Outcome.PENDING, np.uint8(Outcome.STORED_ONLY), columns["outcome"])
        settled = np.where(trained, np.uint8(Outcome.TRAINED), left)
        reasons = np.where(trained, np.uint8(SkipReason.NONE), columns["reason"])
        moved = {index for span in spans for index in span.positions}
        for index in moved:
            account = self.partitions[index]
            own = slice(None) if len(moved) == 1 else np.flatnonzero(columns["partition"] == index)
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
            self._add_outcomes(account, np.bincount(settled[own], minlength=len(Outcome)))
            account.skipped += np.bincount(reasons[own], minlength=len(SkipReason))
            if len(offset):
                account.time_ms = int(columns["time_ms"][own][-1])
        learned = trained & self._first(columns, moved)
        self._learned.add(columns["time_ms"][learned].astype(np.int64))

    def _add_outcomes(self, account: PartitionLedger, counts: NDArray[np.int64]) -> None:
        account.outcomes += counts
        if self._rows is not None:
            for outcome in np.flatnonzero(counts).tolist():
                found = self._rows.labels(account.name.topic, str(account.name.partition), Outcome(outcome).label)
                found.inc(int(counts[outcome]))

    def _first(self, columns: Mapping[str, Array], partitions: Iterable[int]) -> NDArray[np.bool_]:
        """Return which rows have a record time, and are in no version yet; all are of the given partitions.

        Rows of files are none of them: how old they are says nothing of how fast the learner is.
        """
        first: NDArray[np.bool_] = np.greater(columns["time_ms"], 0)
        for index in partitions:
            name = self.partitions[index].name
            if name.history:
                first &= np.not_equal(columns["partition"], index)
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
        """How far training is on all partitions of topics, by `topic:partition`; there may be thousands of files."""
        self.count()
        first = self.first_open()
        each = enumerate(self.partitions)
        return {str(one.name): one.trained(first.get(index)) for index, one in each if not one.name.history}

    @property
    def read(self) -> dict[str, tuple[int, int]]:
        """The offsets of each partition of topics, by `topic:partition`: the first that is read, and the last that was
        read and not left for later."""
        accounts = [account for account in self.partitions if not account.name.history]
        return {str(each.name): (each.start, each.position.offset - 1) for each in accounts}

    def _register(self) -> None:
        latest = set(latest_incarnations(account.name for account in self.partitions).values())
        for index, account in enumerate(self.partitions):
            account.superseded = index not in latest
            account.read &= not account.superseded


class LedgerTotals:
    """What the accounts of a ledger add up to, for people."""

    def __init__(self, ledger: "Ledger") -> None:
        self._ledger = ledger
        self._files = FileTotals()

    @property
    def outcomes(self) -> dict[str, int]:
        """Events by outcome, over all partitions."""
        return by_outcome(self._sum("outcomes", Outcome))

    @property
    def waited(self) -> dict[str, int]:
        """How events that waited for their label ended: by outcome, over all partitions."""
        return by_outcome(self._sum("waited", Outcome))

    @property
    def skipped(self) -> dict[str, int]:
        """Skipped events by reason, over all partitions."""
        return by_reason(self._sum("skipped", SkipReason))

    def reports(self) -> Mapping[str, PartitionReport]:
        """Return the numbers of all accounts, by `topic:partition`, or `topic#incarnation:partition` if superseded.

        The files of each pass over the history are one account, by the topic alone.
        """
        self._ledger.count()
        first = self._ledger.first_open()
        files = self._files.sums(self._ledger.partitions, first)
        return {
            f"{name.topic}#{name.incarnation}:{name.partition}" if each.superseded else str(name): each.report(
                first.get(index)
            )
            for index, each in enumerate(self._ledger.partitions)
            for name in [each.name]
            if not name.history
        } | {topic: total.report() for topic, total in files.items()}

    def _sum(self, counts: str, kind: type[Outcome | SkipReason]) -> NDArray[np.int64]:
        """Return counts of all partitions, and of the files of each pass."""
        self._ledger.count()
        files = self._files.sums(self._ledger.partitions, self._ledger.first_open())
        accounts = [each for each in self._ledger.partitions if not each.name.history]
        accounts += [each.account for each in files.values()]
        return sum((getattr(each, counts) for each in accounts), np.zeros(len(kind), np.int64))


def _distinct(offset: Array, row: Array) -> Array:
    """Return the distinct offsets of a partition; offsets, and rows of the same offset, are ascending."""
    rising = np.greater(offset[1:], offset[:-1])
    if rising.all():
        return offset
    assert (rising | (np.equal(offset[1:], offset[:-1]) & np.greater(row[1:], row[:-1]))).all()
    # Not by `np.unique`, which hashes all rows: a message may have thousands.
    distinct: Array = offset[np.append(True, rising)]
    return distinct
