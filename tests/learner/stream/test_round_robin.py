"""Deterministic batches: they depend on the contents of the topic, not on a clock or the order of arrival."""

import threading
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Block, Coverage, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.stream import round_robin
from anabranch.learner.stream.round_robin import RoundRobin


class Topic:
    """Partitions with `sizes` events, which arrive in blocks; each of `pieces` is a partition and its event count."""

    def __init__(self, schema, sizes, pieces):
        self.schema = schema
        self.sizes = sizes
        self.pieces = list(pieces)
        self.read = [0] * len(sizes)
        self.released = 0

    @property
    def partitions(self):
        return [Partition(TopicPartition("events", i), 0, size) for i, size in enumerate(self.sizes)]

    def settled(self, index):
        return 0

    def poll(self, timeout):
        while self.pieces:
            index, count = self.pieces.pop(0)
            begin, end = self.read[index], min(self.sizes[index], self.read[index] + count)
            if begin < end:
                break
        else:
            rest = [i for i, size in enumerate(self.sizes) if self.read[i] < size]
            if not rest:
                return None
            index = rest[0]
            begin, end = self.read[index], self.sizes[index]
        self.read[index] = end
        columns = fake_columns(self.schema, range(begin, end), label=[0, 1, 2])
        columns["partition"][:] = index
        columns["outcome"][columns["offset"] % 7 == 3] = 3  # held out
        return Block(columns, (Coverage(index, begin, end),))

    def release(self, block):
        self.released += 1


class Markers(Topic):
    """A topic of which partition 0 holds nothing but offsets without an event, or ones that are dead-lettered."""

    def __init__(self, schema, blocks, outcome, before=None):
        super().__init__(schema, [blocks, 8 * blocks], [])
        self.outcome = outcome
        self.blocks = iter(range(2 * blocks))
        self.before = before

    def poll(self, timeout):
        number = next(self.blocks, None)
        if number is None:
            return None
        offset, partition = number // 2, number % 2
        outcome = self.before if offset == 0 and self.before is not None else self.outcome
        offsets = range(8 * offset, 8 * offset + 8) if partition else [offset]
        columns = fake_columns(self.schema, offsets, partition=partition)
        if not partition and outcome is None:
            columns = {name: column[:0] for name, column in columns.items()}
        if not partition and outcome is not None:
            columns["outcome"][:] = outcome
        end = 8 * offset + 8 if partition else offset + 1
        return Block(columns, (Coverage(partition, end - (8 if partition else 1), end),))


@pytest.mark.parametrize("outcome", [None, Outcome.DEAD_LETTERED, Outcome.SKIPPED])
def test_a_partition_without_events_to_train_on_moves_and_keeps_nothing(schema, outcome):
    topic = Markers(schema, 100, outcome)
    reader, stop = RoundRobin(topic, 8, topic.settled), threading.Event()
    found, ends = [], [0, 0]
    while (batch := reader.next(stop)) is not None:
        found.append(batch)
        for span in batch.spans:
            for index, position in span.positions.items():
                assert position.offset >= ends[index]
                ends[index] = position.offset
        assert len(reader._queues[0].blocks) == 0
    assert ends == [100, 800]
    assert [events(batch) for batch in found if len(batch)] == [
        [(1, offset) for offset in range(8 * number, 8 * number + 8)] for number in range(100)
    ]


def test_waiting_events_keep_their_order_and_offsets_without_an_event_are_merged_into_them(schema):
    """A held-out event is in the batch of the next event to train on, so that no step depends on when it arrives."""
    topic = Markers(schema, 100, None, before=Outcome.HELD_OUT)
    reader, stop = RoundRobin(topic, 8, topic.settled), threading.Event()
    while (batch := reader.next(stop)) is not None:
        assert not [span for span in batch.spans if 0 in span.positions]
    (waiting,) = reader._queues[0].blocks
    assert waiting.coverage == (Coverage(0, 0, 100),)


