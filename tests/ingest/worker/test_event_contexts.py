"""The trace contexts of records: which rows get them, and that each comes once, however rows are split into blocks."""

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaProducer

from anabranch.core.tracing.context import MOST_LINKS
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.events.partition import TopicPartition
from ingest.events.position import Position
from ingest.events.schema import Schema
from ingest.kafka.client import Messages
from ingest.kafka.registry import CLIENTS
from ingest.reader.reader import BlockReader
from ingest.worker.block_builder import Assembled, BlockBuilder, Incoming
from ingest.worker.event_contexts import contexts_of, of_block
from tests.support.kafka import SessionBroker

GOOD = b'{"x": [1, 2, 3], "y": 1}'
SCHEMA = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}


def context(number: int, flags: str = "01") -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-{flags}"


def assembled(of_partitions: list[list[str | None]], begin: int = 0) -> Assembled:
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
    return BlockBuilder(Schema(SchemaSettings.model_validate(SCHEMA)), stream, HoldOut(fraction=0, seed=0)).assemble(
        incoming
    )


def test_sampled_messages_have_their_context_at_their_row() -> None:
    found = contexts_of(assembled([[None, context(1), context(2, "00")], [], [context(3), "junk", None]]))
    assert found == [(1, context(1)), (3, context(3))]


def test_a_row_that_has_an_outcome_already_has_no_context() -> None:
    assert contexts_of(assembled([[context(1), context(2)]], begin=1)) == [(0, context(2))]


@given(
    st.lists(st.lists(st.booleans(), max_size=9), max_size=4),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_each_context_comes_in_one_block(sampled: list[list[bool]], sizes: list[int]) -> None:
    fields = [
        [context(10 * number + index) if each else None for index, each in enumerate(messages)]
        for number, messages in enumerate(sampled)
    ]
    rows = assembled(fields)
    contexts, begin, came = contexts_of(rows), 0, []
    while begin < len(rows):
        end = min(len(rows), begin + sizes[begin % len(sizes)])
        own, left_out = of_block(contexts, begin, end)
        assert not left_out
        came += [(begin + row, field) for row, field in own]
        begin = end
    expected = [field for messages in fields for field in messages]
    assert came == [(row, field) for row, field in enumerate(expected) if field is not None]


def test_more_than_a_block_may_have_are_counted() -> None:
    contexts = contexts_of(assembled([[context(number) for number in range(MOST_LINKS + 5)]]))
    own, left_out = of_block(contexts, 1, MOST_LINKS + 5)
    assert (own[0], len(own), left_out) == ((0, context(1)), MOST_LINKS, 4)


@pytest.mark.process
@pytest.mark.parametrize("client", sorted(CLIENTS))
@pytest.mark.parametrize("traced", [True, False])
def test_contexts_come_from_a_broker_only_if_they_are_asked_for(
    kafka: SessionBroker, make_topic: Any, client: str, traced: bool
) -> None:
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
