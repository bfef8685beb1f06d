"""The metrics that are read off the learner's report."""

from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from torch import nn

from anabranch.learner.loop.reporter import Reporter
from anabranch.learner.model.device import UnusedDevice
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.status.report import BackfillReport, LearnerReport, PartitionReport, StorageReport

PARTITION = PartitionReport(
    start=0, end=9, finished=4, passed=2, gaps=0, removed=0, pending=3, trained_through=5, outcomes={"trained": 4}
)


def values(**report):
    registry = CollectorRegistry()
    LearnerMetrics(registry).report.update(
        LearnerReport(pid=1, generation=1, started=0.0, time=100.0, steps=1, **report)
    )
    return registry


def test_each_partition_has_a_series_by_topic_and_number():
    registry = values(partitions={"a:b:1": PARTITION})
    labels = {"topic": "a:b", "partition": "1"}
    names = ("ingest_lag_offsets", "ingest_passed_offsets", "learner_trained_through_offset")
    assert [registry.get_sample_value(f"anabranch_{name}", labels) for name in names] == [3, 2, 5]


def test_the_history_is_counted_and_its_files_have_no_series():
    backfill = BackfillReport(topics=["history"], rows_read=40, rows=100, files_read=0, files=1)
    files = msgspec.structs.replace(PARTITION, files=7, history=1)
    registry = values(backfill=backfill, partitions={"history": files, "events:0": PARTITION})
    names = "anabranch_backfill_rows", "anabranch_backfill_read_rows_total"
    assert [registry.get_sample_value(name) for name in names] == [100, 40]
    assert [values().get_sample_value(name) for name in names] == [0, 0]
    lags = {
        (sample.labels["topic"], sample.labels["partition"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "anabranch_ingest_lag_offsets"
    }
    assert lags == {("events", "0"): 3}


def test_dead_letters_that_were_not_written_are_counted_by_reason():
    registry = values(letters_dropped={"refused": 3, "loop": 1})
    name = "anabranch_ingest_letters_dropped_total"
    assert [registry.get_sample_value(name, {"reason": reason}) for reason in ("refused", "loop")] == [3, 1]


def test_what_the_object_store_lacks_has_a_series_by_kind():
    storage = StorageReport(
        url="s3://b", lag_seconds={"versions": 2.5, "checkpoints": 0.0}, uploaded_bytes=7, failures=3
    )
    registry = values(storage=storage)
    lags = [registry.get_sample_value("anabranch_storage_lag_seconds", {"kind": kind}) for kind in storage.lag_seconds]
    assert lags == [2.5, 0.0]
    names = "anabranch_storage_uploaded_bytes_total", "anabranch_storage_failures_total"
    assert [registry.get_sample_value(name) for name in names] == [7, 3]
    assert [values().get_sample_value(name) for name in names] == [0, 0]


def test_bytes_that_ranks_exchange_are_0_where_they_are_not_counted():
    name = "anabranch_learner_exchanged_bytes_total"
    assert values(exchanged_bytes=7).get_sample_value(name) == 7
    assert values().get_sample_value(name) == 0


def test_times_are_relative_to_that_of_the_report_and_0_where_there_are_none():
    names = ("anabranch_ingest_lag_time_seconds", "anabranch_gate_hold_seconds")
    registry = values(lag_age_seconds=2.0, held_since=90.0)
    assert [registry.get_sample_value(name) for name in names] == [98, 10]
    assert [values().get_sample_value(name) for name in names] == [0, 0]


def test_groups_of_regression_have_no_accuracy():
    name, labels = "anabranch_learner_group_accuracy_ratio", {"group": "00"}
    assert values(accuracy={"old": 0.5}, groups={"00": 0.5}).get_sample_value(name, labels) == 0.5
    assert values(error={"old": 0.5}, groups={"00": 0.5}).get_sample_value(name, labels) is None


def test_the_memory_of_the_device_is_reported_by_purpose():
    registry = values(device_memory={"weights": 400, "scorer": 800})
    assert [
        registry.get_sample_value("anabranch_learner_device_memory_bytes", {"purpose": name})
        for name in ("weights", "scorer")
    ] == [400, 800]


def test_the_problems_are_those_of_all_components(tmp_path):
    bad, good = SimpleNamespace(problem="the disk is full"), SimpleNamespace(problem=None)
    loop: Any = SimpleNamespace(warning=None, state=SimpleNamespace(steps=0, rows_new=0, rows_replay=0))
    loop.non_finite = SimpleNamespace(problem="steps are not finite")
    loop.raising_events = SimpleNamespace(problem="the model raises")
    lag = SimpleNamespace(warning="behind")
    scorer = SimpleNamespace(measures=SimpleNamespace(each={}, kind=None))
    publisher = SimpleNamespace(problem=None, gate=SimpleNamespace(hold=good, scorer=scorer))
    source = SimpleNamespace(problem=None, tombstones={}, hold_out=None)
    erasure = SimpleNamespace(problem=None, erased=0)
    parts: Any = SimpleNamespace(publisher=publisher, checkpointer=bad, lag=lag, late=None)
    parts.source, parts.erasure = source, erasure
    parts.extensions = [SimpleNamespace(warnings=["the teacher is away"], problems=[])]
    parts.trainer = SimpleNamespace(model=nn.Linear(1, 1))
    metrics: Any = SimpleNamespace(learner=LearnerMetrics(CollectorRegistry()))
    unused = UnusedDevice("auto takes the CPU")
    fleet = SimpleNamespace(problems=["the servers cannot be read"], warnings=[])
    parts.extensions.append(fleet)
    constant = LearnerReport(pid=1, generation=1, started=0.0, time=0.0, steps=0)
    reporter = Reporter(tmp_path, constant, loop, parts, metrics, others=(unused,))
    assert reporter.problems() == [
        "the disk is full",
        "steps are not finite",
        "the model raises",
        "auto takes the CPU",
        "the servers cannot be read",
    ]
    assert reporter.warnings() == ["behind", "the teacher is away"]
    reporter.problem = "cannot be written to"
    assert "cannot be written to" in reporter.problems()
    assert len(reporter.problems()) == 6