def batches(topic, size):
    reader, stop = RoundRobin(topic, size, topic.settled), threading.Event()
    found = []
    while (batch := reader.next(stop)) is not None:
        found.append(batch)
        assert [queue.rows for queue in reader._queues] == [sum(map(len, queue.blocks)) for queue in reader._queues]
    return found


def events(batch):
    return list(zip(batch.new["partition"].tolist(), batch.new["offset"].tolist(), strict=True))


pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=30)


@given(st.tuples(*[st.integers(0, 40)] * 3), pieces, pieces, st.integers(1, 12))
def test_batches_are_full_and_do_not_depend_on_the_order_of_blocks(schema, sizes, one, other, size):
    found, again = (batches(Topic(schema, sizes, each), size) for each in (one, other))
    assert [events(batch) for batch in found] == [events(batch) for batch in again]
    assert [len(batch.held_out.get("row", ())) for batch in found] == [
        len(batch.held_out.get("row", ())) for batch in again
    ]
    assert {len(batch) for batch in found} <= {size}
    labelled = [offset % 7 != 3 for count in sizes for offset in range(count)]
    assert len(found) == sum(labelled) // size
    for batch in found:
        assert events(batch) == sorted(events(batch))


@pytest.mark.parametrize("steps", [2, 5])
def test_a_step_with_a_tombstone_is_a_batch_and_the_steps_of_each_are_those_that_come_one_by_one(schema, steps):
    class Tombstones(Topic):
        @override
        def poll(self, timeout):
            block = super().poll(timeout)
            if block is not None:
                columns, erases = block.columns, np.isin(block.columns["offset"], [14, 15, 40])
                columns["outcome"][erases], columns["reason"][erases] = Outcome.SKIPPED, SkipReason.TOMBSTONE
            return block

    def batches(most):
        topic = Tombstones(schema, [60, 60], [(0, 20), (1, 60), (0, 40)])
        robin, found = RoundRobin(topic, 6, topic.settled), []
        robin.round = most
        while (batch := robin.next(threading.Event())) is not None:
            erases = any((span.columns["reason"] == SkipReason.TOMBSTONE).any() for span in batch.spans)
            found.append(([step.new["offset"].tolist() for step in batch.steps()], erases, robin.state()))
        return found

    one, several = batches(1), batches(steps)
    assert [step for each, *_ in several for step in each] == [each[0] for each, *_ in one]
    turns, taken = [turn for *_, turn in one], 0
    for each, erases, turn in several:
        taken += len(each)
        assert turn == turns[taken - 1], "of a checkpoint after this batch"
        assert len(each) == 1 or not erases
    assert {erases for _, erases, _ in several} == {True, False}
    assert max(len(each) for each, *_ in several) == steps


def test_the_partitions_take_turns_also_from_batch_to_batch(schema):
    found = batches(Topic(schema, (3, 10, 2), [(1, 10)]), 4)
    assert [events(batch) for batch in found] == [
        [(0, 0), (0, 1), (1, 0), (2, 0)],
        [(0, 2), (1, 1), (1, 2), (2, 1)],
        [(1, 4), (1, 5), (1, 6), (1, 7)],
    ]


@given(st.tuples(*[st.integers(0, 40)] * 3), pieces, st.integers(1, 12), st.integers(0, 5))
def test_resuming_from_positions_and_turn_makes_the_same_batches(schema, sizes, order, size, done):
    whole = batches(Topic(schema, sizes, order), size)
    if done > len(whole):
        return
    first = RoundRobin(topic := Topic(schema, sizes, order), size, topic.settled)
    positions = [0] * len(sizes)
    for _ in range(done):
        batch = first.next(threading.Event())
        assert batch is not None
        for span in batch.spans:
            for index, position in span.positions.items():
                positions[index] = position.offset
    topic = Topic(schema, sizes, [])
    topic.read = list(positions)
    second = RoundRobin(topic, size, lambda index: positions[index])
    second.restore(first.state())
    rest = []
    while (batch := second.next(threading.Event())) is not None:
        rest.append(events(batch))
    assert rest == [events(batch) for batch in whole[done:]]


