"""Answers through Kafka: what is written for which message, by which version, and what is not."""

import contextlib
import dataclasses
import json
import re

import httpx
import numpy as np
import pytest
import torch
from confluent_kafka import Consumer, KafkaError, KafkaException
from kafka import KafkaAdminClient, TopicPartition

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.partition import TopicPartition as P
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import row_dtype
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.confluent import read_process_write
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.extensions.served_answers.topic import AnswerDecoder
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.serving.reporting.report import read_report
from tests import forkserver
from tests.serving.conftest import Publisher
from tests.support import waiting
from tests.support.topics import TopicFactory
from tests.support.waiting import PATIENCE_SECONDS

pytest.importorskip("confluent_kafka")


@pytest.fixture
def stream(kafka, make_topic):
    """Topics of a test, and a publisher's deployment that reads them."""
    return Stream(kafka.bootstrap, make_topic)


class Stream:
    def __init__(self, bootstrap, make_topic):
        self.bootstrap, self.partitions = bootstrap, 2
        self.input, self.output = make_topic(2), make_topic(2)

    def source(self, **changes):
        settings = {"bootstrap_servers": self.bootstrap, "topics": ["others"], **changes}
        return (
            StreamSettings.model_validate(settings)
            .resolved("tiny")
            .model_copy(update={"dead_letter_topic": f"{self.input}.dead"})
        )

    def of(self, publisher, schema=None, **changes):
        """Return a publisher whose server reads the topics."""
        members = {"source": self.source(**changes)}
        if schema is not None:
            members["schema"] = Schema(SchemaSettings.model_validate(schema))
        return Publisher(dataclasses.replace(publisher.deployment, **members))

    def settings(self, **changes):
        """Return `[serving.stream]`."""
        return {"topics": [self.input], "output": self.output, **changes}

    def committed(self):
        """Return the group's offsets, the sum over all partitions."""
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=self.bootstrap)) as admin:
            found = admin.list_group_offsets(["anabranch-tiny-answers"])
        offsets = found["anabranch-tiny-answers"]
        return sum(offsets[p].offset for p in (TopicPartition(self.input, n) for n in range(2)) if p in offsets)


def event(number, **more):
    return {"x": [float(number), 0.0, 0.0, 0.0], **more}


def answers(consume_all, stream, at_least):
    return consume_all(stream.bootstrap, stream.output, at_least, isolation_level="read_committed")


def sources(records):
    return sorted(dict(record.headers)["anabranch-source"].decode() for record in records)


def test_each_message_gets_one_answer_with_its_key_by_a_version_that_is_named(
    stream, numbers, served, produce, consume_all, eventually
):
    publisher = stream.of(numbers)
    publisher.publish(3)
    for partition in range(2):
        produce(stream.bootstrap, stream.input, [event(i) for i in range(50)], partition=partition, key=b"k")
    with served(publisher, stream=stream.settings()) as running:
        records = answers(consume_all, stream, 100)
        eventually(lambda: running.report().stream.partitions == 2)
    assert sources(records) == sorted(f"{stream.input}[{p}]@{i}" for p in range(2) for i in range(50))
    assert {record.key for record in records} == {b"k"}
    assert len({record.partition for record in records}) == 1  # by the hash of the key, as Java's clients do
    for record in records:
        headers = dict(record.headers)
        assert json.loads(record.value) == {"prediction": 3.0}
        assert (headers["model_version"], headers["trained_through"]) == (b"3", b"events:0=30")
    assert stream.committed() == 100


