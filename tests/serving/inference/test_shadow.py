"""A candidate answers a fraction of the live requests, and never affects them."""

import errno
import sys
from datetime import timedelta

import httpx
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.learner.state_dir.folders import Storage
from anabranch.learner.versions.format import Versions
from anabranch.serving.inference.shadow import Shadow, _AnsweredRequest
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from tests.support.waiting import PATIENCE_SECONDS

UNITS = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])


@pytest.fixture(autouse=True)
def _frequent_polls(monkeypatch):
    monkeypatch.setattr("anabranch.serving.inference.shadow._POLL_CANDIDATES", timedelta(milliseconds=100))


def tensor(rows):
    data = [number for row in rows for number in row]
    return {"inputs": [{"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": data}]}


def ask(server, body):
    reply = httpx.post(server.infer, json=body, timeout=PATIENCE_SECONDS)
    assert (reply.status_code, reply.json().get("model_version")) == (200, "1"), reply.text


def count(server, name):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"anabranch_serving_shadow_{name}"))


@pytest.mark.slow
def test_a_failed_version_is_compared_with_the_served_one(deploy, served, eventually):
    publisher = deploy("linear")
    publisher.publish(1, weights={"weight": UNITS, "bias": torch.zeros(3)})
    # It predicts the same for the first unit vector, and takes the other two for each other.
    publisher.publish(2, weights={"weight": UNITS[[0, 2, 1]], "bias": torch.zeros(3)}, verdict="fail")
    with served(publisher, shadow=1.0) as server:
        eventually(lambda: (shadow := server.report().shadow) and shadow.version == 2)
        for requests in range(1, 4):
            ask(server, tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [2, 0, 0, 0]]))
            eventually(lambda requests=requests: count(server, "rows_total") == 4 * requests)
        compared = count(server, 'rows_total{outcome="compared"}')
        assert compared > 0
        eventually(lambda: count(server, "disagreement_total") == compared / 2)  # counted after the rows
        eventually(lambda: server.report().shadow.rows == compared)
        assert server.report().shadow.disagreement == 0.5
        assert httpx.get(f"{server.url}/api/status").json()["serving"]["shadow"]["version"] == 2
        # What is older than the served one is no candidate any more.
        publisher.publish(3, weights={"weight": UNITS, "bias": torch.zeros(3)})
        eventually(lambda: server.report().version == 3 and server.report().shadow is None)


@pytest.mark.slow
def test_a_stale_learners_version_is_no_candidate(numbers, served, eventually):
    numbers.publish(1, generation=2)
    numbers.publish(2, generation=2, verdict="fail")
    numbers.publish(3, generation=1, verdict="fail")
    with served(numbers, shadow=1.0) as server:
        eventually(lambda: server.report().shadow)
        assert server.report().shadow.version == 2


@pytest.mark.slow
def test_for_regression_the_disagreement_is_the_mean_absolute_difference(numbers, served, body_of, eventually):
    numbers.publish(1)
    numbers.publish(5, verdict="fail")
    with served(numbers, shadow=1.0) as server:
        eventually(lambda: server.report().shadow)
        ask(server, body_of(3))
        eventually(lambda: server.report().shadow.rows == 3)
        assert server.report().shadow.disagreement == 4.0
        assert count(server, "disagreement_total") == 12.0


@pytest.mark.slow
def test_only_the_fraction_is_compared(numbers, served, body_of, eventually):
    numbers.publish(1)
    numbers.publish(2, verdict="fail")
    with served(numbers, shadow=0.25) as server:
        eventually(lambda: server.report().shadow)
        for _ in range(60):
            ask(server, body_of(1))
        assert 0 < count(server, "rows_total") < 40
    with served(numbers) as server:
        ask(server, body_of(1))
        assert server.report().shadow is None
        assert count(server, "rows_total") == 0


