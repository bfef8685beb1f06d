"""Which fields of a Protobuf message `[schema]` reads, and a message type that has only these.

The smaller type makes decoding independent of the rest of the message: all other fields are skipped, also those that
are nested without end. A field with presence (`optional`, wrappers, members of a oneof, all of proto2) that is absent
is missing, and so is one in a message that is absent. Others are never missing: they then have their zero.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from anabranch.ingest.events.schema import UNITS, Schema
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError

_REPEATED, _OPTIONAL = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.LABEL_OPTIONAL
_INTEGERS = ("int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64")
_NUMBERS = (*_INTEGERS, "float", "double")
WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
TIMESTAMP = "google.protobuf.Timestamp"
_TYPE_NAMES = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


@dataclass(frozen=True)
class DeclaredField:
    """A field that `[schema]` reads, and the Protobuf types that it accepts."""

    name: str
    types: tuple[str, ...]
    expected: str
    shape: tuple[int, ...] = ()
    repeated: bool = False
    required: bool = True
    classes: tuple[str, ...] | None = None
    """Names of the classes, for a label that has them."""
    is_label: bool = False
    is_word: bool = False
    """Whether values are strings, and those of an enum the names of its values."""
    per_second: int = 1
    """What a number counts, of a time."""
    is_whole: bool = False

    def of_seconds(self, seconds: Any) -> Any:
        """Return a number of seconds, or an array of them, as the number that a message of this field has."""
        counts = seconds * self.per_second
        return counts // 1 if self.is_whole else counts


@dataclass(frozen=True)
class ReadField:
    """A field that is read from messages of one writer schema.

    Attributes:
        declared: what `[schema]` expects.
        scalar: its type by Protobuf's name; that of the value for wrappers.
        form: "scalar", "wrapper", "timestamp", or "list" for repeated fields.
        presence: whether it may be absent; a list that is empty is not absent.
        steps: the fields of the type that is read that lead to it, the outermost first; it is absent where one of them
            is.
        words: names of an enum's values by their number, where the names are read.
        missing: the value that counts as missing, for a label without presence whose zero is no class.
    """

    declared: DeclaredField
    scalar: str
    form: str
    presence: bool
    steps: tuple[str, ...]
    words: Mapping[int, str] | None = None
    missing: str | None = None

    def word(self, number: int) -> str:
        """Return the name of an enum's value, or its number for values that the writer schema does not have."""
        return (self.words or {}).get(number, str(number))


@dataclass(frozen=True)
class ReadType:
    """A message type with the fields that are read, and whether the writer schema has others.

    `messages` is a type with many of them in its only field, number 1.
    """

    message: Descriptor
    messages: Descriptor
    fields: tuple[ReadField, ...]
    has_unknown: bool


def read_type(writer: Descriptor, schema: Schema) -> ReadType:
    """Return what is read of messages of a writer schema.

    Raises:
        UnfitSchemaError: a field that `[schema]` requires is not in the writer schema, or is of a type that cannot fit.
    """
    file = FileDescriptorProto(name="read.proto", package="read", syntax="proto3")
    messages: dict[tuple[str, ...], DescriptorProto] = {(): file.message_type.add(name="Event")}
    fields: dict[tuple[str, ...], ReadField] = {}
    named: list[ReadField] = []
    for declared in declared_fields(schema):
        path = schema.path(declared.name)
        found = _field_at(writer, path)
        if found is None:
            if declared.required:
                what = f"{writer.full_name} has no field {'.'.join(path)}"
                raise UnfitSchemaError(f"{what}, which [schema] requires; give it a default")
            continue
        field = _read_field(writer, found, declared, path)
        if path not in fields:
            _add(file, _message_of(file, messages, writer, path[:-1]), field, found.number)
        fields[path] = field
        named.append(field)
    many = file.message_type.add(name="Events").field.add(name="event", number=1, label=_REPEATED)
    many.type, many.type_name = FieldDescriptorProto.TYPE_MESSAGE, ".read.Event"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    one, all_of_them = (pool.FindMessageTypeByName(f"read.{name}") for name in ("Event", "Events"))
    return ReadType(one, all_of_them, tuple(named), len(writer.fields) > len({path[0] for path in fields}))


def _field_at(writer: Descriptor, path: tuple[str, ...]) -> Any:
    """Return the field at a path of a message type; None if there is none. Raises UnfitSchemaError."""
    found: Any = None
    for depth, name in enumerate(path):
        if found is not None and (found.message_type is None or found.is_repeated):
            kind = _TYPE_NAMES[found.type] if found.message_type is None else found.message_type.full_name
            repeated = "repeated " if found.is_repeated else ""
            raise UnfitSchemaError(
                f"{'.'.join(path[:depth])} is of Protobuf type {repeated}{kind}, which has no {'.'.join(path)}"
            )
        found = (writer if found is None else found.message_type).fields_by_name.get(name)
        if found is None:
            return None
    return found


