"""One suite over the message formats, and what is special to each."""

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow import pack_batch
from anabranch.ingest.formats.base import WHOLE_MESSAGE
from anabranch.ingest.formats.registry import format_class
from anabranch.ingest.formats.rows import pack_rows, row_dtype
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.testing.checks import NotPromisedError, name_of
from anabranch.testing.formats import CHECKS, a_message_may_have_several_events
from tests.support.formats import FORMATS


def pack_json(schema, event):
    return json.dumps({name: value for name, value in event.items() if value is not None}).encode()


def pack_row(schema, event):
    return pack_rows(schema, [{name: value for name, value in event.items() if value is not None}])


def pack_arrow(schema, event):
    return pack_batch(schema, [event])


def arrow_stream(*batches, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


PACK: dict[str, Callable[[Schema, dict[str, Any]], bytes]] = {
    "json": pack_json,
    "rows": pack_row,
    "arrow": pack_arrow,
}


@pytest.fixture(params=sorted(FORMATS))
def name(request):
    return str(request.param)


def test_every_format_is_in_this_suite():
    assert PACK.keys() == FORMATS.keys()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_a_format_keeps_what_all_promise(name, check):
    try:
        check(FORMATS[name])
    except NotPromisedError:
        assert (name, check) == ("json", a_message_may_have_several_events)


def decode(name, schema, *events):
    return FORMATS[name](schema).decode([PACK[name](schema, event) for event in events])


@pytest.mark.parametrize("classes", [4, ["red", "green", "blue", "black"]], ids=["numbers", "names"])
def test_a_label_of_several_classes_is_a_bool_for_each(name, make_schema, classes):
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": classes, "multi": True})
    known = range(4) if classes == 4 else classes
    lists = [[3, 0], None, [], [1]]
    events = [{"x": index, "y": each and [known[k] for k in each]} for index, each in enumerate(lists)]
    events[2]["y"] = []
    decoded = decode(name, schema, *events)
    assert not decoded.rejects
    assert decoded.columns["labelled"].tolist() == [True, False, True, True]
    assert decoded.columns["label"].dtype == bool
    assert decoded.columns["label"].tolist() == [[k in (each or []) for k in range(4)] for each in lists]


@pytest.mark.parametrize("classes", [4, ["red", "green", "blue", "black"]], ids=["numbers", "names"])
def test_a_label_with_a_length_is_a_class_at_each_position(name, make_schema, classes):
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": classes, "length": 3})
    known = range(4) if classes == 4 else classes
    lists = [[3, None, 1, 2], None, [0], [], [None, None], [None, None, None, 2]]
    events = [{"x": 1, "y": each and [None if k is None else known[k] for k in each]} for each in lists]
    events[3]["y"] = []
    decoded = decode(name, schema, *events)
    assert not decoded.rejects
    assert decoded.columns["labelled"].tolist() == [True, False, True, False, False, False]
    assert decoded.columns["label"].dtype == np.int64
    assert decoded.columns["label"].tolist() == [[3, -100, 1], [-100] * 3, [0, -100, -100], *[[-100] * 3] * 3]


@pytest.mark.parametrize(("classes", "none", "bad"), [(4, -100, 4), (4, -100, -1), (["a", "b"], "", "c")])
def test_a_position_has_a_class_or_none_in_every_format(make_schema, classes, none, bad):
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": classes, "length": 2})
    good = 0 if classes == 4 else "a"
    lists = [[none, good], [good, bad], [good], [none]]
    x, y = pa.array([1] * 4, pa.int8()), pa.array(lists)
    batches = [pa.record_batch({"x": x[i : i + 1], "y": y[i : i + 1]}) for i in range(4)]
    for name, messages in (
        ("json", [pack_json(schema, {"x": 1, "y": each}) for each in lists]),
        ("arrow", [arrow_stream(batch) for batch in batches]),
    ):
        decoded = FORMATS[name](schema).decode(messages)
        assert decoded.columns["label"].tolist() == [[-100, 0], [0, -100], [-100, -100]]
        assert decoded.columns["labelled"].tolist() == [True, True, False]
        assert [reject.message for reject in decoded.rejects] == [1]
    if classes == 4:
        with pytest.raises(SettingsError, match=r"event 0: y = \[\[0\]\] does not fit its row"):
            pack_rows(schema, [{"x": 1, "y": [[0]]}])
        rows = np.array([(1, each) for each in ([none, good], [good, bad])], row_dtype(schema))
        decoded = FORMATS["rows"](schema).decode([rows.tobytes()])
        assert [(reject.row, reject.reason) for reject in decoded.rejects] == [(1, "y is not in 0..3")]


@pytest.mark.parametrize(
    ("classes", "label", "reason"),
    [
        (4, [0, 1, 1], "lists a class twice"),
        (4, [0, 0, 1, 0], "lists a class twice"),
        (4, [4], r"`int` <= 3|in 0..3"),
        (4, [-1], r"`int` >= 0|in 0..3"),
        (4, 2, "Expected `array|not a list of whole numbers"),
        (["a", "b", "c"], ["a", "d"], "Invalid enum value|not a class"),
        (["a", "b", "c"], "a", "Expected `array|not a list of strings"),
    ],
)
def test_a_list_of_what_is_no_class_is_a_fault_of_its_event(make_schema, classes, label, reason):
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": classes, "multi": True})
    good = {"x": 1, "y": [0 if classes == 4 else "a"]}
    message = arrow_stream(pa.record_batch({"x": pa.array([2], pa.int8()), "y": pa.array([label])}))
    for name, bad in (("json", pack_json(schema, {"x": 2, "y": label})), ("arrow", message)):
        decoded = FORMATS[name](schema).decode([PACK[name](schema, good), bad, PACK[name](schema, good)])
        assert decoded.message.tolist() == [0, 2]
        assert decoded.columns["label"][:, 0].all()
        assert [reject.message for reject in decoded.rejects] == [1]
        assert re.search(reason, decoded.rejects[0].reason)


def test_lists_of_classes_may_be_of_any_kind_of_arrow_list(make_schema):
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": ["a", "b", "c"], "multi": True})
    x, words = pa.array([1, 2, 3], pa.int8()), pa.dictionary(pa.int8(), pa.string())
    for kind, lists in (
        (pa.list_(words), [["c"], None, ["a", "b"]]),
        (pa.large_list(pa.string()), [["c"], None, ["a", "b"]]),
        (pa.list_(pa.string(), 2), [["c", "a"], None, ["a", "b"]]),
    ):
        decoded = FORMATS["arrow"](schema).decode([arrow_stream(pa.record_batch({"x": x, "y": pa.array(lists, kind)}))])
        assert decoded.columns["labelled"].tolist() == [True, False, True]
        assert decoded.columns["label"].tolist() == [[word in (each or []) for word in "abc"] for each in lists]
    nothing = arrow_stream(pa.record_batch({"x": x, "y": pa.array([["a"], [None], ["b"]], pa.list_(pa.string()))}))
    decoded = FORMATS["arrow"](schema).decode([nothing])
    assert decoded.row.tolist() == [0, 2]
    assert decoded.rejects[0].reason == "y lists what is not a class"


def test_rows_of_several_classes_are_zeros_and_ones(make_schema):
    label = {"name": "y", "classes": 3, "multi": True, "dtype": "int8"}
    schema = make_schema({"x": {"dtype": "int8"}}, label)
    rows = [bytes([1, 1, 0, 1]), bytes([2, 255, 255, 255]), bytes([3, 0, 2, 0]), bytes([4, 255, 0, 1])]
    decoded = FORMATS["rows"](schema).decode([b"".join(rows)])
    assert decoded.row.tolist() == [0, 1]
    assert decoded.columns["label"].tolist() == [[True, False, True], [False] * 3]
    assert decoded.columns["labelled"].tolist() == [True, False]
    assert {reject.reason for reject in decoded.rejects} == {"y is not 0 or 1 for each class"}
    unsigned = make_schema({"x": {"dtype": "int8"}}, {**label, "dtype": "uint8"})
    for bad in ({"x": 1}, {"x": 1, "y": [3]}, {"x": 1, "y": 2}):
        with pytest.raises(SettingsError, match=r"event 0: y = .* does not fit its row"):
            pack_rows(unsigned, [bad])


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_arbitrary_bytes_are_events_or_rejects_and_never_an_error(values):
    schema = Schema(
        SchemaSettings.model_validate(
            {"features": {"x": {"dtype": "float16", "shape": [2]}}, "label": {"name": "y", "classes": 2}}
        )
    )
    for kind in FORMATS.values():
        decoded = kind(schema).decode(values)
        assert {*decoded.message.tolist(), *(reject.message for reject in decoded.rejects)} == set(range(len(values)))
        assert np.isfinite(decoded.columns["feature.x"]).all()


def test_an_integer_that_is_out_of_its_bounds_is_a_fault_of_its_event(name, make_schema):
    features = {"day": {"dtype": "int64", "min": 0, "max": 6}, "n": {"dtype": "uint8", "shape": [2], "max": 9}}
    schema = make_schema(features, {"name": "y", "classes": 3})
    events = [
        {"day": 6, "n": [0, 9], "y": 1},
        {"day": 7, "n": [0, 0], "y": 1},
        {"day": -1, "n": [0, 0], "y": 1},
        {"day": 0, "n": [0, 10], "y": 1},
        {"day": 0, "n": [9, 9], "y": None},
    ]
    decoded = FORMATS[name](schema).decode([PACK[name](schema, event) for event in events])
    assert decoded.message.tolist() == [0, 4]
    assert decoded.columns["feature.day"].tolist() == [6, 0]
    assert [(reject.message, reject.reason) for reject in decoded.rejects] == [
        (1, "day is not in 0..6"),
        (2, "day is not in 0..6"),
        (3, "n is not 9 or less"),
    ]


def test_a_value_that_is_no_number_is_rejected_by_the_name_of_its_field(name, make_schema):
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, weight={"name": "importance"})
    too_large = math.inf if name == "rows" else 1e39
    (reject,) = decode(name, schema, {"x": 1, "y": 1, "importance": too_large}).rejects
    assert reject.reason == "importance is NaN, infinite or too large"


