"""Turns messages into rows of a block, each with its outcome as far as ingest decides it.

Legend: K rows of the block.
"""

import bisect
import itertools
import logging
import operator
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.core.tracing.context import MOST_LINKS, sampled_contexts
from anabranch.ingest.backfill.history_rows import HistoryRows
from anabranch.ingest.events.block import Array, BlockLayout, Outcome, SkipReason
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.hold_out import held_out
from anabranch.ingest.events.identity import partition_base
from anabranch.ingest.events.key_forms import PLAIN, form_of
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject, joined
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.dead_letters import DeadLetter
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.settings.stream import HoldOut, StreamSettings
from anabranch.ingest.worker.history_blocks import empty, history_columns, message_of, skip_repeated, whole
from anabranch.ingest.worker.label_format import LabelFormat
from anabranch.ingest.worker.value_decoder import ValueDecoder

_LONGEST_REASON = 500
_LONGEST_ROWS = 4_000
"""Bytes of the header that names rows: a dead letter must fit where its message did."""
_MOST_LETTERED = 3
"""A message that was a dead letter this often is in a loop: pipelines read each other's dead letters."""
_SOURCE = "anabranch-source"
_LOG_SECONDS = 60.0
_NAMED = 20
"""Events that one line of the log names."""
_MOST_AHEAD_MS = 300_000
"""A record time further ahead of the clock is a mistake: local time written as UTC, or microseconds."""

log = logging.getLogger(__name__)


class OfFiles(NamedTuple):
    """Which messages of a partition are rows of files of the history: those before a time and before the offset `end`.

    The time is the event's `own`, or that of the record; an event without one is of the topic.
    """

    until_ms: int
    own: bool
    end: int


_BEGIN = Position(0)
"""Of a partition none of whose events has an outcome yet."""


@dataclass(frozen=True)
class Incoming:
    """Messages of one partition, its index, and the position of its first event without an outcome."""

    messages: Messages
    partition: int
    begin: Position = _BEGIN
    of_files: OfFiles | None = None


RowContexts = Sequence[tuple[int, str]]
"""Trace contexts, each with its row."""


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
    overweight: int
    """Events whose weight was larger than `schema.weight.max`, and is that now."""
    fault: str | None
    """What the decoder raised, which is a bug in it; messages that it cannot decode are among the letters."""
    incoming: Sequence[Incoming]
    """The messages that the rows are of: of each partition those before its first deferred message."""
    deferred: Sequence[int] = ()
    """Indexes of the partitions that have a deferred message: one whose schema the registry has not returned yet."""
    tombstones: Mapping[str, int] = field(default_factory=dict)
    """Tombstones by the form of their key."""
    contexts: RowContexts = ()
    """The sampled trace contexts that producers sent in the headers of records, each with its row, ascending."""

    def __len__(self) -> int:
        return len(self.columns["offset"])


