"""The message formats by name."""

from collections.abc import Callable

from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from ingest.formats.base import Format
from ingest.formats.json import JsonFormat
from ingest.formats.rows import RowsFormat


def _arrow(schema: Schema) -> Format:
    try:
        # Imported here since it is an extra.
        from ingest.formats.arrow import ArrowFormat
    except ImportError as exc:
        raise SettingsError("stream.format = \"arrow\" needs pyarrow: pip install 'anabranch[arrow]'") from exc
    return ArrowFormat(schema)


FORMATS: dict[str, Callable[[Schema], Format]] = {"json": JsonFormat, "rows": RowsFormat, "arrow": _arrow}
