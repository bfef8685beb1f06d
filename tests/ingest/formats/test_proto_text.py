"""Protobuf schemas of a registry become the descriptors that protoc makes, and hostile ones become an error."""

import builtins
import contextlib
import importlib
import os
from pathlib import Path

import google.type
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.formats.protobuf_schema.descriptors import message_type
from anabranch.ingest.schema_registry.writer_schema import Reference, UnfitSchemaError, WriterSchema
from tests.support.protobuf import compiled, pool_of, serialized

PROTO3 = """
// A payment.
syntax = "proto3";
package shop.payments.v1;
import "google/protobuf/timestamp.proto";
import public 'google/protobuf/wrappers.proto';
option java_package = "com.shop";  /* of several
lines */
message Payment {
  option deprecated = true;
  reserved 5, 9 to 11, 100 to max;
  reserved "foo", 'bar';
  double amount = 1 [deprecated = true, json_name = "Amount"];
  optional int32 count = 0x2;
  optional bool _count = 03;
  map<string, .shop.payments.v1.Payment.Item> by_id = 4;
  enum Kind { option allow_alias = true; reserved 9; UNKNOWN = 0; CARD = 1 [deprecated = true]; CREDIT = 1; NEG = -7; }
  repeated Kind kinds = 6 [packed = false];
  repeated sfixed64 x = 7 [packed = true];
  string w = 30;
  google.protobuf.Timestamp at = 8;
  .google.protobuf.DoubleValue discount = 12;
  oneof method { string card = 13; uint64 account = 14; Item item = 15; }
  message Item { bytes sku = 1; Payment parent = 2; message Deep { Kind kind = 1; Item item = 2; } Deep deep = 3;; }
  float h = 23; fixed32 a = 16; fixed64 b = 17; sfixed32 c = 18; sint32 d = 19; sint64 e = 20;
  uint32 f = 21; int64 g = 22;
  string message = 24; Kind optional = 25;
}
enum Top { ZERO = 0; }
service Payments { rpc Pay(Payment) returns (stream Payment) { option deprecated = true; } }
;
"""
PROTO2 = """
syntax = "proto2";
import "common/money.proto";
message Order {
  required int64 id = 1 [default = -5];
  optional string remark = 2 [default = "a; } \\" b"];
  optional group Address = 3 { optional string city = 1; }
  optional common.Money total = 4;
  repeated int32 n = 5 [packed = true];
  extensions 100 to 199, 500;
  extend Order { optional int32 inside = 101; }
  message After { optional float x = 1 [default = inf]; }
}
extend Order { optional int32 outside = 100; }
"""
MONEY = (
    "package common; message Money { optional sint64 units = 1; optional Currency c = 2; } enum Currency { EUR = 3; }"
)
CASES: list[tuple[str, dict[str, str]]] = [
    (PROTO3, {}),
    (PROTO2, {"common/money.proto": MONEY}),
    ("message A {}", {}),
    ('syntax = "proto3"; package a; message a { a c = 1; message b { b d = 1; .a.a.b e = 2; } }', {}),
]


def written(text, *references):
    return WriterSchema(7, "protobuf", text, references)


def without_options(message):
    """Remove from a message what does not change how it is read."""
    for field in message.field:
        for name in ("json_name", "default_value", "options"):
            field.ClearField(name)  # type: ignore[arg-type]
    fields = [field for field in message.field if field.type != field.TYPE_GROUP]
    del message.field[:]
    message.field.extend(fields)
    for name in ("extension", "extension_range", "reserved_range", "reserved_name", "visibility"):
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)  # type: ignore[arg-type]
    is_entry = message.options.map_entry
    message.ClearField("options")
    if is_entry:
        message.options.map_entry = True
    for enum in message.enum_type:
        for name in ("options", "reserved_range", "reserved_name"):
            enum.ClearField(name)  # type: ignore[arg-type]
        for value in enum.value:
            value.ClearField("options")
    for nested in message.nested_type:
        without_options(nested)
    return message


