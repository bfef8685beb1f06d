"""The counters of events by outcome, which follow the ledger."""

from collections.abc import Sequence

from prometheus_client import Counter

from ingest.events.block import Outcome
from learner.stream.partition_ledger import PartitionLedger


class OutcomeCounters:
    """Counts events by outcome since the start of this process. Used by one thread."""

    def __init__(self, rows: Counter) -> None:
        self._rows = rows
        self._counted: list[list[int]] = []
        self._counters: dict[tuple[int, int], Counter] = {}

    def register_partitions(self, accounts: Sequence[PartitionLedger]) -> None:
        """Add the accounts that are new; outcomes that they already have are not counted."""
        self._counted += [account.outcomes.tolist() for account in accounts[len(self._counted) :]]

    def update(self, accounts: Sequence[PartitionLedger]) -> None:
        """Count the outcomes since the last call, of the registered accounts."""
        for index, (before, account) in enumerate(zip(self._counted, accounts, strict=False)):
            now = account.outcomes.tolist()
            if now == before:
                continue
            self._counted[index] = now
            for outcome, (old, new) in enumerate(zip(before, now, strict=True)):
                if new != old:
                    self._counter(index, outcome, account).inc(new - old)

    def _counter(self, index: int, outcome: int, account: PartitionLedger) -> Counter:
        """Return the counter of an outcome; cached, since finding it by its labels is slow."""
        if (index, outcome) not in self._counters:
            name = account.name
            self._counters[index, outcome] = self._rows.labels(name.topic, str(name.partition), Outcome(outcome).label)
        return self._counters[index, outcome]
