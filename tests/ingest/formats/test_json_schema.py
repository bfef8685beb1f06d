"""JSON is validated against its writer schema, which comes from the network; NaN is read as Python writes it."""

import json
import math
import socket
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.formats.base import WHOLE_MESSAGE
from anabranch.ingest.formats.json_schema import make_decoder
from anabranch.ingest.formats.json_text import decoded
from anabranch.ingest.schema_registry.writer_schema import Reference, UnfitSchemaError, WriterSchema
from tests.ingest.conftest import make_schema

SCHEMA = make_schema(
    {"amount": {"dtype": "float32"}, "n": {"dtype": "int16", "default": 7}},
    {"name": "y", "classes": ["no", "yes"]},
    key={"name": "id"},
)
PAYMENT = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Payment",
    "type": "object",
    "properties": {
        "amount": {"type": "number", "minimum": 0},
        "n": {"type": "integer"},
        "y": {"enum": ["no", "yes"]},
        "id": {"type": "string", "pattern": "^(k+)+$"},
    },
    "required": ["amount", "id"],
}


def writer(text=PAYMENT, *references):
    return WriterSchema(7, "json-schema", text if isinstance(text, str) else json.dumps(text), references)


def decode(*records, text=PAYMENT, references=()):
    contents = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    return make_decoder(writer(text, *references), SCHEMA).decode(contents)


def test_objects_become_columns():
    decoded = decode({"amount": 1.5, "n": 2, "y": "yes", "id": "k"}, {"amount": 2, "id": "kk", "z": [1]})
    assert not decoded.rejects
    assert decoded.message.tolist() == [0, 1]
    assert decoded.columns["feature.amount"].tolist() == [1.5, 2]
    assert decoded.columns["feature.n"].tolist() == [2, 7]
    assert decoded.columns["label"].tolist() == [1, -1]
    assert decoded.unknown_fields == 1
    assert len(decode().message) == 0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"amount": -1, "id": "k"}, "schema: -1 is less than the minimum of 0 at /amount"),
        ({"id": "k"}, 'schema: "amount" is a required property'),
        ({"amount": "1", "id": "k"}, 'schema: "1" is not of type "number" at /amount'),
        ([1], 'schema: [1] is not of type "object"'),
        ({"amount": 1, "id": "k", "n": 2**20}, "schema: Expected `int` <= 32767 - at `$.n`"),
        ({"amount": 1, "id": "k", "n": None}, 'schema: null is not of type "integer" at /n'),
        ({"amount": 1e39, "id": "k"}, "amount is NaN, infinite or too large"),
        (b"", "schema: Input data was truncated"),
        (b"[" * 100_000, "schema: maximum recursion depth exceeded"),
        (b'{"amount": 1, "id": "\xff"}', "schema: "),
        ({"amount": 1, "id": "k" * 30 + "!"}, 'schema: "kkkk'),
        ({"amount": 1, "id": "!" * 5000}, "schema: "),
    ],
)
def test_a_record_that_does_not_fit_is_rejected_and_its_neighbours_are_not(record, reason):
    good = {"amount": 1, "id": "k"}
    decoded = decode(good, record, good)
    assert decoded.message.tolist() == [0, 2]
    assert decoded.columns["feature.amount"].tolist() == [1, 1]
    assert [(each.message, each.row == WHOLE_MESSAGE) for each in decoded.rejects] in ([(1, True)], [(1, False)])
    assert decoded.rejects[0].reason.startswith(reason)
    assert len(decoded.rejects[0].reason) < 300


def test_a_field_that_is_null_is_missing():
    optional = {"oneOf": [{"type": "null"}, {"type": "number"}]}
    text = {"properties": {"amount": optional, "n": {"type": ["null", "integer"]}, "y": {}}}
    decoded = decode({"amount": 1, "id": "k", "n": None, "y": None}, {"amount": None, "id": "k"}, text=text)
    assert decoded.message.tolist() == [0]
    assert decoded.columns["feature.n"].tolist() == [7]
    assert decoded.columns["labelled"].tolist() == [False]
    assert decoded.rejects == [(1, WHOLE_MESSAGE, "schema: Object missing required field `amount`")]


def test_formats_are_not_checked():
    text = {"properties": {"id": {"type": "string", "format": "date-time"}}}
    assert decode({"amount": 1, "id": "k"}, text=text).message.tolist() == [0]


