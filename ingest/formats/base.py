"""The result of decoding messages: columns of usable events, and a reason for each event that is not.

Legend: M messages in, N usable events out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.schema import Schema

WHOLE_MESSAGE = -1


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
        columns: the schema's payload, and `key_hash` and `group_hash` uint64 `[N]`.
        rejects: events that cannot be used, in the order of (message, row).
        unknown_fields: messages with fields that the schema does not know.
    """

    message: NDArray[np.int32]
    row: NDArray[np.int32]
    columns: Mapping[str, Array]
    rejects: Sequence[Reject]
    unknown_fields: int = 0

    def at(self, indexes: NDArray[np.int32]) -> "Decoded":
        """Return the same with other message indexes: message i becomes `indexes[i]`, in ascending order."""
        rejects = [Reject(int(indexes[each.message]), each.row, each.reason) for each in self.rejects]
        return Decoded(indexes[self.message], self.row, self.columns, rejects, self.unknown_fields)

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
        )


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Join one or more parts, whose messages may be interleaved."""
    if len(parts) == 1:
        return parts[0]
    message = np.concatenate([part.message for part in parts])
    row = np.concatenate([part.row for part in parts])
    order = np.lexsort((row, message))
    columns = {name: np.concatenate([part.columns[name] for part in parts])[order] for name in parts[0].columns}
    rejects = sorted(reject for part in parts for reject in part.rejects)
    return Decoded(message[order], row[order], columns, rejects, sum(part.unknown_fields for part in parts))


class Format(Protocol):
    """Decodes batches of messages. A bad message raises nothing: it becomes a reject."""

    def decode(self, values: Sequence[bytes]) -> Decoded:
        """Decode M message values."""
        ...


def reject_unusable_numbers(decoded: Decoded, schema: Schema) -> Decoded:
    """Reject events with NaN or infinity, a number out of range or a negative weight, in every format.

    A missing label is no fault; its value in the column is `schema.label.missing`.
    """
    for name, column in decoded.columns.items():
        if column.dtype.kind == "f" and name != "label":
            finite = np.isfinite(column)
            if not finite.all():
                bad = np.asarray(~finite.reshape(len(finite), -1).all(axis=1))
                field = {"time": schema.time, "weight": schema.weight}.get(name, name.removeprefix("feature."))
                return reject_unusable_numbers(decoded.without(bad, f"{field} is NaN, infinite or too large"), schema)
    for feature in schema.features:
        outside = feature.outside(decoded.columns[f"feature.{feature.name}"])
        if outside is not None:
            return reject_unusable_numbers(decoded.without(outside, f"{feature.name} is not {feature.allowed}"), schema)
    negative = np.less(decoded.columns["weight"], 0)
    if negative.any():
        return reject_unusable_numbers(decoded.without(negative, f"{schema.weight} is negative"), schema)
    if schema.label.multi:
        return decoded
    label, labelled = decoded.columns["label"], decoded.columns["labelled"].astype(np.bool_)
    if schema.label.classes is None:
        bad, expected = labelled & ~np.isfinite(label.astype(np.float64)), "finite"
    else:
        bad = labelled & (np.less(label, 0) | np.greater_equal(label, schema.label.classes))
        expected = f"in 0..{schema.label.classes - 1}"
    return decoded.without(bad, f"{schema.label.name} is not {expected}") if bad.any() else decoded
