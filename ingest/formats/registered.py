"""The formats `avro`, `protobuf` and `json-schema`: one record a message, written with a schema of the registry.

Messages are grouped by their writer schema, and each group is decoded by the decoder of its schema.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import methodcaller
from typing import NamedTuple

import numpy as np

from anabranch.core.failures import panics_are_errors
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.avro_records.aliases import aliases_in, fields_in
from anabranch.ingest.formats.avro_records.fields import names_of
from anabranch.ingest.formats.base import (
    WHOLE_MESSAGE,
    Decoded,
    Format,
    Headers,
    RecordDecoder,
    Reject,
    joined,
    nothing,
)
from anabranch.ingest.formats.other_formats import not_binary
from anabranch.ingest.schema_registry.cache import SchemaId, WriterSchemas
from anabranch.ingest.schema_registry.message_ids import FIRST_MESSAGE, HEADER, SchemaIdError, locate
from anabranch.ingest.schema_registry.sized_cache import SizedCache
from anabranch.ingest.schema_registry.writer_schema import SchemaKind, UnfitSchemaError, WriterSchema

log = logging.getLogger(__name__)

MakeDecoder = Callable[[WriterSchema, Schema, tuple[int, ...]], RecordDecoder]
_Writer = tuple[SchemaId, tuple[int, ...]]
"""The id of a writer schema, and the indexes of the message type in it."""

_MOST_DECODER_BYTES = 64_000_000
"""Bytes of the schemas whose decoders are kept, each with as much as a small schema takes in a decoder."""
_DECODER_BYTES = 64_000
_LONGEST_REASON = 300
_NO_ID = "it has no schema id: neither the header __value_schema_id, nor a value that begins with a byte 0 or 1"
_WITH_FALLBACK = "stream.registry.fallback = true reads such messages with the subject's newest schema"


class _Group(NamedTuple):
    """Messages of one writer schema: their indexes, and their records."""

    messages: list[int]
    records: list[bytes]


class RegisteredFormat(Format):
    """Decodes messages that name their writer schema; those whose schema cannot be fetched now are deferred."""

    def __init__(
        self,
        schema: Schema,
        kind: SchemaKind,
        schemas: WriterSchemas,
        make_decoder: MakeDecoder,
        *,
        is_of_subject: bool = True,
    ) -> None:
        """`is_of_subject`: the messages are those of `stream.registry.subject`, for which there may be a fallback."""
        super().__init__(schema)
        self._fallback = is_of_subject and schemas.settings.fallback
        self._no_id = f"{_NO_ID}; {_WITH_FALLBACK}" if is_of_subject else _NO_ID
        self._kind = kind
        self._schemas = schemas
        self._make_decoder = make_decoder
        self._reads_aliases = kind == "avro" and is_of_subject and schemas.settings.subject is not None
        self._lacking = SizedCache[WriterSchema, bool](_MOST_DECODER_BYTES)
        """Whether records of a writer schema lack a field that `[schema]` has."""
        self._decoders = SizedCache[tuple[WriterSchema, tuple[int, ...]], RecordDecoder | str](_MOST_DECODER_BYTES)

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:
        """Decode M message values, each one event, a reject, or deferred."""
        groups, rejects = self._group(values, headers)
        # In the order of the messages: those before the first one whose schema is not there yet can be used.
        schemas = self._schemas.find(dict.fromkeys(schema_id for schema_id, _ in groups))
        if self._fallback and any(isinstance(schema, str) for schema in schemas.values()):
            groups = self._with_fallback(groups, schemas, values)
            schemas |= self._schemas.find([None])
        parts, deferred = [], list[int]()
        for (schema_id, indexes), group in groups.items():
            schema = schemas[schema_id]
            if isinstance(schema, WriterSchema) and self._reads_aliases:
                schema = self._with_aliases(schema)
            if schema is None:
                deferred += group.messages
                continue
            decoder = schema if isinstance(schema, str) else self._decoder(schema, indexes)
            if isinstance(decoder, str):
                rejects += [Reject(message, WHOLE_MESSAGE, f"schema: {decoder}") for message in group.messages]
            else:
                parts.append(decoder.decode(group.records).at(np.array(group.messages, np.int32)))
        if len(parts) == 1 and not rejects and not deferred:
            return parts[0]
        return joined([nothing(self.schema, sorted(rejects), sorted(deferred)), *parts])

    def _group(self, values: Sequence[bytes], headers: Sequence[Headers]) -> tuple[dict[_Writer, _Group], list[Reject]]:
        """Return the messages of each writer schema, and rejects for those without an id that can be read."""
        uniform = self._uniform(values, headers)
        if uniform is not None:
            return uniform, []
        groups: dict[_Writer, _Group] = {}
        rejects: list[Reject] = []
        has_indexes = self._kind == "protobuf"
        # An id is parsed once: it is the same as in the message before, or as in a header before.
        prefix, last = b"", _Group([], [])
        by_header: dict[bytes, _Group] = {}
        for message, (value, own) in enumerate(zip(values, headers or repeat(()), strict=False)):
            header = next((content for name, content in own if name == HEADER), None) if own else None
            if header is not None:
                group, begin = by_header.get(header), 0
            else:
                group, begin = last if prefix and value.startswith(prefix) else None, len(prefix)
            if group is None:
                try:
                    schema_id, indexes, begin = locate(value, own, has_indexes=has_indexes)
                    if schema_id is None and not self._fallback:
                        raise SchemaIdError(not_binary(value) or self._no_id)
                except SchemaIdError as exc:
                    if not self._fallback or header is not None:
                        rejects.append(Reject(message, WHOLE_MESSAGE, f"schema: {exc}"))
                        continue
                    schema_id, indexes, begin = None, FIRST_MESSAGE, 0
                group = groups.setdefault((schema_id, indexes), _Group([], []))
                if header is not None:
                    by_header[header] = group
                else:
                    prefix, last = value[:begin], group
            group.messages.append(message)
            group.records.append(value[begin:] if begin else value)
        return groups, rejects

    def _uniform(self, values: Sequence[bytes], headers: Sequence[Headers]) -> dict[_Writer, _Group] | None:
        """Return the one group of messages that all begin with the same id and have no headers; None for others."""
        if not values or any(headers):
            return None
        try:
            schema_id, indexes, begin = locate(values[0], (), has_indexes=self._kind == "protobuf")
        except SchemaIdError:
            return None
        if not begin or not all(map(methodcaller("startswith", values[0][:begin]), values)):
            return None
        return {(schema_id, indexes): _Group(list(range(len(values))), [value[begin:] for value in values])}

    def _with_fallback(
        self,
        groups: Mapping[_Writer, _Group],
        schemas: Mapping[SchemaId, WriterSchema | str | None],
        values: Sequence[bytes],
    ) -> dict[_Writer, _Group]:
        """Return the groups with those whose id does not exist read as messages without one: the bytes are no id."""
        kept = {writer: group for writer, group in groups.items() if not isinstance(schemas[writer[0]], str)}
        lost = [message for writer, group in groups.items() if writer not in kept for message in group.messages]
        without_id = kept.get((None, FIRST_MESSAGE), _Group([], []))
        messages = sorted([*without_id.messages, *lost])
        return kept | {(None, FIRST_MESSAGE): _Group(messages, [values[message] for message in messages])}

    def _with_aliases(self, writer: WriterSchema) -> WriterSchema | None:
        """Return a schema with the aliases of the subject's newest one, if its records lack a field of `[schema]`.

        Returns None while the registry is away: without the aliases, a default would take the place of a value.
        """
        lacks = self._lacking.get(writer)
        if lacks is None:
            lacks = not set(names_of(self.schema)) <= {field["name"] for field in fields_in(writer)}
            self._lacking.put(writer, lacks, writer.size + _DECODER_BYTES)
        if not lacks:
            return writer
        newest = self._schemas.find([None])[None]
        if isinstance(newest, WriterSchema):
            return replace(writer, aliases=aliases_in(newest))
        return None if self._schemas.has_subject else writer

    def _decoder(self, writer: WriterSchema, indexes: tuple[int, ...]) -> RecordDecoder | str:
        """Return the decoder of a writer schema, or why its messages cannot be used."""
        decoder = self._decoders.get((writer, indexes))
        if decoder is None:
            try:
                if writer.kind != self._kind:
                    sentence = (
                        f'schema {writer.id} is of the format "{writer.kind}", but stream.format = "{self._kind}"'
                    )
                    raise UnfitSchemaError(sentence)
                with panics_are_errors():
                    decoder = self._make_decoder(writer, self.schema, indexes)
            except UnfitSchemaError as exc:
                decoder = str(exc)
            except MemoryError:
                raise
            except Exception as exc:
                log.exception("a bug in reading the schema %s: its messages are dead-lettered", writer.id)
                decoder = f"the schema {writer.id} cannot be read: {type(exc).__name__}: {exc}"[:_LONGEST_REASON]
            self._decoders.put((writer, indexes), decoder, writer.size + _DECODER_BYTES)
        return decoder
