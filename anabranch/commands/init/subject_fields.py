"""The fields of a writer schema, as far as a pipeline can read them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.commands.init.files import FIELD_NAME, UNFIT_NAME, PipelineField
from anabranch.core.errors import SettingsError
from anabranch.ingest.schema_registry.message_ids import FIRST_MESSAGE
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema


def fields_of_subject(writer: WriterSchema) -> list[PipelineField]:
    """Return the fields of the records of a writer schema, in its order.

    Raises:
        SettingsError: the schema cannot be read, or needs an extra that is not installed.
    """
    read = {"avro": _of_avro, "protobuf": _of_protobuf, "json-schema": _of_json_schema}[writer.kind]
    try:
        return list(read(writer))
    except ImportError as exc:
        raise SettingsError(f"{writer.kind} needs a package: pip install 'anabranch[registry]'") from exc
    except (UnfitSchemaError, ValueError, AttributeError, TypeError) as exc:
        raise SettingsError(f"the schema {writer.id} cannot be read: {exc}") from exc


def _field(
    name: str, dtype: str, written: str, words: Sequence[str], *, is_list: bool, is_optional: bool
) -> PipelineField:
    """Return a field; one whose name `[schema]` cannot have is left out, and so is a list of any length."""
    shape, vocabulary, why = (1,) if is_list else (), tuple(words) if dtype == "string" else (), ""
    if not FIELD_NAME.fullmatch(name):
        dtype, why = "", UNFIT_NAME
    elif dtype in ("", "time"):
        why = f"it is of type {written}"
    elif is_list:
        why = f"it is of type {written}; to read it, set the number of its values"
    return PipelineField(name, dtype, shape, vocabulary, is_optional, written, why)


def _of_avro(writer: WriterSchema) -> Iterator[PipelineField]:
    from anabranch.ingest.formats.avro_records.schema import TIMESTAMPS, parse_avro

    dtypes = {
        "float": "float32",
        "double": "float32",
        "decimal": "float32",
        "long": "int64",
        "boolean": "bool",
        "string": "string",
        "enum": "string",
        **dict.fromkeys(TIMESTAMPS, "time"),
    }
    record = parse_avro(writer)
    for name, part in zip(record.fields, record.parts, strict=True):
        values = part.without_null()
        inner, is_list = values[0] if len(values) == 1 else part, False
        if inner.kind == "array":
            inner, is_list = inner.parts[0], True
        dtype = dtypes.get(inner.logical or inner.kind, "")
        is_optional = len(values) < len(part.parts or (part,))
        yield _field(name, dtype, part.name, inner.symbols, is_list=is_list, is_optional=is_optional)


def _of_protobuf(writer: WriterSchema) -> Iterator[PipelineField]:
    """Yield the fields of the first message type."""
    from anabranch.ingest.formats.protobuf_schema.descriptors import message_type

    dtypes = {
        **dict.fromkeys(("DOUBLE", "FLOAT"), "float32"),
        **dict.fromkeys(("INT32", "INT64", "UINT32", "UINT64"), "int64"),
        "BOOL": "bool",
        "ENUM": "string",
    }
    for field in message_type(writer, FIRST_MESSAGE).fields:
        numbers = {getattr(field, f"CPPTYPE_{name}"): dtype for name, dtype in dtypes.items()}
        dtype = "string" if field.type == field.TYPE_STRING else numbers.get(field.cpp_type, "")
        written = field.message_type.full_name if field.message_type else field.name
        if written == "google.protobuf.Timestamp":
            dtype = "time"
        words = [value.name for value in field.enum_type.values] if field.enum_type else []
        yield _field(field.name, dtype, written, words, is_list=field.is_repeated, is_optional=field.has_presence)


def _of_json_schema(writer: WriterSchema) -> Iterator[PipelineField]:
    schema: Mapping[str, Any] = json.loads(writer.text)
    dtypes = {"number": "float32", "integer": "int64", "boolean": "bool", "string": "string"}
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
        dtype = dtypes.get(written[0], "") if len(written) == 1 else ""
        if words and all(isinstance(word, str) for word in words):
            dtype = "string"
        else:
            words = ()
        text = f"array of {written[0]}" if is_list else " or ".join(written) or "any type"
        yield _field(str(name), dtype, text, words, is_list=is_list, is_optional=is_optional)
