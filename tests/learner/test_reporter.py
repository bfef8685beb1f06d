"""An extension's own numbers and sentences reach `status`, `/metrics` and `learner.json` by its report alone."""

import io
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from anabranch.commands.status import Status, render
from anabranch.core.reported import Reported
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.extension import Extension
from anabranch.learner.loop.loop_state import LoopMetrics
from anabranch.learner.loop.reporter import Reporter
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.status.report import LearnerReport, read_report
from tests.learner.learner_bench import LearnerBench, small_model

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