def test_references_are_those_of_the_registry():
    text = {"type": "object", "properties": {"amount": {"$ref": "money.json"}}}
    money = Reference("money.json", json.dumps({"$ref": "number.json#/definitions/positive"}))
    number = Reference("number.json", json.dumps({"definitions": {"positive": {"type": "number", "minimum": 0}}}))
    decoded = decode({"amount": 1, "id": "k"}, {"amount": -1, "id": "k"}, text=text, references=(number, money))
    assert decoded.message.tolist() == [0]
    assert "less than the minimum" in decoded.rejects[0].reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "truncated"),
        ("[1]", 'is not of types "boolean", "object"'),
        ({"type": "number or so"}, "is not valid under any of the schemas"),
        ({"$ref": "http://example.com/payment.json"}, "http://example.com/payment.json"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "file:///etc/passwd"),
        ({"$ref": "#/definitions/gone"}, "it refers to #/definitions/gone, which is in none of its documents"),
        ({"pattern": "("}, 'is not a "regex"'),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_and_nothing_is_fetched(monkeypatch, text, reason):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(UnfitSchemaError, match="the JSON Schema 7 cannot be read: ") as caught:
        decode(text=text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"amount": {"type": "string"}}, "amount is of JSON type string, not float32"),
        ({"amount": {"type": ["null", "boolean", "string"]}}, "amount is of JSON type boolean or string, not float32"),
        ({"id": {"type": "object"}}, "id is of JSON type object, not a string or a whole number"),
        ({"y": {"type": "integer"}}, None),
        ({"n": {"type": "string"}}, None),
        ({"amount": {"type": ["null", "number"]}}, None),
        ({"amount": {}}, None),
        ({"amount": True}, None),
    ],
)
def test_a_property_of_a_type_that_cannot_fit_is_named(changes, sentence):
    text = {"type": "object", "properties": {**PAYMENT["properties"], **changes}}  # type: ignore[dict-item]
    if sentence is None:
        assert len(decode(text=text).message) == 0
        return
    with pytest.raises(UnfitSchemaError) as caught:
        decode(text=text)
    assert str(caught.value) == sentence
    optional = make_schema({"amount": {"dtype": "float32", "default": 0}}, {"name": "y", "classes": ["no", "yes"]})
    make_decoder(writer(text), optional)
    if "amount" in changes:
        with pytest.raises(UnfitSchemaError):
            make_decoder(writer({**text, "required": ["amount"]}), optional)


def test_a_property_that_is_excluded_is_named():
    text: dict[str, Any] = {"properties": {"id": {"type": "string"}}, "additionalProperties": False}
    with pytest.raises(UnfitSchemaError, match="the writer schema has no property amount"):
        decode(text=text)
    for changes in ({"additionalProperties": True}, {"patternProperties": {"a": {}}}):
        assert decode({"amount": 1, "id": "k"}, text={**text, **changes}).message.tolist() == [0]


def doubled(levels, word):
    """Subschemas that each refer to the next one twice."""
    inner = {f"a{level}": {word: [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(levels)}
    return {"$defs": {**inner, f"a{levels}": {"type": "object"}}, "$ref": "#/$defs/a0"}


def nested(levels):
    """What is not evaluated is looked for at each level, which evaluates all levels below it once more."""
    text: dict[str, Any] = {"properties": {"amount": {}, "id": {}}}
    for _ in range(levels):
        text = {"allOf": [text], "unevaluatedProperties": False}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **text}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ({"$ref": "#"}, "is recursive"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "is recursive"),
        ({"properties": {"child": {"$ref": "#"}}}, "is recursive"),
        ({"$id": "a.json", "items": {"$ref": "a.json"}}, "is recursive"),
        (
            {"$defs": {"a": {"$ref": "#b"}, "c": {"$anchor": "b", "not": {"$ref": "#/$defs/a"}}}, "$ref": "#b"},
            "recursive",
        ),
        ({"properties": {"a": {"$ref": "other.json"}}}, "is recursive"),
        ({"$dynamicAnchor": "n", "allOf": [{"$dynamicRef": "#n"}]}, "by which it may be recursive"),
        (doubled(30, "anyOf"), "more than 20000 subschemas"),
        (doubled(30, "allOf"), "more than 20000 subschemas"),
        (nested(30), "more than 20000 subschemas"),
    ],
)
def test_a_schema_that_is_recursive_or_explodes_is_refused_before_a_record_is_read(text, sentence):
    circle = Reference("other.json", json.dumps({"not": {"$ref": "other.json"}}))
    with pytest.raises(UnfitSchemaError, match=f"its JSON Schema .*{sentence}"):
        make_decoder(writer(text, circle), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        doubled(10, "allOf"),
        nested(8),
        {"$id": "urn:payment", "$ref": "#/definitions/p", "definitions": {"p": PAYMENT}},
        {"$id": "https://a.com/b/c", "$ref": "d#e", "$defs": {"d": {"$id": "d", "$defs": {"e": {"$anchor": "e"}}}}},
        {"properties": {"a b": {"$ref": "#/x-types/a%20b/0"}}, "x-types": {"a b": [{"type": "string"}]}},
        "true",
    ],
)
def test_a_schema_within_the_bounds_is_read(text):
    assert decode({"amount": 1, "id": "k"}, text=text).message.tolist() == [0]


