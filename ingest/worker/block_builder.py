"""Turns messages into rows of a block, each with its outcome as far as ingest decides it.

Legend: K rows of the block.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ingest.config import HoldOut, StreamSettings
from ingest.events.block import Array, BlockLayout, Outcome, SkipReason
from ingest.events.encoders import hash_texts
from ingest.events.identity import identity_hash, partition_base, seeded_hash
from ingest.events.position import Position
from ingest.events.schema import Schema
from ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject, joined
from ingest.formats.registry import FORMATS
from ingest.kafka.client import Messages
from ingest.kafka.dead_letters import DeadLetter

_LONGEST_REASON = 500
_LONGEST_ROWS = 4_000
"""Bytes of the header that names rows: a dead letter must fit where its message did."""
_MOST_LETTERED = 3
"""A message that was a dead letter this often is in a loop: pipelines read each other's dead letters."""
_SOURCE = "anabranch-source"
_MOST_AHEAD_MS = 86_400_000
"""A record time further ahead of the clock is a mistake, for example microseconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incoming:
    """Messages of one partition, its index, and the position of its first event without an outcome."""

    messages: Messages
    partition: int
    begin: Position


@dataclass(frozen=True)
class Assembled:
    """K rows, partition after partition in the order of arrival, each sorted by (offset, row), and the dead letters.

    `rows` counts the rows of each partition; `looped` counts messages without a dead letter, being in a loop.
    """

    columns: dict[str, Array]
    rows: Sequence[int]
    letters: Sequence[DeadLetter]
    looped: int
    unknown_fields: int
    fault: str | None
    """What the decoder raised, which is a bug in it; messages that it cannot decode are among the letters."""

    def __len__(self) -> int:
        return len(self.columns["offset"])


class BlockBuilder:
    """Decodes messages, rejects bad ones, holds events out; keeps no state between calls."""

    def __init__(self, schema: Schema, stream: StreamSettings, hold_out: HoldOut) -> None:
        self._format = FORMATS[stream.format](schema)
        self._layout = BlockLayout(schema)
        self._most_bytes = int(stream.max_message_bytes)
        self._skip_unlabelled = stream.unlabelled == "skip"
        self._hold_out = hold_out
        self._keyed = schema.key is not None

    def assemble(self, incoming: Sequence[Incoming]) -> Assembled:
        """Return the rows of messages, without those before their partition's `begin`, which have an outcome already.

        The messages of all partitions are decoded together: many small partitions cost no more than a large one.
        """
        lengths = [len(each.messages) for each in incoming]
        part = np.repeat(np.arange(len(incoming)), lengths)
        firsts = (np.cumsum(lengths) - lengths).tolist()
        faults = {
            first + at: why
            for each, first in zip(incoming, firsts, strict=True)
            for at, why in each.messages.faults.items()
        }
        decoded, fault = self._decode([value for each in incoming for value in each.messages.values], faults)
        columns, message = self._rows(decoded, incoming)
        tombstones = self._tombstones(incoming) if self._keyed else {}
        _mark_tombstones(columns, message, tombstones)
        self._assign_outcomes(columns, incoming, part[message])
        letters, looped = [], 0
        for rejects in _by_message(decoded.rejects):
            if rejects[0].message in tombstones:
                continue
            index = int(part[rejects[0].message])
            letter = _letter(incoming[index].messages, rejects[0].message - firsts[index], rejects)
            if [name for name, _ in letter.headers].count(_SOURCE) >= _MOST_LETTERED:
                looped += 1
            else:
                letters.append(letter)
        begin = np.array([(each.begin.offset, each.begin.row) for each in incoming], np.int64).reshape(-1, 2)
        if begin[:, 1].any():
            offset, row = begin[part[message]].T
            fresh = (columns["offset"] != offset) | np.greater_equal(columns["row"], row)
            columns, message = {name: column[fresh] for name, column in columns.items()}, message[fresh]
        rows = np.bincount(part[message], minlength=len(incoming)).tolist()
        return Assembled(columns, rows, letters, looped, decoded.unknown_fields, fault)

    def _tombstones(self, incoming: Sequence[Incoming]) -> dict[int, bytes]:
        """Return the keys of messages with a key and a null value, by the index of the message among all."""
        pairs = chain.from_iterable(zip(each.messages.keys, each.messages.values, strict=True) for each in incoming)
        return {index: key for index, (key, value) in enumerate(pairs) if value is None and key is not None}

    def _decode(self, values: Sequence[bytes | None], faults: Mapping[int, str]) -> tuple[Decoded, str | None]:
        """Decode the messages with a value of allowed size; reject the others. Also return what the decoder raised.

        `faults` are reasons to reject messages, by index, that are known before decoding.
        """
        refused = [
            Reject(index, WHOLE_MESSAGE, faults.get(index) or _unfit(value))
            for index, value in enumerate(values)
            if value is None or len(value) > self._most_bytes or index in faults
        ]
        if not refused:
            return self._decode_fair([value for value in values if value is not None])
        out = {reject.message for reject in refused}
        indexes = np.array([index for index in range(len(values)) if index not in out], np.int32)
        fair = [value for index in indexes.tolist() if (value := values[index]) is not None]
        decoded, fault = self._decode_fair(fair)
        return joined([decoded.at(indexes), self._only(refused)]), fault

    def _decode_fair(self, values: Sequence[bytes]) -> tuple[Decoded, str | None]:
        """Decode messages together; if the decoder raises, decode each alone."""
        try:
            return self._format.decode(values), None
        except MemoryError:
            raise  # not caused by a message
        except Exception as exc:
            log.exception("a bug in decoding: the messages are decoded one by one, those that raise are dead-lettered")
            indexes = np.arange(len(values), dtype=np.int32)[:, None]
            return joined([self._decode_one(value).at(indexes[i]) for i, value in enumerate(values)]), _named(exc)

    def _decode_one(self, value: bytes) -> Decoded:
        try:
            return self._format.decode([value])
        except MemoryError:
            raise
        except Exception as exc:  # noqa: BLE001 logged for the batch, and named in the dead letter
            return self._only([Reject(0, WHOLE_MESSAGE, f"internal: {_named(exc)}")])

    def _only(self, rejects: Sequence[Reject]) -> Decoded:
        return replace(self._format.decode([]), rejects=rejects)

    def _rows(self, decoded: Decoded, incoming: Sequence[Incoming]) -> tuple[dict[str, Array], NDArray[np.int32]]:
        """Merge usable events and rejects in the order of (message, row); the features of rejects are zeros.

        Returns:
            The columns, and the index of each row's message among all.
        """
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
        lengths = [len(each.messages) for each in incoming]
        columns["partition"] = np.repeat(np.array([each.partition for each in incoming], np.int32), lengths)[message]
        columns["offset"] = _of_all([each.messages.offsets for each in incoming])[message]
        columns["time_ms"] = _believable(_of_all([each.messages.times_ms for each in incoming]))[message]
        columns["outcome"] = np.where(usable, Outcome.PENDING, Outcome.DEAD_LETTERED).astype(np.uint8)
        return columns, message

    def _assign_outcomes(self, columns: dict[str, Array], incoming: Sequence[Incoming], part: NDArray[np.intp]) -> None:
        """Skip events without a label, if so configured, and hold out a part of the labelled events.

        `part` is int `[K]`, the index in `incoming` of each row's partition.
        """
        pending = columns["outcome"] == Outcome.PENDING
        labelled = columns["labelled"].astype(np.bool_)
        if self._skip_unlabelled:
            skipped = pending & ~labelled
            columns["outcome"][skipped] = np.uint8(Outcome.SKIPPED)
            columns["reason"][skipped] = np.uint8(SkipReason.UNLABELLED)
        if self._hold_out.fraction > 0:
            bases = np.array([partition_base(each.messages.partition) for each in incoming], np.uint64)
            held_out = pending & labelled & (self._holdout_hash(columns, bases[part]) < self._threshold())
            columns["outcome"][held_out] = np.uint8(Outcome.HELD_OUT)

    def _holdout_hash(self, columns: dict[str, Array], base: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Hash by group, else by key, else by identity: events of one group or key are held out together."""
        seed = self._hold_out.seed
        own = identity_hash(base, columns["offset"].astype(np.int64), columns["row"].astype(np.int32), seed)
        key, group = columns["key_hash"].astype(np.uint64), columns["group_hash"].astype(np.uint64)
        by_key = np.where(key != 0, seeded_hash(key, seed), own)
        return np.where(group != 0, seeded_hash(group, seed), by_key)

    def _threshold(self) -> np.uint64:
        return np.uint64(int(self._hold_out.fraction * 2**64))


