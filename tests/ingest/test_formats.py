"""One suite over the message formats, and what is special to each."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.config import SchemaSettings
from ingest.decoded import WHOLE_MESSAGE, Decoded
from ingest.errors import SettingsError
from ingest.format import FORMATS
from ingest.rows import pack_rows, row_dtype
from ingest.schema import Schema

MakeSchema = Callable[..., Schema]


def pack_json(schema: Schema, event: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in event.items() if value is not None}).encode()


def pack_row(schema: Schema, event: dict[str, Any]) -> bytes:
    return pack_rows(schema, [{name: value for name, value in event.items() if value is not None}])


PACK: dict[str, Callable[[Schema, dict[str, Any]], bytes]] = {"json": pack_json, "rows": pack_row}


@pytest.fixture(params=sorted(FORMATS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_format_is_in_this_suite() -> None:
    assert PACK.keys() == FORMATS.keys()


def decode(name: str, schema: Schema, *events: dict[str, Any]) -> Decoded:
    return FORMATS[name](schema).decode([PACK[name](schema, event) for event in events])


def test_good_events_become_columns_in_order(name: str, make_schema: MakeSchema) -> None:
    schema = make_schema(
        {"x": {"dtype": "float32", "shape": [2, 2]}, "n": {"dtype": "int16"}, "b": {"dtype": "bool"}},
        {"name": "y", "classes": 3},
        weight={"name": "w"},
        time={"name": "t"},
    )
    events = [
        {"x": [[i, 1.5], [-2, 0]], "n": -i, "b": i % 2 == 0, "y": i % 3, "w": 0.5 * i, "t": 1e9 + i} for i in range(5)
    ]
    decoded = decode(name, schema, *events)
    assert not decoded.rejects
    assert decoded.message.tolist() == list(range(5))
    assert decoded.row.tolist() == [0] * 5
    for column, dtype in (("feature.x", "float32"), ("feature.n", "int16"), ("feature.b", "bool"), ("label", "int64")):
        assert decoded.columns[column].dtype == dtype
    assert decoded.columns["feature.x"].tolist() == [event["x"] for event in events]
    assert decoded.columns["feature.n"].tolist() == [event["n"] for event in events]
    assert decoded.columns["feature.b"].tolist() == [event["b"] for event in events]
    assert decoded.columns["label"].tolist() == [event["y"] for event in events]
    assert decoded.columns["weight"].tolist() == [event["w"] for event in events]
    assert decoded.columns["time"].tolist() == [event["t"] for event in events]
    assert decoded.columns["labelled"].all()


def test_no_message_at_all_is_no_event(name: str, schema: Schema) -> None:
    decoded = FORMATS[name](schema).decode([])
    assert len(decoded.message) == 0
    assert decoded.columns["feature.x"].shape == (0, 3)


def test_an_event_without_a_label_is_not_labelled(name: str, schema: Schema) -> None:
    decoded = decode(name, schema, {"x": [1, 2, 3], "y": None}, {"x": [1, 2, 3], "y": 2})
    assert decoded.columns["labelled"].tolist() == [False, True]
    assert decoded.columns["label"].tolist() == [-1, 2]


def test_a_regression_target_may_be_missing(name: str, make_schema: MakeSchema) -> None:
    schema = make_schema({"x": {"dtype": "float64"}}, {"name": "y", "dtype": "float32"})
    decoded = decode(name, schema, {"x": 1, "y": None}, {"x": 1, "y": -2.5})
    assert decoded.columns["labelled"].tolist() == [False, True]
    assert math.isnan(decoded.columns["label"][0])
    assert decoded.columns["label"][1] == -2.5


def test_a_key_and_a_group_hash_alike_in_every_event(name: str, make_schema: MakeSchema) -> None:
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, key={"name": "k"}, group={"name": "g"})
    decoded = decode(name, schema, {"x": 1, "y": 0, "k": 7, "g": 9}, {"x": 2, "y": 1, "k": 7, "g": 8})
    key, group = decoded.columns["key_hash"], decoded.columns["group_hash"]
    assert key[0] == key[1] != 0
    assert group[0] != group[1]


def test_good_events_survive_bad_neighbours(name: str, schema: Schema) -> None:
    good = {"x": [1, 2, 3], "y": 1}
    values = [PACK[name](schema, good), b"", PACK[name](schema, good), b"\xff" * 5]
    decoded = FORMATS[name](schema).decode(values)
    assert decoded.message.tolist() == [0, 2]
    assert [reject.message for reject in decoded.rejects] == [1, 3]


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_arbitrary_bytes_are_events_or_rejects_and_never_an_error(values: list[bytes]) -> None:
    schema = Schema(
        SchemaSettings.model_validate(
            {"features": {"x": {"dtype": "float16", "shape": [2]}}, "label": {"name": "y", "classes": 2}}
        )
    )
    for kind in FORMATS.values():
        decoded = kind(schema).decode(values)
        assert {*decoded.message.tolist(), *(reject.message for reject in decoded.rejects)} == set(range(len(values)))
        assert np.isfinite(decoded.columns["feature.x"]).all()


class TestJson:
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
            (b'{"x": [1, 2, NaN], "y": 1}', "malformed"),
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
    def test_each_kind_of_bad_message_is_rejected_with_its_reason(
        self, schema: Schema, value: bytes, reason: str
    ) -> None:
        decoded = FORMATS["json"](schema).decode([value])
        assert len(decoded.message) == 0
        assert [(reject.message, reject.row) for reject in decoded.rejects] in ([(0, WHOLE_MESSAGE)], [(0, 0)])
        assert reason in decoded.rejects[0].reason

    def test_unknown_fields_are_ignored_and_counted(self, schema: Schema) -> None:
        values = [b'{"x": [1, 2, 3], "y": 1, "z": {"deep": []}}', b'{"x": [1, 2, 3], "y": 1}']
        decoded = FORMATS["json"](schema).decode(values)
        assert decoded.unknown_fields == 1
        assert len(decoded.message) == 2

    def test_two_malformed_messages_never_join_to_good_ones(self, schema: Schema) -> None:
        decoded = FORMATS["json"](schema).decode([b'{"x": [1, 2', b'3], "y": 1}', b'{"x": [1, 2, 3], "y": 0}'])
        assert decoded.message.tolist() == [2]
        assert [reject.message for reject in decoded.rejects] == [0, 1]

    def test_strings_are_encoded_and_unknown_ones_are_id_0(self, make_schema: MakeSchema) -> None:
        schema = make_schema({"c": {"dtype": "string", "encode": {"vocab": ["a", "b"]}}}, {"name": "y", "classes": 2})
        decoded = FORMATS["json"](schema).decode([b'{"c": "b"}', b'{"c": "?"}', '{"c": "\u00e4"}'.encode()])
        assert decoded.columns["feature.c"].tolist() == [2, 0, 0]

    def test_a_feature_with_a_default_is_optional(self, make_schema: MakeSchema) -> None:
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

    def test_classes_are_given_by_name_where_they_have_names(self, make_schema: MakeSchema) -> None:
        schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": ["no", "yes"]})
        decoded = FORMATS["json"](schema).decode([b'{"x": 1, "y": "yes"}', b'{"x": 1}', b'{"x": 1, "y": "maybe"}'])
        assert decoded.columns["label"].tolist() == [1, -1]
        assert "maybe" in decoded.rejects[0].reason

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
    def test_integers_that_do_not_fit_their_dtype_are_rejected(self, make_schema: MakeSchema, dtype: str) -> None:
        schema = make_schema({"n": {"dtype": dtype}}, {"name": "y", "classes": 2})
        limits = np.iinfo(dtype)
        numbers = [int(limits.min), int(limits.max), int(limits.max) + 1, int(limits.min) - 1, 10**30]
        decoded = FORMATS["json"](schema).decode([b'{"n": %d}' % number for number in numbers])
        assert decoded.columns["feature.n"].tolist() == [limits.min, limits.max]
        assert [reject.message for reject in decoded.rejects] == [2, 3, 4]

    def test_a_negative_weight_is_rejected(self, make_schema: MakeSchema) -> None:
        schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, weight={"name": "w"})
        decoded = FORMATS["json"](schema).decode([b'{"x": 1, "y": 1, "w": -0.5}', b'{"x": 1, "y": 1, "w": 0}'])
        assert decoded.message.tolist() == [1]


class TestRows:
    def test_many_rows_in_a_message_are_many_events(self, schema: Schema) -> None:
        message = pack_rows(schema, [{"x": [i, i, i], "y": i % 3} for i in range(4)])
        decoded = FORMATS["rows"](schema).decode([message, message[: len(message) // 2]])
        assert decoded.message.tolist() == [0, 0, 0, 0, 1, 1]
        assert decoded.row.tolist() == [0, 1, 2, 3, 0, 1]
        assert decoded.columns["label"].tolist() == [0, 1, 2, 0, 0, 1]

    def test_a_message_that_is_not_whole_rows_is_rejected_whole(self, schema: Schema) -> None:
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
    def test_bad_rows_are_left_out_of_a_good_message(self, schema: Schema, bad: dict[str, Any], reason: str) -> None:
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
    def test_strings_and_defaults_are_refused_at_start(self, make_schema: MakeSchema, feature: dict[str, Any]) -> None:
        schema = make_schema({"f": feature}, {"name": "y", "classes": 2})
        with pytest.raises(SettingsError, match=r"schema.features.f.*use \"json\""):
            FORMATS["rows"](schema)

    def test_the_layout_is_packed_little_endian_in_the_order_of_the_file(self, make_schema: MakeSchema) -> None:
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

    def test_an_event_that_lacks_a_field_cannot_be_packed(self, schema: Schema) -> None:
        with pytest.raises(SettingsError, match="event 1: x = None"):
            pack_rows(schema, [{"x": [1, 2, 3], "y": 1}, {"y": 1}])
