"""Counters of events by outcome, against the ledger that they follow."""

from prometheus_client import CollectorRegistry

from ingest.events.block import Outcome
from ingest.events.partition import TopicPartition
from ingest.metrics import IngestMetrics
from learner.stream.outcome_counters import OutcomeCounters
from learner.stream.partition_ledger import PartitionLedger


def test_outcomes_of_a_checkpoint_are_not_counted_and_each_later_one_is_counted_once() -> None:
    registry = CollectorRegistry()
    counters = OutcomeCounters(IngestMetrics(registry).rows)
    accounts = [PartitionLedger(TopicPartition("events", number), 0) for number in range(2)]
    accounts[0].outcomes[Outcome.TRAINED] = 7  # of the checkpoint
    counters.register_partitions(accounts[:1])
    accounts[0].outcomes[Outcome.TRAINED] += 3
    counters.update(accounts)
    counters.register_partitions(accounts)  # a partition that was added
    accounts[1].outcomes[Outcome.HELD_OUT] += 2
    counters.update(accounts)
    counters.update(accounts)
    values = {
        (sample.labels["partition"], sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "anabranch_ingest_rows_total"
    }
    assert {labels: value for labels, value in values.items() if value} == {("0", "trained"): 3, ("1", "held_out"): 2}
