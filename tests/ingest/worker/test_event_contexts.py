"""The trace contexts of records: which rows get them, and that each comes once, however rows are split into blocks."""

import contextlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaProducer

from anabranch.core.tracing.context import MOST_LINKS
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming, contexts_of_block

GOOD = b'{"x": [1, 2, 3], "y": 1}'
SCHEMA = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}


def context(number, flags="01"):
    return f"00-{number + 1:032x}-{number + 1:016x}-{flags}"


def assembled(of_partitions, begin=0):
    """Return one row for each message of the partitions; offsets begin at 10, and a message may have a context."""
    incoming = []
    for number, fields in enumerate(of_partitions):
        offsets = range(10, 10 + len(fields))
        headers = [[] if field is None else [("a", b""), ("traceparent", field.encode())] for field in fields]
        messages = Messages(
            TopicPartition("events", number),
            *(offsets, [0] * len(fields), [None] * len(fields), [GOOD] * len(fields), headers, 10 + len(fields)),
        )
        incoming.append(Incoming(messages, number, Position(10, begin)))
    stream = StreamSettings.model_validate({"topics": ["events"]}).resolved("test")
    schema = Schema(SchemaSettings.model_validate(SCHEMA))
    return BlockBuilder(schema, stream, HoldOut(fraction=0, seed=0), traced=True).assemble(incoming)


def test_sampled_messages_have_their_context_at_their_row():
    found = assembled([[None, context(1), context(2, "00")], [], [context(3), "junk", None]]).contexts
    assert found == [(1, context(1)), (3, context(3))]


def test_a_row_that_has_an_outcome_already_has_no_context():
    assert assembled([[context(1), context(2)]], begin=1).contexts == [(0, context(2))]


@given(
    st.lists(st.lists(st.booleans(), max_size=9), max_size=4),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_each_context_comes_in_one_block(sampled, sizes):
    fields = [
        [context(10 * number + index) if each else None for index, each in enumerate(messages)]
        for number, messages in enumerate(sampled)
    ]
    rows = assembled(fields)
    contexts, begin, came = rows.contexts, 0, []
    while begin < len(rows):
        end = min(len(rows), begin + sizes[begin % len(sizes)])
        came += [(begin + row, field) for row, field in contexts_of_block(contexts, begin, end)]
        begin = end
    expected = [field for messages in fields for field in messages]
    assert came == [(row, field) for row, field in enumerate(expected) if field is not None]


def test_a_block_has_the_first_contexts_of_many():
    contexts = assembled([[context(number) for number in range(MOST_LINKS + 5)]]).contexts
    own = contexts_of_block(contexts, 1, MOST_LINKS + 5)
    assert (own[0], len(own)) == ((0, context(1)), MOST_LINKS)


@pytest.mark.process
@pytest.mark.parametrize("client", sorted(CLIENTS))
@pytest.mark.parametrize("traced", [True, False])
def test_contexts_come_from_a_broker_only_if_they_are_asked_for(kafka, make_topic, client, traced):
    topic = make_topic()
    with contextlib.closing(KafkaProducer(bootstrap_servers=kafka.bootstrap)) as producer:
        for number in range(5):
            headers = [("traceparent", context(number, f"0{number % 2}").encode())]
            producer.send(topic, GOOD, headers=headers)
        producer.flush()
    stream = StreamSettings.model_validate({"bootstrap_servers": kafka.bootstrap, "topics": [topic], "client": client})
    source = BlockReader(
        stream.resolved("test"), SchemaSettings.model_validate(SCHEMA), HoldOut(fraction=0, seed=0), traced=traced
    )
    came, rows = [], 0
    try:
        source.open()
        while rows < 5:
            if (block := source.poll(timedelta(seconds=1))) is not None:
                offsets = block.columns["offset"].tolist()
                came += [(offsets[row], field) for row, field in block.contexts]
                rows += len(block)
                source.release(block)
    finally:
        source.close()
    assert came == ([(1, context(1)), (3, context(3))] if traced else [])