class TestJson:
    def test_a_time_may_be_a_number_or_an_iso_time_which_is_utc_without_a_zone(self):
        described = {
            "features": {"x": {"dtype": "float32"}},
            "label": {"name": "y", "classes": 2},
            "time": {"name": "t"},
        }
        times = [
            "1.5",
            '"1970-01-01T00:00:02.5Z"',
            '"1970-01-01T02:00:03+02:00"',
            '"1970-01-01 00:00:04"',
            '"1970-01-02"',
        ]
        bad = ['"noon"', "null", '""', "true", '"1970-13-01"']
        values = [f'{{"x": 1, "y": 1, "t": {time}}}'.encode() for time in times + bad]
        decoded = FORMATS["json"](Schema(SchemaSettings.model_validate(described))).decode(values)
        assert decoded.columns["time"].tolist() == [1.5, 2.5, 3, 4, 86400]
        assert [reject.message for reject in decoded.rejects] == [5, 6, 7, 8, 9]
        assert decoded.rejects[0].reason == "Expected seconds since 1970 or an ISO time, got 'noon' - at `$.t`"

    def test_null_is_missing(self):
        features = {
            "a": {"dtype": "float32", "default": 7},
            "b": {"dtype": "int64", "shape": [2], "default": [1, 2]},
            "c": {"dtype": "string", "encode": {"vocab": ["u"]}, "default": "u"},
        }
        described = {"features": features, "label": {"name": "y", "classes": 2}}
        decode = FORMATS["json"](Schema(SchemaSettings.model_validate(described))).decode
        null, absent = decode([b'{"a": null, "b": null, "c": null, "y": null}']), decode([b"{}"])
        assert not [*null.rejects, *absent.rejects]
        for name, column in null.columns.items():
            np.testing.assert_array_equal(column, absent.columns[name], err_msg=name)
        assert decode([b'{"b": [1, null]}']).rejects

    def test_a_label_with_two_classes_may_be_true_or_false(self):
        described = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}
        values = [b'{"x": 1, "y": %s}' % label for label in (b"true", b"false", b"1", b"null", b"2")]
        decoded = FORMATS["json"](Schema(SchemaSettings.model_validate(described))).decode(values)
        assert [reject.message for reject in decoded.rejects] == [4]
        assert decoded.columns["label"].tolist()[:3] == [1, 0, 1]
        assert decoded.columns["labelled"].tolist() == [True, True, True, False]

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (b"not json", "malformed"),
            (b"", "truncated"),
            (b'{"x": [1, 2, 3], "y": 1', "truncated"),
            (b"[1, 2, 3]", "Expected `object`, got `array`"),
            (b'"x"', "Expected `object`, got `str`"),
            (b'{"y": 1}', "missing required field `x`"),
            (b'{"x": [1, 2], "y": 1}', "length >= 3"),
            (b'{"x": [1, 2, 3, 4], "y": 1}', "length <= 3"),
            (b'{"x": [[1], [2], [3]], "y": 1}', "Expected `float`, got `array`"),
            (b'{"x": [1, 2, "3"], "y": 1}', "Expected `float`, got `str`"),
            (b'{"x": [1, 2, null], "y": 1}', "Expected `float`, got `null`"),
            (b'{"x": [1, 2, true], "y": 1}', "Expected `float`, got `bool`"),
            (b'{"x": null, "y": 1}', "got `null`"),
            (b'{"x": [1, 2, 3], "y": 3}', "<= 2"),
            (b'{"x": [1, 2, 3], "y": -1}', ">= 0"),
            (b'{"x": [1, 2, 3], "y": 1.5}', "got `float`"),
            (b'{"x": [1, 2, 3], "y": "1"}', "got `str`"),
            (b'{"x": [1, 2, NaN], "y": 1}', "NaN is read as null"),
            (b'{"x": [1, 2, Infinity], "y": 1}', "malformed"),
            (b'{"x": [1, 2, 1e999], "y": 1}', "out of range"),
            (b'{"x": [1, 2, 1e39], "y": 1}', "x is NaN, infinite or too large"),
            (b'{"x": [1, 2, 3], "y": 1} {}', "malformed"),
            (b"\xff\xfe\x00", "malformed"),
            (b"[" * 100_000, ""),
            (b'{"x": ' * 100_000, ""),
            (b'{"x": [1, 2, 3], "y": 1, "z": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        ],
    )
    def test_each_kind_of_bad_message_is_rejected_with_its_reason(self, schema, value, reason):
        decoded = FORMATS["json"](schema).decode([value])
        assert len(decoded.message) == 0
        assert [(reject.message, reject.row) for reject in decoded.rejects] in ([(0, WHOLE_MESSAGE)], [(0, 0)])
        assert reason in decoded.rejects[0].reason

    def test_numbers_outside_the_bounds_of_a_float_or_a_label_are_rejected(self, make_schema):
        label = {"name": "y", "dtype": "float64", "min": -10, "max": 10.5}
        schema = make_schema({"x": {"dtype": "float32", "max": 100}}, label)
        pairs = [(1, 10.5), (101, 0), (3.4e38, 0), (0, 10.6), (100, -10), (0, -1e15), (-3.4e38, 0), (0, 1e300)]
        decoded = FORMATS["json"](schema).decode([b'{"x": %g, "y": %.17g}' % pair for pair in pairs])
        assert decoded.message.tolist() == [0, 4, 6]
        assert {reject.message: reject.reason for reject in decoded.rejects} == {
            **dict.fromkeys((1, 2), "x is not 100 or less"),
            **dict.fromkeys((3, 5, 7), "y is not in -10..10.5"),
        }

    def test_unknown_fields_are_ignored_and_counted(self, schema):
        values = [b'{"x": [1, 2, 3], "y": 1, "z": {"deep": []}}', b'{"x": [1, 2, 3], "y": 1}']
        decoded = FORMATS["json"](schema).decode(values)
        assert decoded.unknown_fields == 1
        assert len(decoded.message) == 2

    def test_two_malformed_messages_never_join_to_good_ones(self, schema):
        decoded = FORMATS["json"](schema).decode([b'{"x": [1, 2', b'3], "y": 1}', b'{"x": [1, 2, 3], "y": 0}'])
        assert decoded.message.tolist() == [2]
        assert [reject.message for reject in decoded.rejects] == [0, 1]

    def test_strings_are_encoded_and_unknown_ones_are_id_0(self, make_schema):
        schema = make_schema({"c": {"dtype": "string", "encode": {"vocab": ["a", "b"]}}}, {"name": "y", "classes": 2})
        decoded = FORMATS["json"](schema).decode([b'{"c": "b"}', b'{"c": "?"}', '{"c": "\u00e4"}'.encode()])
        assert decoded.columns["feature.c"].tolist() == [2, 0, 0]

    def test_a_feature_with_a_default_is_optional(self, make_schema):
        schema = make_schema(
            {
                "x": {"dtype": "float32", "shape": [2], "default": [1, 2]},
                "c": {"dtype": "string", "encode": {"vocab": ["a", "b"]}, "default": "b"},
            },
            {"name": "y", "classes": 2},
        )
        decoded = FORMATS["json"](schema).decode([b"{}", b'{"x": [3, 4], "c": "a"}'])
        assert decoded.columns["feature.x"].tolist() == [[1, 2], [3, 4]]
        assert decoded.columns["feature.c"].tolist() == [2, 1]

    def test_classes_are_given_by_name_where_they_have_names(self, make_schema):
        schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": ["no", "yes"]})
        decoded = FORMATS["json"](schema).decode([b'{"x": 1, "y": "yes"}', b'{"x": 1}', b'{"x": 1, "y": "maybe"}'])
        assert decoded.columns["label"].tolist() == [1, -1]
        assert "maybe" in decoded.rejects[0].reason

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
    def test_integers_that_do_not_fit_their_dtype_are_rejected(self, make_schema, dtype):
        schema = make_schema({"n": {"dtype": dtype}}, {"name": "y", "classes": 2})
        limits = np.iinfo(dtype)
        numbers = [int(limits.min), int(limits.max), int(limits.max) + 1, int(limits.min) - 1, 10**30]
        decoded = FORMATS["json"](schema).decode([b'{"n": %d}' % number for number in numbers])
        assert decoded.columns["feature.n"].tolist() == [limits.min, limits.max]
        assert [reject.message for reject in decoded.rejects] == [2, 3, 4]

    def test_a_negative_weight_is_rejected(self, make_schema):
        schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, weight={"name": "w"})
        decoded = FORMATS["json"](schema).decode([b'{"x": 1, "y": 1, "w": -0.5}', b'{"x": 1, "y": 1, "w": 0}'])
        assert decoded.message.tolist() == [1]


