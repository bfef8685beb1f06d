"""From messages to rows of a block."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.rows import pack_rows
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming, OfFiles, _ranges
from tests.support.tokenizer import write_tokenizer

PARTITION = TopicPartition("events", 3)
GOOD = b'{"x": [1, 2, 3], "y": 1}'


def assemble(schema, values, *, fraction=0.0, begin=None, times_ms=None, kind="json", of_files=None, **stream):
    settings = StreamSettings.model_validate({"topics": ["events"], "format": kind, **stream}).resolved("test")
    offsets = range(100, 100 + len(values))
    messages = Messages(
        PARTITION,
        offsets,
        times_ms or [offset * 10 for offset in offsets],
        [b"key-%d" % offset for offset in offsets],
        values,
        [[("trace", b"abc")] for _ in offsets],
        100 + len(values),
    )
    assembler = BlockBuilder(schema, settings, HoldOut(fraction=fraction, seed=1))
    return assembler.assemble([Incoming(messages, 5, begin or Position(0), of_files)])


def test_every_message_is_a_row_with_its_identity(schema):
    rows = assemble(schema, [GOOD, b"bad", GOOD]).columns
    assert rows["offset"].tolist() == [100, 101, 102]
    assert rows["row"].tolist() == [0, 0, 0]
    assert rows["partition"].tolist() == [5, 5, 5]
    assert rows["time_ms"].tolist() == [1000, 1010, 1020]
    assert rows["outcome"].tolist() == [Outcome.PENDING, Outcome.DEAD_LETTERED, Outcome.PENDING]
    assert rows["feature.x"].tolist() == [[1, 2, 3], [0, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize("own", [False, True])
def test_records_from_before_the_switch_are_left_to_files_by_their_time_and_not_by_their_offset(*, own):
    settings = {
        "features": {"x": {"dtype": "float32"}},
        "label": {"name": "y", "classes": 3},
        "key": {"name": "k"},
        "time": {"name": "at"},
    }
    # 107 and 108 arrived after the files were listed; 104 is a tombstone; 105 cannot be decoded.
    seconds = [1.001, 0.9989999, 2.0, 1.0, 0.5, 0.5, 5.0, 0.5, 2.0]
    values: list[bytes | None] = [f'{{"x": 1, "y": 1, "k": "a", "at": {at}}}'.encode() for at in seconds]
    values[4:6] = [None, b"bad"]
    times = [1] * 9 if own else [round(at * 1000) for at in seconds]
    found = assemble(
        Schema(SchemaSettings.model_validate(settings)), values, times_ms=times, of_files=OfFiles(1000, own, 107)
    )
    skipped = SkipReason.LEFT_TO_FILES
    bad = SkipReason.NONE if own else skipped  # its own time is not known
    expected = [0, skipped, 0, 0, SkipReason.TOMBSTONE, bad, 0, 0, 0]
    assert found.columns["reason"].tolist() == expected
    assert found.columns["outcome"][1] == Outcome.SKIPPED
    assert len(found.letters) == own


def test_a_record_time_of_the_future_counts_as_now_and_dead_letters_carry_the_original(schema):
    now = int(time.time() * 1000)
    soon, other_zone, microseconds = now + 60_000, now + 8 * 3_600_000, now * 1000
    times_ms = [soon, other_zone, microseconds, microseconds]
    assembled = assemble(schema, [GOOD, GOOD, GOOD, b"bad"], times_ms=times_ms)
    first, *others = assembled.columns["time_ms"].tolist()
    assert first == soon
    assert all(now <= each <= time.time() * 1000 for each in others)
    assert dict(assembled.letters[0].added)["anabranch-time"] == str(microseconds).encode()


def test_a_weight_above_the_largest_counts_as_that_and_is_named_once(caplog):
    weight = {"name": "w", "max": 10}
    features = {"x": {"dtype": "float32", "shape": [3]}}
    schema = Schema(
        SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}, "weight": weight})
    )
    values = [b'{"x": [1, 2, 3], "y": 1, "w": %s}' % w for w in (b"1", b"1e30", b"10", b"10.5", b"-1", b"1e39")]
    with caplog.at_level("WARNING"):
        assembled = assemble(schema, values)
    assert assembled.columns["weight"][:4].tolist() == [1, 10, 10, 10]
    assert assembled.columns["outcome"].tolist()[4:] == [Outcome.DEAD_LETTERED] * 2
    assert assembled.overweight == 2
    assert caplog.messages == [
        "2 events have a weight above schema.weight.max = 10, and count as that: events[3]@101, events[3]@103"
    ]


def test_a_dead_letter_is_the_message_with_its_reason_and_source(schema):
    (letter,) = assemble(schema, [GOOD, b"bad"]).letters
    assert (letter.key, letter.value) == (b"key-101", b"bad")
    assert letter.headers == [("trace", b"abc")]
    added = dict(letter.added)
    assert added.pop("anabranch-error").startswith(b"JSON is malformed")
    assert added == {"anabranch-source": b"events[3]@101", "anabranch-time": b"1010"}


def test_a_null_value_is_dead_lettered(schema):
    assembled = assemble(schema, [None, GOOD])
    assert assembled.columns["outcome"].tolist() == [Outcome.DEAD_LETTERED, Outcome.PENDING]
    assert assembled.letters[0].value is None
    assert dict(assembled.letters[0].added)["anabranch-error"] == b"null value"


def test_an_oversized_value_is_dead_lettered_before_it_is_parsed(schema):
    assembled = assemble(schema, [GOOD, GOOD + b" " * 1000, GOOD], max_message_bytes="1kB")
    assert assembled.columns["outcome"].tolist() == [Outcome.PENDING, Outcome.DEAD_LETTERED, Outcome.PENDING]
    assert dict(assembled.letters[0].added)["anabranch-error"] == b"oversized: 1024 bytes"


def test_bad_rows_of_a_good_message_make_one_dead_letter_that_names_them(schema):
    good, bad = {"x": [1, 2, 3], "y": 1}, {"x": [1, 2, np.nan], "y": 1}
    assembled = assemble(schema, [pack_rows(schema, [good, bad, good, bad]), b"torn"], kind="rows")
    outcomes = assembled.columns["outcome"]
    dead = Outcome.DEAD_LETTERED
    assert outcomes.tolist() == [Outcome.PENDING, dead, Outcome.PENDING, dead, dead]
    assert assembled.columns["row"].tolist() == [0, 1, 2, 3, 0]
    first, second = (dict(letter.added) for letter in assembled.letters)
    assert first["anabranch-rows"] == b"1,3"
    assert "anabranch-rows" not in second


def test_many_bad_rows_are_named_as_ranges_and_so_many_that_the_header_would_be_long_are_cut(schema):
    good, bad = {"x": [1, 2, 3], "y": 1}, {"x": [1, 2, np.nan], "y": 1}
    runs = [bad, bad, bad, good, bad, bad, good, bad]
    by_turns = [good, bad] * 2000
    assembled = assemble(schema, [pack_rows(schema, runs), pack_rows(schema, by_turns)], kind="rows")
    few, many = (dict(letter.added)["anabranch-rows"].decode() for letter in assembled.letters)
    assert few == "0..2,4,5,7"
    assert len(many) <= 4_004
    *named, end = many.split(",")
    assert named == [str(row) for row in range(1, 2 * len(named), 2)]
    assert end == "..."


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranges_name_each_row_and_no_other(rows):
    named = [part.split("..") for part in _ranges(sorted(rows)).split(",")]
    assert [row for part in named for row in range(int(part[0]), int(part[-1]) + 1)] == sorted(rows)


def test_a_message_that_the_client_could_not_read_is_dead_lettered_with_its_reason_and_tombstones_stay_tombstones(
    schema, make_schema
):
    keyed = make_schema({"x": {"dtype": "float32", "shape": [3]}}, {"name": "y", "classes": 3}, key={"name": "who"})
    faults = {0: "too-large: why", 1: "header: why", 2: "header: why"}
    settings = StreamSettings(topics=("events",)).resolved("test")
    found = []
    for each in (schema, keyed):
        messages = [
            Messages(PARTITION, [7], [0], [b"k"], [GOOD], [()], 8),
            Messages(PARTITION, [8, 9, 10], [0] * 3, [None, b"k", b"k"], [None, GOOD, None], [()] * 3, 11, 0, faults),
        ]
        assembler = BlockBuilder(each, settings, HoldOut(fraction=0, seed=1))
        found.append(assembler.assemble([Incoming(part, 0, Position(0)) for part in messages]))
    unkeyed, keyed_too = found
    dead = Outcome.DEAD_LETTERED
    assert unkeyed.columns["outcome"].tolist() == [Outcome.PENDING, dead, dead, dead]
    assert [dict(letter.added)["anabranch-error"] for letter in unkeyed.letters] == [
        b"too-large: why",
        b"header: why",
        b"header: why",
    ]
    assert [dict(letter.added)["anabranch-source"] for letter in unkeyed.letters] == [
        b"events[3]@8",
        b"events[3]@9",
        b"events[3]@10",
    ]
    assert [letter.value for letter in unkeyed.letters] == [None, GOOD, None]
    assert keyed_too.columns["outcome"].tolist() == [dead, dead, dead, Outcome.SKIPPED]
    assert keyed_too.columns["reason"].tolist()[-1] == SkipReason.TOMBSTONE
    assert len(keyed_too.letters) == 3


def test_a_message_that_was_a_dead_letter_three_times_gets_no_fourth_letter_and_is_counted(schema):
    def sent(times):
        headers = [("anabranch-source", b"events.dead[0]@%d" % number) for number in range(times)]
        messages = Messages(PARTITION, [7], [0], [b"k"], [b"bad"], [headers], 8)
        stream = StreamSettings(topics=("events",)).resolved("test")
        assembler = BlockBuilder(schema, stream, HoldOut(fraction=0, seed=1))
        return assembler.assemble([Incoming(messages, 0, Position(0))])

    third, fourth = sent(2), sent(3)
    assert (len(third.letters), third.looped) == (1, 0)
    assert (len(fourth.letters), fourth.looped) == (0, 1)
    assert fourth.columns["outcome"].tolist() == [Outcome.DEAD_LETTERED]


@pytest.mark.parametrize(
    ("unlabelled", "outcome", "reason"),
    [("skip", Outcome.SKIPPED, SkipReason.UNLABELLED), ("store", Outcome.PENDING, SkipReason.NONE)],
)
def test_events_without_a_label_are_skipped_or_left_to_be_stored(schema, unlabelled, outcome, reason):
    rows = assemble(schema, [b'{"x": [1, 2, 3]}', GOOD], unlabelled=unlabelled).columns
    assert rows["outcome"].tolist() == [outcome, Outcome.PENDING]
    assert rows["reason"].tolist() == [reason, SkipReason.NONE]


def test_held_out_events_are_about_the_fraction_and_always_the_same(schema):
    first = assemble(schema, [GOOD] * 4000, fraction=0.1).columns["outcome"]
    again = assemble(schema, [GOOD] * 4000, fraction=0.1).columns["outcome"]
    assert (first == again).all()
    assert 300 < np.count_nonzero(first == Outcome.HELD_OUT) < 500


def test_all_events_of_a_group_are_held_out_or_none(make_schema):  # type: ignore[no-untyped-def]
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, group={"name": "g"})
    values = [b'{"x": 1, "y": 1, "g": %d}' % (i % 40) for i in range(2000)]
    rows = assemble(schema, values, fraction=0.3).columns  # type: ignore[arg-type]
    held = rows["outcome"] == Outcome.HELD_OUT
    groups = np.arange(2000) % 40
    shares = {held[groups == group].mean() for group in range(40)}
    assert shares == {0.0, 1.0}


def test_rows_before_the_position_are_left_out(schema):
    event = {"x": [1, 2, 3], "y": 1}
    rows = assemble(
        schema, [pack_rows(schema, [event] * 3), pack_rows(schema, [event])], kind="rows", begin=Position(100, 2)
    ).columns
    assert list(zip(rows["offset"].tolist(), rows["row"].tolist(), strict=True)) == [(100, 2), (101, 0)]


class PanicException(BaseException):
    """As PyO3 raises the panic of a package written in Rust."""


class TestABugInTheDecoder:
    @pytest.fixture(autouse=True)
    def bug(self, monkeypatch):
        """A decoder that raises at one value, whatever comes with it."""
        sound = JsonFormat.decode

        def decode(self, values, headers=()):
            if b"poison" in values:
                raise TypeError("unforeseen")
            if b"panic" in values:
                raise PanicException("index out of range")
            return sound(self, values)

        monkeypatch.setattr(JsonFormat, "decode", decode)

    def test_the_message_that_raises_is_dead_lettered_and_its_neighbours_are_events(self, schema, caplog):
        assembled = assemble(schema, [GOOD, b"poison", None, b"bad", GOOD, b"poison"])
        dead = Outcome.DEAD_LETTERED
        assert assembled.columns["outcome"].tolist() == [Outcome.PENDING, dead, dead, dead, Outcome.PENDING, dead]
        assert assembled.columns["feature.x"].tolist()[4] == [1, 2, 3]
        errors = [dict(letter.added)["anabranch-error"] for letter in assembled.letters]
        assert [error.partition(b":")[0] for error in errors[1:3]] == [b"null value", b"JSON is malformed"]
        assert [errors[0], errors[3]] == [b"internal: TypeError: unforeseen"] * 2
        assert assembled.fault == "TypeError: unforeseen"
        assert [record.exc_info is not None for record in caplog.records] == [True]

    def test_a_panic_is_such_a_bug(self, schema):
        assembled = assemble(schema, [GOOD, b"panic", GOOD])
        assert assembled.columns["outcome"].tolist() == [Outcome.PENDING, Outcome.DEAD_LETTERED, Outcome.PENDING]
        assert dict(assembled.letters[0].added)["anabranch-error"] == b"internal: PanicError: index out of range"
        assert assembled.fault == "PanicError: index out of range"

    def test_a_lack_of_memory_is_no_fault_of_a_message(self, schema, monkeypatch):
        def decode(self, values, headers=()):
            raise MemoryError

        monkeypatch.setattr(JsonFormat, "decode", decode)
        with pytest.raises(MemoryError):
            assemble(schema, [GOOD])


def test_a_text_that_the_tokenizer_cannot_encode_is_dead_lettered_alone_and_no_bug(tmp_path):
    backtracks = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path = write_tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=backtracks)
    feature = {"dtype": "string", "encode": {"tokenizer": str(path), "length": 4}}
    text = Schema(SchemaSettings.model_validate({"features": {"t": feature}, "label": {"name": "y", "classes": 2}}))
    good, bad = b'{"t": "good", "y": 1}', b'{"t": "%s!", "y": 1}' % (b"a" * 40)
    assembled = assemble(text, [good, bad, good])
    assert assembled.columns["outcome"].tolist() == [Outcome.PENDING, Outcome.DEAD_LETTERED, Outcome.PENDING]
    assert assembled.columns["feature.t"][2].tolist() == [2, 4, 3, 0]
    assert dict(assembled.letters[0].added)["anabranch-error"].startswith(b"the tokenizer cannot encode a text: ")
    assert assembled.fault is None


def test_partitions_that_are_assembled_together_come_out_as_each_alone(schema):
    """Rows, letters and held-out events, also where a message has begun to be learned or none is left."""
    event, bad = {"x": [1, 2, 3], "y": 1}, {"x": [1, 2, np.nan], "y": 1}
    values = [[[event, event, bad], [bad]], [], [[event], [event] * 3], [[bad, event]]]
    incoming = [
        Incoming(
            Messages(
                TopicPartition("events", number),
                range(7, 7 + len(each)),
                [number] * len(each),
                [b"%d" % number] * len(each),
                [pack_rows(schema, rows) for rows in each],
                [[]] * len(each),
                20,
            ),
            number,
            Position(7, 1 if number == 0 else 0),
        )
        for number, each in enumerate(values)
    ]
    stream = StreamSettings.model_validate({"topics": ["events"], "format": "rows"})
    assembler = BlockBuilder(schema, stream, HoldOut(fraction=0.5, seed=1))
    together, alone = assembler.assemble(incoming), [assembler.assemble([each]) for each in incoming]
    assert together.rows == [len(each) for each in alone] == [3, 0, 4, 2]
    assert list(together.letters) == [letter for each in alone for letter in each.letters]
    for name, column in together.columns.items():
        assert column.tolist() == [value for each in alone for value in each.columns[name].tolist()], name
    assert {Outcome.HELD_OUT, Outcome.PENDING, Outcome.DEAD_LETTERED} == set(together.columns["outcome"].tolist())


KEYED = Schema(
    SchemaSettings.model_validate(
        {
            "features": {"x": {"dtype": "float32", "shape": [3]}},
            "label": {"name": "y", "classes": 3},
            "key": {"name": "k"},
        }
    )
)


def test_a_null_value_with_a_key_is_a_tombstone_where_events_have_keys():
    events = [b'{"x": [1, 2, 3], "y": 1, "k": "key-102"}', b'{"x": [1, 2, 3], "y": 1, "k": 7}']
    assembled = assemble(KEYED, [events[0], events[1], None, b"bad"])
    rows = assembled.columns
    assert rows["outcome"].tolist() == [Outcome.PENDING, Outcome.PENDING, Outcome.SKIPPED, Outcome.DEAD_LETTERED]
    assert rows["reason"].tolist() == [SkipReason.NONE, SkipReason.NONE, SkipReason.TOMBSTONE, SkipReason.NONE]
    assert rows["key_hash"][0] == rows["key_hash"][2], "a message's key is not compared as the event's text"
    assert [letter.key for letter in assembled.letters] == [b"key-103"]
    assert int(rows["key_hash"][1]) == int(hash_texts([b"7"])[0])