@pytest.mark.parametrize(
    "tags",
    [
        {"contains": {"enum": [[number] for number in range(2_500)]}, "minContains": 10**9},
        {"items": {"anyOf": [{"const": {"a": [number]}} for number in range(2_500)]}},
        {"items": {"properties": {f"a{number}": {"type": "string"} for number in range(5_000)}}},
        {"items": {"required": [f"a{number}" for number in range(5_000)]}},
        {"patternProperties": {f"^a{number}": {} for number in range(2_500)}},
    ],
)
def test_a_record_that_may_need_too_many_steps_is_rejected_before_it_is_validated(tags):
    long, short = ({"amount": 1, "id": "k", "tags": tags} for tags in ([[-1]] * 30_000, {"b": 1}))
    decoded = decode(long, short, text={"properties": {"tags": tags}})
    assert decoded.message.tolist() == [1]
    assert " bytes are too many to validate: its writer schema may need " in decoded.rejects[0].reason


def test_a_long_record_of_a_usual_schema_is_validated():
    tags = {
        "type": "array",
        "uniqueItems": True,
        "items": {"properties": {f"a{n}": {"type": "number"} for n in range(40)}},
    }
    record = {"amount": 1, "id": "k", "tags": [{f"a{number % 40}": number} for number in range(50_000)]}
    assert decode(record, text={"properties": {"tags": tags}}).message.tolist() == [0]


@pytest.mark.timeout(30)
def test_a_pattern_that_takes_many_steps_rejects_its_message():
    text = {"properties": {"id": {"pattern": "^(?=k)((k|kk)+)+$"}}}
    decoded = decode({"amount": 1, "id": "k" * 5000 + "!"}, {"amount": 1, "id": "k"}, text=text)
    assert decoded.message.tolist() == [1]
    assert decoded.rejects[0].reason.startswith("schema: ")


NUMBERS = st.floats(0, allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"amount": NUMBERS, "id": st.just("k")},
            optional={"n": st.integers(-(2**15), 2**15 - 1), "y": st.sampled_from(["no", "yes"])},
        ),
        max_size=6,
    )
)
def test_what_is_encoded_is_decoded(events):
    decoded = decode(*events)
    assert not decoded.rejects
    assert decoded.columns["feature.amount"].tolist() == [each["amount"] for each in events]
    assert decoded.columns["feature.n"].tolist() == [each.get("n", 7) for each in events]
    assert decoded.columns["label"].tolist() == [
        ["no", "yes"].index(each["y"]) if "y" in each else -1 for each in events
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_arbitrary_bytes_are_events_or_rejects(records):
    decoded = decode(*records)
    assert sorted([*decoded.message.tolist(), *(each.message for each in decoded.rejects)]) == list(range(len(records)))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.just(math.nan), st.text(), st.just('\\"NaN')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def without_nan(value):
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) else value


@given(VALUES)
def test_what_python_writes_is_read_with_null_for_each_nan(value):
    assert decoded(msgspec.json.decode, json.dumps(value).encode()) == without_nan(value)


@pytest.mark.parametrize("text", [b'{"x": Na}', b"[1,]", b'"NaN', b"", b'{"x": "NaN",}', b"\xff"])
def test_other_text_that_is_no_json_has_the_reason_of_the_decoder(text):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as caught:
        decoded(msgspec.json.decode, text)
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as plain:
        msgspec.json.decode(text)
    assert str(caught.value) == str(plain.value)


@pytest.mark.parametrize("text", [b"[Infinity]", b"[-Infinity]", b"[NaN, Infinity]"])
def test_infinity_is_named(text):
    with pytest.raises(msgspec.DecodeError, match=r"^JSON is malformed: .*: it has Infinity, which is no JSON$"):
        decoded(msgspec.json.decode, text)


def test_a_nan_where_null_is_none_of_the_values_is_named():
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float`, got `null`.*; NaN is read as null"):
        decoded(msgspec.json.Decoder(list[float]).decode, b"[NaN]")


@pytest.mark.parametrize("text", [b'{"a": NaN, "' + b'\\"' * 500_000, b'[NaN, "' * 100_000, b'"' * 1_000_001 + b"NaN"])
def test_hostile_text_takes_time_in_proportion_to_its_length(text):
    began = time.process_time()
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        decoded(msgspec.json.decode, text)
    assert time.process_time() - began < 5