def test_it_waits_for_a_partition_without_events(schema):
    topic = Topic(schema, (20, 1), [(0, 20)])
    reader = RoundRobin(topic, 4, topic.settled)
    topic.sizes = (20, 99)
    topic.poll, poll = lambda timeout: poll(timeout) if topic.read[0] == 0 else None, topic.poll  # type: ignore[method-assign]
    assert reader.next(threading.Event()) is None
    topic.sizes = (20, 0)
    batch = reader.next(threading.Event())
    assert batch is not None
    assert np.unique(batch.new["partition"]).tolist() == [0]


def test_too_many_waiting_events_are_an_error(schema, monkeypatch):
    monkeypatch.setattr(round_robin, "MOST_ROWS", 10)
    topic = Topic(schema, (40, 5), [(0, 40)])
    with pytest.raises(SettingsError, match=r"wait for the turn of events\[1\], which has none"):
        RoundRobin(topic, 4, topic.settled).next(threading.Event())


def test_a_partition_may_be_added_with_its_first_block(schema):
    topic = Topic(schema, (4,), [])
    reader, stop = RoundRobin(topic, 2, topic.settled), threading.Event()
    assert reader.next(stop) is not None
    topic.sizes, topic.read = (4, 6), [4, 0]
    reader._sort(topic.poll(timedelta()))
    assert reader.next(stop) is not None


class FilesFirst(Topic):
    """Two files, which arrive in order, and then a topic of two partitions."""

    @property
    def partitions(self):
        files = [Partition(TopicPartition("history", i, 0, 1), 0, size) for i, size in enumerate(self.sizes[:2])]
        return [*files, *super().partitions[2:]]

    def poll(self, timeout):
        reading = next((i for i in (0, 1) if self.read[i] < self.sizes[i]), None)
        if reading is not None:
            self.pieces.insert(0, (reading, self.pieces[0][1] if self.pieces else 3))
        return super().poll(timeout)


@pytest.mark.slow
@given(
    st.tuples(*[st.integers(0, 40)] * 4),
    st.lists(st.tuples(st.integers(2, 3), st.integers(1, 9)), max_size=30),
    st.lists(st.tuples(st.integers(2, 3), st.integers(1, 9)), max_size=30),
    st.integers(1, 12),
)
def test_files_come_first_one_after_the_other(schema, sizes, one, other, size):
    found, again = (batches(FilesFirst(schema, sizes, each), size) for each in (one, other))
    assert [events(batch) for batch in found] == [events(batch) for batch in again]
    assert [len(batch.held_out.get("row", ())) for batch in found] == [
        len(batch.held_out.get("row", ())) for batch in again
    ]
    all_events = [event for batch in found for event in events(batch)]
    assert len(all_events) // size == sum(offset % 7 != 3 for count in sizes for offset in range(count)) // size
    files = [(i, offset) for i in (0, 1) for offset in range(sizes[i]) if offset % 7 != 3]
    assert all_events[: len(files)] == files[: len(all_events)]
    ends = {index: span.positions[index].offset for batch in found for span in batch.spans for index in span.positions}
    if len(all_events) > len(files):
        assert [ends.get(i, 0) for i in (0, 1)] == [*sizes[:2]], "events at the end of a file were left"


def test_a_topic_that_was_taken_out_is_not_waited_for(schema):
    class Removed(Topic):
        @property
        @override
        def partitions(self):
            here, gone = super().partitions
            return [here, Partition(gone.name, 0, 5, read=False)]

        @override
        def settled(self, index):
            return 5 if index else 0

    topic = Removed(schema, [16, 0], [(0, 16)])
    assert [len(batch) for batch in batches(topic, 4)] == [4, 4, 4]
