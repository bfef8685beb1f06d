"""What the report has of the loop, of its features, of extensions and of sources that nothing can be learned of."""

import io
import json
import logging
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from rich.console import Console
from torch import nn

from anabranch.commands.status import Status, render
from anabranch.core.reported import Reported
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.learner.extension import Extension
from anabranch.learner.loop.loop_state import LoopMetrics
from anabranch.learner.loop.reporter import (
    PATIENCE,
    BackfillRate,
    FeatureWatch,
    Heartbeat,
    Reporter,
    live_bytes,
    processor_times,
    unusable_sources,
)
from anabranch.learner.model.features.host_state import HostState
from anabranch.learner.model.features.learned import LearnedFeatures
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.status.report import LearnerReport, PartitionReport, read_report
from anabranch.learner.status.status_server import serve_status
from anabranch.learner.stream.ledger import Ledger
from tests.learner.learner_bench import LearnerBench, small_model
from tests.support.waiting import wait_until

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_tensors_are_counted_by_purpose():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert live_bytes(CPU, model, optimizer, {}) == {"weights": 4 * (12 + 6 + 6) + 8}
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    found = live_bytes(CPU, model, optimizer, {"scorer": 5, "replay": 0})
    assert found == {"weights": 104, "gradients": 72, "optimizer": 72, "scorer": 5}


def test_frozen_weights_are_counted_separately():
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert live_bytes(CPU, model, optimizer, {}) == {"weights": 16, "base": 48}


def test_buffers_that_stay_on_the_host_are_not_counted():
    model = nn.Sequential(nn.Linear(3, 1), HostState(sketch=torch.zeros(1000))).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert live_bytes(torch.device("meta"), model, optimizer, {}) == {"weights": 16}


def test_on_cuda_the_rest_of_what_is_allocated_and_reserved_is_reported(monkeypatch):
    stats = {"allocated_bytes.all.current": 100, "reserved_bytes.all.current": 250}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    model = nn.Linear(3, 3)
    found = live_bytes(CUDA, model, torch.optim.SGD(model.parameters(), lr=0.1), {"replay": 30})
    assert found == {"weights": 48, "replay": 30, "other": 22, "cached": 150}
    assert sum(found.values()) == 250


def test_the_tier_of_the_store_is_counted_where_the_device_has_it(make_bench):
    bench = make_bench(3)
    tier = bench.store.tiers.all[0]
    assert bench.store.tiers.memory.device_bytes == tier.slots * tier.slot_bytes > 0


def asked(port, path="healthz"):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)


@pytest.mark.process
def test_healthz_says_when_the_loop_hangs_and_when_it_goes_on():
    registry, now = CollectorRegistry(), 0.0
    heartbeat = Heartbeat(LearnerMetrics(registry).heartbeat, lambda: now)
    with serve_status("127.0.0.1:0", "", registry, lambda: [heartbeat.problem] if heartbeat.problem else []) as port:
        now = 10 * PATIENCE.total_seconds()
        assert asked(port) == (200, {"ok": True, "problems": []}), "a start takes its time"
        heartbeat.beat()
        now += PATIENCE.total_seconds() - 1
        assert asked(port)[0] == 200
        now += 1
        code, said = asked(port)
        assert code == 503
        assert said["problems"][0].startswith("the training loop has made no progress for more than 60 s")
        heartbeat.beat()
        assert asked(port)[0] == 200


def test_the_metric_is_zero_until_the_first_beat():
    registry = CollectorRegistry()
    heartbeat = Heartbeat(LearnerMetrics(registry).heartbeat)
    name = "anabranch_learner_heartbeat_time_seconds"
    assert registry.get_sample_value(name) == 0
    heartbeat.beat()
    assert (registry.get_sample_value(name) or 0) > 1e9


