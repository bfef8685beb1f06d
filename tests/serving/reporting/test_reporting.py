"""The sentence on the health of a pipeline, and the counts of several serving processes."""

import json

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict

from anabranch.learner.status.report import BackfillReport, BaselineReport, LearnerReport, MeasureReport
from anabranch.serving.reporting.health import ReportAge, judge
from anabranch.serving.reporting.report import AnswersReport, ServingReport
from anabranch.serving.reporting.worker_pool import PoolCollector, WorkerPool

LEARNER = LearnerReport(pid=1, generation=1, started=0, time=1000, steps=7)


def constant(answer="0", **report):
    rule = f"always answering {answer}"
    return {"constant": BaselineReport(rule=rule, **report), "last_label": BaselineReport(rule="it", scores={"now": 2})}


FRAUD = {
    "outcomes": {"trained": 5000},
    "accuracy": {"old": 0.992, "now": 1.0},
    "baselines": constant(scores={"old": 0.994, "now": 0.9}),
}


def judged(name="average_precision", *, higher=True, **value):
    """A measure whose interval is of 0.005 to either side, where one answer for all has 0.012."""
    lower, upper = ({window: each + add for window, each in value.items()} for add in (-0.005, 0.005))
    measure = MeasureReport(value, lower, upper, dict.fromkeys(value, 0.012), higher)
    return {"measure": name, "measures": {name: measure}}


HISTORY = BackfillReport(topics=["history"], rows_read=5, rows=10, files_read=0, files=1)
SERVING = ServingReport(pid=2, started=0, time=1000, address="http://127.0.0.1:8000", ready=True, version=3)


@pytest.mark.parametrize(
    ("learner", "serving", "state", "sentence"),
    [
        ({}, {}, "well", "All is well."),
        ({"warnings": ["a"]}, {}, "well", "All is well, with 1 warning."),
        ({"warnings": ["a", "b"]}, {}, "well", "All is well, with 2 warnings."),
        ({"warnings": ["a"], "problems": ["b"]}, {}, "unhealthy", "Learner: b"),
        ({"lag_seconds": 9.0}, {"freshness_p50_seconds": 9.0}, "well", "All is well."),
        ({"lag_seconds": 74.0}, {}, "attention", "What is served is 1 minute behind the stream."),
        ({"lag_seconds": 439.0}, {}, "attention", "What is served is 7 minutes behind the stream."),
        ({}, {"freshness_p50_seconds": 4000.0}, "attention", "What is served is 1 hour behind the stream."),
        ({"backfill": HISTORY}, {"freshness_p50_seconds": 4000.0}, "well", "All is well."),
        (
            FRAUD | {"lag_seconds": 12.0},
            {},
            "attention",
            (
                "What is served is more than 10 seconds behind the stream. "
                "The model is no better than always answering 0."
            ),
        ),
        (FRAUD | {"accuracy": {"old": 0.996, "now": 0.99}}, {}, "well", "All is well."),
        (FRAUD | judged(held_out=0.2), {}, "well", "All is well."),
        (
            FRAUD | judged(held_out=0.01),
            {},
            "attention",
            "By average precision the model is no better than always answering 0.",
        ),
        (
            FRAUD | judged(now=0.001) | {"baselines": {}},
            {},
            "attention",
            "By average precision the model is worse than one answer for all events.",
        ),
        (
            FRAUD | judged("log_loss", now=0.03, higher=False) | {"baselines": constant(scores={}, worse=True)},
            {},
            "attention",
            ("The model is worse than always answering 0. By log loss the model is worse than always answering 0."),
        ),
        (FRAUD | judged("log_loss", now=0.01, higher=False), {}, "well", "All is well."),
        (FRAUD | judged("ece", now=0.03, higher=False), {}, "well", "All is well."),
        (FRAUD | {"outcomes": {"trained": 999}}, {}, "well", "All is well."),
        (FRAUD | {"baselines": constant(scores={"old": 1.0}), "accuracy": {"old": 1.0}}, {}, "well", "All is well."),
        (
            FRAUD | {"baselines": constant("the mean", scores={"now": 0.5}), "accuracy": {}, "error": {"now": 0.6}},
            {},
            "attention",
            "The model is no better than always answering the mean.",
        ),
        (
            FRAUD | {"baselines": constant(scores={"old": 0.9}, worse=True)},
            {},
            "attention",
            "The model is worse than always answering 0.",
        ),
        (FRAUD | {"problems": ["a"]}, {}, "unhealthy", "Learner: a"),
        (None, {}, "starting", "No learner has reported yet"),
        (
            {},
            {"version": None, "problems": ["no version can be served yet"]},
            "starting",
            "The first version is on its way",
        ),
        ({"problems": ["the broker is gone"]}, {}, "unhealthy", "Learner: the broker is gone"),
        ({"time": 960}, {}, "unhealthy", "The learner does not report"),
        ({"problems": ["a"]}, {"problems": ["b"]}, "unhealthy", "2 things are wrong."),
    ],
)
def test_health_is_one_sentence(learner, serving, state, sentence):
    report = None if learner is None else msgspec.structs.replace(LEARNER, **learner)
    silent = report is not None and ReportAge(wall=lambda: 1000.0).is_silent(report)
    health = judge(report, msgspec.structs.replace(SERVING, **serving), silent=silent)
    assert health.state == state
    assert health.sentence.startswith(sentence)
    assert bool(health.problems) == (state == "unhealthy")
    assert health.silent == ("does not report" in sentence)


