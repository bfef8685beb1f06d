"""Batches from blocks in few slots, which are overwritten as soon as their block is released."""

import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ingest.events.block import Block, Coverage, Outcome
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.batches import PATIENCE, Batches

LONG = timedelta(hours=1)


class Slots:
    """A stream of blocks in a few slots; a released block is overwritten."""

    def __init__(self, schema, sizes, slots, others=frozenset()):
        """`others` are the offsets of events that are held out."""
        self._schema, self._sizes, self._free, self._others = schema, sizes, slots, others
        self._offset = 0

    def poll(self, timeout):
        if not self._sizes:
            return None
        if not self._free:
            assert not timeout, "it waits for slots that it has itself"
            return None
        self._free -= 1
        begin, self._offset = self._offset, self._offset + self._sizes.pop(0)
        columns = fake_columns(self._schema, range(begin, self._offset + 1), label=[0, 1, 2])
        columns = {name: column[:-1] for name, column in columns.items()}
        for offset in range(begin, self._offset):
            if offset in self._others:
                columns["outcome"][offset - begin] = Outcome.HELD_OUT
        return Block(columns, (Coverage(0, begin, self._offset),))

    def release(self, block):
        self._free += 1
        for column in block.columns.values():
            column[...] = np.zeros((), column.dtype)


def next_of(batches):
    batch = batches.next(threading.Event())
    assert batch is not None
    return batch


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 60),
    st.sampled_from([1, 2, 7, 32]),
    st.data(),
)
def test_rows_are_those_of_the_stream_though_a_batch_is_larger_than_all_slots(schema, slots, sizes, size, steps, data):
    """In rounds of any number of steps, whose blocks end anywhere; and then no slot is kept but that of one block."""
    total = sum(sizes)
    others = data.draw(st.frozensets(st.integers(0, max(0, total - 1)), max_size=total))
    trained = [offset for offset in range(total) if offset not in others]
    stream, found, held = Slots(schema, list(sizes), slots, others), list[int](), list[int]()
    batches = Batches(stream, size, timedelta(0))
    batches.round = steps
    # Every event, whoever it is, is settled by a span.
    position = 0
    while position < total:
        batch = next_of(batches)
        assert len(batch) <= steps * size
        assert len(batch) <= size or not len(batch) % size
        assert stream._free >= slots - 1
        for columns, offsets in ((batch.new, found), (batch.held_out, held)):
            if columns:
                offsets += columns["offset"].tolist()
                expected = fake_columns(schema, columns["offset"].tolist())
                assert np.array_equal(columns["feature.x"], expected["feature.x"])
        position = max([position, *(each.offset for span in batch.spans for each in span.positions.values())])
    assert found == trained
    assert held == sorted(others & set(range(total)))


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"),
    [
        ([8] * 6, 4, [32, 16]),  # a step each
        ([3] * 16, 4, [32, 16]),  # less than a step, and its end in the middle of one
        ([20, 12, 40], 32, [72]),
        ([20, 12, 3], 32, [32, 3]),  # what is no whole step is left for the next batch
        ([6, 30], 2, [16, 16, 4]),
    ],
)
def test_a_round_has_all_full_steps_that_have_arrived_wherever_their_blocks_end(schema, sizes, steps, expected):
    batches = Batches(Slots(schema, list(sizes), 16), 8, timedelta(0))
    batches.round = steps
    found = [next_of(batches) for _ in expected]
    assert [len(batch) for batch in found] == expected
    assert np.concatenate([batch.new["offset"] for batch in found]).tolist() == list(range(sum(sizes)))
    assert [list(batch.ends) for batch in found] == [[*range(8, n, 8), n] if n > 8 else [] for n in expected]


def test_a_round_does_not_wait_for_a_second_step(schema):
    stream = Slots(schema, [8, 7], 16)
    batches, polled, waits = Batches(stream, 8, LONG), stream.poll, list[timedelta]()
    batches.round = 32
    stream.poll = lambda timeout: waits.append(timeout) or polled(timeout)  # type: ignore[method-assign]
    assert len(next_of(batches)) == 8
    assert waits[1:] == [timedelta(0)] * 2