class BlockBuilder:
    """Decodes messages, rejects bad ones, holds events out; keeps nothing of messages between calls."""

    def __init__(
        self,
        schema: Schema,
        stream: StreamSettings,
        hold_out: HoldOut,
        schemas: WriterSchemas | None = None,
        *,
        traced: bool = False,
    ) -> None:
        """`traced`: rows have the trace contexts of their messages."""
        self.schemas = schemas
        """Finds the writer schemas of messages, where the stream has a registry."""
        self._traced = traced
        most_bytes = int(stream.max_message_bytes)
        self._decoder = ValueDecoder(make_format(stream, schema, schemas), schema, most_bytes)
        self._layout = BlockLayout(schema)
        self._skip_unlabelled = stream.unlabelled == "skip"
        self._hold_out = hold_out
        self._most_weight, self._next_log = schema.most_weight or 0.0, 0.0
        self._keyed, self._follows_deletes = schema.key is not None, stream.envelope == "debezium"
        self._label_topics = stream.label_topics
        self._label_decoder: ValueDecoder | None = None
        if stream.labels is not None:
            self._label_decoder = ValueDecoder(LabelFormat(schema, stream, schemas), schema, most_bytes)
        # A tombstone's key is that of events; where labels have another key, theirs name no event.
        self._keyless_topics = () if schema.join_column == "key_hash" else stream.label_topics

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
        of_labels = np.array([each.messages.partition.topic in self._label_topics for each in incoming], np.bool_)[part]
        decoded, fault = self._decode(incoming, faults, of_labels)
        if decoded.deferred:
            usable, deferred = _before(incoming, decoded.deferred, firsts)
            assembled = self.assemble(usable)
            return replace(assembled, deferred=sorted({*deferred, *assembled.deferred}))
        columns, message = self._rows(decoded, incoming)
        tombstones, deletes = self._erasing(incoming, decoded, part)
        of_files = _of_files(columns, [each.of_files for each in incoming], part[message])
        columns["outcome"][of_files] = np.uint8(Outcome.SKIPPED)
        columns["reason"][of_files] = np.uint8(SkipReason.LEFT_TO_FILES)
        left = set(message[of_files].tolist())
        _mark_tombstones(columns, message, tombstones)
        deleted = np.isin(message, list(deletes))
        columns["outcome"][deleted], columns["reason"][deleted] = (
            np.uint8(Outcome.SKIPPED),
            np.uint8(SkipReason.DELETED),
        )
        self._assign_outcomes(columns, incoming, part[message], of_labels[message])
        letters, looped = [], 0
        for rejects in _by_message(decoded.rejects):
            if rejects[0].message in tombstones or rejects[0].message in left or rejects[0].message in deletes:
                continue
            index = int(part[rejects[0].message])
            letter = dead_letter(incoming[index].messages, rejects[0].message - firsts[index], rejects)
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
        heavy = self._count_overweight(decoded, incoming, part, firsts)
        forms = dict(Counter(map(form_of, tombstones.values())))
        contexts = _contexts(incoming, rows, columns["offset"]) if self._traced else ()
        return Assembled(
            columns,
            rows,
            letters,
            looped,
            decoded.unknown_fields,
            heavy,
            fault,
            incoming,
            tombstones=forms,
            contexts=contexts,
        )

    def assemble_history(self, rows: HistoryRows, indexes: Sequence[int]) -> Assembled:
        """Return rows of files; `indexes` are those of their partitions, in order."""
        part = np.repeat(np.arange(len(indexes)), list(rows.counts.values()))
        columns = history_columns(rows, np.array(indexes, np.int32)[part], self._layout)
        columns["time_ms"] = _believable(rows.time_ms)
        source = [Incoming(empty(name), index, Position(0)) for name, index in zip(rows.counts, indexes, strict=True)]
        self._assign_outcomes(columns, source, part, np.zeros(len(part), np.bool_))
        again = np.array([name.history > 1 for name in rows.counts], np.bool_)[part]
        _mark_deletes(columns, rows.decoded.deletes, again)
        skip_repeated(columns, again)
        letters = [
            dead_letter(
                message_of(rows, reject.message, list(rows.counts)[int(part[reject.message])]),
                0,
                [whole(reject)],
                [("anabranch-format", b"json")],
            )
            for reject in rows.decoded.rejects
            if not again[reject.message] and reject.message not in rows.decoded.deletes
        ]
        heavy, unknown = len(rows.decoded.overweight), rows.decoded.unknown_fields
        return Assembled(columns, list(rows.counts.values()), letters, 0, unknown, heavy, None, source)

    def _count_overweight(
        self, decoded: Decoded, incoming: Sequence[Incoming], part: NDArray[np.intp], firsts: Sequence[int]
    ) -> int:
        """Return the events with a weight that was too large, and log the first of them, once a minute at most."""
        if decoded.overweight and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_SECONDS
            named = []
            for message in decoded.overweight[:_NAMED]:
                index = int(part[message])
                of = incoming[index].messages
                name = of.partition
                named.append(f"{name.topic}[{name.partition}]@{of.offsets[message - firsts[index]]}")
            log.warning(
                "%d events have a weight above schema.weight.max = %g, and count as that: %s",
                len(decoded.overweight),
                self._most_weight,
                ", ".join(named),
            )
        return len(decoded.overweight)

    def _erasing(
        self, incoming: Sequence[Incoming], decoded: Decoded, part: NDArray[np.intp]
    ) -> tuple[dict[int, bytes], set[int]]:
        """Return the keys of messages that erase events, by the index of the message, and deletes that erase none."""
        tombstones = self._tombstones(incoming) if self._keyed else {}
        deletes = dict(decoded.deletes)
        if self._follows_deletes:
            # For log compaction, such a message follows each delete; its key is that of the table, in JSON.
            deletes |= {message: b"" for message, key in tombstones.items() if form_of(key) != PLAIN}
        for message, key in deletes.items():
            if key and incoming[int(part[message])].messages.partition.topic not in self._keyless_topics:
                tombstones[message] = key
            else:
                tombstones.pop(message, None)
        return tombstones, deletes.keys() - tombstones.keys()

    def _tombstones(self, incoming: Sequence[Incoming]) -> dict[int, bytes]:
        """Return the keys of messages with a key and a null value, by the index of the message among all."""
        keyed = [each.messages.partition.topic not in self._keyless_topics for each in incoming]
        messages = [each.messages for each in incoming]
        pairs = chain.from_iterable(
            zip(each.keys if known else [None] * len(each), each.values, strict=True)
            for each, known in zip(messages, keyed, strict=True)
        )
        return {index: key for index, (key, value) in enumerate(pairs) if value is None and key is not None}

    def _decode(
        self, incoming: Sequence[Incoming], faults: Mapping[int, str], of_labels: NDArray[np.bool_]
    ) -> tuple[Decoded, str | None]:
        """Decode all messages, those of label topics as labels, bool `[messages]`. Also return what a format raised.

        `faults` are reasons to reject messages, by index, that are known before decoding.
        """
        values = [value for each in incoming for value in each.messages.values]
        headers = [own for each in incoming for own in each.messages.headers]
        if self._label_decoder is None or not of_labels.any():
            return self._decoder.decode(values, headers, faults)
        parts, fault = [], None
        for decoder, chosen in ((self._decoder, ~of_labels), (self._label_decoder, of_labels)):
            indexes = np.flatnonzero(chosen).astype(np.int32)
            part, raised = decoder.decode(
                [values[index] for index in indexes.tolist()],
                [headers[index] for index in indexes.tolist()],
                {at: faults[index] for at, index in enumerate(indexes.tolist()) if index in faults},
            )
            parts.append(part.at(indexes))
            fault = fault or raised
        return joined(parts), fault

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

    def _assign_outcomes(
        self,
        columns: dict[str, Array],
        incoming: Sequence[Incoming],
        part: NDArray[np.intp],
        of_labels: NDArray[np.bool_],
    ) -> None:
        """Skip events without a label, if so configured, or let them wait, and hold out a part of the labelled events.

        `part` is int `[K]`, the index in `incoming` of each row's partition; `of_labels` are the rows of label topics.
        """
        pending = columns["outcome"] == Outcome.PENDING
        labelled = columns["labelled"].astype(np.bool_)
        if self._label_decoder is not None:
            columns["outcome"][pending & of_labels] = np.uint8(Outcome.LABEL)
            columns["outcome"][pending & ~of_labels & ~labelled] = np.uint8(Outcome.WAITING)
            pending &= ~of_labels & labelled
        elif self._skip_unlabelled:
            skipped = pending & ~labelled
            columns["outcome"][skipped] = np.uint8(Outcome.SKIPPED)
            columns["reason"][skipped] = np.uint8(SkipReason.UNLABELLED)
        if self._hold_out.fraction > 0:
            bases = np.array([partition_base(each.messages.partition) for each in incoming], np.uint64)
            columns["outcome"][pending & labelled & held_out(self._hold_out, columns, bases[part])] = np.uint8(
                Outcome.HELD_OUT
            )


