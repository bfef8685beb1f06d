"""Messages of Kafka Connect: its JSON converter's `schema` and `payload`, and Debezium's changes of a table's rows.

A change has the row in `after`, and with `op` what happened to it: `c` created, `u` updated, `r` read for a snapshot,
`d` deleted. The row of a delete is in `before`, which has its key at least.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Format, Headers, Reject, joined, nothing
from anabranch.ingest.formats.event_fields import value_at
from anabranch.ingest.formats.json_text import decoded
from anabranch.ingest.settings.stream import StreamSettings

_NULL = b"null"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LONGEST = 40


class _Change(msgspec.Struct):
    payload: Raw | UnsetType = UNSET
    op: Any = UNSET
    before: Raw | UnsetType = UNSET
    after: Raw | UnsetType = UNSET


_PARSE = msgspec.json.Decoder(_Change).decode


class _ChangeError(ValueError):
    """A message has no envelope, or none that can be read."""


class Delete(NamedTuple):
    """A delete of the events of a key; empty: of none."""

    key: bytes
    reason: str = "debezium: a row was deleted"


class ConnectFormat(Format):
    """Decodes the payload of messages by another format; the schema next to it is not read."""

    def __init__(self, schema: Schema, inner: Format) -> None:
        super().__init__(schema)
        self._inner = inner

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:
        """Decode M message values; reasons of rejects that are due to the envelope begin with its name."""
        events, own, indexes, rejects, deletes = [], [], [], [], {}
        for index, (value, header) in enumerate(zip(values, headers or repeat(()), strict=False)):
            try:
                event = self._event(value)
            except _ChangeError as exc:
                rejects.append(Reject(index, WHOLE_MESSAGE, str(exc)))
                continue
            if isinstance(event, Delete):
                rejects.append(Reject(index, WHOLE_MESSAGE, event.reason))
                deletes[index] = event.key
                continue
            events.append(event)
            own.append(header)
            indexes.append(index)
        inner = self._inner.decode(events, own)
        if not rejects:
            return inner
        others = replace(nothing(self.schema, rejects), deletes=deletes)
        return joined([inner.at(np.array(indexes, np.int32)), others])

    def _event(self, value: bytes) -> bytes | Delete:
        """Return the event in a message, or what the message is instead."""
        return _present(_read(value, "connect").payload, "connect: its payload")


class DebeziumFormat(ConnectFormat):
    """Decodes the rows of changes, with or without the envelope of Connect's converter around them.

    A delete becomes a reject that is in `Decoded.deletes`.
    """

    def __init__(self, schema: Schema, inner: Format, *, erases: bool) -> None:
        """`erases`: a delete erases the events of its key; otherwise, it is skipped."""
        super().__init__(schema, inner)
        self._key = schema.path(schema.key) if erases and schema.key else None

    def _event(self, value: bytes) -> bytes | Delete:
        change = _read(value, "debezium")
        if change.op is UNSET and not isinstance(change.payload, UnsetType):
            change = _read(bytes(change.payload), "debezium")
        if change.op == "d":
            return _delete(change.before, self._key)
        if change.op not in ("c", "u", "r"):
            what = "is missing" if change.op is UNSET else f"is {change.op!r}"[:_LONGEST]
            raise _ChangeError(f"debezium: op {what}, not c, u, r or d")
        return _present(change.after, f"debezium: op is {change.op}, but after")


class RowEnvelope(NamedTuple):
    """What rows of files may be in: the envelope of the stream, or none.

    Attributes:
        name: as in `stream.envelope`; other names than `connect` and `debezium` stand for none.
        key: where the key is whose events a delete erases; None: a delete erases none.
    """

    name: str = "none"
    key: tuple[str, ...] | None = None

    @classmethod
    def of(cls, stream: StreamSettings, schema: Schema) -> "RowEnvelope":
        """Return the envelope of a stream."""
        erases = stream.deletes == "erase" and schema.key is not None
        return cls(stream.envelope, schema.path(schema.key) if erases and schema.key else None)

    def row(self, line: bytes) -> bytes | Delete:
        """Return the row of a line in the envelope; what is in none as it is. Raises ValueError where it has no row."""
        if self.name not in ("connect", "debezium"):
            return line
        message = _read(line, self.name)
        if self.name == "debezium" and message.op is UNSET and not isinstance(message.payload, UnsetType):
            message = _read(bytes(message.payload), self.name)
        part = message.after if self.name == "debezium" else message.payload
        if self.name == "debezium" and message.op == "d" and not isinstance(message.before, UnsetType):
            return _delete(message.before, self.key)
        if isinstance(part, UnsetType) or (self.name == "debezium" and message.op is UNSET):
            return line
        return _present(part, f"{self.name}: its row")


NO_ENVELOPE = RowEnvelope()
"""Of files whose rows are in none."""


def _delete(before: Raw | UnsetType, key: tuple[str, ...] | None) -> Delete:
    """Return the delete of the row `before`; raises _ChangeError where it has no key at this path."""
    if key is None:
        return Delete(b"")
    try:
        value = value_at(msgspec.json.decode(_NULL if isinstance(before, UnsetType) else before), key)
    except _UNREADABLE as exc:
        raise _ChangeError(f"debezium: {exc}") from exc
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise _ChangeError(
            f"debezium: a row was deleted, and before has no {'.'.join(key)}, the field of [schema.key], so that "
            "nothing is erased"
        )
    return Delete(str(value).encode())


def _present(part: Raw | UnsetType, what: str) -> bytes:
    if isinstance(part, UnsetType):
        raise _ChangeError(f"{what} is missing")
    content = bytes(part)
    if content == _NULL:
        raise _ChangeError(f"{what} is null")
    return content


def _read(value: bytes, name: str) -> _Change:
    try:
        return decoded(_PARSE, value)
    except _UNREADABLE as exc:
        raise _ChangeError(f"{name}: {exc}") from exc