def test_answers_are_those_of_http(stream, deploy, served, produce, consume_all):
    publisher = stream.of(deploy("linear"))
    torch.manual_seed(0)
    weights = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    publisher.publish(1, weights)
    rows = [[float(i), -1.0, 0.5, i / 7] for i in range(20)]
    with served(publisher, stream=stream.settings()) as running:
        produce(stream.bootstrap, stream.input, [{"x": row} for row in rows])
        records = answers(consume_all, stream, 20)
        data = [number for row in rows for number in row]
        body = {"inputs": [{"name": "x", "shape": [20, 4], "datatype": "FP32", "data": data}]}
        reply = httpx.post(running.infer, json=body).json()
    outputs = {output["name"]: output["data"] for output in reply["outputs"]}
    for record in records:
        value, at = json.loads(record.value), int(dict(record.headers)["anabranch-source"].decode().rpartition("@")[2])
        assert value["prediction"] == outputs["prediction"][at]
        assert value["probabilities"] == pytest.approx(outputs["probabilities"][3 * at : 3 * at + 3], abs=1e-6)


def test_answers_have_the_calibration_and_the_decision_of_their_version_and_can_be_read_back(
    stream, deploy, served, produce, consume_all
):
    publisher = stream.of(deploy("linear"))
    costs = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [50.0, 50.0, 0.0]]
    rule = AnswerRule(Calibration("platt", 500, bias=[1.0, 0.0, 0.0]), costs)
    publisher.publish(4, {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, rule=rule)
    produce(stream.bootstrap, stream.input, [event(i) for i in range(5)])
    with served(publisher, stream=stream.settings()):
        records = answers(consume_all, stream, 5)
    expected = torch.tensor([1.0, 0.0, 0.0]).log_softmax(0)
    for record in records:
        value = json.loads(record.value)
        assert value["prediction"] == 2
        assert value["probabilities"] == pytest.approx(expected.exp().tolist(), abs=1e-6)
    values, headers = [record.value for record in records], [record.headers for record in records]
    messages = Messages(P(stream.output, 0), range(5), [0] * 5, [None] * 5, values, headers, 5)
    read, unreadable = AnswerDecoder("classes", 3).decode(messages)
    assert (sorted(read.offset), set(read.source), set(read.version)) == ([*range(5)], {(stream.input, 0)}, {4})
    assert unreadable == 0
    np.testing.assert_allclose(read.output_NK, np.tile(expected.numpy(), (5, 1)), atol=1e-6)


def test_a_restart_goes_on_where_the_server_stopped(stream, numbers, served, produce, consume_all):
    publisher = stream.of(numbers)
    publisher.publish(1)
    for begin in (0, 10):
        produce(stream.bootstrap, stream.input, [event(i) for i in range(10)])
        with served(publisher, stream=stream.settings()):
            records = answers(consume_all, stream, begin + 10)
    assert sources(records) == sorted(f"{stream.input}[0]@{i}" for i in range(20))


def test_messages_that_cannot_be_decoded_or_answered_become_dead_letters_and_the_others_are_answered(
    stream, deploy, served, produce, consume_all, eventually
):
    publisher = stream.of(deploy("touchy"))
    publisher.publish(1, {"scale": torch.ones(())})
    values = [event(1), b"{", event(-1), {"y": 1}, event(2), event(1000), None]
    produce(stream.bootstrap, stream.input, values, key=b"a")
    with served(publisher, stream=stream.settings()) as running:
        records = answers(consume_all, stream, 2)
        letters = consume_all(stream.bootstrap, f"{stream.input}.dead", 5)
        counts = eventually(lambda: (m := running.report().stream.messages).get("dead_lettered") and m)
    assert sources(records) == [f"{stream.input}[0]@{i}" for i in (0, 4)]
    assert {record.value for record in records} == {b'{"prediction":1.0}', b'{"prediction":2.0}'}
    reasons = {
        dict(letter.headers)["anabranch-source"].decode()[-1]: dict(letter.headers)["anabranch-error"]
        for letter in letters
    }
    assert set(reasons) == {"1", "2", "3", "5", "6"}
    assert reasons["2"].startswith(b"the model fails on this input: IndexError")
    assert b"no finite prediction" in reasons["5"]
    assert reasons["6"] == b"null value"
    assert [letter.value for letter in letters if letter.value == b"{"]
    assert counts == {"answered": 2, "dead_lettered": 5}


def test_tombstones_get_no_answer_where_events_have_a_key(stream, numbers, served, produce, consume_all):
    schema = {**numbers.deployment.schema.settings.model_dump(exclude_unset=True), "key": {"name": "user"}}
    publisher = stream.of(numbers, schema)
    publisher.publish(1)
    produce(stream.bootstrap, stream.input, [event(1, user="a"), None, event(2, user="a")], key=b"a")
    with served(publisher, stream=stream.settings()):
        records = answers(consume_all, stream, 2)
    assert sources(records) == [f"{stream.input}[0]@{i}" for i in (0, 2)]
    assert consume_all(stream.bootstrap, f"{stream.input}.dead") == []


def test_a_message_of_several_events_gets_a_list_with_null_for_those_without_an_answer(
    stream, deploy, served, produce, consume_all
):
    publisher = stream.of(deploy("touchy"), format="rows")
    publisher.publish(1, {"scale": torch.ones(())})
    rows = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [3.0, 0, 0, 0]])
    packed = np.zeros(3, row_dtype(publisher.deployment.schema))
    packed["x"] = rows.numpy()
    produce(stream.bootstrap, stream.input, [packed.tobytes(), packed[2:].tobytes()])
    with served(publisher, stream=stream.settings()):
        first, second = answers(consume_all, stream, 2)
        (letter,) = consume_all(stream.bootstrap, f"{stream.input}.dead", 1)
    found = {record.value for record in (first, second)}
    assert found == {b'[{"prediction":1.0},null,{"prediction":3.0}]', b'[{"prediction":3.0}]'}
    assert dict(letter.headers)["anabranch-rows"] == b"1"


