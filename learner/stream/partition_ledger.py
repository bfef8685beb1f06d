"""The account of one partition in the ledger: its position, its offsets, and its events by outcome."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint, Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.status.report import PartitionReport
from anabranch.learner.stream.trained_through import PartitionProgress

_COUNTED: Mapping[str, type[Outcome | SkipReason]] = {
    "outcomes": Outcome,
    "skipped": SkipReason,
    "waited": Outcome,
    "waited_skipped": SkipReason,
}
"""The counts of events in an account, each by what."""


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
        self.read = True
        """Whether anything of it is to come: not from a topic that was taken out of the settings, for one."""
        self.outcomes = np.zeros(len(Outcome), np.int64)
        self.skipped = np.zeros(len(SkipReason), np.int64)
        self.waited = np.zeros(len(Outcome), np.int64)
        """How events that waited for their label ended."""
        self.waited_skipped = np.zeros(len(SkipReason), np.int64)

    def update(self, partition: Partition) -> None:
        """Set the broker's end offset and the topic's id, where they are known."""
        self.read, end, topic_id = partition.read, partition.end, partition.topic_id
        if partition.read or self.superseded:
            self.end = max(self.end, end or 0)
        elif end is not None:
            self.end = end
        if topic_id is not None and topic_id != self.mark.topic_id:
            self.mark = PartitionFingerprint(topic_id, self.mark.last)

    def state(self) -> dict[str, Any]:
        """Return the account as JSON values, for a checkpoint."""
        return {
            "topic": self.name.topic,
            "partition": self.name.partition,
            "incarnation": self.name.incarnation,
            "history": self.name.history,
            "start": self.start,
            "position": [self.position.offset, self.position.row],
            "end": self.end,
            "gaps": self.gaps,
            "removed": self.removed,
            "passed": self.passed,
            "time_ms": self.time_ms,
            "topic_id": self.mark.topic_id,
            "last": None if self.mark.last is None else asdict(self.mark.last),
            **{name: {each.label: int(getattr(self, name)[each]) for each in kind} for name, kind in _COUNTED.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return an account from its state in a checkpoint."""
        partition = TopicPartition(state["topic"], state["partition"], state["incarnation"], state["history"])
        account = cls(partition, state["start"])
        account.position = account.counted = Position(*state["position"])
        account.end, account.gaps, account.removed = state["end"], state["gaps"], state["removed"]
        account.passed, account.time_ms = state["passed"], state["time_ms"]
        last = state["last"]
        account.mark = PartitionFingerprint(state["topic_id"], None if last is None else Fingerprint(**last))
        for name, kind in _COUNTED.items():
            setattr(account, name, np.array([state[name].get(each.label, 0) for each in kind], np.int64))
        return account

    def trained(self, first_open: int | None = None) -> PartitionProgress:
        """Return how far a version that is published now is trained, given the first event that has not ended."""
        return PartitionProgress(self._through(first_open), self.name.incarnation, self.time_ms)

    def _through(self, first_open: int | None) -> int:
        return (self.position.offset if first_open is None else min(self.position.offset, first_open)) - 1

    @property
    def waiting(self) -> int:
        """Number of events that wait for their label, or for the step after it."""
        return int(self.outcomes[Outcome.WAITING] - self.waited.sum())

    @property
    def pending(self) -> int:
        """Number of offsets without an outcome that can still be read."""
        return 0 if self.superseded else max(0, self.end - self.position.offset)

    def report(self, first_open: int | None = None) -> PartitionReport:
        """Return the numbers of the account, which add up, given the first event that has not ended."""
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
            trained_through=self._through(first_open),
            seen_through=here - 1,
            incarnation=self.name.incarnation,
            outcomes=by_outcome(self.outcomes),
            skipped=by_reason(self.skipped),
            waiting=self.waiting,
            waited=by_outcome(self.waited),
            waited_skipped=by_reason(self.waited_skipped),
        )


def by_outcome(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return counts by outcome, without those of late labels that are 0."""
    return {
        outcome.label: int(counts[outcome])
        for outcome in Outcome
        if counts[outcome] or Outcome.PENDING < outcome <= Outcome.SKIPPED
    }


def by_reason(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return the counts of skipped events by reason, without zeros."""
    return {reason.label: int(counts[reason]) for reason in SkipReason if counts[reason] and reason}
