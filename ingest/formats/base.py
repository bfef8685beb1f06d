"""The result of decoding messages: columns of usable events, and a reason for each event that is not.

Legend: M messages in, N usable events out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array, BlockLayout
from anabranch.ingest.events.schema import IGNORED, Schema, allowed, no_times, outside, times_in
from anabranch.ingest.settings.formats import FormatKind

WHOLE_MESSAGE = -1
Headers = Sequence[tuple[str, bytes]]
"""The headers of one message, in their order; a name may occur several times."""


class Reject(NamedTuple):
    """An event that cannot be used; `row` is WHOLE_MESSAGE if its message has no usable event."""

    message: int
    row: int
    reason: str


@dataclass(frozen=True)
class Decoded:
    """N usable events in the order of (message, row).

    Attributes:
        message: int32 `[N]`, index of each event's message.
        row: int32 `[N]`, its index in the message.
        columns: the schema's payload, and uint64 `[N]` for each of `Schema.hashed`.
        rejects: events that cannot be used, in the order of (message, row).
        unknown_fields: messages with fields that the schema does not know.
        deferred: messages that cannot be decoded yet, since the registry is away; they have neither events nor rejects.
        deletes: the rejects' messages that are deletes, and no faults, each with the key whose events it erases; empty
            where it erases none.
        overweight: of each event whose weight was larger than `schema.weight.max`, and is that now, its message.
    """

    message: NDArray[np.int32]
    row: NDArray[np.int32]
    columns: Mapping[str, Array]
    rejects: Sequence[Reject]
    unknown_fields: int = 0
    deferred: Sequence[int] = ()
    overweight: Sequence[int] = ()
    deletes: Mapping[int, bytes] = field(default_factory=dict)

    def at(self, indexes: NDArray[np.int32]) -> "Decoded":
        """Return the same with other message indexes: message i becomes `indexes[i]`, in ascending order."""
        rejects = [Reject(int(indexes[each.message]), each.row, each.reason) for each in self.rejects]
        deferred = [int(indexes[message]) for message in self.deferred]
        heavy = [int(indexes[message]) for message in self.overweight]
        deletes = {int(indexes[message]): key for message, key in self.deletes.items()}
        return Decoded(
            indexes[self.message], self.row, self.columns, rejects, self.unknown_fields, deferred, heavy, deletes
        )

    def without(self, bad: NDArray[np.bool_], reason: str) -> "Decoded":
        """Return the same with the events of the mask `[N]` rejected for `reason`."""
        rejects = [Reject(int(m), int(r), reason) for m, r in zip(self.message[bad], self.row[bad], strict=True)]
        good = ~bad
        return Decoded(
            self.message[good],
            self.row[good],
            {name: column[good] for name, column in self.columns.items()},
            sorted([*self.rejects, *rejects]),
            self.unknown_fields,
            self.deferred,
            self.overweight,
            self.deletes,
        )


def nothing(schema: Schema, rejects: Sequence[Reject] = (), deferred: Sequence[int] = ()) -> Decoded:
    """Return what has no usable event."""
    none, empty = np.zeros(0, np.int32), BlockLayout(schema).empty(0)
    names = (*schema.payload(), *(f"{start}_hash" for start, _ in schema.hashed))
    return Decoded(none, none, {name: empty[name] for name in names}, rejects, deferred=deferred)


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Join one or more parts, whose messages may be interleaved."""
    if len(parts) == 1:
        return parts[0]
    message = np.concatenate([part.message for part in parts])
    row = np.concatenate([part.row for part in parts])
    order = np.lexsort((row, message))
    columns = {name: np.concatenate([part.columns[name] for part in parts])[order] for name in parts[0].columns}
    rejects = sorted(reject for part in parts for reject in part.rejects)
    unknown, deferred = sum(part.unknown_fields for part in parts), sorted(i for part in parts for i in part.deferred)
    heavy = sorted(i for part in parts for i in part.overweight)
    deletes = {message: key for part in parts for message, key in part.deletes.items()}
    return Decoded(message[order], row[order], columns, rejects, unknown, deferred, heavy, deletes)