def _of_files(
    columns: Mapping[str, Array], each: Sequence[OfFiles | None], part: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return which rows are read from files, bool `[K]`; `part` is the index in `each` of each row's partition."""
    found = np.zeros(len(part), np.bool_)
    for index, until in enumerate(each):
        if until is not None:
            own = part == index
            seconds = columns["time"][own].astype(np.float64) if until.own else columns["time_ms"][own] / 1000
            times_ms = np.rint(seconds * 1000)
            before = np.greater(times_ms, 0) & np.less(times_ms, until.until_ms)
            found[own] = before & np.less(columns["offset"][own], until.end)
    return found


def _before(
    incoming: Sequence[Incoming], deferred: Sequence[int], firsts: Sequence[int]
) -> tuple[list[Incoming], list[int]]:
    """Return the messages of each partition before its first deferred one, and the partitions that have one."""
    usable, partitions = list(incoming), []
    for message in reversed(deferred):
        index = bisect.bisect_right(firsts, message) - 1
        usable[index] = replace(incoming[index], messages=incoming[index].messages.part(0, message - firsts[index]))
        partitions.append(incoming[index].partition)
    return usable, sorted(set(partitions))


def _mark_tombstones(columns: dict[str, Array], message: NDArray[np.int32], tombstones: Mapping[int, bytes]) -> None:
    """Skip the rows of tombstones, and write the hash of their key, by which the learner erases events."""
    if tombstones:
        rows = np.flatnonzero(np.isin(message, list(tombstones)))
        columns["outcome"][rows] = np.uint8(Outcome.SKIPPED)
        columns["reason"][rows] = np.uint8(SkipReason.TOMBSTONE)
        columns["key_hash"][rows] = hash_texts([tombstones[int(message[row])] for row in rows.tolist()])


def _mark_deletes(columns: dict[str, Array], deletes: Mapping[int, bytes], again: NDArray[np.bool_]) -> None:
    """Skip the rows of files that are deletes; those with a key erase its events, at the first pass over a file."""
    rows = np.array(list(deletes), np.int64)
    columns["outcome"][rows], columns["reason"][rows] = np.uint8(Outcome.SKIPPED), np.uint8(SkipReason.DELETED)
    erasing = {row: key for row, key in deletes.items() if key and not again[row]}
    _mark_tombstones(columns, np.arange(len(columns["outcome"]), dtype=np.int32), erasing)


def _of_all(numbers: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(numbers), np.int64)


def _believable(times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace record times of the future by now: with them, all real events would count as old."""
    now = int(time.time() * 1000)
    ahead = times_ms > now + _MOST_AHEAD_MS
    return np.where(ahead, now, times_ms) if ahead.any() else times_ms


def _by_message(rejects: Sequence[Reject]) -> list[list[Reject]]:
    groups: list[list[Reject]] = []
    for reject in rejects:
        if groups and groups[-1][0].message == reject.message:
            groups[-1].append(reject)
        else:
            groups.append([reject])
    return groups


def dead_letter(
    messages: Messages, index: int, rejects: Sequence[Reject], more: Sequence[tuple[str, bytes]] = ()
) -> DeadLetter:
    """Return the message at `index` unchanged, with headers for the reason, its source and its time, and `more`."""
    partition = messages.partition
    source = f"{partition.topic}[{partition.partition}]@{messages.offsets[index]}"
    added = [
        ("anabranch-error", rejects[0].reason[:_LONGEST_REASON].encode()),
        (_SOURCE, source.encode()),
        ("anabranch-time", str(messages.times_ms[index]).encode()),
        *more,
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


def _contexts(incoming: Sequence[Incoming], rows: Sequence[int], offset: Array) -> RowContexts:
    """Return the sampled contexts of messages, each with its row, ascending; `offset` is int64 `[K]`.

    Only the first row of a message that has several gets its context. Messages without headers are passed over in C.
    """
    contexts = []
    begin = 0
    for each, own in zip(incoming, rows, strict=True):
        offsets = offset[begin : begin + own]
        if any(each.messages.headers):
            sampled = list(sampled_contexts(each.messages.headers))
            sent = [each.messages.offsets[index] for index, _ in sampled]
            found = np.searchsorted(offsets, sent).tolist()
            for row, sent_at, (_, context) in zip(found, sent, sampled, strict=True):
                if row < own and offsets[row] == sent_at:  # else it has an outcome from before
                    contexts.append((begin + row, context))
        begin += own
    return contexts


def contexts_of_block(contexts: RowContexts, begin: int, end: int) -> list[tuple[int, str]]:
    """Return those of rows `[begin, end)`, with their rows from `begin` on: the first ones, where they are too many.

    Quick however many there are, since `contexts` ascend.
    """
    first, after = (bisect.bisect_left(contexts, row, key=operator.itemgetter(0)) for row in (begin, end))
    return [(row - begin, context) for row, context in contexts[first : min(after, first + MOST_LINKS)]]