def test_the_age_of_a_report_does_not_depend_on_the_wall_clock():
    now, wall = [50.0], [1000.0]
    age = ReportAge(lambda: now[0], lambda: wall[0])
    assert not age.is_silent(LEARNER)
    wall[0] += 3600
    now[0] += 9
    assert not age.is_silent(LEARNER), "the clock was set forward"
    report = msgspec.structs.replace(LEARNER, time=wall[0])
    wall[0] -= 86400
    assert not age.is_silent(report)
    now[0] += 10
    assert age.is_silent(report), "the clock was set back, and the learner is gone"
    assert not age.is_silent(msgspec.structs.replace(LEARNER, time=wall[0]))
    assert ReportAge(lambda: now[0], lambda: wall[0] + 100).is_silent(msgspec.structs.replace(LEARNER, time=wall[0]))


def test_counts_are_added_up_while_another_worker_starts(tmp_path):
    """The client library makes a file, and then gives it a size: in between it is empty."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(str(tmp_path)))
    (tmp_path / "counter_1.db").touch()
    assert generate_latest(registry) == b""
    for number, count in ((0, 2.0), (1, 3.0)):
        counts = MmapedDict(str(tmp_path / f"counter_{number}.db"))  # type: ignore[no-untyped-call]
        counts.write_value(json.dumps(["hits", "hits_total", {}, "Hits"]), count, 0.0)  # type: ignore[no-untyped-call]
        counts.close()  # type: ignore[no-untyped-call]
    assert b"hits_total 5.0" in generate_latest(registry)


def test_answers_of_workers_are_added_up_and_their_counts_once(tmp_path):
    pool = WorkerPool(tmp_path, 2)
    for number, (partitions, rate, lag, p50) in enumerate([(2, 10.0, 5, 0.25), (1, 4.0, 2, None)]):
        stream = AnswersReport(
            topics=["in"],
            output="out",
            partitions=partitions,
            messages={"answered": 70},  # of both
            per_second=rate,
            lag=lag,
            p50_seconds=p50,
        )
        report = ServingReport(pid=number, started=0, time=1, address="http://127.0.0.1:1", ready=True, stream=stream)
        pool.write(number, report)
    joined = pool.joined(1, 0.0)
    assert joined is not None
    assert joined.stream == AnswersReport(
        topics=["in"], output="out", partitions=3, messages={"answered": 70}, per_second=14.0, lag=7, p50_seconds=0.25
    )


def test_the_skew_of_workers_is_the_largest_and_a_warning_is_said_once(tmp_path):
    pool = WorkerPool(tmp_path, 2)
    for number, skew in enumerate([{"amount": 0.3, "fee": 0.1}, {"amount": 0.2, "country": 0.1}]):
        report = ServingReport(
            pid=number, started=0, time=1, address="http://127.0.0.1:1", ready=True, skew=skew, warnings=["amount"]
        )
        pool.write(number, report)
    joined = pool.joined(1, 0.0)
    assert joined is not None
    assert joined.skew == {"amount": 0.3, "fee": 0.1, "country": 0.1}
    assert joined.warnings == ["amount"]
