"""The message formats by name."""

from collections.abc import Callable

from anabranch.core.errors import SettingsError
from ingest.decoded import Format
from ingest.json import JsonFormat
from ingest.rows import RowsFormat
from ingest.schema import Schema


def _arrow(schema: Schema) -> Format:
    try:
        # Imported here since it is an extra.
        from ingest.arrow import ArrowFormat
    except ImportError as exc:
        raise SettingsError("stream.format = \"arrow\" needs pyarrow: pip install 'anabranch[arrow]'") from exc
    return ArrowFormat(schema)


FORMATS: dict[str, Callable[[Schema], Format]] = {"json": JsonFormat, "rows": RowsFormat, "arrow": _arrow}
