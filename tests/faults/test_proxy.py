"""Faults of the network to the broker or to Redis: training continues, and the counts add up."""

import threading

import numpy as np
import pytest

from tests.faults.kills import CODE, ROW, TEXT, accounts
from tests.faults.pipeline import Pipeline, Supervised, make_topic, producer, send
from tests.faults.proxy import Fault, Proxy
from tests.pipelines import adds_up, encoded, total

FAULTS = {
    "corrupted": Fault(corrupted=1.0),
    "closed": Fault(closed=True),
    "stalled": Fault(stalled=True),
    "delayed": Fault(delay_seconds=0.2),
    "throttled": Fault(bytes_per_second=20_000),
}
EVENTS = 400
REPLAYING = """
{stream}
[schema.features.x]
dtype = "float32"
shape = [64]
[schema.label]
name = "y"
classes = 3
[model]
factory = "faulty_model:build"
{learner}
batch_size = 16
device = "cpu"
[gate]
holdout_fraction = 0.0
[replay]
capacity = 3000
device_bytes = 0
disk = {bytes = "4MB"}
"""
PICKY = """
from torch import nn

class Picky(nn.Linear):
    def forward(self, x):
        if not ((x == 0) | (x == 1)).all():
            raise ValueError("a row that no event had")
        return super().forward(x)

def build():
    return Picky(64, 3)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_trained_once_through_faults_of_the_network_to_the_broker(kafka, tmp_path):
    topic = make_topic(kafka.bootstrap, "proxy")
    text = TEXT.format(events=EVENTS * (len(FAULTS) + 1), batch=16, checkpoint_every="200ms")
    with Proxy(kafka.bootstrap) as proxy:
        pipeline = Pipeline(tmp_path, proxy.address, topic, CODE, text)
        with Supervised(pipeline) as learner:
            for index, fault in enumerate([Fault(), *FAULTS.values()]):
                # A fast learner fetches too few events at once to be corrupted, unless they wait for it.
                proxy.suffer(Fault(stalled=True) if fault.corrupted else fault)
                rows = np.zeros(EVENTS, ROW)
                rows["id"] = np.arange(EVENTS) + index * EVENTS
                send(kafka.bootstrap, topic, (row.tobytes() for row in rows))
                proxy.suffer(fault)
                if fault.closed or fault.stalled:
                    learner.until(lambda: pipeline.report().problems, "a problem of the broker")
                    proxy.heal()
                if fault.corrupted:
                    learner.until(lambda: proxy.corruptions, "a bit that is flipped")
                    proxy.heal()
                expected = (index + 1) * EVENTS
                report = learner.wait_for(lambda report, n=expected: total(report) == n, f"all events of {fault}")
                proxy.heal()
            report = learner.wait_for(lambda report: not report.problems, "health")
            assert proxy.connections > 3
    assert report.steps == report.steps_since_start, "it was started again"
    assert adds_up(report)
    assert report.outcomes["trained"] == expected
    assert (accounts(pipeline) == 1).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_events_are_replayed_from_the_disk_through_faults_of_the_network_to_redis(kafka, mortal_redis, tmp_path):
    topic, sent = make_topic(kafka.bootstrap, "redis"), 0
    messages = encoded({"x": [float(i % 3 == k % 3) for k in range(64)], "y": i % 3} for i in range(EVENTS))
    with Proxy(f"127.0.0.1:{mortal_redis.port}") as proxy:
        text = REPLAYING + f'redis = {{url = "redis://{proxy.address}/0", bytes = "20MB"}}\n'
        pipeline = Pipeline(tmp_path, kafka.bootstrap, topic, PICKY, text)
        with Supervised(pipeline) as learner:
            for name, fault in {"none": Fault(), **FAULTS}.items():
                proxy.suffer(fault)
                done = False
                while not done:
                    send(kafka.bootstrap, topic, messages)
                    sent += len(messages)
                    learner.wait_for(lambda report, n=sent: total(report) == n, f"all events, with Redis {name}")
                    # One that answers late counts as away for seconds, in which it sends nothing to be corrupted.
                    done = not fault.corrupted or proxy.corruptions > 0
                if fault.closed or fault.stalled:
                    learner.wait_for(lambda report: "redis" in " ".join(report.problems), "a problem of Redis")
                proxy.heal()
                learner.wait_for(lambda report: not report.problems, f"health after Redis was {name}")
            pid, report = learner.pid(), learner.wait_for(lambda _: True, "a report")
            assert report.pid == pid
            assert report.steps == report.steps_since_start, "it was started again"
    assert adds_up(report)
    assert report.outcomes["trained"] == report.replay_rows["disk"] == sent
    assert report.replay_lost == 0


class Withholding(Proxy):
    """Passes no answer of the server on while `passes` is not set."""

    def __init__(self, target):
        super().__init__(target)
        self.passes = threading.Event()
        self.passes.set()

    def _spoiled(self, chunk):
        self.passes.wait()
        return chunk


def test_an_event_whose_acknowledgement_is_lost_is_sent_again_and_stored_once(kafka, consume_all):
    topic = make_topic(kafka.bootstrap, "acknowledged")
    with Withholding(kafka.bootstrap) as proxy, producer(proxy.address, topic) as sender:
        sender.send(b"first")
        sender.flush()
        connections = proxy.connections
        proxy.passes.clear()
        sender.send(b"second")
        assert len(consume_all(kafka.bootstrap, topic, 2)) == 2
        proxy.suffer(Fault(closed=True))
        proxy.passes.set()  # to connections that are closed
        assert sender.acknowledged == 1
        proxy.heal()
        sender.flush()
        assert sender.acknowledged == 2
        assert proxy.connections > connections
    assert [record.value for record in consume_all(kafka.bootstrap, topic, 2)] == [b"first", b"second"]
