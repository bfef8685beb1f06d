"""The metrics that are read off the learner's report."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from learner.metrics import LearnerMetrics
from learner.model.device import UnusedDevice
from learner.reporter import Reporter
from learner.state_dir.report import LearnerReport, PartitionReport

PARTITION = PartitionReport(
    start=0, end=9, finished=4, passed=2, gaps=0, removed=0, pending=3, trained_through=5, outcomes={"trained": 4}
)


def values(**report: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    LearnerMetrics(registry).report.update(
        LearnerReport(pid=1, generation=1, started=0.0, time=100.0, steps=1, **report)
    )
    return registry


def test_each_partition_has_a_series_by_topic_and_number() -> None:
    registry = values(partitions={"a:b:1": PARTITION})
    labels = {"topic": "a:b", "partition": "1"}
    names = ("ingest_lag_offsets", "ingest_passed_offsets", "learner_trained_through_offset")
    assert [registry.get_sample_value(f"anabranch_{name}", labels) for name in names] == [3, 2, 5]


def test_dead_letters_that_were_not_written_are_counted_by_reason() -> None:
    registry = values(letters_dropped={"refused": 3, "loop": 1})
    name = "anabranch_ingest_letters_dropped_total"
    assert [registry.get_sample_value(name, {"reason": reason}) for reason in ("refused", "loop")] == [3, 1]


def test_times_are_relative_to_that_of_the_report_and_0_where_there_are_none() -> None:
    names = ("anabranch_ingest_lag_time_seconds", "anabranch_gate_hold_seconds")
    registry = values(lag_age_seconds=2.0, held_since=90.0)
    assert [registry.get_sample_value(name) for name in names] == [98, 10]
    assert [values().get_sample_value(name) for name in names] == [0, 0]


def test_groups_of_regression_have_no_accuracy() -> None:
    name, labels = "anabranch_learner_group_accuracy_ratio", {"group": "00"}
    assert values(accuracy={"old": 0.5}, groups={"00": 0.5}).get_sample_value(name, labels) == 0.5
    assert values(error={"old": 0.5}, groups={"00": 0.5}).get_sample_value(name, labels) is None


def test_the_memory_of_the_device_is_reported_by_purpose() -> None:
    registry = values(device_memory={"weights": 400, "scorer": 800})
    assert [
        registry.get_sample_value("anabranch_learner_device_memory_bytes", {"purpose": name})
        for name in ("weights", "scorer")
    ] == [400, 800]


def test_the_problems_are_those_of_all_components(tmp_path: Any) -> None:
    bad, good = SimpleNamespace(problem="the disk is full"), SimpleNamespace(problem=None)
    loop: Any = SimpleNamespace(
        problem="steps are not finite", warning=None, state=SimpleNamespace(steps=0, rows_new=0, rows_replay=0)
    )
    loop.raising_events = SimpleNamespace(problem="the model raises")
    lag = SimpleNamespace(warning="behind")
    publisher = SimpleNamespace(problem=None, gate=SimpleNamespace(hold=good))
    parts: Any = SimpleNamespace(source=good, publisher=publisher, checkpointer=bad, erasure=good, lag=lag)
    metrics: Any = SimpleNamespace(learner=LearnerMetrics(CollectorRegistry()))
    unused = UnusedDevice("auto takes the CPU")
    arguments: Any = {"strategy": "none", "classification": True, "unused_device": unused}
    reporter = Reporter(tmp_path, 1, loop, parts, metrics, **arguments)
    assert reporter.problems() == ["the disk is full", "steps are not finite", "the model raises", "auto takes the CPU"]
    assert reporter.warnings() == ["behind"]
    reporter.problem = "cannot be written to"
    assert "cannot be written to" in reporter.problems()
    assert len(reporter.problems()) == 5
