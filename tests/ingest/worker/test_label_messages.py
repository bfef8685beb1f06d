"""Events that wait for their labels, and the messages of label topics."""

import io

import fastavro
import numpy as np
import pytest

from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import pack_rows
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming

SCHEMA = {
    "features": {"x": {"dtype": "float32", "shape": [2]}},
    "label": {"name": "y", "classes": ["no", "yes"]},
    "key": {"name": "id"},
}
EVENT = b'{"x": [1, 2], "id": "a"}'


def messages(topic, values):
    n = len(values)
    keys = [b"key-%d" % index for index in range(n)]
    return Messages(TopicPartition(topic, 0), range(n), [1000] * n, keys, values, [[]] * n, n)


def assemble(events, labels, *, schema=None, fraction=0.0, kind="json", **settings):
    """Decode events and labels together: the rows of the labels follow those of the events."""
    named = {"topics": ["events"], "format": kind, "labels": {"topics": ["labels"], "wait": "1h", **settings}}
    stream = StreamSettings.model_validate(named).resolved("test")
    compiled = Schema(SchemaSettings.model_validate(schema or SCHEMA), stream.labels)
    builder = BlockBuilder(compiled, stream, HoldOut(fraction=fraction, seed=1))
    incoming = [
        Incoming(messages(topic, values), index, Position(0))
        for index, (topic, values) in enumerate([("events", events), ("labels", labels)])
        if values
    ]
    return builder.assemble(incoming)


def test_an_event_without_a_label_waits_and_one_with_a_label_does_not():
    rows = assemble([EVENT, b'{"x": [3, 4], "id": "b", "y": "yes"}'], []).columns
    assert rows["outcome"].tolist() == [Outcome.WAITING, Outcome.PENDING]
    assert rows["feature.x"].tolist() == [[1, 2], [3, 4]]


def test_a_label_has_its_key_and_its_class_and_no_features():
    rows = assemble([EVENT], [b'{"id": "a", "y": "yes"}', b'{"id": "b", "y": "no"}']).columns
    assert rows["outcome"].tolist() == [Outcome.WAITING, Outcome.LABEL, Outcome.LABEL]
    assert rows["key_hash"].tolist() == hash_texts([b"a", b"a", b"b"]).tolist()
    assert rows["label"].tolist() == [-1, 1, 0]
    assert rows["labelled"].tolist() == [False, True, True]
    assert not rows["feature.x"][1:].any()


def test_waiting_events_and_labels_are_not_held_out_by_ingest():
    events = [b'{"x": [1, 2], "id": "%d"}' % index for index in range(200)]
    labels = [b'{"id": "%d", "y": "yes"}' % index for index in range(200)]
    outcomes = assemble(events, labels, fraction=0.5).columns["outcome"]
    assert set(outcomes.tolist()) == {Outcome.WAITING, Outcome.LABEL}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'{"y": "yes"}', "Object missing required field `id`"),
        (b'{"id": "a", "y": "maybe"}', "Invalid enum value 'maybe' - at `$.y`"),
        (b'{"id": "a"}', "y is missing or null"),
        (b'{"id": "a", "y": null}', "y is missing or null"),
    ],
)
def test_a_label_message_that_cannot_be_used_is_a_dead_letter_with_one_sentence(value, reason):
    done = assemble([EVENT], [b'{"id": "a", "y": "yes"}', value])
    (letter,) = done.letters
    headers = dict(letter.added)
    assert headers["anabranch-error"].decode() == reason
    assert headers["anabranch-source"] == b"labels[0]@1"
    assert done.columns["outcome"].tolist() == [Outcome.WAITING, Outcome.LABEL, Outcome.DEAD_LETTERED]


def test_labels_may_have_other_names_for_the_key_and_the_label():
    event = b'{"x": [1, 2], "id": "customer", "order": 7}'
    rows = assemble([event], [b'{"order": 7, "paid": "yes"}'], key="order", name="paid").columns
    assert rows["outcome"].tolist() == [Outcome.WAITING, Outcome.LABEL]
    assert rows["join_hash"].tolist() == hash_texts([b"7", b"7"]).tolist()
    assert rows["key_hash"].tolist() == [*hash_texts([b"customer"]).tolist(), 0]


def test_labels_may_find_their_events_by_the_group():
    schema = {**SCHEMA, "group": {"name": "session"}}
    event = b'{"x": [1, 2], "id": "a", "session": "s"}'
    rows = assemble([event], [b'{"session": "s", "y": "yes"}'], schema=schema, key="session").columns
    assert rows["group_hash"].tolist() == hash_texts([b"s", b"s"]).tolist()
    assert "join_hash" not in rows


