"""The format `protobuf`: records of one message type, decoded in columns by ptars, or one by one without it."""

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import RecordDecoder
from anabranch.ingest.formats.protobuf_schema.descriptors import message_type
from anabranch.ingest.formats.protobuf_schema.fields import read_type
from anabranch.ingest.formats.protobuf_schema.records import ProtobufRecords
from anabranch.ingest.schema_registry.writer_schema import WriterSchema


def make_decoder(writer: WriterSchema, schema: Schema, indexes: tuple[int, ...] = (0,)) -> RecordDecoder:
    """Return the decoder of the message type at `indexes`: of the message in the file, then of one nested in it, etc.

    Raises:
        UnfitSchemaError: the writer schema cannot be read, or its messages can never fit `[schema]`.
    """
    read = read_type(message_type(writer, indexes), schema)
    one_by_one = ProtobufRecords(read, schema)
    try:
        # Imported here since ptars and pyarrow are extras.
        from anabranch.ingest.formats.protobuf_schema.columns import ProtobufColumns
    except ImportError:
        return one_by_one
    return ProtobufColumns(read, schema, one_by_one)
