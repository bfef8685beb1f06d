"""The ingest process and a real broker, while the Schema Registry is away for a time."""

import contextlib
import io
from collections import defaultdict
from datetime import timedelta

import fastavro
import pytest
from confluent_kafka import Producer

from anabranch.ingest.events.block import Outcome
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings

SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})


def avro_record(kind):
    fields = [{"name": "x", "type": kind}, {"name": "y", "type": "int"}]
    return {"type": "record", "name": "Event", "fields": fields}


def message(number, kind, x):
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(avro_record(kind)), {"x": x, "y": 1})
    return b"\0" + number.to_bytes(4) + sink.getvalue()


@pytest.mark.parametrize("client", ["confluent", "kafka-python"])
def test_an_outage_loses_nothing_and_each_partition_keeps_its_order(kafka, make_topic, registry, client):
    topic = make_topic(partitions=2)
    registry.token = "t0ken"
    known = registry.register(f"{topic}-value", avro_record("double"))
    producer = Producer({"bootstrap.servers": kafka.bootstrap})

    def send(partition, number, kind, *values):
        for x in values:
            producer.produce(topic, message(number, kind, x), partition=partition)
        assert producer.flush(60) == 0

    settings = {"bootstrap_servers": kafka.bootstrap, "topics": [topic], "client": client, "format": "avro"}
    stream = StreamSettings.model_validate(settings | {"registry": {"url": registry.url, "token": "t0ken"}})
    source = BlockReader(stream.resolved("test"), SCHEMA, HoldOut(fraction=0, seed=0))
    read: dict[int, list[float]] = defaultdict(list)
    outcomes: set[int] = set()

    def read_until(done):
        for _ in range(600):
            block = source.poll(timedelta(seconds=0.1))
            if block is not None:
                columns = (block.columns[name].tolist() for name in ("partition", "feature.x", "outcome"))
                for index, x, outcome in zip(*columns, strict=True):
                    read[index].append(x)
                    outcomes.add(outcome)
                source.release(block)
            if done():
                return
        pytest.fail(f"not so within a minute: {dict(read)}, {source.problem}")

    with contextlib.closing(source):
        source.open(timeout=timedelta(seconds=120))
        send(0, known, "double", 0)
        send(1, known, "double", 0)
        read_until(lambda: read == {0: [0], 1: [0]})
        registry.faults.away = True
        changed = registry.register(f"{topic}-value", avro_record("int"))
        send(0, known, "double", 1, 2)
        send(0, changed, "int", 3, 4)
        send(0, known, "double", 5)
        send(1, known, "double", 1, 2, 3)
        read_until(lambda: read == {0: [0, 1, 2], 1: [0, 1, 2, 3]} and source.problem is not None)
        assert f"{topic}[0] waits at offset 3 for the schema of its message: the registry at" in str(source.problem)
        send(1, known, "double", 4)
        read_until(lambda: read[1] == [0, 1, 2, 3, 4])
        assert read[0] == [0, 1, 2]
        registry.faults.away = False
        read_until(lambda: read[0] == [0, 1, 2, 3, 4, 5] and source.problem is None)
    assert outcomes == {Outcome.PENDING}
    assert read == {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3, 4]}