@pytest.mark.slow
def test_a_candidate_that_cannot_be_loaded_affects_no_request(deploy, served, body_of, eventually):
    publisher = deploy("linear")
    publisher.publish(1, weights={"weight": UNITS, "bias": torch.zeros(3)})
    publisher.publish(2, weights={"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, verdict="fail")
    with served(publisher, shadow=1.0) as server:
        eventually(lambda: (shadow := server.report().shadow) and shadow.failed)
        assert "size mismatch" in server.report().shadow.failed
        ask(server, body_of(1))
        eventually(lambda: server.report().ready and not server.report().problems)
        assert count(server, "rows_total") == 0


class PolledShadow:
    """A shadow whose thread is not started, while version 1 is served; it polls every half minute."""

    def __init__(self, publisher):
        publisher.publish(1)
        self.served = load_version(publisher.deployment, publisher.versions.manifest(1), 8)
        self.now = 0.0
        metrics = ServingMetrics(CollectorRegistry())
        self.shadow = Shadow(
            *(publisher.deployment, 1.0, 8, metrics),
            served=lambda: self.served,
            is_idle=lambda: True,
            on_error=pytest.fail,
            clock=lambda: self.now,
        )

    def poll(self):
        self.now += 30
        self.shadow._poll()
        return self.shadow._candidate.number if self.shadow._candidate else None

    def failed(self):
        assert self.shadow.report is not None
        return self.shadow.report.failed


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ESTALE, "Stale file handle"), MemoryError("none left"), torch.OutOfMemoryError("none left")],
    ids=repr,
)
def test_a_candidate_that_cannot_be_read_or_has_no_memory_is_tried_again(numbers, error):
    shadowed = PolledShadow(numbers)
    numbers.publish(2, verdict="fail")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Versions, "weights", raises(error))
        assert [shadowed.poll() for _ in range(5)] == [None] * 5
        assert str(error) in str(shadowed.failed())
    assert shadowed.poll() == 2
    assert shadowed.failed() is None
    row = {"x": np.zeros((1, 4), np.float32)}
    request = _AnsweredRequest(shadowed.served, row, shadowed.served.run(row), shadowed.now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedVersion, "run", raises(error))
        assert shadowed.shadow._candidate is not None
        shadowed.shadow._compare(request, shadowed.shadow._candidate)
        assert str(error) in str(shadowed.failed())
    assert shadowed.poll() == 2, "it is given up permanently"


def test_a_candidate_that_does_not_fit_is_given_up_permanently(numbers, monkeypatch):
    shadowed = PolledShadow(numbers)
    numbers.publish(2, verdict="fail", weights={"number": torch.zeros(3)})
    assert shadowed.poll() is None
    monkeypatch.setattr("anabranch.serving.inference.shadow.load_version", raises(AssertionError("it was tried again")))
    assert [shadowed.poll() for _ in range(5)] == [None] * 5


def test_a_versions_directory_that_is_unreadable_for_a_while_does_not_end_the_shadow(numbers):
    shadowed = PolledShadow(numbers)
    numbers.publish(2, verdict="fail")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "numbers", raises(OSError(errno.EIO, "Input/output error")))
        assert shadowed.poll() is None
    assert shadowed.poll() == 2


@pytest.mark.slow
def test_a_candidate_that_hangs_delays_no_request_and_its_requests_are_dropped(deploy, served, body_of, eventually):
    publisher = deploy("sluggish")
    publisher.publish(1)
    publisher.publish(100, verdict="fail")
    with served(publisher, shadow=1.0) as server:
        eventually(lambda: server.report().shadow)
        models = sys.modules[publisher.deployment.model.factory.partition(":")[0]]
        models.go_on.clear()  # for which it would wait for 30 seconds
        try:
            for _ in range(20):
                ask(server, body_of(1))
            assert count(server, 'rows_total{outcome="compared"}') == 0, "they waited for the candidate"
            # One is at work, and four wait; or fewer, where the shadow found no moment without a request.
            eventually(lambda: count(server, 'rows_total{outcome="dropped"}') >= 15)
        finally:
            models.go_on.set()
        eventually(lambda: count(server, 'rows_total{outcome="compared"}') >= 1)


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_is_between_0_and_1(numbers, served, fraction):
    with pytest.raises(ValueError, match="shadow"):
        with served(numbers, shadow=fraction):
            pass
