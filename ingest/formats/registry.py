"""The message formats by name."""

from collections.abc import Callable
from typing import get_args

from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.events.schema import Schema
from ingest.formats.base import Format, RecordDecoder
from ingest.formats.envelopes.cloud_events import CloudEventsFormat
from ingest.formats.json import JsonFormat
from ingest.formats.registered import MakeDecoder, RegisteredFormat
from ingest.formats.rows import RowsFormat
from ingest.schema_registry.cache import WriterSchemas
from ingest.schema_registry.message_ids import FIRST_MESSAGE
from ingest.schema_registry.writer_schema import SchemaKind, WriterSchema


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
    return CloudEventsFormat(schema, inner) if stream.envelope == "cloudevents" else inner


def _inner(stream: StreamSettings, schema: Schema, schemas: WriterSchemas | None, *, is_of_subject: bool) -> Format:
    for kind in get_args(SchemaKind):
        if kind == stream.format:
            assert schemas is not None
            return RegisteredFormat(schema, kind, schemas, _decoders(kind), is_of_subject=is_of_subject)
    return FORMATS[stream.format](schema)


def make_decoder(writer: WriterSchema, schema: Schema) -> RecordDecoder:
    """Return the decoder of a writer schema's records, in Protobuf those of the first message type.

    Raises:
        UnfitSchemaError: none of its records fits `schema`.
        SettingsError: it needs an extra that is not installed.
    """
    return _decoders(writer.kind)(writer, schema, FIRST_MESSAGE)


def _arrow(schema: Schema) -> Format:
    try:
        # Imported here since it is an extra.
        from ingest.formats.arrow import ArrowFormat
    except ImportError as exc:
        raise SettingsError("stream.format = \"arrow\" needs pyarrow: pip install 'anabranch[arrow]'") from exc
    return ArrowFormat(schema)


def _decoders(kind: SchemaKind) -> MakeDecoder:
    try:
        # Imported here since they are extras.
        if kind == "avro":
            from ingest.formats.avro import make_decoder as make_avro_decoder

            return lambda writer, schema, _: make_avro_decoder(writer, schema)
        if kind == "protobuf":
            from ingest.formats.protobuf import make_decoder as make_protobuf_decoder

            return make_protobuf_decoder
        from ingest.formats.json_schema import make_decoder as make_json_schema_decoder

        return lambda writer, schema, _: make_json_schema_decoder(writer, schema)
    except ImportError as exc:
        raise SettingsError(f"stream.format = \"{kind}\" needs a package: pip install 'anabranch[registry]'") from exc


FORMATS: dict[str, Callable[[Schema], Format]] = {"json": JsonFormat, "rows": RowsFormat, "arrow": _arrow}
"""The formats whose messages need nothing but `[schema]` to be read."""
