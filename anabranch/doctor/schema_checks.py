"""The schema, and whether the stream's format can hold it."""

from collections.abc import Iterator

from anabranch.core.errors import SettingsError
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from ingest.events.schema import Schema
from ingest.formats.registry import FORMATS


def check_schema(context: CheckContext) -> Iterator[Finding]:
    """Whether defaults fit their features, and the format takes the fields."""
    pipeline = context.config.pipeline
    try:
        schema = Schema(pipeline.events)
        FORMATS[pipeline.stream.format](schema)
    except SettingsError as exc:
        yield found("schema.invalid", f"{exc}.", path=context.path)
    else:
        yield ok(
            f"Features {', '.join(f.name for f in schema.features)} and label {schema.label.name} go as "
            f'"{pipeline.stream.format}".'
        )