class Format:
    """Decodes batches of messages. A bad message raises nothing: it becomes a reject.

    `stream.format` builds a class of the user with the schema, and the arguments in `stream.format_args`.
    """

    kind: ClassVar[FormatKind] = FormatKind()
    """Its entry of the catalog `ingest.settings.formats.FORMATS`."""

    def __init__(self, schema: Schema) -> None:
        """Raises SettingsError when messages cannot hold the schema."""
        self.schema = schema

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:
        """Decode M message values; `headers` are those of each message, empty if no message has any."""
        raise NotImplementedError

    def pack(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        """Return a message of events, each with the fields of the schema that it has; of one if not `kind.several`.

        Only for formats with `kind.writes`. Raises SettingsError when a value does not fit.
        """
        raise NotImplementedError


class RecordDecoder(Protocol):
    """Decodes records of one writer schema, without the id that may precede each in its message."""

    def decode(self, records: Sequence[bytes]) -> Decoded:
        """Decode M records, each one event or a reject.

        A record that cannot be read under the reader's rules raises nothing: it becomes a reject whose reason begins
        with `schema: `.
        """
        ...


def reject_unusable_numbers(decoded: Decoded, schema: Schema) -> Decoded:
    """Reject events with NaN or infinity, a number out of range, a time in another unit than seconds or a negative
    weight, in every format.

    Weights above `schema.weight.max` become that.
    A missing label is no fault; its value in the column is `schema.label.missing`.
    """
    optional = {f"feature.{feature.name}" for feature in schema.features if feature.may_be_nan}
    for name, column in decoded.columns.items():
        if column.dtype.kind == "f" and name != "label" and not _all_finite(column):
            finite = np.isfinite(column) | np.isnan(column) if name in optional else np.isfinite(column)
            bad = np.asarray(~finite.reshape(len(column), -1).all(axis=1))
            if not bad.any():
                continue
            field = {"time": schema.time, "weight": schema.weight}.get(name, name.removeprefix("feature."))
            return reject_unusable_numbers(decoded.without(bad, f"{field} is NaN, infinite or too large"), schema)
    for feature in schema.features:
        beyond = feature.outside(decoded.columns[f"feature.{feature.name}"])
        if beyond is not None:
            return reject_unusable_numbers(decoded.without(beyond, f"{feature.name} is not {feature.allowed}"), schema)
    if schema.time is not None and (far := no_times(decoded.columns["time"])) is not None:
        return reject_unusable_numbers(
            decoded.without(far, f"{schema.time} is not {times_in(schema.time_unit)}"), schema
        )
    negative = np.less(decoded.columns["weight"], 0)
    if negative.any():
        return reject_unusable_numbers(decoded.without(negative, f"{schema.weight} is negative"), schema)
    if schema.most_weight is not None and (heavy := np.greater(decoded.columns["weight"], schema.most_weight)).any():
        weight = np.minimum(decoded.columns["weight"], np.float32(schema.most_weight))
        columns = {**decoded.columns, "weight": weight}
        decoded = replace(decoded, columns=columns, overweight=decoded.message[heavy].tolist())
    if schema.label.multi:
        return decoded
    label, labelled = decoded.columns["label"], decoded.columns["labelled"].astype(np.bool_)
    if schema.label.length is not None:
        has = label != IGNORED
        bad = (has & (np.less(label, 0) | np.greater_equal(label, schema.label.classes or 0))).any(axis=1) & labelled
        columns = {**decoded.columns, "labelled": labelled & has.any(axis=1)}
        decoded, expected = replace(decoded, columns=columns), f"in 0..{(schema.label.classes or 0) - 1}"
    elif schema.label.classes is None:
        bad, expected = labelled & ~np.isfinite(label.astype(np.float64)), "finite"
        far = outside(label, schema.label.min, schema.label.max)
        if far is not None and (far & labelled & ~bad).any():
            far &= labelled & ~bad
            reason = f"{schema.label.name} is not {allowed(schema.label.min, schema.label.max)}"
            return reject_unusable_numbers(decoded.without(far, reason), schema)
    else:
        bad = labelled & (np.less(label, 0) | np.greater_equal(label, schema.label.classes))
        expected = f"in 0..{schema.label.classes - 1}"
    return decoded.without(bad, f"{schema.label.name} is not {expected}") if bad.any() else decoded


def seconds_of(text: str) -> float:
    """Return the seconds since 1970 of an ISO time, which is UTC without a zone; raises ValueError where it is none."""
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def nested(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return the values in lists of this shape; lists of another length do not become what the schema accepts."""
    for size in reversed(shape[1:]):
        values = [values[begin : begin + size] for begin in range(0, len(values), size)]
    return values


def _all_finite(column: Array) -> bool:
    """Return whether no number is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass without memory: a sum with such a number is not finite either. That of finite ones may overflow.
        return bool(np.isfinite(np.add.reduce(column, axis=None)) or np.isfinite(column).all())
