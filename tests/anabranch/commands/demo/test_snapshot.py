"""A snapshot of the demo: whether the demo is complete, and what its report and its lines make of it."""

import json

import msgspec
import pytest

from anabranch.commands.demo.report import make_report, percent, plain_line, seconds, summary, to_json
from anabranch.commands.demo.snapshot import Completion, DemoSnapshot
from anabranch.learner.status.report import BaselineReport, LearnerReport, MeasureReport
from anabranch.serving.reporting.report import ServingReport

KEYS = [
    "events_produced",
    "events_trained",
    "events_stored_only",
    "events_held_out",
    "events_dead_lettered",
    "events_skipped",
    "accuracy_now",
    "accuracy_old",
    "accuracy_old_without_replay",
    "measures",
    "versions_published",
    "swaps",
    "http_requests",
    "http_failures",
    "freshness_p50_seconds",
    "freshness_p99_seconds",
    "replay_rows",
    "seconds",
]


def learner(outcomes, **changes):
    report = LearnerReport(
        pid=1,
        generation=1,
        started=0,
        time=0,
        steps=9,
        outcomes=outcomes,
        accuracy={"now": 0.9, "old": 0.8},
        replay_rows={"device": 90},
        versions_published=12,
    )
    return msgspec.structs.replace(report, **changes)


def serving(**changes):
    report = ServingReport(
        pid=2,
        started=0,
        time=0,
        address="http://127.0.0.1:8000",
        ready=True,
        version=11,
        swaps={"swapped": 10},
        freshness_p50_seconds=0.25,
        freshness_p99_seconds=0.5,
    )
    return msgspec.structs.replace(report, **changes)


@pytest.fixture
def snapshot():
    """Makes the snapshot of a demo of 100 events that is over, but for what is changed."""

    def make(**changes):
        values = {
            "seconds": 12.3456,
            "sent": 100,
            "phase": 9,
            "last_offsets": {"events:0": 49, "events:1": 49},
            "learner": learner({"trained": 90, "held_out": 9, "dead_lettered": 1}),
            "baseline": learner({"trained": 90, "held_out": 9, "dead_lettered": 1}, accuracy={"old": 0.1}),
            "serving": serving(),
            "trained_through": {"events:0": 49, "events:1": 49},
            "requests": 500,
            "failures": 0,
            "last_failure": None,
            "restarts": {"learner": 0},
        }
        return DemoSnapshot(**(values | changes))

    return make


def test_the_demo_is_over_when_every_event_has_its_outcome_and_is_in_replies(snapshot):
    assert Completion(baseline=True).missing(snapshot()) is None


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"last_offsets": None}, "the producer has sent 100 events and is not done"),
        ({"learner": None}, "100 events were sent, but 0 have an outcome"),
        ({"learner": learner({"trained": 99})}, "100 events were sent, but 99 have an outcome"),
        ({"trained_through": {"events:0": 49}}, "the last reply's model has learned events:1 up to -1, not 49"),
        ({"baseline": learner({"trained": 40})}, "100 events were sent, but only 40 have an outcome in the baseline"),
    ],
)
def test_what_is_missing_is_named(snapshot, changes, missing):
    assert Completion(baseline=True).missing(snapshot(**changes)) == missing


def test_without_a_baseline_none_is_waited_for(snapshot):
    assert Completion(baseline=False).missing(snapshot(baseline=None)) is None


def test_a_minute_without_progress_is_overdue_and_progress_starts_it_again(snapshot):
    now = [0.0]
    completion = Completion(baseline=False, clock=lambda: now[0])
    assert not completion.is_overdue(snapshot(sent=1))
    for now[0], sent, overdue in ((59.0, 1, False), (60.0, 2, False), (119.0, 2, False), (121.0, 2, True)):
        assert completion.is_overdue(snapshot(sent=sent)) is overdue


def test_the_report_has_exactly_its_keys(snapshot):
    report = json.loads(to_json(make_report(snapshot())))
    assert list(report) == KEYS
    assert report["events_produced"] == sum(report[key] for key in KEYS[1:6])
    assert (report["accuracy_now"], report["accuracy_old"], report["accuracy_old_without_replay"]) == (0.9, 0.8, 0.1)
    assert (report["versions_published"], report["swaps"], report["http_requests"]) == (12, 10, 500)
    assert (report["replay_rows"], report["seconds"]) == ({"device": 90}, 12.346)
    assert (report["freshness_p50_seconds"], report["freshness_p99_seconds"]) == (0.25, 0.5)


