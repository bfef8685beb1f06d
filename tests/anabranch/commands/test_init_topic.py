"""`anabranch init --from TOPIC`: a pipeline that can use the messages of a topic, in whatever format they are."""

import io
import json
import random
import time
from datetime import UTC, datetime

import fastavro
import pytest

from anabranch import cli
from anabranch.config.loader import load_config
from tests.support.ports import free_ports
from tests.support.protobuf import message_class

ROWS = 120
HOUR_MS = 3_600_000
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "account_id", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "amount", "type": ["null", "double"]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["CARD", "CASH"]}},
        {"name": "ship", "type": {"type": "record", "name": "Ship", "fields": [{"name": "km", "type": "float"}]}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "late", "type": "boolean"},
    ],
}
PROTOBUF = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
enum Kind { CARD = 0; CASH = 1; }
message Ship { float km = 1; }
message Order {
  string account_id = 1;
  google.protobuf.Timestamp at = 2;
  optional double amount = 3;
  Kind kind = 4;
  Ship ship = 5;
  map<string, string> tags = 6;
  bool late = 7;
}
"""


def orders():
    r = random.Random(7)
    for n in range(ROWS):
        km = r.uniform(1, 900)
        yield {
            "account_id": f"a{n % 9}",
            "at": 1_767_225_600_000 + n * HOUR_MS,
            "amount": None if n % 10 == 0 else round(r.uniform(1, 99), 2),
            "kind": r.choice(["CARD", "CASH"]),
            "ship": {"km": km},
            "tags": {"a": "b"},
            "late": km > 450,
        }


def json_lines(registry):
    del registry
    return [{**row, "at": datetime.fromtimestamp(row["at"] / 1000, UTC).isoformat()} for row in orders()]


def avro(registry):
    parsed, found = fastavro.parse_schema(AVRO), []
    prefix = b"\0" + registry.register("orders-value", AVRO).to_bytes(4)
    for row in orders():
        file = io.BytesIO()
        fastavro.schemaless_writer(file, parsed, row)
        found.append(prefix + file.getvalue())
    return found


def protobuf(registry):
    order, found = message_class(PROTOBUF, "Order"), []
    prefix = b"\0" + registry.register("orders-value", PROTOBUF, "PROTOBUF").to_bytes(4) + b"\x02\x02"
    for row in orders():
        message = order(account_id=row["account_id"], kind=row["kind"], late=row["late"], tags=row["tags"])
        message.at.FromMilliseconds(row["at"])
        message.ship.km = row["ship"]["km"]
        if row["amount"] is not None:
            message.amount = row["amount"]
        found.append(prefix + message.SerializeToString())
    return found


def json_schema(registry):
    prefix = b"\0" + registry.register("orders-value", {"type": "object"}, "JSON").to_bytes(4)
    return [prefix + json.dumps(row).encode() for row in json_lines(registry)]


def debezium(registry):
    return [{"op": "c", "before": None, "after": row, "ts_ms": 1} for row in json_lines(registry)]


def cloud_events(registry):
    head = {"specversion": "1.0", "type": "order", "source": "shop"}
    return [{**head, "id": str(n), "data": row} for n, row in enumerate(json_lines(registry))]


FORMATS = {each.__name__: each for each in (json_lines, avro, protobuf, json_schema, debezium, cloud_events)}


@pytest.fixture
def init(tmp_path, kafka, registry, capsys, monkeypatch):
    """`init(topic, ...)` returns what the command returns and prints."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)

    def init(topic, *arguments, broker=kafka.bootstrap):
        options = ["--label", "late", "--broker", broker, "--registry", registry.url, *arguments]
        code = cli.main(["init", str(tmp_path / "p"), "--from", topic, *options])
        return code, "".join(capsys.readouterr())

    return init


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize("name", FORMATS)
def test_the_pipeline_can_use_the_messages_of_the_topic(name, init, kafka, registry, make_topic, produce, tmp_path):
    topic, messages = make_topic(2), FORMATS[name](registry)
    now_ms = int(time.time() * 1000)  # a broker removes what is old
    times = [now_ms - ROWS + n for n in range(ROWS)]
    for partition in range(2):
        part = slice(partition, None, 2)
        produce(kafka.bootstrap, topic, messages[part], partition=partition, timestamp_ms=times[part])
    produce(kafka.bootstrap, topic, [None, b"{"], key=b"k")
    code, printed = init(topic, "--no-backtest")
    assert code == 0, printed
    assert f"the pipeline can use {ROWS} of {ROWS + 1} messages; the first that it cannot: " in printed
    pipeline = load_config(tmp_path / "p" / "pipeline.toml", {}).pipeline
    stream, events = pipeline.stream, pipeline.events
    formats = {"avro": "avro", "protobuf": "protobuf", "json_schema": "json-schema"}
    envelopes = {"debezium": "debezium", "cloud_events": "cloudevents"}
    assert (stream.topics, stream.bootstrap_servers) == ((topic,), kafka.bootstrap)
    assert (stream.format, stream.envelope) == (formats.get(name, "json"), envelopes.get(name, "none"))
    assert {feature: (each.field, each.missing, each.cycles) for feature, each in events.features.items()} == {
        "at": (None, None, ("day",)),
        "amount": (None, "indicator", ()),
        "kind": (None, None, ()),
        "km": ("ship.km", None, ()),
    }
    assert (events.key.name, events.time.name, events.label.classes) == ("account_id", "at", 2)


