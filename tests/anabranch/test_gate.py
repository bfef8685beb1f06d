"""The gate and the watch from end to end: learner and serving as processes, requests over HTTP, a worse model."""

import contextlib
import http.client
import json
import signal
import threading

import numpy as np
import pytest

from anabranch.config.loader import load_config
from anabranch.learner.errors import VersionError
from anabranch.learner.status.report import read_report
from anabranch.learner.stream.trained_through import parse_trained_through
from anabranch.learner.versions.format import Versions
from tests.pipelines import LINEAR
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.any_broker, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
batch_size = 16
strategy = "none"
optimizer = {{name = "sgd", lr = {lr}}}
[versions]
publish_every = "100ms"
[checkpoints]
every = "1h"
[gate]
holdout_fraction = 0.25
holdout_rows = 1000
min_rows = {min_rows}
max_drop_old = {max_drop}
max_hold = "1s"
[serving]
port = {port}
[device_sharing]
policy = "exclusive"  # a learner at a low level would wait for whatever else the machine does
"""
BREAKING = """
import torch
from torch import nn

class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += self.training
        return self.scale * torch.where(self.steps > 50, x.roll(1, 1), x)

def build():
    return Breaking()
"""
MAX_DROP = 0.05
CHANCE = 0.03
"""Two standard errors of the difference between accuracies of .95 on two samples of 500: the gate's and the test's."""


def shapes(seed, count, shift=0):
    """Features near one of three corners, and which of them, or the next one where labels are permuted."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, count)
    x = (2 * np.eye(3)[label] + 0.4 * rng.standard_normal((count, 3))).round(3)
    return x.tolist(), ((label + shift) % 3).tolist()


class Pipeline:
    """Learner and serving under `up`, and a client that asks about clean events."""

    def __init__(self, folder, port, status, send):
        self.versions = Versions(folder / "var" / "versions")
        self._folder, self._port, self._status, self._send = folder, port, status, send
        self._x, self._y = shapes(1, 500)
        self._produced = 0
        self.accuracy = {}
        """On clean events, by the version that answered."""

    def send(self, seed, count, shift=0):
        x, y = shapes(seed, count, shift)
        self._send([{"x": each, "y": label} for each, label in zip(x, y, strict=True)])
        self._produced += count

    def get(self, path, port=None, method="GET", body=None):
        connection = http.client.HTTPConnection("127.0.0.1", port or self._port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def ask(self):
        """Ask about all clean events at once; return the version that answered and how far it has learned."""
        flat = [number for each in self._x for number in each]
        inputs = [{"name": "x", "shape": [len(self._x), 3], "datatype": "FP32", "data": flat}]
        status, body = self.get("/v2/models/test/infer", method="POST", body=json.dumps({"inputs": inputs}))
        if status != 200:
            return None
        reply = json.loads(body)
        (answers,) = (output["data"] for output in reply["outputs"] if output["name"] == "prediction")
        version = int(reply["model_version"])
        self.accuracy[version] = float(np.mean(np.array(answers) == np.array(self._y)))
        return version, parse_trained_through(reply["parameters"]["trained_through"])

    def has_served_all(self):
        """Whether a version answers that has learned all that was sent."""
        found = self.ask()
        return found is not None and sum(found[1].values()) == self._produced - 1 and found[0]

    def report(self):
        return read_report(self._folder / "var")

    def has_learned_all(self):
        report = self.report()
        return report is not None and sum(report.outcomes.values()) == self._produced and report

    def has_judged_all(self):
        """Whether there is a verdict on a version that has learned all that was sent."""
        for number in reversed(self.versions.numbers()):
            with contextlib.suppress(VersionError):  # it may be deleted meanwhile
                learned = self.versions.manifest(number).trained_through.values()
                if sum(each.offset for each in learned) == self._produced - 1:
                    return self.versions.verdict(number)
        return None

    def order(self, action, version):
        status, body = self.get(f"/api/versions/{version}:{action}", method="POST")
        assert status == 200, body

    def health(self):
        return json.loads(self.get("/api/status")[1])["health"]

    def metric(self, name):
        text = self.get("/metrics", port=self._status)[1].decode()
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))


@contextlib.contextmanager
def asked_all_the_while(pipeline):
    """Asks again and again until the end."""
    done, replies = threading.Event(), []

    def run():
        while not done.wait(0.02):
            replies.append(pipeline.ask())

    asker = threading.Thread(target=run)
    asker.start()
    try:
        yield
    finally:
        done.set()
        asker.join()
    assert len(replies) > 20
    assert None not in replies


