"""The message formats by name."""

from collections.abc import Sequence
from typing import get_args

from anabranch.core.extras import needs
from anabranch.core.users_code import build
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import Format, RecordDecoder
from anabranch.ingest.formats.envelopes.change_events import ConnectFormat, DebeziumFormat
from anabranch.ingest.formats.envelopes.cloud_events import CloudEventsFormat, binary_headers
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.registered import MakeDecoder, RegisteredFormat
from anabranch.ingest.formats.rows import RowsFormat
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.schema_registry.message_ids import FIRST_MESSAGE
from anabranch.ingest.schema_registry.writer_schema import SchemaKind, WriterSchema
from anabranch.ingest.settings.formats import FORMAT
from anabranch.ingest.settings.stream import StreamSettings


def make_format(
    stream: StreamSettings, schema: Schema, schemas: WriterSchemas | None = None, *, is_of_subject: bool = True
) -> Format:
    """Return the format of a stream.

    Args:
        stream: names the format.
        schema: the fields of its messages.
        schemas: finds the writer schemas of its messages, where it has a registry.
        is_of_subject: whether the messages are those of `stream.registry.subject`.

    Raises:
        SettingsError: the format cannot hold the schema, or needs an extra that is not installed.
    """
    inner = _inner(stream, schema, schemas, is_of_subject=is_of_subject)
    if stream.envelope == "cloudevents":
        return CloudEventsFormat(schema, inner)
    if stream.envelope == "connect":
        return ConnectFormat(schema, inner)
    return DebeziumFormat(schema, inner, erases=stream.deletes == "erase") if stream.envelope == "debezium" else inner


def wrapped(stream: StreamSettings, event: bytes) -> tuple[bytes, Sequence[tuple[str, bytes]]]:
    """Return the value and the headers of a message with an event, in the envelope of the stream."""
    if stream.envelope == "cloudevents":
        return event, binary_headers()
    starts = {"connect": b'{"schema":null,"payload":', "debezium": b'{"before":null,"op":"c","after":'}
    start = starts.get(stream.envelope)
    return (event if start is None else start + event + b"}"), ()


def _inner(stream: StreamSettings, schema: Schema, schemas: WriterSchemas | None, *, is_of_subject: bool) -> Format:
    for kind in get_args(SchemaKind):
        if kind == stream.format:
            assert schemas is not None
            return RegisteredFormat(schema, kind, schemas, _decoders(kind), is_of_subject=is_of_subject)
    format_: Format = build("stream.format", stream.format, format_class(stream.format), stream.format_args, schema)
    return format_


def format_class(name: str) -> type[Format]:
    """Return the class of a format, by a name of `stream.format` that needs no registry.

    Raises:
        SettingsError: it needs an extra that is not installed.
    """
    if name == "arrow":
        with needs('stream.format = "arrow"', "pyarrow", "arrow"):
            from anabranch.ingest.formats.arrow import ArrowFormat
        return ArrowFormat
    return {"json": JsonFormat, "rows": RowsFormat}.get(name) or FORMAT.find(name)


def make_decoder(writer: WriterSchema, schema: Schema) -> RecordDecoder:
    """Return the decoder of a writer schema's records, in Protobuf those of the first message type.

    Raises:
        UnfitSchemaError: none of its records fits `schema`.
        SettingsError: it needs an extra that is not installed.
    """
    return _decoders(writer.kind)(writer, schema, FIRST_MESSAGE)


def _decoders(kind: SchemaKind) -> MakeDecoder:
    with needs(f'stream.format = "{kind}"', "a package", "registry"):
        if kind == "avro":
            from anabranch.ingest.formats.avro import make_decoder as make_avro_decoder

            return lambda writer, schema, _: make_avro_decoder(writer, schema)
        if kind == "protobuf":
            from anabranch.ingest.formats.protobuf import make_decoder as make_protobuf_decoder

            return make_protobuf_decoder
        from anabranch.ingest.formats.json_schema import make_decoder as make_json_schema_decoder

        return lambda writer, schema, _: make_json_schema_decoder(writer, schema)
