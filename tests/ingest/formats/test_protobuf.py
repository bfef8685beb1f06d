"""Protobuf records become columns, by ptars and one by one alike; what cannot be read is rejected with its reason."""

import base64
import contextlib
import importlib
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.formats import protobuf
from anabranch.ingest.formats.base import WHOLE_MESSAGE
from anabranch.ingest.formats.protobuf_schema.columns import ProtobufColumns
from anabranch.ingest.formats.protobuf_schema.records import ProtobufRecords
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema
from tests.ingest.conftest import make_schema
from tests.support.protobuf import message_class, serialized

EVENT = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
enum Kind { KIND_UNSPECIFIED = 0; CARD = 1; CASH = 2; }
message Event {
  float amount = 1;
  optional int32 count = 2;
  string country = 3;
  Kind kind = 4;
  repeated double x = 5;
  google.protobuf.Timestamp at = 6;
  google.protobuf.DoubleValue weight = 7;
  string id = 8;
  Kind label = 9;
  repeated string words = 10;
  bool fresh = 11;
  google.protobuf.StringValue city = 12;
  oneof who { uint64 user = 13; string guest = 14; }
  repeated Kind kinds = 15;
  Event parent = 16;
  map<string, int32> counts = 17;
}
"""
VOCAB = {"vocab": ["CARD", "CASH"]}
FEATURES = {
    "amount": {"dtype": "float32"},
    "count": {"dtype": "int16", "default": 7},
    "country": {"dtype": "string", "encode": {"vocab": ["de", "fr"]}},
    "kind": {"dtype": "string", "encode": VOCAB},
    "x": {"dtype": "float64", "shape": [2, 2], "default": -1},
    "words": {"dtype": "string", "shape": [2], "encode": {"vocab": ["a", "b"]}},
    "fresh": {"dtype": "bool"},
    "city": {"dtype": "string", "encode": {"vocab": ["Ulm"]}, "default": "Ulm"},
    "user": {"dtype": "int64", "default": -5},
    "kinds": {"dtype": "string", "shape": [1], "encode": VOCAB, "default": "CASH"},
}
SCHEMA = make_schema(
    FEATURES,
    {"name": "label", "classes": ["CARD", "CASH"]},
    key={"name": "id"},
    time={"name": "at"},
    weight={"name": "weight"},
)
MESSAGE = message_class(EVENT, "shop.Event")
SERIALIZED = serialized(EVENT)


def writer(text=EVENT, *references):
    return WriterSchema(7, "protobuf", text, references)


def decoder(name, schema, text=EVENT, indexes=(0,)):
    made = protobuf.make_decoder(writer(text), schema, indexes)
    assert isinstance(made, ProtobufColumns)
    return made if name == "columns" else made._one_by_one


@pytest.fixture(params=["columns", "one by one"])
def decode(request):
    """`decode(schema, *records, text=..., indexes=...)` by one of the two ways."""

    def decode(schema, *records, text=EVENT, indexes=(0,)):
        return decoder(request.param, schema, text, indexes).decode(records)

    return decode


def event(**fields):
    """A message with every required field."""
    message = MESSAGE(words=["a", "b"], id="k")
    message.at.seconds, message.weight.value = 1_700_000_000, 0.5
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)
    return message


def record(**fields):
    content: bytes = event(**fields).SerializeToString()
    return content


def test_every_kind_of_field_becomes_a_column(decode):
    message = event(amount=1.5, count=3, country="fr", kind=2, x=[1, 2, 3, 4], label=1, words=["b", "c"], fresh=True)
    message.at.nanos, message.user, message.city.value = 250_000_000, 2**40, "Bonn"
    message.kinds.append(1)
    decoded = decode(SCHEMA, message.SerializeToString())
    assert not decoded.rejects
    assert {name: column.tolist() for name, column in decoded.columns.items() if "hash" not in name} == {
        "feature.amount": [1.5],
        "feature.count": [3],
        "feature.country": [2],
        "feature.kind": [2],
        "feature.x": [[[1, 2], [3, 4]]],
        "feature.words": [[2, 0]],
        "feature.fresh": [True],
        "feature.city": [0],
        "feature.user": [2**40],
        "feature.kinds": [[1]],
        "label": [0],
        "labelled": [True],
        "weight": [0.5],
        "time": [1_700_000_000.25],
    }
    assert {name: (column.dtype, column.shape[1:]) for name, column in decoded.columns.items()} == {
        **SCHEMA.payload(),
        "key_hash": (np.dtype(np.uint64), ()),
        "group_hash": (np.dtype(np.uint64), ()),
    }
    assert decoded.columns["key_hash"] == decode(SCHEMA, record(amount=9)).columns["key_hash"]


def test_a_field_with_presence_that_is_absent_takes_its_default(decode):
    decoded = decode(SCHEMA, record(), record(count=0, user=0, guest="g"))
    assert decoded.columns["feature.count"].tolist() == [7, 0]
    assert decoded.columns["feature.city"].tolist() == [1, 1]
    assert decoded.columns["feature.user"].tolist() == [-5, -5]


def test_an_empty_list_takes_its_default(decode):
    decoded = decode(SCHEMA, record(), record(x=[0] * 4, kinds=[1]))
    assert decoded.columns["feature.x"].tolist() == [[[-1, -1], [-1, -1]], [[0, 0], [0, 0]]]
    assert decoded.columns["feature.kinds"].tolist() == [[2], [1]]


def test_a_field_without_presence_is_its_zero(decode):
    decoded = decode(SCHEMA, record())
    assert decoded.columns["feature.amount"].tolist() == [0]
    assert decoded.columns["feature.country"].tolist() == [0]
    assert decoded.columns["feature.fresh"].tolist() == [False]


@pytest.mark.parametrize(
    ("remove", "reason"),
    [("at", "at is null|missing required field `at`"), ("weight", "weight is null|missing required field `weight`")],
)
def test_a_required_field_that_is_absent_is_a_fault_of_its_message(decode, remove, reason):
    message = event()
    message.ClearField(remove)
    decoded = decode(SCHEMA, record(), message.SerializeToString(), record())
    assert decoded.message.tolist() == [0, 2]
    assert [reject.message for reject in decoded.rejects] == [1]
    assert any(decoded.rejects[0].reason.endswith(each) for each in reason.split("|"))
    assert decoded.rejects[0].reason.startswith("schema: ")


def test_a_label_that_is_the_zero_of_an_enum_is_no_label_unless_it_is_a_class(decode):
    decoded = decode(SCHEMA, record(), record(label=2))
    assert decoded.columns["labelled"].tolist() == [False, True]
    assert decoded.columns["label"].tolist() == [-1, 1]
    named = make_schema(
        {"amount": {"dtype": "float32"}}, {"name": "label", "classes": ["KIND_UNSPECIFIED", "CARD", "CASH"]}
    )
    assert decode(named, record(), record(label=2)).columns["label"].tolist() == [0, 2]
    decoded = decode(SCHEMA, record(label=3))
    assert len(decoded.message) == 0
    numbered = make_schema({"amount": {"dtype": "float32"}}, {"name": "label", "classes": 4})
    assert decode(numbered, record(), record(label=3)).columns["label"].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("kind", "label", "values", "expected"),
    [
        ("bool", {"classes": 2}, [True, False], [1, 0]),
        ("optional bool", {"classes": 2}, [None, False], [-1, 0]),
        ("google.protobuf.BoolValue", {"classes": 2}, [None, True], [-1, 1]),
        ("optional sint64", {"classes": 3}, [2, None], [2, -1]),
        ("string", {"classes": ["no", "yes"]}, ["yes", ""], [1, -1]),
        ("float", {"dtype": "float32"}, [2.5, 0.0], [2.5, 0]),
        ("uint32", {"dtype": "float64"}, [2, 0], [2, 0]),
    ],
)
def test_labels_of_each_kind(decode, kind, label, values, expected):
    text = f'syntax = "proto3"; import "google/protobuf/wrappers.proto"; message A {{ float x = 1; {kind} y = 2; }}'
    kind_of, schema = message_class(text, "A"), make_schema({"x": {"dtype": "float32"}}, {"name": "y", **label})
    records = []
    for value in values:
        message = kind_of()
        if value is not None and kind.startswith("google"):
            message.y.value = value
        elif value is not None:
            message.y = value
        records.append(message.SerializeToString())
    decoded = decode(schema, *records, text=text)
    assert decoded.columns["label"].tolist() == expected
    assert decoded.columns["labelled"].tolist() == [each != -1 for each in expected]


@pytest.mark.parametrize("classes", [3, ["CARD", "CASH", "ZERO"]], ids=["numbers", "names"])
@pytest.mark.parametrize("kind", ["enum", "plain"])
def test_a_label_of_several_classes_is_a_repeated_field(decode, classes, kind):
    if kind == "plain":
        kind = "int64" if classes == 3 else "string"
        values: list[Any] = [1, 0, 2] if classes == 3 else ["CASH", "CARD", "ZERO"]
    else:
        kind, values = "Kind", [1, 0, 2] if classes == 3 else [2, 1, 0]
    text = f"""syntax = "proto3"; enum Kind {{ ZERO = 0; CARD = 1; CASH = 2; }}
    message A {{ int32 x = 1; repeated {kind} y = 2; }}"""
    kind_of = message_class(text, "A")
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": classes, "multi": True})
    records = [kind_of(y=each).SerializeToString() for each in (values[:2], [], values[2:], [values[0]] * 2)]
    decoded = decode(schema, *records, text=text)
    assert decoded.message.tolist() == [0, 1, 2]
    assert decoded.columns["label"].tolist() == [[True, True, False], [False] * 3, [False, False, True]]
    assert decoded.columns["labelled"].all()
    assert decoded.rejects[0].message == 3
    assert decoded.rejects[0].reason == "y lists a class twice" or decoded.rejects[0].reason.startswith("schema: ")


def test_a_label_with_a_length_is_a_repeated_field_with_empty_names(decode):
    text = 'syntax = "proto3"; message A { int32 x = 1; repeated string y = 2; }'
    schema = make_schema({"x": {"dtype": "int8"}}, {"name": "y", "classes": ["a", "b"], "length": 2})
    kind = message_class(text, "A")
    decoded = decode(schema, *(kind(y=each).SerializeToString() for each in (["", "b", "a"], [], ["c"])), text=text)
    assert decoded.columns["label"].tolist() == [[-100, 1], [-100, -100]]
    assert decoded.columns["labelled"].tolist() == [True, False]
    assert [reject.message for reject in decoded.rejects] == [2]


def test_packed_and_unpacked_lists_are_read_alike(decode):
    schema = make_schema({"x": {"dtype": "float32", "shape": [3]}}, {"name": "y", "classes": 2})
    text = 'syntax = "proto3"; message A { repeated float x = 1 [packed = %s]; int32 y = 2; }'
    for packed in ("true", "false"):
        content = message_class(text % packed, "A")(x=[1, 2, 3], y=1).SerializeToString()
        for declared in ("true", "false"):
            decoded = decode(schema, content, text=text % declared)
            assert decoded.columns["feature.x"].tolist() == [[1, 2, 3]]


def test_enums_have_the_name_that_was_declared_first_and_unknown_ones_their_number(decode):
    text = """enum K { option allow_alias = true; A = 5; B = 5; C = 1; }
    message M { optional K k = 1; optional int32 y = 2; }"""
    newer = "enum K { A = 5; D = 9; } message M { optional K k = 1; }"
    schema = make_schema(
        {"k": {"dtype": "string", "encode": {"vocab": ["A", "B", "C", "9"]}}}, {"name": "y", "classes": 2}
    )
    of, ofd = message_class(text, "M"), message_class(newer, "M")
    records = [of(k=5).SerializeToString(), of(k=1).SerializeToString(), ofd(k=9).SerializeToString()]
    assert decode(schema, *records, text=text).columns["feature.k"].tolist() == [1, 3, 4]


def test_a_key_may_be_an_enum(decode):
    schema = make_schema({"amount": {"dtype": "float32"}}, {"name": "y", "classes": 2}, key={"name": "kind"})
    by_name = make_schema({"amount": {"dtype": "float32"}}, {"name": "y", "classes": 2}, key={"name": "country"})
    hashes = decode(schema, record(kind=1)).columns["key_hash"]
    assert hashes == decode(by_name, record(country="CARD")).columns["key_hash"]


def test_the_indexes_choose_the_message_type(decode):
    text = """syntax = "proto3"; message Other { string x = 1; }
    message Outer { message Inner { float x = 3; int32 y = 4; } Inner inner = 1; }"""
    schema = make_schema({"x": {"dtype": "float32"}}, {"name": "y", "classes": 3})
    content = message_class(text, "Outer.Inner")(x=2.5, y=1).SerializeToString()
    assert decode(schema, content, text=text, indexes=(1, 0)).columns["feature.x"].tolist() == [2.5]
    assert decode(schema, content, text=serialized(text), indexes=(1, 0)).columns["label"].tolist() == [1]


def test_a_message_type_that_contains_itself_is_read(decode):
    message = event(amount=1)
    for _ in range(50):
        outer = event(amount=message.amount + 1)
        outer.parent.CopyFrom(message)
        message = outer
    assert decode(SCHEMA, message.SerializeToString()).columns["feature.amount"].tolist() == [51]


def test_messages_with_fields_that_the_schema_lacks_are_counted(decode):
    assert decode(SCHEMA, record(), b"\x08", record()).unknown_fields == 2
    small = 'syntax = "proto3"; message A { float amount = 1; int32 y = 2; }'
    schema = make_schema({"amount": {"dtype": "float32"}}, {"name": "y", "classes": 2})
    assert decode(schema, b"", text=small).unknown_fields == 0


def test_no_record_at_all_is_no_event(decode):
    decoded = decode(SCHEMA)
    assert len(decoded.message) == 0
    assert decoded.columns["feature.x"].shape == (0, 2, 2)


MALFORMED = {
    "varint that ends": b"\x10\x80",
    "varint of 11 bytes": b"\x10" + b"\x80" * 10 + b"\x01",
    "field number 0": b"\x00\x00",
    "wire type 7": b"\x0f",
    "text that ends": b"\x1a\x05ab",
    "text that is not UTF-8": b"\x1a\x02\xff\xfe",
    "list that ends within a number": b"\x2a\x21" + b"\x00" * 33,
    "group that is open": b"\x63",
    "group that ends alone": b"\x0c",
    "group that ends as another": b"\x63\x14",
    "submessage that ends": b"\x32\x02\x08",
    "length beyond the end": b"\x1a\xff\xff\xff\xff\x07",
    "length of 64 bits": b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_protobuf_is_rejected_and_its_neighbours_are_not(decode, bad):
    for content in (bad, record(amount=1) + bad):
        decoded = decode(SCHEMA, record(amount=2), content, record(amount=3), content)
        assert decoded.columns["feature.amount"].tolist() == [2, 3]
        reason = "schema: it is not a Protobuf message"
        assert decoded.rejects == [(1, WHOLE_MESSAGE, reason), (3, WHOLE_MESSAGE, reason)]


def test_a_group_that_is_not_read_is_skipped(decode):
    assert decode(SCHEMA, b"\xc3\x3e\x08\x01\xc4\x3e" + record(amount=2)).columns["feature.amount"].tolist() == [2]


WITHIN = {
    "net": {"dtype": "float32", "field": "parent.amount"},
    "city": {"dtype": "string", "encode": VOCAB, "field": "parent.parent.kind", "default": "CASH"},
    "x": {"dtype": "float64", "shape": [2], "default": -1, "field": "parent.x"},
    "w": {"dtype": "float32", "default": 9, "field": "parent.weight"},
    "when": {"dtype": "float64", "cycles": ["day"], "field": "parent.at"},
    "amount": {"dtype": "float32"},
}


def within(features=WITHIN, **more):
    return make_schema(features, {"name": "label", "classes": ["CARD", "CASH"]}, **more)


def test_fields_within_messages_are_read_by_their_path(decode):
    schema = within(key={"name": "id", "field": "parent.id"}, time={"name": "t", "field": "parent.at"})
    whole = event(amount=1)
    whole.parent.amount, whole.parent.id, whole.parent.at.seconds, whole.parent.at.nanos = 2.5, "k", 50, 500_000_000
    whole.parent.x[:], whole.parent.weight.value, whole.parent.parent.kind = [3, 4], 0.25, 1
    some = event(amount=2)
    some.parent.at.seconds = 60
    decoded = decode(schema, whole.SerializeToString(), some.SerializeToString(), record(amount=3))
    assert {name: column.tolist() for name, column in decoded.columns.items() if "hash" not in name} == {
        "feature.net": [2.5, 0],
        "feature.city": [1, 2],
        "feature.x": [[3, 4], [-1, -1]],
        "feature.w": [0.25, 9],
        "feature.when": [50.5, 60],
        "feature.amount": [1, 2],
        "label": [-1, -1],
        "labelled": [False, False],
        "weight": [1, 1],
        "time": [50.5, 60],
    }
    assert decoded.columns["key_hash"][0] == decode(SCHEMA, record()).columns["key_hash"]
    assert [reject.message for reject in decoded.rejects] == [2]


def test_a_label_of_several_classes_within_a_message_is_missing_where_that_is(decode):
    label = {"name": "y", "field": "parent.kinds", "classes": ["CARD", "CASH"], "multi": True}
    schema = make_schema({"amount": {"dtype": "float32"}}, label)
    none, some = event(), event()
    none.parent.amount = 1
    some.parent.kinds[:] = [2]
    decoded = decode(schema, record(), none.SerializeToString(), some.SerializeToString())
    assert decoded.columns["labelled"].tolist() == [False, True, True]
    assert decoded.columns["label"].tolist()[1:] == [[0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ({"a": "parent.nothing"}, "shop.Event has no field parent.nothing, which [schema] requires"),
        ({"a": "nothing.amount"}, "shop.Event has no field nothing.amount, which [schema] requires"),
        ({"a": "amount.net"}, "amount is of Protobuf type float, which has no amount.net"),
        (
            {"a": "counts.value"},
            "counts is of Protobuf type repeated shop.Event.CountsEntry, which has no counts.value",
        ),
        ({"a": "parent.country"}, "a is of Protobuf type string, not float64"),
    ],
)
def test_a_path_that_leads_to_no_value_is_refused(paths, sentence):
    features = {name: {"dtype": "float64", "field": path} for name, path in paths.items()}
    with pytest.raises(UnfitSchemaError, match=re.escape(sentence)):
        protobuf.make_decoder(writer(), within(features))


def test_values_out_of_range_are_rejected_alike(decode):
    decoded = decode(
        SCHEMA,
        record(count=2**20),
        record(amount=float("nan")),
        record(x=[1, 2, 3]),
        record(words=["a"]),
        record(kinds=[1, 1]),
        record(user=2**63),
        record(amount=1),
    )
    assert decoded.message.tolist() == [6]
    assert [reject.message for reject in decoded.rejects] == list(range(6))
    assert decoded.rejects[1].reason == "amount is NaN, infinite or too large"


def test_a_signalling_nan_is_rejected_without_a_warning(decode):
    decoded = decode(SCHEMA, record() + b"\x3a\x09\x09" + bytes.fromhex("010000000000f07f"))
    assert [reject.message for reject in decoded.rejects] == [0]


@pytest.mark.parametrize(
    ("field", "feature", "sentence"),
    [
        ("string x = 1;", {"dtype": "float32"}, "x is of Protobuf type string, not float32"),
        ("bytes x = 1;", {"dtype": "string", "encode": {"hash": 9}}, "x is of Protobuf type bytes, not string"),
        ("float x = 1;", {"dtype": "int8"}, "x is of Protobuf type float, not int8"),
        ("int32 x = 1;", {"dtype": "bool"}, "x is of Protobuf type int32, not bool"),
        ("repeated float x = 1;", {"dtype": "float32"}, "x is of Protobuf type repeated float, not float32"),
        ("float x = 1;", {"dtype": "float32", "shape": [2]}, "x is of Protobuf type float, not float32 of shape [2]"),
        ("map<string, float> x = 1;", {"dtype": "float32", "shape": [2]}, "x is of Protobuf type repeated A.XEntry"),
        ("A x = 1;", {"dtype": "float32"}, "x is of Protobuf type A, not float32"),
        ("google.protobuf.Timestamp x = 1;", {"dtype": "float32"}, "x is of Protobuf type google.protobuf.Timestamp"),
        ("google.protobuf.StringValue x = 1;", {"dtype": "int8"}, "x is of Protobuf type google.protobuf.StringValue"),
        ("float z = 1;", {"dtype": "float32"}, "A has no field x, which [schema] requires; give it a default"),
    ],
)
def test_a_writer_schema_that_can_never_fit_is_refused(field, feature, sentence):
    text = f"""syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";
    message A {{ {field} int32 y = 2; }}"""
    with pytest.raises(UnfitSchemaError) as caught:
        protobuf.make_decoder(writer(text), make_schema({"x": feature}, {"name": "y", "classes": 2}))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("value", ["", "string value = 1;", "repeated float value = 1;", "DoubleValue value = 1;"])
def test_a_type_that_has_the_name_of_a_wrapper_only_is_no_crash(value):
    text = f"""syntax = "proto3"; package google.protobuf; message A {{ DoubleValue x = 1; int32 y = 2; }}
    message DoubleValue {{ {value} }}"""
    try:
        made = protobuf.make_decoder(
            writer(text), make_schema({"x": {"dtype": "float32"}}, {"name": "y", "classes": 2})
        )
    except UnfitSchemaError as exc:
        assert "x is of Protobuf type google.protobuf.DoubleValue" in str(exc)  # noqa: PT017
    else:
        decoded = made.decode([b"", b"\x0a\x00", b"\x0a\x04\x00\x00\x80\x3f"])
        assert sorted([*decoded.message.tolist(), *(reject.message for reject in decoded.rejects)]) == [0, 1, 2]


def test_without_ptars_records_are_decoded_one_by_one(monkeypatch):
    for name in ("ptars", "anabranch.ingest.formats.protobuf_schema.columns"):
        monkeypatch.setitem(sys.modules, name, None)
    made = importlib.import_module("anabranch.ingest.formats.protobuf").make_decoder(writer(), SCHEMA)
    assert isinstance(made, ProtobufRecords)
    assert made.decode([record(amount=2)]).columns["feature.amount"].tolist() == [2]


def test_records_that_ptars_refuses_are_decoded_one_by_one(monkeypatch):
    made = protobuf.make_decoder(writer(), SCHEMA)

    class Refusing:
        def list_to_record_batch(self, _):
            raise ValueError("refused")

    monkeypatch.setattr(made, "_handler", Refusing())
    decoded = made.decode([record(amount=2), b"\x08", record(amount=3)])
    assert decoded.columns["feature.amount"].tolist() == [2, 3]
    assert [reject.message for reject in decoded.rejects] == [1]


def same(first, second):
    columns = first.columns.keys() == second.columns.keys() and all(
        np.array_equal(column, second.columns[name], equal_nan=column.dtype.kind == "f")
        for name, column in first.columns.items()
    )
    where = [[reject.message for reject in each.rejects] for each in (first, second)]
    return columns and first.message.tolist() == second.message.tolist() and where[0] == where[1]


def damaged(dice, content):
    """Change a few bytes: flip, truncate, insert, remove or append."""
    data = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        at = dice.randrange(len(data) + 1)
        how = dice.randrange(5)
        if how == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at:at] = dice.randbytes(dice.randrange(1, 6))
        elif how == 3:
            del data[at : at + dice.randrange(1, 5)]
        else:
            data += content[: dice.randrange(len(content))]
    return bytes(data)


UNWEIGHTED = make_schema(
    FEATURES, {"name": "label", "classes": ["CARD", "CASH"]}, key={"name": "id"}, time={"name": "at"}
)
BOTH = [decoder(name, UNWEIGHTED) for name in ("columns", "one by one")]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_both_ways_read_damaged_records_alike(dice):
    good = [
        record(amount=1.5, count=3, country="fr", kind=2, x=[1, 2, 3, 4], label=1, fresh=True, user=5),
        record(kinds=[2], guest="g", count=-1),
    ]
    records = [damaged(dice, dice.choice(good)) for _ in range(8)]
    columns, one_by_one = (each.decode(records) for each in BOTH)
    assert same(columns, one_by_one)
    readable = {*columns.message.tolist(), *(reject.message for reject in columns.rejects)}
    assert readable == set(range(8))
    refused = {reject.message for reject in columns.rejects if "not a Protobuf message" in reject.reason}
    assert refused == set(unparsed(records))


def unparsed(records):
    for index, content in enumerate(records):
        try:
            BOTH[1]._parse(content)  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 of whatever kind
            yield index


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"amount": FLOATS, "country": st.text(max_size=9), "fresh": st.booleans(), "kind": st.integers(0, 2)},
            optional={
                "count": st.integers(-(2**15), 2**15 - 1),
                "x": st.lists(FLOATS, min_size=4, max_size=4),
                "user": st.integers(0, 2**63 - 1),
                "label": st.integers(0, 2),
            },
        ),
        max_size=6,
    )
)
def test_what_is_encoded_is_decoded(events):
    records = [record(**each) for each in events]
    for each in BOTH:
        decoded = each.decode(records)
        assert not decoded.rejects
        assert decoded.columns["feature.amount"].tolist() == [each["amount"] for each in events]
        assert decoded.columns["feature.fresh"].tolist() == [each["fresh"] for each in events]
        assert decoded.columns["feature.kind"].tolist() == [each["kind"] for each in events]
        assert decoded.columns["feature.count"].tolist() == [each.get("count", 7) for each in events]
        assert decoded.columns["feature.user"].tolist() == [each.get("user", -5) for each in events]
        assert decoded.columns["feature.x"].reshape(-1, 4).tolist() == [each.get("x", [-1.0] * 4) for each in events]
        words = [{"de": 1, "fr": 2}.get(each["country"], 0) for each in events]
        assert decoded.columns["feature.country"].tolist() == words
        assert decoded.columns["label"].tolist() == [each.get("label", 0) - 1 for each in events]


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_damaged_descriptor_is_a_decoder_or_an_error(dice):
    content = damaged(dice, base64.b64decode(SERIALIZED))
    with contextlib.suppress(UnfitSchemaError):
        made = protobuf.make_decoder(writer(base64.b64encode(content).decode()), SCHEMA)
        decoded = made.decode([record(amount=1), b"\x08"])
        assert sorted([*decoded.message.tolist(), *(reject.message for reject in decoded.rejects)]) == [0, 1]