@pytest.fixture
def start(spawn, kafka, make_topic, produce, free_port, write_pipeline, tmp_path):
    """Starts a pipeline of a model."""
    started = []

    def begin(model, lr, min_rows):
        topic, port = make_topic(1), free_port()
        rest = CONFIG.format(port=port, lr=lr, min_rows=min_rows, max_drop=MAX_DROP)
        config = load_config(write_pipeline(kafka.bootstrap, topic, rest, model), {})
        status = int(config.pipeline.learner.status.rpartition(":")[2])
        environment = {"OMP_NUM_THREADS": "1"}
        started.append(spawn("-m", "anabranch", "up", environment=environment, cwd=tmp_path))
        return Pipeline(tmp_path, port, status, lambda values: produce(kafka.bootstrap, topic, values))

    yield begin
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)


def test_of_a_poisoned_stream_nothing_is_served_that_is_worse_and_an_alert_says_so(start, until):
    pipeline = start(LINEAR, lr=0.1, min_rows=100)
    pipeline.send(2, 2000)
    began = until(pipeline.has_served_all, "a version that has learned all clean events")
    before = pipeline.accuracy[began]
    assert before > 0.95
    assert pipeline.versions.verdict(began).verdict in ("pass", "inconclusive")

    with asked_all_the_while(pipeline):
        for seed in range(3, 9):
            pipeline.send(seed, 500, shift=1)
            # Were there no version before more of them have come, they would be what is old.
            until(pipeline.has_judged_all, "a version that has learned the poisoned events")
        alert = "no version has passed the gate since"
        until(lambda: any(alert in each for each in pipeline.report().problems), "an alert")
    worst = min(accuracy for version, accuracy in pipeline.accuracy.items() if version >= began)
    assert worst >= before - MAX_DROP - CHANCE, pipeline.accuracy
    assert alert in pipeline.health()["sentence"]
    assert pipeline.metric("anabranch_gate_hold_seconds") > 0

    poisoned = pipeline.versions.numbers()[-1]
    served = pipeline.ask()[0]
    pipeline.order("promote", poisoned)
    assert pipeline.ask()[0] == poisoned
    assert pipeline.accuracy[poisoned] < 0.3, "the stream was not poisoned, and nothing is shown"
    pipeline.order("reject", poisoned)
    assert pipeline.ask()[0] == served


def test_a_version_that_is_worse_on_events_that_come_after_it_is_withdrawn(start, until):
    pipeline = start(BREAKING, lr=1e-6, min_rows=100_000)
    pipeline.send(2, 300)
    until(pipeline.has_served_all, "a version that has learned the first events")
    pipeline.send(3, 1500)  # the model breaks in step 51
    until(pipeline.has_learned_all, "all events are learned")
    until(lambda: (r := pipeline.report()).withdrawn and r, "the watch withdraws it")
    number = until(lambda: (found := pipeline.ask()) and pipeline.accuracy[found[0]] > 0.95 and found[0], "a rollback")
    verdicts = {each: pipeline.versions.verdict(each) for each in pipeline.versions.numbers() if each > number}
    assert {verdict.verdict for verdict in verdicts.values()} == {"fail"}
    watched = [verdict.numbers["watch_drop"] for verdict in verdicts.values() if "watch_drop" in verdict.numbers]
    assert min(watched) > 0.5
    pipeline.send(4, 200)
    until(pipeline.has_learned_all, "later events are learned")
    assert pipeline.ask()[0] == number, "what is as bad is served again"


def test_while_a_good_version_is_pinned_a_worse_one_is_not_served(start, until):
    pipeline = start(BREAKING, lr=1e-6, min_rows=100_000)
    pipeline.send(2, 300)
    good = until(pipeline.has_served_all, "a version that has learned the first events")
    pipeline.order("pin", good)
    pipeline.send(3, 1500)  # the model breaks in step 51
    until(pipeline.has_learned_all, "all events are learned")
    newest = lambda: pipeline.versions.numbers()[-1]  # noqa: E731
    broken = until(lambda: pipeline.versions.manifest(newest()).step > 60 and newest(), "a version of the broken model")
    assert {pipeline.ask()[0] for _ in range(50)} == {good}
    assert pipeline.accuracy[good] > 0.95
    pipeline.order("unpin", good)
    pipeline.order("promote", broken)  # by now the watch may have withdrawn it
    pipeline.ask()
    assert pipeline.accuracy[broken] < 0.3, "the model was not worse, and nothing is shown"
    pipeline.order("reject", broken)
    assert pipeline.ask()[0] < broken
