"""The message formats by name."""

from collections.abc import Callable

from ingest.decoded import Format
from ingest.json import JsonFormat
from ingest.rows import RowsFormat
from ingest.schema import Schema

FORMATS: dict[str, Callable[[Schema], Format]] = {"json": JsonFormat, "rows": RowsFormat}