def test_labels_as_rows_are_a_label_and_a_key():
    schema = {**SCHEMA, "label": {"name": "y", "classes": 3}}
    labels = np.array([(2, 7), (0, 8)], [("y", "<i8"), ("id", "<i8")]).tobytes()
    event = pack_rows(Schema(SchemaSettings.model_validate(schema)), [{"x": [1, 2], "id": 7}])
    rows = assemble([event], [labels], schema=schema, kind="rows").columns
    assert rows["label"].tolist() == [-1, 2, 0]
    assert rows["outcome"].tolist() == [Outcome.WAITING, Outcome.LABEL, Outcome.LABEL]
    assert rows["key_hash"].tolist() == hash_texts([b"7", b"7", b"8"]).tolist()


def test_a_tombstone_of_a_label_topic_erases_its_key_as_one_of_an_event_topic_does():
    rows = assemble([EVENT], [b'{"id": "a", "y": "yes"}', None]).columns
    assert rows["outcome"].tolist()[-1] == Outcome.SKIPPED
    assert rows["reason"].tolist()[-1] == SkipReason.TOMBSTONE
    assert rows["key_hash"].tolist()[-1] == hash_texts([b"key-1"])[0]


def test_a_tombstone_of_labels_with_a_key_of_their_own_is_dead_lettered_since_it_names_no_event():
    done = assemble([b'{"x": [1, 2], "id": "c", "order": 7}'], [None], key="order")
    assert done.columns["outcome"].tolist() == [Outcome.WAITING, Outcome.DEAD_LETTERED]
    assert dict(done.letters[0].added)["anabranch-error"] == b"null value"


def avro(fields):
    written = [{"name": name, "type": kind} for name, kind in fields.items()]
    return {"type": "record", "name": "Message", "fields": written}


def encoded(number, written, event):
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(written), event)
    return b"\0" + number.to_bytes(4) + sink.getvalue()


class TestWithARegistry:
    EVENTS = avro({"id": "string", "order": "string", "x": {"type": "array", "items": "float"}})
    LABELS = avro({"id": "string", "order": "string", "y": "string"})

    @pytest.fixture(params=["id", "order"])
    def build(self, request, registry):
        """Decodes messages of events and labels, each with the schema that it names."""
        numbers = registry.register("events-value", self.EVENTS), registry.register("labels-value", self.LABELS)
        labels = {"topics": ["labels"], "wait": "1h", "key": request.param}
        settings = {"topics": ["events"], "format": "avro", "labels": labels}
        settings["registry"] = {"url": registry.url, "fallback": True}
        stream = StreamSettings.model_validate(settings).resolved("test")
        schemas = writer_schemas(stream)
        assert schemas is not None
        schema = Schema(SchemaSettings.model_validate(SCHEMA), stream.labels)
        builder = BlockBuilder(schema, stream, HoldOut(fraction=0, seed=1), schemas)

        def build(with_id=True):
            event = encoded(numbers[0], self.EVENTS, {"id": "a", "order": "o", "x": [1, 2]})
            label = encoded(numbers[1], self.LABELS, {"id": "a", "order": "o", "y": "yes"})
            topics = {"events": [event], "labels": [label if with_id else label[5:]]}
            return builder.assemble(
                [
                    Incoming(messages(topic, values), index, Position(0))
                    for index, (topic, values) in enumerate(topics.items())
                ]
            )

        yield build
        schemas.close()

    def test_labels_are_read_with_the_schema_of_their_topic(self, build):
        rows = build().columns
        assert rows["outcome"].tolist() == [Outcome.WAITING, Outcome.LABEL]
        name = "join_hash" if "join_hash" in rows else "key_hash"
        assert rows[name][0] == rows[name][1] != 0
        assert rows["label"][1] == 1

    def test_the_fallback_of_events_is_none_for_labels(self, build):
        (letter,) = build(with_id=False).letters
        reason = dict(letter.added)["anabranch-error"].decode()
        assert reason.startswith("schema: it has no schema id")
        assert "fallback" not in reason

    def test_labels_of_an_unknown_schema_are_deferred_while_the_registry_is_away(self, build, registry):
        registry.faults.away = True
        done = build()
        assert list(done.deferred) == [0, 1]
        assert not len(done)
        assert not done.letters