def test_messages_wait_for_the_first_version_and_a_swap_in_between_loses_none(
    stream, numbers, served, produce, consume_all, eventually
):
    publisher = stream.of(numbers)
    produce(stream.bootstrap, stream.input, [event(i) for i in range(5)])
    with served(publisher, ready=False, stream=stream.settings()) as running:
        publisher.publish(1)
        assert len(answers(consume_all, stream, 5)) == 5
        for number in range(2, 7):
            produce(stream.bootstrap, stream.input, [event(i) for i in range(20)], partition=number % 2)
            publisher.publish(number)
        eventually(lambda: running.report().version == 6)
        produce(stream.bootstrap, stream.input, [event(0)])
        records = answers(consume_all, stream, 106)
    assert len(sources(records)) == len(set(sources(records))) == 106
    assert all(json.loads(r.value)["prediction"] == float(dict(r.headers)["model_version"]) for r in records)
    assert {dict(record.headers)["model_version"] for record in records} >= {b"1", b"6"}


def test_reading_pauses_at_the_bound_of_messages_in_flight(
    stream, deploy, served, produce, consume_all, models, eventually
):
    publisher = stream.of(deploy("held"))
    publisher.publish(1)
    with served(publisher, stream=stream.settings(max_in_flight=8), max_batch=4) as running:
        hold = models / "hold"
        hold.touch()
        try:
            produce(stream.bootstrap, stream.input, [event(i) for i in range(100)])
            eventually(lambda: running.report().stream.lag == 100)
            assert answers(consume_all, stream, 0) == []
            assert stream.committed() == 0
        finally:
            hold.unlink()
        assert len(answers(consume_all, stream, 100)) == 100
        eventually(lambda: running.report().stream.lag == 0)


def test_servers_divide_the_partitions_and_one_that_stops_loses_no_message(
    stream, deploy_in, served, produce, consume_all, eventually, tmp_path
):
    publishers = [stream.of(deploy_in("number", tmp_path / name)) for name in ("a", "b")]
    for publisher in publishers:
        publisher.publish(1)
    settings = stream.settings()
    with served(publishers[0], stream=settings) as first:
        with served(publishers[1], stream=settings) as second:
            eventually(lambda: (first.report().stream.partitions, second.report().stream.partitions) == (1, 1))
            for partition in range(2):
                produce(stream.bootstrap, stream.input, [event(i) for i in range(30)], partition=partition)
            answers(consume_all, stream, 60)
            eventually(lambda: second.report().stream.messages == {"answered": 30})
        produce(stream.bootstrap, stream.input, [event(i) for i in range(30)], partition=1)
        records = answers(consume_all, stream, 90)
        eventually(lambda: first.report().stream.partitions == 2)
    assert len(sources(records)) == len(set(sources(records))) == 90


