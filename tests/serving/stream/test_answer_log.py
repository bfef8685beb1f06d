"""The log of answers: which events it writes for which request, what it drops, and that no answer waits for it."""

import dataclasses
import json
import re
import socket
import weakref
from types import SimpleNamespace

import grpc
import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.confluent import best_effort
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.serving.grpc.messages import MESSAGES, SERVICE
from anabranch.serving.metrics import LogMetrics
from anabranch.serving.protocol.codec import Request, Signature
from anabranch.serving.protocol.tensors import TensorSpec
from anabranch.serving.settings import AnswerLogSettings
from anabranch.serving.stream import answer_log
from anabranch.serving.stream.answer_log import AnswerLog
from tests.serving.conftest import Publisher

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {"x": {"dtype": "float32", "shape": [4]}},
            "label": {"name": "y", "dtype": "float32"},
            "key": {"name": "card"},
        }
    )
)
SIGNATURE = Signature(SCHEMA, [TensorSpec("prediction", np.dtype("float32"), ())], 4096, kept={"card", "x"})
VERSION = SimpleNamespace(name="3", progress={"trained_through": "events:0=30"})


def of(publisher, bootstrap):
    """Return a publisher whose server has the broker, and events with the key `card`."""
    settings = StreamSettings.model_validate({"bootstrap_servers": bootstrap, "topics": ["others"]})
    return Publisher(dataclasses.replace(publisher.deployment, schema=SCHEMA, source=settings.resolved("tiny")))


