"""The format `json-schema`: JSON objects, validated against their writer schema, then decoded as `json` does.

The writer schema comes from the network: references to other documents are resolved from the registry's alone, what
validation may cost is bounded before a record is read, and a pattern that needs too many steps rejects its message.

Legend: M records.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats import json_text
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, RecordDecoder, Reject
from anabranch.ingest.formats.event_fields import event_reader
from anabranch.ingest.formats.event_structs import StructDecoder
from anabranch.ingest.formats.json_schema_bounds import most_steps
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema

_MOST_STEPS = 10_000
"""Steps back that a pattern may take: milliseconds."""
_MOST_VALIDATION_STEPS = 200_000_000
"""Steps that validating one message may take: seconds at worst."""
_FEWEST_BYTES = 2
"""A value of an array or an object has this many bytes at least, with its comma."""
_LONGEST_REASON = 200
_MORE_PROPERTIES = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"}
"""Keywords by which a schema may allow properties that it does not list."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def make_decoder(writer: WriterSchema, schema: Schema) -> RecordDecoder:
    """Return the decoder of objects of a writer schema.

    Raises:
        UnfitSchemaError: the writer schema is no JSON Schema, refers to a document that the registry does not have, or
            declares a field of `[schema]` with a type that cannot fit; or it is recursive, or too large.
    """
    try:
        document = msgspec.json.decode(writer.text)
        others = {each.name: msgspec.json.decode(each.text) for each in writer.references}
        steps = most_steps(document, others)
        registry = jsonschema_rs.Registry(list(others.items()))
        validator = jsonschema_rs.validator_for(
            document,
            registry=registry,
            offline=True,
            validate_formats=False,  # many producers do not, and JSON Schema makes it optional
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_MOST_STEPS),
        )
    except (*_UNREADABLE, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as exc:
        raise UnfitSchemaError(f"the JSON Schema {writer.id} cannot be read: {_first_line(exc)}") from exc
    if isinstance(document, dict):
        _check_properties(document, schema)
    return JsonSchemaRecords(validator, schema, steps)


def _check_properties(document: Mapping[str, Any], schema: Schema) -> None:
    """Raise UnfitSchemaError if a field of `[schema]` is declared with other types, or excluded.

    Only properties that the document declares itself are checked, and others may be in a message all the same unless it
    excludes them; each message is validated anyway.
    """
    properties: Any = document.get("properties", {})
    is_closed = document.get("additionalProperties") is False and not document.keys() & _MORE_PROPERTIES
    for field, types, expected, required in _declared(schema):
        name, *inner = schema.path(field)
        types, expected = ({"object"}, "an object") if inner else (types, expected)
        found = properties.get(name)
        if name not in properties and is_closed and required:
            raise UnfitSchemaError(
                f"the writer schema has no property {name}, which [schema] requires; give it a default"
            )
        kinds = found.get("type") if isinstance(found, dict) else None
        kinds = {kinds} if isinstance(kinds, str) else set(kinds or ()) - {"null"}
        if kinds and not kinds & types and (required or name in document.get("required", ())):
            raise UnfitSchemaError(f"{name} is of JSON type {' or '.join(sorted(kinds))}, not {expected}")


def _declared(schema: Schema) -> Iterator[tuple[str, set[str], str, bool]]:
    """Yield name, types, their description, and whether it is required, of each field of `[schema]`."""
    number, word = {"number", "integer"}, {"string", "number", "integer"}
    for feature in schema.features:
        expected = "string" if feature.is_string else str(feature.dtype)
        types = {"string"} if feature.is_string else {"boolean"} if feature.dtype.kind == "b" else number
        if feature.is_time:
            types, expected = word, "a number of seconds or an ISO time"
        if feature.shape:
            types, expected = {"array"}, f"{expected} of shape {list(feature.shape)}"
        yield feature.name, types, expected, feature.default is None
    label = schema.label
    types, expected = ({"string"}, "a string") if label.names is not None else (number, "a number")
    yield label.name, {"array"} if label.is_list else types, "an array" if label.is_list else expected, False
    for name, types, expected in (
        (schema.key, word, "a string or a whole number"),
        (schema.time, word, "a number of seconds or an ISO time"),
        (schema.weight, number, "a number"),
        (schema.group, word, "a string or a whole number"),
        (schema.join, word, "a string or a whole number"),
    ):
        if name is not None:
            yield name, types, expected, True


class JsonSchemaRecords:
    """Decodes objects of one writer schema. A field that is null, where the writer schema allows that, is missing."""

    def __init__(self, validator: Any, schema: Schema, steps: int) -> None:
        """Take the steps that `validator` needs for one value at most: by them, records that are too long are rejected
        before they are validated."""
        self._validator = validator
        self._steps = steps
        self._most_bytes = _MOST_VALIDATION_STEPS * _FEWEST_BYTES // steps
        self._parse = partial(json_text.decoded, msgspec.json.Decoder().decode)
        exact, lenient = (
            event_reader(schema, lambda kind: partial(msgspec.convert, type=kind), forbid_unknown=each)
            for each in (True, False)
        )
        self._decoder = StructDecoder[Any](schema, exact, lenient, "schema: ")

    def decode(self, records: Sequence[bytes]) -> Decoded:
        """Decode M records, each one event or a reject."""
        is_valid = self._validator.is_valid
        invalid: list[Reject] = []
        valid: list[int] = []
        documents: list[Any] = []
        for index, record in enumerate(records):
            try:
                if len(record) > self._most_bytes:
                    raise ValueError(
                        f"{len(record)} bytes are too many to validate: its writer schema may need {self._steps} steps "
                        f"for each value, which bounds a record to {self._most_bytes} bytes"
                    )
                document = self._parse(record)
                if is_valid(document):
                    valid.append(index)
                    documents.append(_without_null(document))
                    continue
                self._validator.validate(document)
                reason = "it does not fit its writer schema"
            except (*_UNREADABLE, ValueError) as exc:
                reason = _first_line(exc)
            invalid.append(Reject(index, WHOLE_MESSAGE, f"schema: {reason}"))
        decoded = self._decoder.decode(documents).at(np.array(valid, np.int32))
        return replace(decoded, rejects=sorted([*decoded.rejects, *invalid]))


def _without_null(document: Any) -> Any:
    """Return an object without its null fields: many serializers write a missing field as null."""
    if isinstance(document, dict) and None in document.values():
        return {name: value for name, value in document.items() if value is not None}
    return document


def _first_line(exc: Exception) -> str:
    """Return what an error says, without the schema and the message, which may be long."""
    path = "".join(f"/{each}" for each in getattr(exc, "instance_path", ()))
    return f"{str(exc).partition(chr(10))[0][:_LONGEST_REASON]}{f' at {path}' if path else ''}"