@pytest.mark.slow
def test_a_server_that_joins_gets_partitions_while_the_model_answers_nothing(
    kafka, stream, deploy, served, produce, models, eventually
):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker answers no member that leaves during a rebalance")
    publisher = stream.of(deploy("held"))
    publisher.publish(1)
    given = []
    with served(publisher, stream=stream.settings(max_in_flight=8), max_batch=4) as running:
        (models / "hold").touch()
        settings = {"bootstrap.servers": stream.bootstrap, "group.id": "anabranch-tiny-answers"}
        other = Consumer({**settings, "session.timeout.ms": 6000, "enable.auto.commit": False})
        try:
            produce(stream.bootstrap, stream.input, [event(i) for i in range(100)])
            eventually(lambda: running.report().stream.lag == 100)
            other.subscribe([stream.input], on_assign=lambda _, partitions: given.extend(partitions))
            eventually(lambda: other.poll(0.1) or given)
        finally:
            (models / "hold").unlink()
            other.close()


def test_an_answer_that_the_topic_does_not_take_is_a_problem_that_lasts(stream, deploy, served, produce, eventually):
    publisher = stream.of(deploy("linear"), format="rows")
    publisher.publish(1, {"weight": torch.randn(3, 4), "bias": torch.randn(3)})
    rows = np.zeros(40_000, row_dtype(publisher.deployment.schema))
    rows["x"] = np.random.default_rng(0).standard_normal((40_000, 4))
    produce(stream.bootstrap, stream.input, [rows.tobytes()])
    with served(publisher, stream=stream.settings()) as running:

        def problem():
            return next((each for each in running.report().problems if "raise its max.message.bytes" in each), None)

        before, time = eventually(problem), running.report().time
        eventually(lambda: running.report().time > time + 3)
        assert problem() == before


@pytest.mark.slow
def test_a_broker_that_hangs_costs_time_alone(mortal_kafka, numbers, served, produce, consume_all, eventually):
    stream = Stream(mortal_kafka.bootstrap, TopicFactory(mortal_kafka.bootstrap, "hangs"))
    publisher = stream.of(numbers)
    publisher.publish(1)
    with served(publisher, stream=stream.settings()) as running:
        produce(stream.bootstrap, stream.input, [event(i) for i in range(500)])
        eventually(lambda: running.report().stream.messages.get("answered"))
        mortal_kafka.stop_answering()
        eventually(lambda: running.report().problems)
        mortal_kafka.answer_again()
        produce(stream.bootstrap, stream.input, [event(i) for i in range(500)], partition=1)
        eventually(lambda: stream.committed() == 1000)
        eventually(lambda: running.report().problems == [])
        records = answers(consume_all, stream, 1000)
    assert sources(records) == sorted(f"{stream.input}[{p}]@{i}" for p in range(2) for i in range(500))


@pytest.mark.process
def test_workers_divide_the_partitions_and_report_the_sum(stream, pipeline, numbers, produce, consume_all, eventually):
    answering = f'workers = 2\n[serving.stream]\ntopics = ["{stream.input}"]\noutput = "{stream.output}"\n'
    path = pipeline(more=answering)
    text = path.read_text().replace("[stream]", f'[stream]\nbootstrap_servers = "{stream.bootstrap}"')
    path.write_text(
        text.replace('topics = ["events"]', f'topics = ["events"]\ndead_letter_topic = "{stream.input}.dead"')
    )
    numbers.publish(1)
    with (path.parent / "log").open("w") as log:
        process = forkserver.start(["-m", "anabranch.serving", "-c", str(path)], stderr=log, start_new_session=True)
    try:
        state_dir = numbers.deployment.state_dir
        waiting.wait_until(
            lambda: (r := read_report(state_dir)) and r.stream and r.stream.partitions == 2,
            what=lambda: f"two partitions of {read_report(state_dir)}, after {(path.parent / 'log').read_text()}:",
        )
        for partition in range(2):
            produce(stream.bootstrap, stream.input, [event(i) for i in range(30)], partition=partition)
        assert len(set(sources(answers(consume_all, stream, 60)))) == 60
        eventually(lambda: read_report(state_dir).stream.messages == {"answered": 60})
    finally:
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0