def body(rows, cards=None, **members):
    inputs = [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": list(range(4 * rows))}]
    if cards is not None:
        inputs.append({"name": "card", "shape": [rows], "datatype": "BYTES", "data": cards})
    return {"inputs": inputs, **members}


def test_each_answered_row_is_an_event_once_the_server_has_stopped(
    kafka, make_topic, numbers, served, consume_all, eventually
):
    topic, publisher = make_topic(1), of(numbers, kafka.bootstrap)
    publisher.publish(3)
    with served(publisher, grpc_port=0, log={"topic": topic, "features": True}) as running:
        reply = httpx.post(running.infer, json=body(2, ["A", "Ü"]), headers={"x-request-id": "first"}, timeout=60)
        httpx.post(running.infer, json=body(1, id="second"), timeout=60).raise_for_status()
        httpx.post(running.infer, json={"inputs": []}, timeout=60)
        message = MESSAGES["ModelInferRequest"](model_name="tiny", id="third")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        message.raw_input_contents.append(np.ones(4, np.float32).tobytes())
        with grpc.insecure_channel(eventually(lambda: running.report().grpc_address)) as channel:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(message.SerializeToString(), timeout=60)
        inputs = httpx.get(f"{running.url}/v2/models/tiny", timeout=60).json()["inputs"]
    assert reply.json()["outputs"][0]["data"] == [3.0, 3.0]
    assert {"name": "card", "datatype": "BYTES", "shape": [-1]} in inputs
    records = consume_all(kafka.bootstrap, topic, at_least=4)
    common = {"model_version": "3", "trained_through": "events:0=30", "outputs": {"prediction": 3.0}}
    assert [json.loads(record.value) for record in records] == [
        {"request_id": "first", "row": 0, "key": "A", **common, "features": {"x": [0.0, 1.0, 2.0, 3.0]}},
        {"request_id": "first", "row": 1, "key": "Ü", **common, "features": {"x": [4.0, 5.0, 6.0, 7.0]}},
        {"request_id": "second", "row": 0, "key": None, **common, "features": {"x": [0.0, 1.0, 2.0, 3.0]}},
        {"request_id": "third", "row": 0, "key": None, **common, "features": {"x": [1.0] * 4}},
    ]
    assert [record.key for record in records] == [b"A", "Ü".encode(), None, None]
    headers = dict(records[1].headers)
    assert re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", headers.pop("ce_time"))
    assert headers.pop("ce_source").startswith(b"/anabranch/tiny/")
    assert headers == {
        "ce_specversion": b"1.0",
        "ce_id": b"first-1",
        "ce_type": b"anabranch.answer",
        "content-type": b"application/json",
    }
    report = running.report()
    assert (report.log.topic, report.log.answers) == (topic, {"written": 4})


@pytest.fixture
def nowhere():
    """An address that refuses connections, and that nobody else can take."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_answers_do_not_wait_for_a_broker_that_is_away(numbers, served, nowhere, monkeypatch, eventually):
    monkeypatch.setattr(best_effort, "_TIMEOUT_MS", 200)
    publisher = of(numbers, nowhere)
    publisher.publish(3)
    with served(publisher, log={"topic": "answers"}) as running:
        for _ in range(5):
            assert httpx.post(running.infer, json=body(2), timeout=60).status_code == 200
        report = eventually(lambda: (r := running.report()).log.answers.get("dropped") == 10 and r.problems and r)
        text = httpx.get(f"{running.url}/metrics", timeout=60).text
    assert report.ready
    assert re.match(r'answers are missing in "answers", the topic of \[serving.log\]: .', report.problems[0])
    assert 'anabranch_serving_log_answers_total{outcome="dropped"} 10.0' in text
    assert running.report().log.answers == {"dropped": 10}


@pytest.fixture
def log(numbers, nowhere):
    """`log(**settings)`: a log whose broker is away, and whose thread does not run."""

    def make(**settings):
        settings = AnswerLogSettings(topic="answers", **settings)
        return AnswerLog(of(numbers, nowhere).deployment, settings, LogMetrics(*[CollectorRegistry()] * 2), "a")

    return make


def request(name, rows=1):
    return Request({}, rows, name, {"prediction": False}, {}, None), {"prediction": np.zeros(rows, np.float32)}


def test_a_sample_is_of_the_same_requests_on_every_server(log):
    servers, chosen = [log(sample=0.1), log(sample=0.1)], []
    for server in servers:
        for number in range(5000):
            server.add(SIGNATURE, "", VERSION, *request(f"r{number}"))
        chosen.append([answered.request_id for answered in server._waiting])
    assert chosen[0] == chosen[1]
    assert 400 < len(chosen[0]) < 600  # the names are fixed: 500 are expected, and the standard deviation is 21


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(log, monkeypatch):
    monkeypatch.setattr(answer_log, "_MOST_BYTES", 10 * (answer_log._ROW_BYTES + 4))
    full = log()
    for _ in range(12):
        full.add(SIGNATURE, "r", VERSION, *request(None))
    full._count()
    assert (len(full._waiting), full.report().answers) == (10, {"dropped": 2})
    assert full.problem == (
        'answers are missing in "answers", the topic of [serving.log]: they come faster than this server can write them'
    )


def test_a_large_request_is_logged_whole_by_a_broker_that_takes_it(
    kafka, make_topic, numbers, monkeypatch, consume_all, eventually
):
    monkeypatch.setattr(best_effort, "_MOST_KILOBYTES", 16)  # a tenth of the request
    topic = make_topic(1)
    metrics = LogMetrics(*[CollectorRegistry()] * 2)
    log = AnswerLog(of(numbers, kafka.bootstrap).deployment, AnswerLogSettings(topic=topic), metrics, "a")
    log.start()
    log.add(SIGNATURE, "r", VERSION, *request(None, rows=1000))
    eventually(lambda: sum(log.report().answers.values()) == 1000)
    log.stop()
    assert log.report().answers == {"written": 1000}
    assert len(consume_all(kafka.bootstrap, topic, at_least=1000)) == 1000


class Version:
    name, progress = "3", VERSION.progress


def test_what_is_enqueued_keeps_neither_a_model_nor_inputs_that_are_not_logged(log):
    version, features = Version(), {"x": np.zeros((1, 4), np.float32)}
    asked, answers = request("r")
    kept = [weakref.ref(version), weakref.ref(features["x"])]
    log = log()
    log.add(SIGNATURE, "", version, dataclasses.replace(asked, features=features), answers)
    del version, features
    assert [each() for each in kept] == [None, None]


def test_strings_count_as_long_as_they_are(log, monkeypatch):
    monkeypatch.setattr(answer_log, "_MOST_BYTES", 10_000)
    log, (asked, answers) = log(), request("r")
    asked = dataclasses.replace(asked, given={"card": np.array(["x" * 20_000], object)})
    log.add(SIGNATURE, "", VERSION, asked, answers)
    log._count()
    assert log.report().answers == {"dropped": 1}


def test_the_end_waits_for_a_broker_that_is_away_only_for_a_while(log, monkeypatch):
    monkeypatch.setattr(answer_log, "_FLUSH", answer_log.timedelta(seconds=0.2))
    ended = log()
    ended.add(SIGNATURE, "r", VERSION, *request(None, rows=3))
    ended.start()
    ended.stop()
    assert not ended._thread.is_alive()
    assert ended.report().answers == {"dropped": 3}
    assert "the broker did not answer before the end" in ended.problem
