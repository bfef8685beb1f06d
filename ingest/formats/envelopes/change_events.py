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


class _Delete(NamedTuple):
    """A delete of the events of a key; empty: of none."""

    key: bytes


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
            if isinstance(event, _Delete):
                rejects.append(Reject(index, WHOLE_MESSAGE, "debezium: a row was deleted"))
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

    def _event(self, value: bytes) -> bytes | _Delete:
        """Return the event in a message, or what the message is instead."""
        return _present(_read(value, "connect").payload, "connect: its payload")


class DebeziumFormat(ConnectFormat):
    """Decodes the rows of changes, with or without the envelope of Connect's converter around them.

    A delete becomes a reject that is in `Decoded.deletes`.
    """

    def __init__(self, schema: Schema, inner: Format, *, erases: bool) -> None:
        """`erases`: a delete erases the events of its key; otherwise, it is skipped."""
        super().__init__(schema, inner)
        self._key = schema.key if erases else None

    def _event(self, value: bytes) -> bytes | _Delete:
        change = _read(value, "debezium")
        if change.op is UNSET and not isinstance(change.payload, UnsetType):
            change = _read(bytes(change.payload), "debezium")
        if change.op == "d":
            return self._delete(change.before)
        if change.op not in ("c", "u", "r"):
            what = "is missing" if change.op is UNSET else f"is {change.op!r}"[:_LONGEST]
            raise _ChangeError(f"debezium: op {what}, not c, u, r or d")
        return _present(change.after, f"debezium: op is {change.op}, but after")

    def _delete(self, before: Raw | UnsetType) -> _Delete:
        if self._key is None:
            return _Delete(b"")
        path = self.schema.path(self._key)
        try:
            key = value_at(msgspec.json.decode(_NULL if isinstance(before, UnsetType) else before), path)
        except _UNREADABLE as exc:
            raise _ChangeError(f"debezium: {exc}") from exc
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise _ChangeError(
                f"debezium: a row was deleted, and before has no {'.'.join(path)}, the field of [schema.key], so that "
                "nothing is erased"
            )
        return _Delete(str(key).encode())


def row_in(envelope: str, line: bytes) -> bytes:
    """Return the row of a message in an envelope of `connect` or `debezium`; what is in none as it is.

    Raises ValueError where the message is in the envelope, and has no row, such as a delete.
    """
    name = "debezium" if envelope == "debezium" else "connect"
    message = _read(line, name)
    if envelope == "debezium" and message.op is UNSET and not isinstance(message.payload, UnsetType):
        message = _read(bytes(message.payload), name)
    part = message.after if envelope == "debezium" else message.payload
    if isinstance(part, UnsetType) or (envelope == "debezium" and message.op is UNSET):
        return line
    if message.op == "d":
        raise _ChangeError("debezium: a row was deleted")
    return _present(part, f"{name}: its row")


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
