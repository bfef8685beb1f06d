"""A tombstone erases the events of its key that were read before it, and no others, however its record is written."""

import time

import numpy as np
import pytest

from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.events.identity import partition_base, partition_name
from anabranch.ingest.events.key_forms import PLAIN
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.learner.loop import tombstones
from anabranch.learner.loop.tombstones import Tombstones, TombstoneWatch
from anabranch.learner.stream.batch import Span
from anabranch.replay.erasure.erased_events import ByKey, ErasedEvents


@pytest.mark.parametrize(
    ("forms", "erased", "beginning"),
    [
        ({}, 0, None),
        ({PLAIN: 9}, 0, None),  # of events that have left the store
        ({PLAIN: 10}, 0, "none of 10 tombstones has erased an event that is stored: is their key, byte for byte"),
        ({PLAIN: 10}, 1, None),
        ({"a JSON object": 1}, 0, "1 of 1 tombstones have a key in another form than the text of [schema.key], and"),
        ({"a JSON object": 1}, 10, None),  # events have such keys
        (
            {PLAIN: 1, "a JSON object": 2, "a binary number": 3},
            10,
            "5 of 6 tombstones have a key in another form than the text of [schema.key], and erase nothing: a JSON ",
        ),
    ],
)
def test_the_forms_are_named_where_nothing_says_that_events_have_them(forms, erased, beginning):
    warning = TombstoneWatch(lambda: forms, lambda: erased).warning
    assert (warning is None) if beginning is None else str(warning).startswith(beginning)


PARTITIONS = [TopicPartition("events", index) for index in range(3)]
BASES = np.array([partition_base(name) for name in PARTITIONS], np.uint64)
KEYS = 8


class Stream:
    """Batches of events of a few keys on three partitions, of which some are tombstones."""

    def __init__(self, seed, share=0.05):
        self._dice = np.random.default_rng(seed)
        self._share = share
        self.next = [0] * len(PARTITIONS)
        self.read: list[tuple[int, int, int]] = []
        """All earlier events, as partition, offset and key."""

    @property
    def positions(self):
        return {name: Position(offset) for name, offset in zip(PARTITIONS, self.next, strict=True)}

    def span(self, events):
        rows = []
        for _ in range(events):
            index = int(self._dice.integers(len(PARTITIONS)))
            rows.append((index, self.next[index], int(self._dice.integers(1, KEYS)), self._dice.random() < self._share))
            self.next[index] += 1 + int(self._dice.integers(2))
        partition, offset, key, is_tombstone = (np.array([row[at] for row in rows]) for at in range(4))
        reason = np.where(is_tombstone, SkipReason.TOMBSTONE, SkipReason.NONE).astype(np.uint8)
        columns = {
            "partition": partition.astype(np.int32),
            "offset": offset.astype(np.int64),
            "key_hash": key.astype(np.uint64),
            "reason": reason,
            "outcome": np.full(events, Outcome.PENDING, np.uint8),
        }
        positions = {index: Position(self.next[index]) for index in range(len(PARTITIONS))}
        return Span(columns, np.zeros(events, np.bool_), positions, {}, {}, {})

    def expected(self, span):
        """Yield the position of each tombstone, and all events of its key that were read before: a plain reference."""
        columns = span.columns
        for index in range(len(columns["offset"])):
            event = tuple(int(columns[name][index]) for name in ("partition", "offset", "key_hash"))
            if columns["reason"][index] == SkipReason.TOMBSTONE:
                by = f"{partition_name(PARTITIONS[event[0]])}@{event[1]}"
                yield by, [each for each in self.read if each[2] == event[2]]
            self.read.append(event)  # type: ignore[arg-type]


@pytest.mark.parametrize("many", [1, 10, 40, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tombstone_erases_all_earlier_events_of_its_key_and_no_later_ones(monkeypatch, seed, many):
    monkeypatch.setattr(tombstones, "_MANY", many)
    stream, made = Stream(seed), Tombstones()
    made.register_partitions(PARTITIONS)
    found: list[tuple[ByKey, list[tuple[int, int, int]]]] = []
    for size in np.random.default_rng(seed).integers(1, 30, 40).tolist():
        before = stream.positions
        spans = [stream.span(size), stream.span(3)]
        records = list(made.records(spans, lambda before=before: before))
        expected = [each for span in spans for each in stream.expected(span)]
        assert [record.by for record in records] == [by for by, _ in expected]
        found += [(record, covered) for record, (_, covered) in zip(records, expected, strict=True)]
    partition, offset, key = (np.array([each[at] for each in stream.read]) for at in range(3))
    columns = {"partition": partition.astype(np.int32), "offset": offset, "key_hash": key.astype(np.uint64)}
    for record, before in found:
        covered = np.flatnonzero(ErasedEvents([record]).covers(BASES, columns))
        assert [stream.read[index] for index in covered.tolist()] == before


def test_records_share_their_ends_until_many_events_were_read(monkeypatch):
    monkeypatch.setattr(tombstones, "_MANY", 500)
    stream, made = Stream(0), Tombstones()
    made.register_partitions(PARTITIONS)
    records: list[ByKey] = []
    for _ in range(200):
        before = stream.positions
        records += made.records([stream.span(25)], lambda before=before: before)
    assert len(records) > 200
    assert len({id(record.up_to) for record in records}) <= 200 * 25 // 500 + 1
    assert max(len(record.beyond) for record in records) <= len(PARTITIONS)


def test_a_stream_without_tombstones_reads_no_positions():
    stream, made = Stream(0, share=0.0), Tombstones()
    made.register_partitions(PARTITIONS)
    span = stream.span(200)

    def positions():
        raise AssertionError("positions are read without a tombstone")

    begin = time.thread_time()
    for _ in range(100):
        assert list(made.records([span], positions)) == []
    assert time.thread_time() - begin < 5
