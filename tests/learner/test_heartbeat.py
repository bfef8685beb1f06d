"""A loop that hangs is a problem, in `/healthz` too; one that starts, works or waits is not."""

import json
import sys
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from anabranch.learner.loop.reporter import PATIENCE, Heartbeat, processor_times
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.status.status_server import serve_status
from tests.support.waiting import wait_until


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