class TestRows:
    def test_many_rows_in_a_message_are_many_events(self, schema):
        message = pack_rows(schema, [{"x": [i, i, i], "y": i % 3} for i in range(4)])
        decoded = FORMATS["rows"](schema).decode([message, message[: len(message) // 2]])
        assert decoded.message.tolist() == [0, 0, 0, 0, 1, 1]
        assert decoded.row.tolist() == [0, 1, 2, 3, 0, 1]
        assert decoded.columns["label"].tolist() == [0, 1, 2, 0, 0, 1]

    def test_a_message_that_is_not_whole_rows_is_rejected_whole(self, schema):
        message = pack_rows(schema, [{"x": [1, 2, 3], "y": 1}])
        decoded = FORMATS["rows"](schema).decode([message[:-1], message + b"\0", message])
        assert [(reject.message, reject.row) for reject in decoded.rejects] == [(0, WHOLE_MESSAGE), (1, WHOLE_MESSAGE)]
        assert decoded.message.tolist() == [2]

    @pytest.mark.parametrize(
        ("bad", "reason"),
        [
            ({"x": [1, math.nan, 3], "y": 1}, "x is NaN"),
            ({"x": [1, math.inf, 3], "y": 1}, "x is NaN, infinite"),
            ({"x": [1, 2, 3], "y": 3}, "y is not in 0..2"),
            ({"x": [1, 2, 3], "y": -7}, "y is not in 0..2"),
        ],
    )
    def test_bad_rows_are_left_out_of_a_good_message(self, schema, bad, reason):
        good = {"x": [1, 2, 3], "y": 1}
        decoded = FORMATS["rows"](schema).decode([pack_rows(schema, [good, bad, good, bad])])
        assert decoded.row.tolist() == [0, 2]
        assert [(reject.message, reject.row) for reject in decoded.rejects] == [(0, 1), (0, 3)]
        assert reason in decoded.rejects[0].reason

    @pytest.mark.parametrize(
        "feature",
        [{"dtype": "string", "encode": {"hash": 8}}, {"dtype": "float32", "default": 0.5}],
        ids=["string", "default"],
    )
    def test_strings_and_defaults_are_refused_at_start(self, make_schema, feature):
        schema = make_schema({"f": feature}, {"name": "y", "classes": 2})
        with pytest.raises(SettingsError, match=r"schema.features.f.*use \"json\""):
            FORMATS["rows"](schema)

    def test_the_layout_is_packed_little_endian_in_the_order_of_the_file(self, make_schema):
        schema = make_schema(
            {"b": {"dtype": "uint8"}, "a": {"dtype": "float64", "shape": [2]}},
            {"name": "y", "dtype": "int16", "classes": 9},
            key={"name": "k"},
            weight={"name": "w"},
        )
        dtype = row_dtype(schema)
        assert dtype.names == ("b", "a", "y", "k", "w")
        assert dtype.itemsize == 1 + 16 + 2 + 8 + 4
        assert all(dtype[name].base.byteorder in "<=|" for name in dtype.names)

    def test_an_event_that_lacks_a_field_cannot_be_packed(self, schema):
        with pytest.raises(SettingsError, match="event 1: x = None"):
            pack_rows(schema, [{"x": [1, 2, 3], "y": 1}, {"y": 1}])


EVENT_SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {
                "x": {"dtype": "float32", "shape": [2]},
                "n": {"dtype": "int8"},
                "b": {"dtype": "bool", "default": True},
                "c": {"dtype": "string", "encode": {"vocab": ["a", "b"]}, "default": "b"},
            },
            "label": {"name": "y", "classes": ["no", "yes"]},
            "key": {"name": "k"},
            "time": {"name": "t"},
            "weight": {"name": "w"},
        }
    )
)
ARROW_TYPES = {
    "x": pa.list_(pa.float64()),
    "n": pa.int64(),
    "b": pa.bool_(),
    "c": pa.string(),
    "y": pa.string(),
    "k": pa.string(),
    "t": pa.float64(),
    "w": pa.float64(),
}
NUMBERS = st.floats(0, 1e9, width=32)


