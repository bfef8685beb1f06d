"""Rows within Kafka Connect's and Debezium's envelopes, and what deletes do."""

import contextlib
import json
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from anabranch.ingest.backfill.build import history_of
from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.registry import make_format, wrapped
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder
from tests.ingest.worker.test_block_builder import assemble

SETTINGS = {
    "features": {"x": {"dtype": "float32"}},
    "label": {"name": "y", "classes": 2},
    "key": {"name": "id"},
}
PATIENCE = timedelta(seconds=100)
SCHEMA = Schema(SchemaSettings.model_validate(SETTINGS))
ROW = {"id": 7, "x": 1.5, "y": 1}


def stream(envelope, **more):
    return StreamSettings.model_validate({"topics": ["t"], "envelope": envelope, **more})


def decoded(envelope, *messages, **more):
    values = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in messages]
    return make_format(stream(envelope, **more), SCHEMA).decode(values)


def change(op, **more):
    return {"before": None, "after": ROW, "source": {"table": "t"}, "op": op, "ts_ms": 1, **more}


def of_connect(payload):
    return {"schema": {"type": "struct", "fields": []}, "payload": payload}


class TestEvents:
    @pytest.mark.parametrize(
        ("envelope", "message"),
        [
            ("connect", of_connect(ROW)),
            ("connect", {"schema": None, "payload": ROW}),
            *[("debezium", change(op)) for op in "cur"],
            ("debezium", of_connect(change("c"))),
        ],
    )
    def test_are_the_rows(self, envelope, message):
        found = decoded(envelope, message, message)
        plain = JsonFormat(SCHEMA).decode([json.dumps(ROW).encode()] * 2)
        assert not found.rejects
        for name, column in plain.columns.items():
            np.testing.assert_array_equal(found.columns[name], column)

    @pytest.mark.parametrize(
        ("envelope", "message", "reason"),
        [
            ("connect", ROW, "connect: its payload is missing"),
            ("connect", of_connect(None), "connect: its payload is null"),
            ("connect", of_connect({"x": 1}), "Object missing required field `id`"),
            ("connect", b"[1]", "connect: Expected `object`, got `array`"),
            ("debezium", ROW, "debezium: op is missing, not c, u, r or d"),
            ("debezium", change("t"), "debezium: op is 't', not c, u, r or d"),
            ("debezium", change("u", after=None), "debezium: op is u, but after is null"),
            ("debezium", {"op": "c"}, "debezium: op is c, but after is missing"),
            ("debezium", change("c", after=[1]), "Expected `object`, got `array`"),
            ("debezium", b"{", "debezium: Input data was truncated"),
            ("debezium", of_connect(None), "debezium: Expected `object`, got `null`"),
            ("debezium", b'{"op":' + b"[" * 2000, "debezium: "),
            ("debezium", change("d", before={"x": 1}), "before has no id, the field of [schema.key], so that nothing"),
            ("debezium", change("d"), "before has no id"),
            ("debezium", b'{"op":"d","before":{"id":"\xff"}}', "debezium: "),
        ],
    )
    def test_what_is_none_is_a_reject_that_says_why(self, envelope, message, reason):
        good = change("c") if envelope == "debezium" else of_connect(ROW)
        found = decoded(envelope, good, message, good)
        (reject,) = found.rejects
        assert reject.message == 1
        assert reason in reject.reason
        assert not found.deletes
        assert found.message.tolist() == [0, 2]

    @given(
        st.binary(max_size=60)
        | st.sampled_from([b'{"op":%s,"before":%s,"after":%s}']).flatmap(
            lambda text: st.tuples(
                *[st.sampled_from([b'"c"', b'"d"', b"1", b"null", b"{}", b'{"id":1,"x":NaN}'])] * 3
            ).map(lambda parts: text % parts)
        )
    )
    def test_any_bytes_are_an_event_or_a_reject(self, value):
        for envelope in ("connect", "debezium"):
            found = decoded(envelope, value)
            assert len(found.message) + len(found.rejects) == 1

    @pytest.mark.parametrize("envelope", ["none", "connect", "debezium"])
    def test_what_produce_writes_is_read(self, envelope):
        value, headers = wrapped(stream(envelope), json.dumps(ROW).encode())
        assert headers == ()
        assert decoded(envelope, value).columns["feature.x"].tolist() == [1.5]