@pytest.mark.parametrize("outcome", [Outcome.STORED_ONLY, Outcome.WAITING, Outcome.LABEL])
def test_a_round_has_one_block_of_events_that_are_kept_without_a_step(schema, outcome):
    """There is room for those of one: in the store, or among those that wait."""
    stream, columns = Slots(schema, [], 0), list[Block]()
    for number in range(4):
        block = fake_columns(schema, range(16 * number, 16 * number + 16), label=[0, 1, 2])
        block["outcome"][5 if number else 16 :] = outcome
        columns.append(Block(block, (Coverage(0, 16 * number, 16 * number + 16),)))
    stream.poll = lambda timeout: columns.pop(0) if columns else None  # type: ignore[method-assign]
    stream.release = lambda block: None  # type: ignore[method-assign]
    batches = Batches(stream, 2, timedelta(0), most_late=lambda _steps: 100)
    batches.round = 32
    kept = []
    while columns or batches._blocks:
        batch = next_of(batches)
        kept.append(
            sum(len(each["offset"]) if each else 0 for each in (batch.stored_only, batch.waiting, batch.labels))
        )
    assert sum(kept) == 33
    assert max(kept) == 11


def test_a_batch_larger_than_all_slots_releases_the_slots_that_it_needs(schema):
    batches = Batches(Slots(schema, [10] * 8, 2), 64, LONG)
    batch = next_of(batches)
    assert batch.new["offset"].tolist() == list(range(64))


def test_blocks_without_rows_delay_nothing(schema):
    batches = Batches(Slots(schema, [0, 0, 0, 10], 1), 10, LONG)
    assert len(next_of(batches)) == 10


@pytest.mark.parametrize("after", [3, 40])
def test_rows_after_the_last_event_to_train_on_are_in_the_same_batch(schema, after):
    batches = Batches(Slots(schema, [32 + after], 2, frozenset(range(32, 32 + after))), 32, LONG)
    batch = next_of(batches)
    assert len(batch) == 32
    assert len(batch.held_out["offset"]) == after
    assert batch.spans[-1].positions[0].offset == 32 + after


def test_waiting_for_more_events_of_a_batch_ends_with_stop(schema):
    stop, source = threading.Event(), Slots(schema, [10], 2)
    polled = source.poll

    def poll(timeout):
        assert timeout <= PATIENCE
        block = polled(timeout)
        if block is None and timeout:
            stop.set()
        return block

    source.poll = poll  # type: ignore[method-assign]
    begin = time.monotonic()
    batch = Batches(source, 64, LONG).next(stop)
    assert batch is not None
    assert len(batch) == 10
    assert time.monotonic() - begin < LONG.total_seconds() / 60


def late(schema, outcomes):
    """Return a stream of one block with these outcomes."""
    columns = fake_columns(schema, range(len(outcomes)), label=[0, 1, 2])
    columns["outcome"][:] = outcomes
    columns["labelled"][columns["outcome"] == Outcome.WAITING] = False
    return OneBlock(Block(columns, (Coverage(0, 0, len(outcomes)),)))


class OneBlock:
    """A stream that ends after one block."""

    def __init__(self, block):
        self._blocks = [block]

    def poll(self, timeout):
        return self._blocks.pop() if self._blocks else None

    def release(self, block):
        """Keep the block as it is."""


def test_waiting_events_and_labels_are_columns_of_their_own_and_end_a_batch(schema):
    outcomes = [Outcome.WAITING, Outcome.LABEL, Outcome.PENDING, Outcome.DEAD_LETTERED] * 25
    batches = Batches(late(schema, outcomes), 100, LONG, most_late=lambda _steps: 20)
    first, second = next_of(batches), next_of(batches)
    assert first.waiting["offset"].tolist() == list(range(0, 40, 4))
    assert first.labels["offset"].tolist() == list(range(1, 40, 4))
    assert first.new["offset"].tolist() == list(range(2, 40, 4))
    assert "feature.x" in first.waiting
    assert "feature.x" not in first.labels
    assert second.spans[0].columns["offset"][0] == 40


def test_without_late_labels_a_batch_has_neither(schema):
    batch = next_of(Batches(late(schema, [Outcome.PENDING] * 3), 3, LONG))
    assert (batch.waiting, batch.labels, batch.decided) == ({}, {}, None)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_an_event_that_leaves_a_round_moves_no_other_into_another_step(sizes, data):
    """Also where all events of a step leave it: then it is no step."""
    ends, count = np.cumsum(sizes).tolist(), sum(sizes)
    leaves = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    batch = Batch({"offset": np.arange(count)}, {}, {}, [], ends=ends)
    expected = [part[~leaves[part]].tolist() for part in np.split(np.arange(count), ends[:-1])]
    batch.leave_out(leaves)
    found = [step.new["offset"].tolist() for step in batch.steps() if step.new]
    assert found == [part for part in expected if part]