def mostly(good, *others):
    return st.one_of(*[good] * 12, *others)


EVENTS = st.fixed_dictionaries(
    {
        "x": mostly(
            st.lists(NUMBERS, min_size=2, max_size=2),
            st.none(),
            st.just([1.0, None]),
            st.just([1.0]),
            st.just([1.0, 1e39]),
        ),
        "n": mostly(st.integers(-128, 127), st.none(), st.just(128), st.just(-129)),
        "b": mostly(st.booleans(), st.none()),
        "c": mostly(st.sampled_from(["a", "b", "?", "\u00e4"]), st.none()),
        "y": mostly(st.sampled_from(["no", "yes"]), st.none(), st.just("maybe")),
        "k": mostly(st.text(max_size=3), st.none()),
        "t": mostly(NUMBERS, st.none(), st.just(-5.0)),
        "w": mostly(NUMBERS, st.none(), st.just(-0.5), st.just(1e39)),
    }
)


class TestArrow:
    @pytest.fixture
    def words(self, make_schema):
        """Strings in each column that may have some."""
        return make_schema(
            {
                "c": {"dtype": "string", "encode": {"vocab": ["a", "b"]}},
                "d": {"dtype": "string", "encode": {"vocab": ["a", "b"]}, "shape": [2], "default": "b"},
            },
            {"name": "y", "classes": ["no", "yes"]},
            key={"name": "k"},
        )

    def decode(self, schema, *batches):
        return FORMATS["arrow"](schema).decode([arrow_stream(pa.record_batch(batch)) for batch in batches])

    def test_rows_and_batches_of_a_message_are_counted_through(self, schema):
        batch = pa.RecordBatch.from_pylist([{"x": [i, i, i], "y": i} for i in range(3)])
        one = pa.RecordBatch.from_pylist([{"y": 0, "x": [1.5, 2, 3]}])
        decoded = FORMATS["arrow"](schema).decode([arrow_stream(batch, batch), arrow_stream(one), arrow_stream(batch)])
        assert decoded.message.tolist() == [0] * 6 + [1] + [2] * 3
        assert decoded.row.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1, 2]
        assert decoded.columns["label"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2]
        assert decoded.columns["feature.x"][6].tolist() == [1.5, 2, 3]

    @pytest.mark.parametrize(
        "kind",
        [
            pa.list_(pa.list_(pa.float32(), 3), 2),
            pa.list_(pa.list_(pa.float16())),
            pa.large_list(pa.list_(pa.int8(), 3)),
            pa.list_(pa.float64(), 6),
            pa.list_(pa.uint64()),
        ],
        ids=str,
    )
    def test_a_shape_is_nested_lists_or_one_flat_list(self, make_schema, kind):
        schema = make_schema({"x": {"dtype": "float32", "shape": [2, 3]}}, {"name": "y", "classes": 3})
        rows = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
        nested = pa.types.is_nested(kind.value_type)
        array = pa.array([[row[:3], row[3:]] if nested else row for row in rows], kind)
        # A slice has offsets that do not begin at 0.
        batch = pa.record_batch({"x": pa.concat_arrays([array, array]), "y": [1, 1, 1, 1]}).slice(1, 2)
        decoded = FORMATS["arrow"](schema).decode([arrow_stream(batch)])
        assert not decoded.rejects
        assert decoded.columns["feature.x"].reshape(2, 6).tolist() == [rows[1], rows[0]]

    @pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
    def test_strings_are_encoded_at_any_depth(self, words, text):
        batch = {
            "c": pa.array(["b", "?", None, "a"], text),
            "d": pa.array([["a", "b"], None, ["a", "a"], ["?", "a"]], pa.list_(text)),
            "y": pa.array(["yes", None, "no", "maybe"], text),
            "k": pa.array(["7", "u", "v", "w"], text),
        }
        decoded = self.decode(words, batch)
        assert decoded.row.tolist() == [0, 1]
        assert decoded.columns["feature.c"].tolist() == [2, 0]
        assert decoded.columns["feature.d"].tolist() == [[1, 2], [2, 2]]
        assert decoded.columns["label"].tolist() == [1, -1]
        assert decoded.columns["labelled"].tolist() == [True, False]
        assert [(reject.row, reject.reason) for reject in decoded.rejects] == [
            (2, "c is null"),
            (3, "y is not a class"),
        ]
        by_json = FORMATS["json"](words).decode([b'{"c": "b", "k": 7}'])
        assert decoded.columns["key_hash"][0] == by_json.columns["key_hash"][0]

    def test_dictionaries_of_many_messages_may_differ(self, make_schema):
        schema = make_schema({"c": {"dtype": "string", "encode": {"hash": 2**31}}}, {"name": "y", "classes": 2})
        texts = [[f"{i}-{j}" for j in range(3)] for i in range(200)]
        small = pa.dictionary(pa.int8(), pa.string())
        decoded = self.decode(schema, *({"c": pa.array(each, small)} for each in texts))
        plain = self.decode(schema, *({"c": each} for each in texts))
        assert len(decoded.message) == 600
        assert decoded.columns["feature.c"].tolist() == plain.columns["feature.c"].tolist()

    def test_a_null_within_a_dictionary_is_a_null(self, words):
        coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(["a", None]))
        decoded = self.decode(words, {"c": coded, "k": [1, 2, 3]})
        assert decoded.row.tolist() == [0]
        assert [reject.reason for reject in decoded.rejects] == ["c is null"] * 2

    def test_a_null_word_is_a_missing_label_or_the_default_where_there_is_no_null_index(self, words):
        coded = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", None]))
        yes = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([None, "yes"]))
        decoded = self.decode(words, {"c": ["a", "b"], "k": [1, 2], "y": yes})
        assert decoded.columns["labelled"].tolist() == [False, True]
        assert [reject.reason for reject in self.decode(words, {"c": coded, "k": [1, 2]}).rejects] == ["c is null"]

    @pytest.mark.parametrize(
        "absent", [None, pa.nulls(2), pa.array([None, None], pa.int64())], ids=["no", "null", "int64"]
    )
    def test_a_label_without_values_is_not_labelled(self, schema, absent):
        batch = {"x": [[1, 2, 3]] * 2} | ({} if absent is None else {"y": absent})
        decoded = self.decode(schema, batch)
        assert decoded.columns["labelled"].tolist() == [False, False]
        assert decoded.columns["label"].tolist() == [-1, -1]

    def test_a_null_takes_the_default_where_there_is_one(self, make_schema):
        schema = make_schema(
            {"x": {"dtype": "float32", "shape": [2], "default": [1, 2]}, "n": {"dtype": "int8", "default": 7}},
            {"name": "y", "classes": 2},
        )
        batch = {"x": [[3.0, 4.0], None, [5.0, None]], "y": [0, 1, 1]}
        decoded = self.decode(schema, batch, {"y": [1], "n": pa.nulls(1), "x": pa.nulls(1)}, {"y": [0]})
        assert decoded.columns["feature.x"].tolist() == [[3, 4], [1, 2], [1, 2], [1, 2]]
        assert decoded.columns["feature.n"].tolist() == [7, 7, 7, 7]
        assert [(reject.message, reject.row, reject.reason) for reject in decoded.rejects] == [
            (0, 2, "x does not fit float32 of shape [2]")
        ]

    @pytest.mark.parametrize(
        ("x", "y", "reason"),
        [
            ([1, 2], 1, "x does not fit float32 of shape [3]"),
            ([1, 2, 3, 4], 1, "x does not fit float32 of shape [3]"),
            ([1, None, 3], 1, "x does not fit float32 of shape [3]"),
            (None, 1, "x is null"),
            ([1, math.nan, 3], 1, "x is NaN, infinite"),
            ([1, math.inf, 3], 1, "x is NaN, infinite"),
            ([1, 1e39, 3], 1, "x is NaN, infinite or too large"),
            ([1, 2, 3], 3, "y is not in 0..2"),
            ([1, 2, 3], -1, "y is not in 0..2"),
        ],
    )
    def test_bad_rows_are_left_out_of_a_good_message(self, schema, x, y, reason):
        kind = pa.list_(pa.float64())
        batch = {"x": pa.array([[1, 2, 3], x, [4, 5, 6], x], kind), "y": [1, y, 2, y]}
        decoded = self.decode(schema, batch)
        assert decoded.row.tolist() == [0, 2]
        assert decoded.columns["feature.x"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert [(reject.message, reject.row) for reject in decoded.rejects] == [(0, 1), (0, 3)]
        assert reason in decoded.rejects[0].reason

    @pytest.mark.parametrize(
        ("batch", "reason"),
        [
            ({"y": [1]}, "missing required column x"),
            ({"x": [[1, 2]], "y": [1.0]}, "y is of Arrow type double, not a whole number"),
            ({"x": [1.0], "y": [1]}, "x is of Arrow type double, not float32 of shape [3]"),
            ({"x": [["1", "2", "3"]], "y": [1]}, "x is of Arrow type list<item: string>, not float32"),
            ({"x": [[True] * 3], "y": [1]}, "not float32 of shape [3]"),
            ({"x": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), "y": [1]}, "[2], not float32 of shape [3]"),
            ({"x": pa.array([], pa.list_(pa.float32(), 3))}, "it holds no event"),
        ],
    )
    def test_a_message_of_other_types_is_rejected_whole(self, schema, batch, reason):
        (reject,) = self.decode(schema, batch).rejects
        assert (reject.message, reject.row) == (0, WHOLE_MESSAGE)
        assert reason in reject.reason

    def test_two_columns_of_one_name_are_rejected(self, schema):
        batch = pa.record_batch([pa.array([[1.0, 2.0, 3.0]]), pa.array([1]), pa.array([2])], names=["x", "y", "y"])
        (reject,) = FORMATS["arrow"](schema).decode([arrow_stream(batch)]).rejects
        assert reject.reason == "two columns are named y"

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
    def test_integers_of_any_width_are_taken_where_they_fit(self, make_schema, dtype):
        schema = make_schema({"n": {"dtype": dtype}}, {"name": "y", "classes": 2})
        limits = np.iinfo(dtype)
        numbers = [int(limits.min), int(limits.max), int(limits.max) + 1, int(limits.min) - 1]
        for wide, fitting in ((pa.int64(), [*range(-(2**63), 2**63, 2**63 - 1)]), (pa.uint64(), [0, 2**64 - 1])):
            bounds = min(fitting), max(fitting)
            tried = [number for number in numbers if bounds[0] <= number <= bounds[1]]
            decoded = self.decode(schema, {"n": pa.array(tried, wide)})
            good = [number for number in tried if limits.min <= number <= limits.max]
            assert decoded.columns["feature.n"].tolist() == good
            assert {reject.reason for reject in decoded.rejects} <= {f"n does not fit {dtype}"}

    @pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
    def test_a_time_is_a_timestamp_of_any_unit_or_seconds(self, make_schema, unit):
        schema = make_schema(
            {"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, time={"name": "t"}, weight={"name": "w"}
        )
        scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
        for zone in (None, "Europe/Stockholm"):
            moments = pa.array([1_700_000_000 * scale, -3600 * scale, None, scale], pa.int64())
            times = moments.cast(pa.timestamp(unit, zone))
            decoded = self.decode(schema, {"x": [1] * 4, "t": times, "w": [1.0, 0.5, 1.0, -1.0]})
            assert decoded.columns["time"].tolist() == [1.7e9, -3600]
            assert [reject.reason for reject in decoded.rejects] == ["t is null", "w is negative"]
        decoded = self.decode(schema, {"x": [1, 1], "t": [1_700_000_000, 5], "w": pa.array([1, 2], pa.uint8())})
        assert decoded.columns["time"].tolist() == [1.7e9, 5]

    def test_unknown_columns_are_ignored_and_counted(self, schema):
        known = {"x": [[1, 2, 3]], "y": [1]}
        decoded = self.decode(schema, {**known, "z": [{"deep": [1]}]}, known, {"z": ["?"], **known})
        assert decoded.unknown_fields == 2
        assert decoded.message.tolist() == [0, 1, 2]

    def test_events_after_the_end_of_the_stream_are_not_passed_over(self, schema):
        stream = arrow_stream(pa.record_batch({"x": [[1, 2, 3]], "y": [1]}))
        decoded = FORMATS["arrow"](schema).decode([stream + stream, stream])
        assert decoded.message.tolist() == [1]
        assert "bytes follow the end" in decoded.rejects[0].reason

    @pytest.mark.parametrize("codec", ["lz4", "zstd"])
    def test_compressed_batches_are_read(self, schema, codec):
        batch = pa.RecordBatch.from_pylist([{"x": [i, 0, 0], "y": i % 3} for i in range(500)])
        decoded = FORMATS["arrow"](schema).decode([arrow_stream(batch, compression=codec)])
        assert decoded.columns["feature.x"][:, 0].tolist() == list(range(500))

    def test_a_message_that_would_take_much_memory_is_refused(self, make_schema):
        schema = make_schema({"n": {"dtype": "int64", "default": 0}}, {"name": "y", "classes": 2})
        zeros = pa.record_batch({"n": np.zeros(1_000_000, np.int64)})
        nulls = pa.record_batch({"n": pa.nulls(1_000_000)})
        unread = pa.record_batch({"n": [0], "z": pa.array(["x" * 10_000_000])})
        bombs = [arrow_stream(zeros, compression="zstd"), arrow_stream(nulls), arrow_stream(unread, compression="zstd")]
        assert max(map(len, bombs)) < 10_000
        before = pa.total_allocated_bytes()
        decoded = FORMATS["arrow"](schema).decode(bombs)
        assert [reject.message for reject in decoded.rejects] == [0, 1, 2]
        assert all("send it uncompressed" in reject.reason for reject in decoded.rejects)
        assert pa.total_allocated_bytes() - before < 1_000_000

    def test_deltas_and_very_many_batches_are_refused(self, words):
        first, second = ({"c": pa.array(texts).dictionary_encode(), "k": [1, 2]} for texts in (["a", "b"], ["a", "c"]))
        longer = pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", "b", "c"]).dictionary_encode()
        deltas = [pa.record_batch({"c": coded, "k": [1] * len(coded)}) for coded in longer]
        values = [
            arrow_stream(*deltas, emit_dictionary_deltas=True),
            arrow_stream(*[pa.record_batch(first)] * 100),
            arrow_stream(pa.record_batch(first), pa.record_batch(second)),
        ]
        decoded = FORMATS["arrow"](words).decode(values)
        assert ["deltas are not taken" in decoded.rejects[0].reason, "64 parts" in decoded.rejects[1].reason] == [
            True
        ] * 2
        assert decoded.message.tolist() == [2] * 4
        assert decoded.columns["feature.c"].tolist() == [1, 2, 1, 0]

    @pytest.mark.parametrize("kind", ["file", "bare batch", "legacy", "v4", "tensor"])
    def test_other_arrow_bytes_are_refused_with_a_reason(self, schema, kind):
        batch = pa.RecordBatch.from_pylist([{"x": [1, 2, 3], "y": 1}])
        sink = pa.BufferOutputStream()
        if kind == "file":
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
        elif kind == "bare batch":
            sink.write(batch.serialize())
        elif kind == "tensor":
            pa.ipc.write_tensor(pa.Tensor.from_numpy(np.zeros(3)), sink)
        else:
            options = (
                {"use_legacy_format": True} if kind == "legacy" else {"metadata_version": pa.ipc.MetadataVersion.V4}
            )
            sink.write(arrow_stream(batch, **options))
        (reject,) = FORMATS["arrow"](schema).decode([sink.getvalue().to_pybytes()]).rejects
        assert (reject.row, "rror" in reject.reason) == (WHOLE_MESSAGE, False)
        assert any(word in reject.reason for word in ("is no Arrow IPC stream", "before 1.0", "is a schema"))

    @settings(max_examples=300)
    @given(st.data())
    def test_a_damaged_message_is_events_or_a_reject_and_never_an_error(self, data):
        value = bytearray(data.draw(st.sampled_from(DAMAGEABLE)))
        for _ in range(data.draw(st.integers(1, 4))):
            index = data.draw(st.integers(0, len(value) - 1))
            patch = data.draw(st.sampled_from([b"\x00", b"\xff", b"\xff" * 8, b"\x00" * 7 + b"\x40", b"\x01\x02"]))
            value[index : index + len(patch)] = patch
        torn = bytes(value[: data.draw(st.integers(0, len(value)))]) if data.draw(st.booleans()) else bytes(value)
        decoded = FORMATS["arrow"](DAMAGED).decode([torn])
        assert {*decoded.message.tolist(), *(reject.message for reject in decoded.rejects)} == {0}
        assert len(decoded.message) * 32 <= 65_536 + 32 * len(torn)

    @settings(max_examples=200)
    @given(st.lists(EVENTS, min_size=1, max_size=6), st.integers(0, 2), st.booleans())
    def test_it_makes_of_events_what_json_makes_of_them(self, events, before, coded):
        """All in one message, as a slice of a longer batch, with words as they are or as dictionaries."""
        rows = [events[0]] * before + events
        arrays = {name: pa.array([event[name] for event in rows], kind) for name, kind in ARROW_TYPES.items()}
        if coded:
            arrays |= {name: arrays[name].dictionary_encode() for name in ("c", "y", "k")}
        decoded = FORMATS["arrow"](EVENT_SCHEMA).decode([arrow_stream(pa.record_batch(arrays).slice(before))])
        by_json = FORMATS["json"](EVENT_SCHEMA).decode([pack_json(EVENT_SCHEMA, event) for event in events])
        assert decoded.row.tolist() == by_json.message.tolist()
        assert [reject.row for reject in decoded.rejects] == [reject.message for reject in by_json.rejects]
        for name, column in by_json.columns.items():
            assert decoded.columns[name].dtype == column.dtype
            assert decoded.columns[name].tolist() == column.tolist(), name

    def test_without_pyarrow_the_extra_is_named(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "anabranch.ingest.formats.arrow", raising=False)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(SettingsError, match=r"pip install 'anabranch\[arrow\]'"):
            format_class("arrow")


DAMAGED = Schema(
    SchemaSettings.model_validate(
        {
            "features": {
                "x": {"dtype": "float32", "shape": [2]},
                "c": {"dtype": "string", "encode": {"hash": 9}, "shape": [2], "default": "?"},
            },
            "label": {"name": "y", "classes": ["no", "yes"]},
            "key": {"name": "k"},
            "time": {"name": "t"},
        }
    )
)


def damageable():
    """Small messages of every kind of column."""
    batch = pa.record_batch(
        {
            "x": pa.array([[1, 2], [3, None], None, [4]], pa.list_(pa.float64())),
            "c": pa.array([["a", "b"]] * 4, pa.list_(pa.dictionary(pa.int8(), pa.string()), 2)),
            "y": pa.array(["no", "yes", None, "no"]).dictionary_encode(),
            "k": ["p", "q", "r", None],
            "t": pa.array([1, 2, 3, 4], pa.timestamp("us")),
            "z": [{"deep": [1]}] * 4,
        }
    )
    yield arrow_stream(batch)
    yield arrow_stream(batch, batch)
    yield arrow_stream(batch, compression="lz4")
    yield arrow_stream(batch, compression="zstd")


DAMAGEABLE = list(damageable())
