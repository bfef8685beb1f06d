"""From messages of one partition to rows of a block, each with its outcome as far as ingest decides it.

Legend: M messages, K rows of the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.block import Array, BlockLayout, Outcome, SkipReason, TopicPartition
from ingest.client import DeadLetter, Messages
from ingest.config import HoldOut, StreamSettings
from ingest.decoded import WHOLE_MESSAGE, Decoded, Reject
from ingest.format import FORMATS
from ingest.identity import identity_hash, partition_base, seeded_hash
from ingest.messages import Position
from ingest.schema import Schema

_LONGEST_REASON = 500


@dataclass(frozen=True)
class Assembled:
    """K rows of one partition in the order of (offset, row), and the dead letters among them."""

    partition: int
    columns: dict[str, Array]
    letters: Sequence[DeadLetter]
    end: int
    removed: int
    unknown_fields: int

    def __len__(self) -> int:
        return len(self.columns["offset"])


class Assembler:
    """Decodes, rejects, holds out; keeps no state between calls."""

    def __init__(self, schema: Schema, stream: StreamSettings, hold_out: HoldOut) -> None:
        self._format = FORMATS[stream.format](schema)
        self._layout = BlockLayout(schema)
        self._most_bytes = int(stream.max_message_bytes)
        self._skip_unlabelled = stream.unlabelled == "skip"
        self._hold_out = hold_out

    def assemble(self, messages: Messages, index: int, begin: Position) -> Assembled:
        """Make the rows of `messages`; those before `begin` have their outcome already and are left out."""
        decoded = self._decode(messages.values)
        columns = self._rows(decoded, messages, index)
        self._settle(columns, messages.partition)
        letters = [_letter(messages, rejects) for rejects in _by_message(decoded.rejects)]
        if begin.row:
            fresh = (columns["offset"] != begin.offset) | np.greater_equal(columns["row"], begin.row)
            columns = {name: column[fresh] for name, column in columns.items()}
        return Assembled(index, columns, letters, messages.end, messages.removed, decoded.unknown_fields)

    def _decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode the messages that have a value of a fair size; the others are rejects."""
        refused = [
            Reject(place, WHOLE_MESSAGE, "null value" if value is None else f"oversized: {len(value)} bytes")
            for place, value in enumerate(values)
            if value is None or len(value) > self._most_bytes
        ]
        if not refused:
            return self._format.decode([value for value in values if value is not None])
        out = {reject.message for reject in refused}
        places = np.array([place for place in range(len(values)) if place not in out], np.int32)
        decoded = self._format.decode([value for place in places.tolist() if (value := values[place]) is not None])
        rejects = [Reject(int(places[reject.message]), reject.row, reject.reason) for reject in decoded.rejects]
        return Decoded(
            places[decoded.message], decoded.row, decoded.columns, sorted([*rejects, *refused]), decoded.unknown_fields
        )

    def _rows(self, decoded: Decoded, messages: Messages, index: int) -> dict[str, Array]:
        """Merge usable events and rejects in the order of (message, row); the features of rejects are zeros."""
        rejects = decoded.rejects
        message = np.concatenate([decoded.message, np.array([r.message for r in rejects], np.int32)])
        row = np.concatenate([decoded.row, np.array([max(r.row, 0) for r in rejects], np.int32)])
        order = np.lexsort((row, message))
        total, good = len(order), len(decoded.message)
        columns = self._layout.empty(total)
        usable = order < good
        for name, column in decoded.columns.items():
            columns[name][usable] = column if not rejects else column[order[usable]]
        message, columns["row"] = message[order], row[order].astype(np.int32)
        columns["partition"] = np.full(total, index, np.int32)
        columns["offset"] = np.array(messages.offsets, np.int64)[message]
        columns["time_ms"] = np.array(messages.times_ms, np.int64)[message]
        columns["outcome"] = np.where(usable, Outcome.PENDING, Outcome.DEAD_LETTERED).astype(np.uint8)
        return columns

    def _settle(self, columns: dict[str, Array], partition: TopicPartition) -> None:
        """Skip events without a label, if so set, and hold some of the labelled ones out."""
        pending = columns["outcome"] == Outcome.PENDING
        labelled = columns["labelled"].astype(np.bool_)
        if self._skip_unlabelled:
            skipped = pending & ~labelled
            columns["outcome"][skipped] = np.uint8(Outcome.SKIPPED)
            columns["reason"][skipped] = np.uint8(SkipReason.UNLABELLED)
        if self._hold_out.fraction > 0:
            held_out = pending & labelled & (self._guard_hash(columns, partition) < self._threshold())
            columns["outcome"][held_out] = np.uint8(Outcome.HELD_OUT)

    def _guard_hash(self, columns: dict[str, Array], partition: TopicPartition) -> NDArray[np.uint64]:
        """Hash by group, else by key, else by identity, so that what belongs together is held out together."""
        seed = self._hold_out.seed
        base = np.full(len(columns["offset"]), partition_base(partition), np.uint64)
        own = identity_hash(base, columns["offset"].astype(np.int64), columns["row"].astype(np.int32), seed)
        key, group = columns["key_hash"].astype(np.uint64), columns["group_hash"].astype(np.uint64)
        by_key = np.where(key != 0, seeded_hash(key, seed), own)
        return np.where(group != 0, seeded_hash(group, seed), by_key)

    def _threshold(self) -> np.uint64:
        return np.uint64(int(self._hold_out.fraction * 2**64))


def _by_message(rejects: Sequence[Reject]) -> list[list[Reject]]:
    groups: list[list[Reject]] = []
    for reject in rejects:
        if groups and groups[-1][0].message == reject.message:
            groups[-1].append(reject)
        else:
            groups.append([reject])
    return groups


def _letter(messages: Messages, rejects: Sequence[Reject]) -> DeadLetter:
    """Return the message as it came, with the headers that tell why and from where it came."""
    place = rejects[0].message
    partition = messages.partition
    source = f"{partition.topic}[{partition.partition}]@{messages.offsets[place]}"
    added = [
        ("anabranch-error", rejects[0].reason[:_LONGEST_REASON].encode()),
        ("anabranch-source", source.encode()),
        ("anabranch-time", str(messages.times_ms[place]).encode()),
    ]
    if rejects[0].row != WHOLE_MESSAGE:
        added.append(("anabranch-rows", ",".join(str(reject.row) for reject in rejects).encode()))
    return DeadLetter(messages.keys[place], messages.values[place], [*messages.headers[place], *added])