@pytest.mark.process
def test_livez_fails_for_a_loop_that_hangs_and_for_no_other_problem():
    registry, now = CollectorRegistry(), 0.0
    heartbeat = Heartbeat(LearnerMetrics(registry).heartbeat, lambda: now)
    heartbeat.beat()
    problems, hang = ["the broker is away"], lambda: heartbeat.problem
    with serve_status("127.0.0.1:0", "", registry, lambda: problems, hang=hang) as port:
        assert asked(port) == (503, {"ok": False, "problems": problems})
        assert asked(port, "livez") == (200, {"ok": True, "problems": []})
        now = PATIENCE.total_seconds()
        wait_until(lambda: asked(port, "livez")[0] == 503)
        assert asked(port, "livez") == (503, {"ok": False, "problems": [heartbeat.problem]})


def test_a_loop_that_gets_little_of_the_processor_says_so_and_one_that_gets_half_or_rests_does_not():
    now, ran, waited = 0.0, 0.0, 0.0
    heartbeat = Heartbeat(LearnerMetrics(CollectorRegistry()).heartbeat, lambda: now, lambda: (ran, waited))

    def pass_seconds(seconds, got, asked):
        nonlocal now, ran, waited
        for _ in range(seconds):
            now, ran, waited = now + 1, ran + got * asked, waited + (1 - got) * asked
            heartbeat.beat()

    pass_seconds(20, got=0.5, asked=1)
    assert heartbeat.warning is None
    pass_seconds(20, got=0.03, asked=1)
    assert heartbeat.warning is not None
    assert heartbeat.warning.startswith("training has got 3% of the processor time that it asked for in the last 10 s")
    pass_seconds(20, got=0.03, asked=0.1)
    assert heartbeat.warning is None, "a loop that waits for events asks for little"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count")
def test_the_processor_time_of_a_thread_is_what_it_has_used():
    began, before = time.thread_time(), processor_times()[0]
    while time.thread_time() - began < 0.05:
        pass
    assert 0.04 < processor_times()[0] - before < 0.2


def report(pending=0, history=0, **outcomes):
    """Return the account of events by outcome, or by reason for skipped ones."""
    reasons = {name: count for name, count in outcomes.items() if name not in ("trained", "dead_lettered", "label")}
    counted = {name: count for name, count in outcomes.items() if name not in reasons}
    counted["skipped"] = sum(reasons.values())
    return PartitionReport(
        *(0, 0, 0, 0, 0, 0, pending, 0), outcomes=counted, skipped=reasons, history=history, files=2 * bool(history)
    )


@pytest.mark.parametrize(
    ("partitions", "named"),
    [
        (
            {"history": report(history=1, unlabelled=400)},
            "none of the 400 events of history can be used: 0 were",
        ),
        ({"history": report(history=1, dead_lettered=3)}, "3 were rejected, and 0 have no label"),
        ({"history": report(pending=1, history=1, dead_lettered=3)}, None),
        ({"history": report(history=1, left_to_topics=400)}, None),
        ({"history": report(history=1, left_to_topics=400, dead_lettered=2)}, "none of the 2 events of history"),
        ({"history": report(history=1, trained=1, dead_lettered=900)}, None),
        ({"history.2": report(history=2, repeated=900)}, None),
        ({"e:0": report(dead_lettered=60), "e:1": report(unlabelled=40, pending=9)}, "none of the 100 events of e can"),
        ({"e:0": report(dead_lettered=60), "e:1": report(unlabelled=39)}, None),
        ({"e:0": report(dead_lettered=900), "e:1": report(trained=1)}, None),
        ({"e:0": report(dead_lettered=900), "f:0": report(trained=1)}, "none of the 900 events of e can"),
        ({"e#0:0": report(dead_lettered=900), "e:0": report(trained=1)}, None),
        ({"e:0": report(tombstone=900)}, None),
        ({"labels:0": report(label=900)}, None),
        ({}, None),
    ],
)
def test_a_source_of_which_no_event_can_be_used_is_named(partitions, named):
    found = unusable_sources(partitions)
    assert len(found) == (named is not None)
    assert (named or "") in "".join(found)