@pytest.mark.slow
@pytest.mark.services
def test_a_backtest_of_the_messages_follows_at_once(init, kafka, make_topic, produce):
    topic = make_topic()
    produce(kafka.bootstrap, topic, json_lines(None))
    code, printed = init(topic)
    assert code == 0, printed
    assert f"can use {ROWS} of {ROWS} messages\n" in printed
    assert "recent accuracy" in printed
    assert "anabranch up" in printed


@pytest.mark.services
class TestRefusals:
    def test_a_topic_that_is_not_there(self, init, kafka):
        code, printed = init("no-such-topic")
        assert code == 2
        assert f"no-such-topic is no file, and no topic of the broker at {kafka.bootstrap}" in printed

    def test_a_broker_that_is_away(self, init):
        (port,) = free_ports(1)
        code, printed = init("orders", broker=f"127.0.0.1:{port}")
        assert code == 3
        assert "orders is no file; as a topic: " in printed

    @pytest.mark.parametrize("name", ["orders.csv", "orders.jsonl.gz", "folder/orders"])
    def test_a_file_that_is_not_there_is_no_topic(self, init, name):
        code, printed = init(name)
        assert code == 2
        assert f"{name} cannot be read: No such file or directory" in printed

    def test_a_topic_without_messages(self, init, make_topic, kafka, produce):
        topic = make_topic()
        produce(kafka.bootstrap, topic, [None], key=b"k")
        code, printed = init(topic)
        assert code == 2
        assert "has no message with a value" in printed

    def test_messages_that_nothing_can_read(self, init, make_topic, kafka, produce):
        topic = make_topic()
        produce(kafka.bootstrap, topic, [b"hello", b"PAR1"])
        code, printed = init(topic)
        assert code == 2
        assert f"no message of the topic {topic} can be read; the first: DecodeError" in printed

    def test_a_registry_that_lacks_the_schema(self, init, make_topic, kafka, produce):
        topic = make_topic()
        produce(kafka.bootstrap, topic, [b"\0\0\0\0\x09abc"])
        code, printed = init(topic)
        assert code in (2, 3)
        assert "9" in printed
        assert "Traceback" not in printed

    def test_a_setting_of_the_environment_that_is_none(self, init, monkeypatch):
        monkeypatch.setenv("ANABRANCH__STREAM__PROPERTIES__NO__SUCH", "1")
        code, printed = init("orders")
        assert code == 2
        assert "ANABRANCH__STREAM__*: properties.no" in printed
