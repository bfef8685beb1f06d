"""The fields of a writer schema, as far as a pipeline can read them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from anabranch.core.errors import SettingsError
from ingest.schema_registry.message_ids import FIRST_MESSAGE
from ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema

_NAME = "[A-Za-z_][A-Za-z0-9_]*"
"""Names that a field of `[schema]` may have."""
FieldKind = Literal["number", "integer", "boolean", "string", "words", "time", "other"]


@dataclass(frozen=True)
class SubjectField:
    """A field of the records of a subject.

    Attributes:
        name: as the writer has it.
        kind: what a pipeline can read it as; `words` are strings of a known list, `other` cannot be read.
        written: its type in the writer's words.
        words: the strings of `words`.
        is_list: whether a value is a list.
        is_optional: whether it may be missing or null.
    """

    name: str
    kind: FieldKind
    written: str
    words: tuple[str, ...] = ()
    is_list: bool = False
    is_optional: bool = False


def fields_of_subject(writer: WriterSchema) -> list[SubjectField]:
    """Return the fields of the records of a writer schema, in its order.

    Raises:
        SettingsError: the schema cannot be read, or needs an extra that is not installed.
    """
    read = {"avro": _of_avro, "protobuf": _of_protobuf, "json-schema": _of_json_schema}[writer.kind]
    try:
        fields = list(read(writer))
    except ImportError as exc:
        raise SettingsError(f"{writer.kind} needs a package: pip install 'anabranch[registry]'") from exc
    except (UnfitSchemaError, ValueError, AttributeError, TypeError) as exc:
        raise SettingsError(f"the schema {writer.id} cannot be read: {exc}") from exc
    return [field if re.fullmatch(_NAME, field.name) else replace(field, kind="other") for field in fields]


def _of_avro(writer: WriterSchema) -> Iterator[SubjectField]:
    from ingest.formats.avro_records.schema import TIMESTAMPS, parse_avro

    kinds: dict[str, FieldKind] = {
        "float": "number",
        "double": "number",
        "decimal": "number",
        "long": "integer",
        "boolean": "boolean",
        "string": "string",
        "enum": "words",
        **dict.fromkeys(TIMESTAMPS, "time"),
    }
    record = parse_avro(writer)
    for name, part in zip(record.fields, record.parts, strict=True):
        values = part.without_null()
        inner, is_list = values[0] if len(values) == 1 else part, False
        if inner.kind == "array":
            inner, is_list = inner.parts[0], True
        kind = kinds.get(inner.logical or inner.kind, "other")
        yield SubjectField(name, kind, part.name, inner.symbols, is_list, len(values) < len(part.parts or (part,)))


def _of_protobuf(writer: WriterSchema) -> Iterator[SubjectField]:
    """Yield the fields of the first message type."""
    from ingest.formats.protobuf_schema.descriptors import message_type

    kinds: dict[str, FieldKind] = {
        **dict.fromkeys(("DOUBLE", "FLOAT"), "number"),
        **dict.fromkeys(("INT32", "INT64", "UINT32", "UINT64"), "integer"),
        "BOOL": "boolean",
        "ENUM": "words",
    }
    for field in message_type(writer, FIRST_MESSAGE).fields:
        names = {getattr(field, f"CPPTYPE_{name}"): kind for name, kind in kinds.items()}
        kind = "string" if field.type == field.TYPE_STRING else names.get(field.cpp_type, "other")
        written = field.message_type.full_name if field.message_type else field.name
        if written == "google.protobuf.Timestamp":
            kind = "time"
        words = tuple(value.name for value in field.enum_type.values) if field.enum_type else ()
        yield SubjectField(field.name, kind, written, words, field.is_repeated, field.has_presence)


def _of_json_schema(writer: WriterSchema) -> Iterator[SubjectField]:
    schema: Mapping[str, Any] = json.loads(writer.text)
    kinds: dict[str, FieldKind] = {
        "number": "number",
        "integer": "integer",
        "boolean": "boolean",
        "string": "string",
    }
    required = schema.get("required", ())
    for name, member in schema.get("properties", {}).items():
        types = member.get("type", ())
        names = [types] if isinstance(types, str) else list(types)
        is_optional = name not in required or "null" in names
        inner, is_list, written = member, False, [each for each in names if each != "null"]
        if written == ["array"] and isinstance(member.get("items"), dict):
            inner, is_list = member["items"], True
            written = [str(inner.get("type"))]
        words = inner.get("enum", ())
        kind = kinds.get(written[0], "other") if len(written) == 1 else "other"
        if words and all(isinstance(word, str) for word in words):
            kind = "words"
        text = f"array of {written[0]}" if is_list else " or ".join(written) or "any type"
        yield SubjectField(str(name), kind, text, tuple(words) if kind == "words" else (), is_list, is_optional)