def progress(read, **changes):
    members = {"rows_done": read, "rows": 1_000_000, "files_done": 0, "files": 3, "file": "a.parquet"}
    members |= {"done": False, "topics": ("history",)}
    return HistoryProgress(**members | changes)


def test_the_expected_end_follows_the_rate_of_the_last_half_minute():
    now = [50.0]
    rate = BackfillRate(lambda: now[0])
    first = rate.report(progress(400_000))
    assert (first.rate, first.seconds_left) == (0, None), "rows that an earlier process has read are no rate"
    for second in range(1, 61):
        now[0] += 1
        report = rate.report(progress(400_000 + (1000 if second <= 20 else 6000) * second))
    assert report.rate == pytest.approx(6000, rel=0.001)
    assert report.seconds_left == pytest.approx(40, rel=0.001)
    assert (report.topics, report.file, report.files, report.fraction) == (["history"], "a.parquet", 3, 0.76)


def test_a_stalled_backfill_has_no_end_and_a_switch_is_the_end():
    now = [50.0]
    rate = BackfillRate(lambda: now[0])
    rate.report(progress(999_999))
    now[0] += 40
    stalled = rate.report(progress(999_999))
    assert (stalled.rate, stalled.seconds_left, stalled.fraction) == (0, None, 0.999), (
        "rounded to 100 % it would be over"
    )
    done = rate.report(progress(1_000_000, done=True, files_done=3, file=None))
    assert (done.rate, done.seconds_left, done.fraction, done.done) == (0, 0, 1, True)


def test_an_outlier_is_named_by_feature_and_offset_with_the_command_that_undoes_it(caplog):
    features = {name: {"dtype": "float32", "scale": "standard"} for name in ("x", "z")}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 2}}))
    learned = LearnedFeatures(schema)
    ledger = Ledger()
    for name in ("others", "events"):
        ledger.add_partition(TopicPartition(name, 3), 0)
    watch = FeatureWatch(learned, ledger)
    values = np.random.default_rng(0).normal(size=(2, 400)).astype(np.float32)
    values[1, 217] = -3.4e38
    columns = {"feature.x": values[0], "feature.z": values[1], "label": np.zeros(400, np.int64)}
    columns |= {"time_ms": np.zeros(400, np.int64), "partition": np.ones(400, np.int32), "offset": np.arange(400) + 60}
    with caplog.at_level(logging.WARNING):
        learned.observe(columns)
        watch.poll()
        watch.poll()
    assert watch.clipped == {"x": 0, "z": 1}
    (said,) = caplog.messages
    assert "schema.features.z of events[3]@277 is -3.4e+38, far from all others" in said
    assert '"anabranch undo --offsets events[3]@277..277"' in said
    assert watch.warning == said


HOUR_MS = 3_600_000
CONSTANT = LearnerReport(pid=1, generation=1, started=0.0, time=0.0, steps=0, strategy="er")


class HoursReport(msgspec.Struct, frozen=True, kw_only=True):
    """Events by the hour of the day at which they were appended."""

    events: Annotated[dict[str, int], Reported("anabranch_hours_events_total", "Events by hour.", "hour")]
    busiest_ratio: Annotated[float | None, Reported("anabranch_hours_busiest_ratio", "Of the busiest hour.")] = None
    held_bytes: int = 0

    @Reported("anabranch_hours", "Hours with an event.")
    def count(self):
        return len(self.events)