def described(message):
    proto = DescriptorProto()
    message.CopyToProto(proto)
    return without_options(proto)


@pytest.mark.parametrize(("text", "imports"), CASES)
def test_a_text_becomes_the_descriptor_that_protoc_makes(text, imports):
    files = compiled(text, imports)
    (package,) = {file.package for file in files.file if file.name == "main.proto"}
    references = [Reference(name, each) for name, each in imports.items()]
    for index, message in enumerate(files.file[-1].message_type):
        expected = pool_of(files).FindMessageTypeByName(f"{package}.{message.name}".strip("."))
        found = message_type(written(text, *references), (index,))
        assert found.full_name == expected.full_name
        assert described(found) == described(expected)


def test_the_files_of_google_become_the_descriptors_that_protoc_made_of_them():
    (root,) = {path.parent for path in (Path(each).parent for each in google.type.__path__)}
    files = {path.relative_to(root).as_posix(): path for path in (root / "google").rglob("*.proto")}
    compared = 0
    for name in sorted(each for each in files if each.startswith(("google/type/", "google/rpc/", "google/api/"))):
        module = importlib.import_module(f"{name.removesuffix('.proto').replace('/', '.')}_pb2")
        imports = [Reference(each, files[each].read_text()) for each in _imports(module.DESCRIPTOR) if each in files]
        for index, expected in enumerate(module.DESCRIPTOR.message_types_by_name.values()):
            found = message_type(written(files[name].read_text(), *imports), (index,))
            assert described(found) == described(expected)
            compared += 1
    assert compared > 100


def _imports(file):
    """Yield the names of a file's imports, those that they need first."""
    for each in file.dependencies:
        yield from _imports(each)
        yield each.name


@pytest.mark.parametrize(("text", "imports"), CASES)
def test_a_serialized_descriptor_is_read_as_its_text(text, imports):
    references = [Reference(name, serialized(each)) for name, each in imports.items()]
    found = message_type(written(serialized(text, imports), *references), (0,))
    assert described(found) == described(
        message_type(written(text, *[Reference(*each) for each in imports.items()]), (0,))
    )


@pytest.mark.parametrize(
    ("indexes", "name"),
    [((0,), "Payment"), ((0, 1), "Payment.Item"), ((0, 1, 0), "Payment.Item.Deep"), ((0, 0), "Payment.ByIdEntry")],
)
def test_indexes_count_messages_as_descriptors_do(indexes, name):
    for text in (PROTO3, serialized(PROTO3)):
        assert message_type(written(text), indexes).full_name == f"shop.payments.v1.{name}"


@pytest.mark.parametrize("indexes", [(1,), (-1,), (0, 9), (0, 1, 0, 0), (2**62,), (0,) * 5000])
def test_indexes_of_no_message_are_named(indexes):
    with pytest.raises(
        UnfitSchemaError, match="the Protobuf schema 7 cannot be read: it has no message at the indexes"
    ):
        message_type(written(PROTO3), indexes)