def _message_of(
    file: FileDescriptorProto,
    messages: dict[tuple[str, ...], DescriptorProto],
    writer: Descriptor,
    path: tuple[str, ...],
) -> DescriptorProto:
    """Return the message type that is read at a path, which is added to the one that it is in if need be."""
    if path not in messages:
        outer, number = _message_of(file, messages, writer, path[:-1]), _field_at(writer, path).number
        messages[path] = file.message_type.add(name=f"Within{len(messages)}")
        outer.field.add(
            name=_name_of(number),
            number=number,
            label=_OPTIONAL,
            type=FieldDescriptorProto.TYPE_MESSAGE,
            type_name=f".read.{messages[path].name}",
        )
    return messages[path]


def _name_of(number: int) -> str:
    """Return the name that a field has in the type that is read."""
    return f"field_{number}"


def declared_fields(schema: Schema) -> Iterator[DeclaredField]:
    """Yield the fields that a message may have, the features first and in their order."""
    words, whole = ("string", "enum"), (*_INTEGERS, "enum")
    for feature in schema.features:
        types = {"b": ("bool",), "f": _NUMBERS}.get(feature.dtype.kind, whole)
        expected = "string" if feature.is_string else str(feature.dtype)
        if feature.is_time:
            types, expected = (*types, TIMESTAMP), "a google.protobuf.Timestamp or a number"
        yield DeclaredField(
            feature.name,
            words if feature.is_string else types,
            f"{expected} of shape {list(feature.shape)}" if feature.shape else expected,
            feature.shape,
            repeated=bool(feature.shape),
            required=feature.default is None,
            is_word=feature.is_string,
            per_second=UNITS[feature.unit][0],
            is_whole=feature.dtype.kind != "f",
        )
    label = schema.label
    if label.names is not None:
        types, expected = words, "a string or an enum"
    elif label.classes is not None:
        types, expected = whole, "a whole number"
        if label.one_of == 2:
            types, expected = (*whole, "bool"), "a whole number or a bool"
    else:
        types, expected = _NUMBERS, "a number"
    yield DeclaredField(
        label.name,
        types,
        f"repeated, each {expected}" if label.is_list else expected,
        repeated=label.is_list,
        required=False,
        classes=label.names,
        is_label=True,
        is_word=label.names is not None,
    )
    for name, types, expected in (
        (schema.key, (*words, *_INTEGERS), "a string or a whole number"),
        (schema.time, (*_NUMBERS, TIMESTAMP), "a google.protobuf.Timestamp or a number of seconds"),
        (schema.weight, _NUMBERS, "a number"),
        (schema.group, (*words, *_INTEGERS), "a string or a whole number"),
        (schema.join, (*words, *_INTEGERS), "a string or a whole number"),
    ):
        if name is not None:
            per_second = UNITS[schema.time_unit][0] if name == schema.time else 1
            yield DeclaredField(name, types, expected, is_word="enum" in types, per_second=per_second)


def _read_field(writer: Descriptor, found: Any, declared: DeclaredField, path: tuple[str, ...]) -> ReadField:
    repeated = bool(found.is_repeated)
    scalar, form = _TYPE_NAMES[found.type], "list" if repeated else "scalar"
    if found.message_type is not None and not repeated and scalar == "message":
        scalar = found.message_type.full_name
        value = found.message_type.fields_by_name.get("value")
        if scalar in WRAPPERS and value is not None:
            scalar, form = _TYPE_NAMES[value.type], "wrapper"
        elif scalar == TIMESTAMP:
            form = "timestamp"
    if scalar not in declared.types or repeated != declared.repeated:
        named = found.message_type or found.enum_type
        kind = f"{'repeated ' if repeated else ''}{named.full_name if named else scalar}"
        raise UnfitSchemaError(f"{declared.name} is of Protobuf type {kind}, not {declared.expected}")
    words: dict[int, str] | None = None
    if scalar == "enum" and declared.is_word:
        words = {}
        for value in found.enum_type.values:
            words.setdefault(value.number, value.name)
    presence = bool(found.has_presence)
    zero = "" if words is None else words.get(0, "0")
    unset = not presence and not repeated and declared.classes is not None and zero not in declared.classes
    steps = tuple(_name_of(_field_at(writer, path[:end]).number) for end in range(1, len(path) + 1))
    return ReadField(declared, scalar, form, presence, steps, words, zero if unset else None)


def _add(file: FileDescriptorProto, message: DescriptorProto, field: ReadField, number: int) -> None:
    """Add a field to the message type that is read: enums as numbers, and wrappers and timestamps as own messages."""
    kind = FieldDescriptorProto.Type
    label = _REPEATED if field.form == "list" else _OPTIONAL
    added = message.field.add(name=field.steps[-1], number=number, label=label)
    scalar = "int32" if field.scalar == "enum" else field.scalar
    if field.form in ("wrapper", "timestamp"):
        inner = file.message_type.add(name=f"Field{len(file.message_type)}")
        added.type, added.type_name = kind.TYPE_MESSAGE, f".read.{inner.name}"
        values = (("seconds", "int64"), ("nanos", "int32")) if field.form == "timestamp" else (("value", scalar),)
        for index, (name, each) in enumerate(values, start=1):
            inner.field.add(name=name, number=index, label=_OPTIONAL, type=kind.Value(f"TYPE_{each.upper()}"))
        return
    added.type = kind.Value(f"TYPE_{scalar.upper()}")
    if field.presence:
        added.proto3_optional = True
        added.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_presence_{number}")