class Hours(Extension):
    name = "events_by_hour"

    def __init__(self):
        self.counts = dict[str, int]()
        self.problem_now: str | None = None

    def trained(self, batch, result):
        for hour in (np.asarray(batch.new["timestamp"]) // HOUR_MS % 24).tolist():
            self.counts[str(hour)] = self.counts.get(str(hour), 0) + 1

    @property
    def problem(self):
        return self.problem_now

    @property
    def warning(self):
        return "no event by night" if "3" not in self.counts else None

    def report(self):
        ratio = max(self.counts.values()) / sum(self.counts.values()) if self.counts else None
        return {
            self.name: HoursReport(events=dict(self.counts), busiest_ratio=ratio, held_bytes=2_500_000),
            "withdrawn": 7,
        }


def test_what_an_extension_reports_is_in_the_report_on_the_screen_and_among_the_metrics(tmp_path, schema):
    bench = LearnerBench(tmp_path, schema, small_model(), 2)
    try:
        registry, hours = CollectorRegistry(), Hours()
        metrics = LoopMetrics(bench.metrics.ingest, bench.metrics.replay, LearnerMetrics(registry))
        parts = replace(bench.parts, extensions=(hours,))
        reporter = Reporter(tmp_path, CONSTANT, bench.loop, parts, metrics, bench.background_store)
        reporter.report()
        assert registry.get_sample_value("anabranch_hours_busiest_ratio") == 0
        hours.counts, hours.problem_now = {"3": 30, "14": 1970}, "the clock is wrong"
        reporter.report()
    finally:
        bench.close()
    report = read_report(tmp_path)
    assert report is not None
    assert report.extensions == {
        "events_by_hour": {"events": {"3": 30, "14": 1970}, "busiest_ratio": 0.985, "held_bytes": 2_500_000}
    }
    assert report.withdrawn == 7  # a field of the report itself
    assert registry.get_sample_value("anabranch_gate_withdrawn_total") == 7
    assert report.problems == ["the clock is wrong"]
    console = Console(width=120, file=io.StringIO())
    console.print(render(Status("demo", str(tmp_path), time.time(), report, None)))
    line = "events by hour events 3 30, 14 1,970; busiest 98.5%; held 2.5 MB"
    assert line in " ".join(console.file.getvalue().split())
    values = [registry.get_sample_value("anabranch_hours_events_total", {"hour": hour}) for hour in ("3", "14")]
    assert values == [30, 1970]
    assert registry.get_sample_value("anabranch_hours") == 2


def test_a_warning_of_an_extension_is_one_of_the_learner(tmp_path, schema):
    bench = LearnerBench(tmp_path, schema, small_model(), 2)
    try:
        parts = replace(bench.parts, extensions=(Hours(),))
        reporter = Reporter(tmp_path, CONSTANT, bench.loop, parts, bench.metrics)
        assert reporter.warnings() == ["no event by night"]
    finally:
        bench.close()


def test_full_rates_are_those_of_the_last_seconds_in_which_events_always_waited(tmp_path, schema, monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("anabranch.learner.loop.reporter.time", clock)
    bench = LearnerBench(tmp_path, schema, small_model(), 0)
    stream, state = bench.stream, bench.loop.state
    bench.loop.ledger.add_partition(TopicPartition("events", 0), 0)
    (partition,) = bench.loop.ledger.partitions

    def report(end, rows):
        """Learn some rows in a step of a tenth of a second, half a second after the last report."""
        now[0] += 0.5
        stream.ends_time = now[0]
        partition.end = end
        state.steps, state.rows_new = state.steps + 1, state.rows_new + rows
        bench.metrics.learner.step.observe(0.1)
        reporter.report()
        found = read_report(tmp_path)
        assert found is not None
        return found

    try:
        reporter = Reporter(tmp_path, CONSTANT, bench.loop, bench.parts, bench.metrics, bench.background_store)
        assert [report(64, 8).full_rates for _ in range(9)] == [{}] * 9, "for too short a time"
        full = report(64, 8).full_rates
        assert (full["steps"], full["rows_new"], full["step_seconds"]) == (2, 16, pytest.approx(0.2))
        caught_up = report(0, 1)
        assert caught_up.rates["rows_new"] < 16
        assert caught_up.full_rates == full
        assert [report(64, 1).full_rates for _ in range(9)] == [full] * 9
        assert report(64, 1).full_rates["rows_new"] == 2
        assert caught_up.checkpoint_seconds is None
        bench.metrics.learner.checkpoint.observe(0.25)
        bench.metrics.learner.checkpoint.observe(0.75)
        assert report(0, 1).checkpoint_seconds == 0.5
    finally:
        bench.close()
