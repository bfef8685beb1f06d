"""Headers without a value (null), which records can have, and which kafka-python's producer refuses."""

from collections.abc import Sequence
from typing import Any

from kafka.record.default_records import DefaultRecordBatchBuilder


class _Null(bytes):
    """Stands for no value, as empty bytes, wherever kafka-python asks for bytes or their length."""


_NULL = _Null()
_append = DefaultRecordBatchBuilder.append


def sendable(headers: Sequence[tuple[str, bytes | None]]) -> list[tuple[str, bytes]]:
    """Return headers as `KafkaProducer.send` takes them; those without a value stay so in the record."""
    return [(name, _NULL if value is None else value) for name, value in headers]


def _append_with_null(
    builder: Any, offset: int, timestamp: int, key: Any, value: Any, headers: Any, **options: Any
) -> Any:
    # The builder writes None as null: only `send` and the batch around the builder have no argument for it.
    headers = [(name, None if content is _NULL else content) for name, content in headers]
    return _append(builder, offset, timestamp, key, value, headers, **options)


DefaultRecordBatchBuilder.append = _append_with_null
