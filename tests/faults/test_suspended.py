"""A suspended learner, and one whose broker is killed: they continue, and no event is trained twice."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.faults.kills import CODE, ROW, TEXT, accounts
from tests.faults.pipeline import Pipeline, Supervised, make_topic, send
from tests.pipelines import adds_up, total
from tests.support.waiting import PATIENCE_SECONDS

EVENTS = 400
HALF = EVENTS // 2


def halves():
    rows = np.zeros(EVENTS, ROW)
    rows["id"] = np.arange(EVENTS)
    for half in (rows[:HALF], rows[HALF:]):
        yield [row.tobytes() for row in half]


def pipeline_on(bootstrap, folder):
    text = TEXT.format(events=EVENTS, batch=16, checkpoint_every="200ms")
    return Pipeline(folder, bootstrap, make_topic(bootstrap, "suspended"), CODE, text)


def all_trained(report):
    return total(report) == EVENTS and not report.problems


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no signal that stops a process")
def test_a_suspended_learner_keeps_its_lock_and_continues(kafka, tmp_path):
    pipeline, (first, second) = pipeline_on(kafka.bootstrap, tmp_path), halves()
    command = [sys.executable, "-m", "anabranch.learner", "-c", str(pipeline.path)]
    with Supervised(pipeline) as learner:
        send(kafka.bootstrap, pipeline.topic, first)
        learner.wait_for(lambda report: total(report) == HALF and (report.checkpoint or 0) > 1, "half of the events")
        pid, family = learner.pid(), learner.family()
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            assert pipeline.steps() is None, "a suspended learner answers"
            send(kafka.bootstrap, pipeline.topic, second)
            environment = {**os.environ, "ANABRANCH__LEARNER__STOP_TIMEOUT": "1s"}
            second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
        finally:
            for process in family:
                process.send_signal(signal.SIGCONT)
        assert second.returncode == 2
        assert "another learner is at work" in second.stderr
        report = learner.wait_for(all_trained, "all events")
        assert learner.pid() == pid
    assert adds_up(report)
    assert (accounts(pipeline) == 1).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_whose_broker_is_killed_waits_and_reports_a_problem(mortal_kafka, tmp_path):
    pipeline, (first, second) = pipeline_on(mortal_kafka.bootstrap, tmp_path), halves()
    with Supervised(pipeline) as learner:
        send(mortal_kafka.bootstrap, pipeline.topic, first)
        learner.wait_for(lambda report: total(report) == HALF, "half of the events")
        pid = learner.pid()
        mortal_kafka.kill()
        learner.wait_for(lambda report: bool(report.problems), "a problem of the broker")
        mortal_kafka.start()
        send(mortal_kafka.bootstrap, pipeline.topic, second)
        report = learner.wait_for(all_trained, "all events")
        assert learner.pid() == pid
    assert adds_up(report)
    assert (accounts(pipeline) == 1).all()
