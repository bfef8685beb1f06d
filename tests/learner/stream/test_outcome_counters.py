"""Counters of events by outcome, against the ledger that they follow, and of letters that were not written."""

from prometheus_client import CollectorRegistry

from ingest.events.block import Outcome
from ingest.events.partition import TopicPartition
from ingest.metrics import IngestMetrics
from learner.stream.ledger import PartitionLedger
from learner.stream.outcome_counters import LetterCounters, OutcomeCounters


def test_what_a_checkpoint_had_is_not_counted_and_each_outcome_after_it_is_once() -> None:
    registry = CollectorRegistry()
    counters = OutcomeCounters(IngestMetrics(registry).rows)
    accounts = [PartitionLedger(TopicPartition("events", number), 0) for number in range(2)]
    accounts[0].outcomes[Outcome.TRAINED] = 7  # of the checkpoint
    counters.meet(accounts[:1])
    accounts[0].outcomes[Outcome.TRAINED] += 3
    counters.move(accounts)
    counters.meet(accounts)  # a partition that was added
    accounts[1].outcomes[Outcome.HELD_OUT] += 2
    counters.move(accounts)
    counters.move(accounts)
    told = {
        (sample.labels["partition"], sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "anabranch_ingest_rows_total"
    }
    assert {place: value for place, value in told.items() if value} == {("0", "trained"): 3, ("1", "held_out"): 2}


def test_each_dead_letter_that_was_not_written_is_counted_once_by_its_reason() -> None:
    registry = CollectorRegistry()
    counters = LetterCounters(IngestMetrics(registry).letters_dropped)
    for told in ({}, {"refused": 2}, {"refused": 2, "loop": 1}, {"refused": 3, "loop": 1}):
        counters.move(told)
    name = "anabranch_ingest_letters_dropped_total"
    assert [registry.get_sample_value(name, {"reason": reason}) for reason in ("refused", "loop")] == [3, 1]