class TestDeletes:
    DELETE = json.dumps(change("d", before={"id": 7, "x": None}, after=None)).encode()

    def of(self, *values, **more):
        return assemble(SCHEMA, values, envelope="debezium", **more)

    def test_erase_the_events_of_their_key_as_tombstones_do(self):
        found = self.of(json.dumps(change("c")).encode(), self.DELETE)
        assert found.columns["outcome"].tolist() == [Outcome.PENDING, Outcome.SKIPPED]
        assert found.columns["reason"].tolist() == [SkipReason.NONE, SkipReason.TOMBSTONE]
        assert found.columns["key_hash"].tolist() == hash_texts([b"7", b"7"]).tolist()
        assert found.tombstones == {"text": 1}
        assert not found.letters

    def test_erase_nothing_where_the_user_says_so(self):
        found = self.of(self.DELETE, deletes="skip")
        assert found.columns["outcome"].tolist() == [Outcome.SKIPPED]
        assert found.columns["reason"].tolist() == [SkipReason.DELETED]
        assert not found.tombstones
        assert not found.letters

    def test_without_a_key_there_is_nothing_to_erase(self):
        schema = Schema(SchemaSettings.model_validate({**SETTINGS, "key": None}))
        found = assemble(schema, [self.DELETE], envelope="debezium")
        assert found.columns["reason"].tolist() == [SkipReason.DELETED]

    def test_that_name_no_key_are_dead_letters(self):
        found = self.of(json.dumps(change("d")).encode())
        assert found.columns["outcome"].tolist() == [Outcome.DEAD_LETTERED]
        assert len(found.letters) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"envelope": "debezium", "format": "rows"}, 'envelope = "debezium" is for format = "json", not "rows"'),
        ({"envelope": "connect", "deletes": "skip"}, 'deletes = "skip" is for envelope = "debezium", not "connect"'),
    ],
)
def test_settings_that_contradict_are_refused(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        StreamSettings.model_validate({"topics": ["t"], **settings})


class TestRowsOfFiles:
    """Rows of a history may be in the envelope of the stream, and need not be."""

    def rows(self, tmp_path, *messages, epochs=1, **more):
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join(f"{message if isinstance(message, str) else json.dumps(message)}\n" for message in messages)
        )
        settings = stream(more.pop("envelope", "debezium"), backfill={"files": [str(path)], "epochs": epochs}, **more)
        with contextlib.closing(history_of(settings, SCHEMA, 0)) as history:
            history.list_files(None)
            builder = BlockBuilder(SCHEMA, settings, HoldOut(fraction=0, seed=0))
            found = []
            while not history.done:
                rows = history.poll(PATIENCE)
                found.append(builder.assemble_history(rows, range(len(rows.counts))))
        return found

    @pytest.mark.parametrize("message", [ROW, change("c"), change("r"), of_connect(change("u"))])
    def test_are_read_in_the_envelope_and_without_it(self, tmp_path, message):
        (found,) = self.rows(tmp_path, message)
        assert found.columns["feature.x"].tolist() == [1.5]
        assert found.columns["outcome"].tolist() == [Outcome.PENDING]

    @pytest.mark.parametrize(("deletes", "reason"), [("erase", SkipReason.TOMBSTONE), ("skip", SkipReason.DELETED)])
    def test_deletes_are_those_of_the_stream(self, tmp_path, deletes, reason):
        (found,) = self.rows(tmp_path, change("c"), change("d", before=ROW, after=None), deletes=deletes)
        assert found.columns["outcome"].tolist() == [Outcome.PENDING, Outcome.SKIPPED]
        assert found.columns["reason"].tolist() == [SkipReason.NONE, reason]
        key = hash_texts([b"7"])[0] if deletes == "erase" else 0
        assert found.columns["key_hash"].tolist() == [hash_texts([b"7"])[0], key]
        assert not found.letters

    def test_a_delete_erases_once_however_often_the_file_is_read(self, tmp_path):
        found = self.rows(tmp_path, change("c"), change("d", before=ROW, after=None), epochs=2)
        assert [each.columns["reason"].tolist()[1] for each in found] == [SkipReason.TOMBSTONE, SkipReason.DELETED]

    def test_a_delete_without_a_key_and_a_row_that_is_none_are_dead_letters_that_can_be_sent_again(self, tmp_path):
        odd = [change("d", before={}, after=None), change("c", after=ROW | {"y": 9}), change("c", after=None), "{"]
        (found,) = self.rows(tmp_path, *odd)
        assert found.columns["outcome"].tolist() == [Outcome.DEAD_LETTERED] * 4
        assert json.loads(found.letters[1].value) == ROW | {"y": 9}
        why = [dict(letter.added)["anabranch-error"].decode() for letter in found.letters]
        assert ["before has no id" in why[0], "is null" in why[2], "debezium: Input data was" in why[3]] == [True] * 3

    def test_a_shuffle_does_not_move_deletes(self):
        with pytest.raises(ValidationError, match=r"backfill\.shuffle does not go with deletes"):
            stream("debezium", backfill={"files": ["a.jsonl"], "shuffle": 10})
        assert stream("debezium", deletes="skip", backfill={"files": ["a.jsonl"], "shuffle": 10})