def test_imports_of_options_may_be_missing_but_not_those_of_a_field():
    text = 'import "confluent/meta.proto"; message A { optional string b = 1 [(confluent.field_meta).doc = "x"]; }'
    assert [field.name for field in message_type(written(text), (0,)).fields] == ["b"]
    with pytest.raises(UnfitSchemaError, match="couldn't resolve name"):
        message_type(written('import "gone.proto"; message A { optional gone.B b = 1; }'), (0,))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no message"),
        ("mesage A {}", "line 1: expected a statement such as message, found 'mesage'"),
        ("message A {\n  string b = 1\n}", "line 3: expected ';', found '}'"),
        ("message A { string b = x; }", "expected a whole number, found 'x'"),
        ("message A { string b = 99999999999; }", "expected a number of 32 bits"),
        (f"message A {{ string b = {'9' * 5000}; }}", "expected a whole number"),
        ("message A { string b = 0; }", "invalid field number"),
        ("message A { string b = 1; string c = 1; }", "duplicate field number"),
        ("message A { B b = 1; }", "couldn't resolve name 'B'"),
        ("message A {} message A {}", "duplicate symbol"),
        ("message A { map<string string> b = 1; }", "expected ','"),
        ("message A { enum B { C = 0 } }", "expected ';'"),
        ("message A { oneof b { c d } }", "expected '='"),
        ("message A {", "expected a name, found the end"),
        ("option a = {", "expected '}', found the end"),
        ("/* open", "expected the end of a comment"),
        ('import "a', "expected a name, a number or a symbol"),
        ("import a;", "expected a text in quotes"),
        ('syntax = "proto4";', 'its syntax is "proto4"'),
        ('edition = "2024"; message A {}', "it is written in an edition"),
        ("message A { " * 33, "at most 32 messages within each other"),
        ("\0", "expected a statement"),
        ("aGVsbG8=", "Error parsing message"),
    ],
)
def test_a_schema_that_cannot_be_read_is_an_error_that_says_why(text, reason):
    with pytest.raises(UnfitSchemaError, match="the Protobuf schema 7 cannot be read: ") as caught:
        message_type(written(text), (0,))
    assert reason in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "option a = [" + "/*" * 400_000,
        "message A { " * 70_000,
        "option a = " + "{" * 900_000,
        "message A {" + "string s = 1;" * 60_000,
        "x" * 1_000_001,
        "a." * 400_000,
        "'" * 900_000,
        "message A { string b = 1" + "0" * 900_000 + "; }",
    ],
    ids=["comments", "nested", "braces", "fields", "long", "dots", "quotes", "digits"],
)
@pytest.mark.timeout(30)
def test_a_schema_that_is_made_to_take_long_is_refused(text):
    with pytest.raises(UnfitSchemaError):
        message_type(written(text), (0,))


def test_no_file_is_read_and_no_program_is_run(monkeypatch):
    def forbidden(*arguments, **_):
        raise AssertionError(arguments)

    for module, name in ((builtins, "open"), (os, "open"), (os, "posix_spawn"), (os, "fork")):
        monkeypatch.setattr(module, name, forbidden)
    text = 'import "/etc/passwd"; import "../../secret.proto"; message A { optional string b = 1; }'
    for each in (text, "message A {"):
        try:
            message_type(written(each, Reference("/etc/passwd", "message P {}")), (0,))
        except UnfitSchemaError:
            assert each != text


def test_a_reference_may_be_there_twice_and_files_of_protobuf_are_its_own():
    text = 'import "money.proto"; import "google/protobuf/wrappers.proto"; message A { optional common.Money a = 1; }'
    other = Reference("google/protobuf/wrappers.proto", "package google.protobuf; message DoubleValue {}")
    found = message_type(written(text, Reference("money.proto", MONEY), other, Reference("money.proto", MONEY)), (0,))
    assert [field.name for field in found.fields_by_name["a"].message_type.fields] == ["units", "c"]
    wrappers = found.file.dependencies[1]
    assert len(wrappers.message_types_by_name) == 9


def test_imports_that_refer_to_each_other_end():
    one, two = 'import "two"; message One { optional Two t = 1; }', 'import "one"; message Two { optional One o = 1; }'
    with pytest.raises(UnfitSchemaError):
        message_type(written(one, Reference("one", one), Reference("two", two)), (0,))
    own = 'import "schema/7"; message A { optional A a = 1; }'
    assert message_type(written(own), (0,)).full_name == "A"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.randoms(use_true_random=False))
def test_any_text_is_a_descriptor_or_an_error(noise, dice):
    text, _ = dice.choice(CASES)
    at, end = sorted(dice.choices(range(len(text)), k=2))
    for each in (noise, text[:at] + noise + text[dice.choice([at, end]) :]):
        with contextlib.suppress(UnfitSchemaError):
            message_type(written(each), (0,))