def _mark_tombstones(columns: dict[str, Array], message: NDArray[np.int32], tombstones: Mapping[int, bytes]) -> None:
    """Skip the rows of tombstones, and write the hash of their key, by which the learner erases events."""
    if tombstones:
        rows = np.flatnonzero(np.isin(message, list(tombstones)))
        columns["outcome"][rows] = np.uint8(Outcome.SKIPPED)
        columns["reason"][rows] = np.uint8(SkipReason.TOMBSTONE)
        columns["key_hash"][rows] = hash_texts([tombstones[int(message[row])] for row in rows.tolist()])


def _of_all(numbers: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(numbers), np.int64)


def _believable(times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace record times of the far future by now: with one of them, all real events would count as old."""
    now = int(time.time() * 1000)
    return np.where(times_ms > now + _MOST_AHEAD_MS, now, times_ms)


def _unfit(value: bytes | None) -> str:
    return "null value" if value is None else f"oversized: {len(value)} bytes"


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _by_message(rejects: Sequence[Reject]) -> list[list[Reject]]:
    groups: list[list[Reject]] = []
    for reject in rejects:
        if groups and groups[-1][0].message == reject.message:
            groups[-1].append(reject)
        else:
            groups.append([reject])
    return groups


def _letter(messages: Messages, index: int, rejects: Sequence[Reject]) -> DeadLetter:
    """Return the message at `index` unchanged, with headers for the reason, its source and its time."""
    partition = messages.partition
    source = f"{partition.topic}[{partition.partition}]@{messages.offsets[index]}"
    added = [
        ("anabranch-error", rejects[0].reason[:_LONGEST_REASON].encode()),
        (_SOURCE, source.encode()),
        ("anabranch-time", str(messages.times_ms[index]).encode()),
    ]
    if rejects[0].row != WHOLE_MESSAGE:
        added.append(("anabranch-rows", _ranges([reject.row for reject in rejects]).encode()))
    return DeadLetter(messages.keys[index], messages.values[index], messages.headers[index], added)


def _ranges(rows: Sequence[int]) -> str:
    """Write ascending rows as `3,17,20..31`; a text that is too long ends with `,...`."""
    edges = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2, append=rows[-1] + 2) != 1)
    written: list[str] = []
    length = 0
    for begin, end in itertools.pairwise(edges.tolist()):
        first, last = rows[begin], rows[end - 1]
        text = f"{first}" if first == last else f"{first},{last}" if last == first + 1 else f"{first}..{last}"
        length += len(text) + 1
        if length > _LONGEST_ROWS:
            return ",".join([*written, "..."])
        written.append(text)
    return ",".join(written)