def test_latency_and_counts_are_in_the_metrics(stream, numbers, served, produce, consume_all, eventually):
    publisher = stream.of(numbers)
    publisher.publish(1)
    with served(publisher, stream=stream.settings()) as running:
        produce(stream.bootstrap, stream.input, [event(i) for i in range(10)])
        report = eventually(lambda: (r := running.report().stream).messages.get("answered") == 10 and r)
        text = httpx.get(f"{running.url}/metrics").text
    assert 0 < report.p50_seconds <= report.p99_seconds
    assert re.search(r"^anabranch_serving_stream_answer_duration_seconds_count 10\.0$", text, re.MULTILINE)
    assert 'anabranch_serving_stream_messages_total{outcome="answered"} 10.0' in text
    assert re.search(r"^anabranch_serving_stream_lag \d", text, re.MULTILINE)


def test_from_the_latest_on_earlier_messages_get_no_answer(stream, numbers, served, produce, consume_all, eventually):
    publisher = stream.of(numbers)
    publisher.publish(1)
    produce(stream.bootstrap, stream.input, [event(i) for i in range(10)])
    with served(publisher, stream=stream.settings(start="latest")) as running:
        eventually(lambda: running.report().stream.partitions == 2)
        produce(stream.bootstrap, stream.input, [event(1)])
        records = answers(consume_all, stream, 1)
    assert sources(records) == [f"{stream.input}[0]@10"]


def test_at_least_once_commits_after_its_answers_without_a_transaction(
    stream, numbers, served, produce, consume_all, eventually
):
    publisher = stream.of(numbers)
    publisher.publish(1)
    produce(stream.bootstrap, stream.input, [event(i) for i in range(10)])
    with served(publisher, stream=stream.settings(delivery="at-least-once")):
        assert len(answers(consume_all, stream, 10)) == 10
        eventually(lambda: stream.committed() == 10)


def test_a_topic_that_is_missing_is_a_problem_and_the_server_answers_http_meanwhile(
    stream, numbers, served, body_of, create_topic, produce, consume_all, eventually
):
    publisher = stream.of(numbers)
    publisher.publish(1)
    missing = f"{stream.output}-later"
    produce(stream.bootstrap, stream.input, [event(1)])
    with served(publisher, stream=stream.settings(output=missing)) as running:
        eventually(lambda: any(f'topic "{missing}" does not exist' in each for each in running.report().problems))
        assert httpx.post(running.infer, json=body_of(1)).status_code == 200
        create_topic(stream.bootstrap, missing)
        assert len(consume_all(stream.bootstrap, missing, 1, isolation_level="read_committed")) == 1
        eventually(lambda: running.report().problems == [])


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (KafkaError._UNSUPPORTED_FEATURE, r"has no transactions; set serving\.stream\.delivery"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, r"may not use the transactional id anabranch-tiny-answers-"),
    ],
)
def test_a_broker_without_transactions_ends_the_server_with_a_sentence(
    stream, numbers, served, monkeypatch, eventually, code, sentence
):
    class Refusing(read_process_write.Producer):
        def init_transactions(self, *_):
            raise KafkaException(KafkaError(code))

    monkeypatch.setattr(read_process_write, "Producer", Refusing)
    publisher = stream.of(numbers)
    publisher.publish(1)
    with pytest.raises(SettingsError, match=sentence):
        with served(publisher, stream=stream.settings()) as running:
            eventually(lambda: not running.report().ready)
