"""One account for all files of a pass over the history: there may be thousands, and each stays as it is once read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ingest.backfill.files import rows_of
from ingest.events.partition import TopicPartition
from ingest.events.position import Position
from learner.state_dir.report import PartitionReport
from learner.stream.partition_ledger import PartitionLedger


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
