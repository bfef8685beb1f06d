"""The counters of events by outcome, which follow the ledger."""

from collections.abc import Sequence

from prometheus_client import Counter

from ingest.events.block import Outcome
from learner.stream.ledger import PartitionLedger


class OutcomeCounters:
    """Counts what was settled since the start of this process. Used by one thread."""

    def __init__(self, rows: Counter) -> None:
        self._rows = rows
        self._told: list[list[int]] = []
        self._counters: dict[tuple[int, int], Counter] = {}

    def meet(self, accounts: Sequence[PartitionLedger]) -> None:
        """Learn of accounts by their index; what they have by now is not counted."""
        self._told += [account.outcomes.tolist() for account in accounts[len(self._told) :]]

    def move(self, accounts: Sequence[PartitionLedger]) -> None:
        """Count what was settled since the last time, of the accounts that were met."""
        for index, (told, account) in enumerate(zip(self._told, accounts, strict=False)):
            now = account.outcomes.tolist()
            if now == told:
                continue
            self._told[index] = now
            for kind, (before, after) in enumerate(zip(told, now, strict=True)):
                if after != before:
                    self._counter(index, kind, account).inc(after - before)

    def _counter(self, index: int, kind: int, account: PartitionLedger) -> Counter:
        """Return the counter of an outcome, which is looked up by its labels once."""
        if (index, kind) not in self._counters:
            name = account.name
            self._counters[index, kind] = self._rows.labels(name.topic, str(name.partition), Outcome(kind).label)
        return self._counters[index, kind]