def test_without_a_baseline_its_accuracy_is_null(snapshot):
    assert make_report(snapshot(baseline=None)).accuracy_old_without_replay is None


def test_a_demo_that_has_only_begun_can_be_reported_and_shown(snapshot):
    empty = snapshot(
        sent=0,
        last_offsets=None,
        learner=None,
        baseline=None,
        serving=None,
        trained_through={},
    )
    assert make_report(empty).events_trained == 0
    assert "none with an outcome" in summary(empty)
    assert "version -" in plain_line(empty)


def test_the_closing_words_compare_with_the_baseline(snapshot):
    text = summary(snapshot())
    assert "100 events in 12 s: 90 trained, 9 held out, 1 dead lettered" in text
    assert "on old classes 80% (no replay 10%)" in text
    assert "no replay" not in summary(snapshot(baseline=None))


def test_the_plain_line_has_what_matters_and_what_is_unhealthy(snapshot):
    line = plain_line(snapshot(restarts={"learner": 2}, last_failure="503 busy", failures=1))
    for part in (
        "100 events, class 9",
        "now 90%, old 80% (no replay 10%)",
        "version 11, freshness p50 0.25 s",
        "500 requests, 1 f",
    ):
        assert part in line
    assert line.endswith("learner was started again 2 times; the last request failed: 503 busy")
    assert "\n" not in line


def test_an_accuracy_has_next_to_it_what_it_is_to_be_compared_with(snapshot):
    constant = BaselineReport(rule="always answering 3", scores={"now": 0.12, "old": 0.25})
    last = BaselineReport(rule="the last label", scores={"now": 0.6})
    baselines = {"constant": constant, "last_label": last}
    report = learner({"trained": 90}, accuracy={"now": 0.66, "old": 0.8}, baselines=baselines)
    line = plain_line(snapshot(learner=report))
    assert "accuracy now 66% (always answering 3 12%, the last label 60%), " in line
    assert "old 80% (no replay 10%, always answering 3 25%)" in line
    assert "now 66% (always answering 3 12%, the last label 60%), of each new digit before it is learned" in summary(
        snapshot(learner=report)
    )


def test_the_closing_words_have_the_measure_that_judges_and_what_one_answer_has(snapshot):
    windows = {"now": 0.9, "held_out": 0.8123}
    measures = {
        "log_loss": MeasureReport(windows, windows, windows, {"held_out": 2.3}),
        "macro_f1": MeasureReport(windows, windows, windows, {"held_out": 0.018}),
        "roc_auc": MeasureReport({"now": 0.5}),
    }
    for measure, line in (
        ("macro_f1", "macro f1 0.812 on held-out events, where one answer for all has 0.018\n"),
        ("accuracy", "log loss 0.812 on held-out events, where one answer for all has 2.3\n"),
    ):
        figures = snapshot(learner=learner({"trained": 90}, measures=measures, measure=measure))
        assert line in summary(figures)
        assert json.loads(to_json(make_report(figures)))["measures"]["log_loss"]["constant"] == {"held_out": 2.3}
    assert "held-out events" not in summary(snapshot())


def test_a_poisoned_phase_and_the_version_that_the_gate_refuses_are_named(snapshot):
    assert "gate" not in plain_line(snapshot())
    line = plain_line(snapshot(poisoned=True))
    assert line.endswith("; gate: the producer sends wrong labels on purpose; nothing judged yet")
    refused = learner({"trained": 99}, version=7, verdict="fail", held_reasons=["worse than the served version"])
    assert plain_line(snapshot(learner=refused)).endswith("; gate: version 7 FAIL: worse than the served version")


def test_figures_are_written_for_people():
    assert (percent(None), percent(0.876), seconds(None)) == ("-", "88%", "-")
    assert (seconds(0.0123), seconds(1.234)) == ("12.3 ms", "1.23 s")
