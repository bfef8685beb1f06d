"""Messages are found by header, key and time; nothing is written."""

import json

import pytest

from anabranch.ingest.errors import BrokerError, RegistryError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.search.stream_search import StreamSearch, with_header, with_key
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

NAME = TopicPartition("events", 0)
STREAM = StreamSettings(topics=("events",))
SCHEMA = SchemaSettings.model_validate(
    {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}, "key": {"name": "who"}}
)


@pytest.fixture
def topic():
    """Events of three people, with a gap, a broken message and a tombstone among them."""
    topic = FakePartition()
    for number in range(30):
        topic.append(json.dumps({"x": 1.0, "y": 0, "who": f"p{number % 3}"}).encode())
    topic.skip(2)
    topic.append(b"{broken")
    topic.append(None)
    topic.append(json.dumps({"x": 1.0, "y": 1, "who": "p1"}).encode())
    topic.skip()
    return topic


@pytest.mark.parametrize(
    ("matches", "found"),
    [
        (lambda: with_key([b"p1"], SCHEMA, STREAM), [*range(4, 30, 3), 34]),
        (lambda: with_key([b"nobody"], SCHEMA, STREAM), []),
        (lambda: with_header("trace", "17"), [17]),
        (lambda: with_header("trace", "3"), []),
    ],
)
def test_messages_are_found_within_their_bounds(topic, matches, found):
    client, seen = FakeClient({NAME: topic}), []
    with StreamSearch(STREAM, client) as search:
        assert search.log_ends == {NAME: 36}
        progress = lambda read, total: seen.append((read, total))  # noqa: E731
        offsets = search.matching({NAME: 4}, {NAME: 36}, matches(), progress)
    assert offsets == ({NAME: found} if found else {})
    assert seen[-1] == (32, 32)
    assert not client.letters
    assert not client.committed


def test_a_broker_that_is_away_is_an_error(topic):
    client = FakeClient({NAME: topic})
    client.away = True
    with pytest.raises(BrokerError), StreamSearch(STREAM, client):
        pass


def test_a_message_whose_schema_cannot_be_fetched_is_an_error_since_its_key_is_not_known(free_port):
    settings = {"topics": ["events"], "format": "avro", "registry": {"url": f"http://127.0.0.1:{free_port()}"}}
    stream = StreamSettings.model_validate(settings).resolved("test")
    topic = FakePartition()
    topic.append(b"\0\0\0\0\1...")
    with (
        StreamSearch(stream, FakeClient({NAME: topic})) as search,
        pytest.raises(RegistryError, match=r"events\[0\]@0: "),
    ):
        search.matching({NAME: 0}, {NAME: 1}, with_key([b"p1"], SCHEMA, stream), lambda read, total: None)
