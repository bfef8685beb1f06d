"""The format `avro`: decoders of the records of one writer schema.

Where pyruhvro and pyarrow are installed and the schema suits them, records become columns together; else fastavro reads
one after the other.
"""

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.avro_records.aliases import renamed
from anabranch.ingest.formats.avro_records.fields import names_of, read_fields
from anabranch.ingest.formats.avro_records.rows import AvroRowsDecoder
from anabranch.ingest.formats.avro_records.schema import parse_avro
from anabranch.ingest.formats.base import RecordDecoder
from anabranch.ingest.schema_registry.writer_schema import WriterSchema


def make_decoder(writer: WriterSchema, schema: Schema) -> RecordDecoder:
    """Return the decoder of the records of a writer schema.

    Raises:
        UnfitSchemaError: no record of the writer schema fits `[schema]`.
    """
    record = renamed(parse_avro(writer), writer.aliases, names_of(schema))
    reading = read_fields(schema, record)
    try:
        # Imported here since they are of the extra `fast`.
        from anabranch.ingest.formats.avro_records.columns import AvroColumnsDecoder, suits_columns
    except ImportError:
        return AvroRowsDecoder(reading)
    return AvroColumnsDecoder(reading) if suits_columns(reading) else AvroRowsDecoder(reading)
