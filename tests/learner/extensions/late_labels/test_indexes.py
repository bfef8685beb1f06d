"""The table of entries with its changes, and the indexes by key, by time and by recency."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.learner.extensions.late_labels.durable_table import DurableTable
from anabranch.learner.extensions.late_labels.indexes import DueTimes, KeyIndex, Numbers, rounds
from anabranch.learner.extensions.late_labels.kept_labels import RecentKeys

MANY = 20_000


def ids_of(*values):
    return np.array(values, np.int32)


def test_numbers_that_were_released_are_taken_again_first():
    numbers = Numbers(6)
    assert numbers.take(4).tolist() == [0, 1, 2, 3]
    numbers.release(ids_of(1, 3))
    assert (numbers.free, numbers.used) == (4, 4)
    assert sorted(numbers.take(3).tolist()) == [1, 3, 4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.data())
def test_an_index_finds_all_entries_in_use_of_each_key(keys, data):
    array, used = np.zeros(100, np.uint64), np.zeros(100, np.uint8)
    index = KeyIndex(array, used)
    for number in range(3):
        ids = np.arange(number * 30, number * 30 + len(keys), dtype=np.int32)
        array[ids], used[ids] = keys, 1
        index.add(ids)
        removed = data.draw(st.lists(st.sampled_from(range(90))))
        used[removed] = 0
    asked = np.arange(6).astype(np.uint64)
    position, found = index.find(asked)
    expected = [(at, entry) for at in range(1, 6) for entry in range(100) if used[entry] and array[entry] == at]
    assert list(zip(position.tolist(), found.tolist(), strict=True)) == expected


def test_keys_that_are_equal_in_half_of_their_bits_are_distinguished():
    array, used = np.array([7, 7 + 2**32, 7 + 2**40], np.uint64), np.ones(3, np.uint8)
    index = KeyIndex(array, used)
    index.add(np.arange(3, dtype=np.int32))
    position, found = index.find(array[[2, 0]])
    assert (position.tolist(), found.tolist()) == ([0, 1], [2, 0])


def test_many_entries_of_one_key_are_added_and_found_without_a_loop():
    array, used = np.full(10 * MANY, 5, np.uint64), np.ones(10 * MANY, np.uint8)
    index = KeyIndex(array, used)
    for begin in range(0, len(array), 1000):
        index.add(np.arange(begin, begin + 1000, dtype=np.int32))
    assert len(index.find(array[:1])[1]) == len(array)


def test_entries_out_of_use_are_left_out_of_the_runs_in_time():
    array, used = np.arange(1, MANY + 1).astype(np.uint64), np.ones(MANY, np.uint8)
    index = KeyIndex(array, used)
    index.add(np.arange(MANY, dtype=np.int32))
    full = index.nbytes
    used[::2] = 0
    index.shrink(MANY // 2)
    assert index.nbytes == full // 2


def test_equal_keys_are_in_rounds_in_their_order():
    keys = np.array([3, 0, 4, 3, 3, 4], np.uint64)
    assert [turn.tolist() for turn in rounds(keys)] == [[0, 2], [3, 5], [4]]
    assert list(rounds(keys[:0])) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_entries_are_due_once_in_any_order_of_their_times(times, data):
    array, waits = np.array(times, np.int64), np.ones(len(times), np.bool_)
    due = DueTimes(array, lambda ids: waits[ids])
    first = data.draw(st.integers(0, len(times)))
    due.add(np.arange(first, dtype=np.int32))
    for until in data.draw(st.lists(st.integers(0, 60))):
        found = due.pop_before(until)
        assert found.tolist() == [at for at in range(first) if waits[at] and times[at] < until]
        waits[found] = False
    due.add(np.arange(first, len(times), dtype=np.int32))
    left = sorted(np.flatnonzero(waits).tolist(), key=lambda at: (times[at], at))
    oldest = due.pop_oldest(3)
    assert array[oldest].tolist() == [times[at] for at in left[:3]]
    waits[oldest] = False
    assert due.pop_before(100).tolist() == np.flatnonzero(waits).tolist()


def test_entries_that_left_otherwise_take_no_memory_for_long():
    times, waits = np.arange(MANY), np.ones(MANY, np.bool_)
    due = DueTimes(times, lambda ids: waits[ids])
    due.add(np.arange(MANY, dtype=np.int32))
    full = due.nbytes
    waits[100:] = False
    due.shrink(100)
    assert due.nbytes < full / 2
    assert due.pop_before(MANY).tolist() == list(range(100))


def test_recent_keys_are_found_and_few_others():
    rng, recent = np.random.default_rng(0), RecentKeys()
    keys = rng.integers(1, 2**63, 2**18).astype(np.uint64)
    for begin in range(0, len(keys), 2**12):
        recent.add(keys[begin : begin + 2**12])
    assert recent.find(keys).all()
    others = rng.integers(1, 2**63, 2**16).astype(np.uint64)
    assert recent.find(others).mean() < 1 / 40
    assert not recent.find(np.zeros(1, np.uint64)).any()


ENTRY = np.dtype([("key", "u8"), ("same", "u8"), ("offset", "i8")])


@pytest.fixture
def table():
    return DurableTable(ENTRY, "key", 8, 3, like_key=("same",))


def insert(table, *offsets):
    keys = np.array(offsets, np.uint64) + np.uint64(1)
    return table.insert({"key": keys, "same": keys, "offset": np.array(offsets)}, 1)


def held(before, table, number):
    """Return the base, the new offsets, and all offsets of a checkpoint, by those of the one before."""
    change, ids = table.begin_snapshot(number)
    stays = [offset for offset, alive in zip(before, change.alive.tolist(), strict=True) if alive]
    new = change.index["offset"].tolist()
    assert [*stays, *new] == table["offset"][ids].tolist()
    assert change.index["same"].tolist() == [offset + 1 for offset in new]
    return change.base, new, [*stays, *new]


def test_a_checkpoint_has_what_came_left_and_changed_since_the_one_before(table):
    ids = insert(table, 0, 1, 2, 3)
    assert held([], table, 1) == (None, [0, 1, 2, 3], [0, 1, 2, 3])
    table.change(ids[:1], 2)  # states are written with each checkpoint
    table.delete(ids[1:2])
    assert insert(table, 4).tolist() == [1]  # the number of another entry of the last checkpoint
    table.set("offset", ids[2:3], 2)
    assert held([0, 1, 2, 3], table, 2) == (1, [4, 2], [0, 3, 4, 2])
    assert held([0, 3, 4, 2], table, 3) == (2, [], [0, 3, 4, 2])
    assert (len(table), table.counts[1:].tolist(), table.ids(2, 2).tolist()) == (4, [3, 1], [0])


def test_after_a_checkpoint_that_was_not_written_the_next_has_all_entries(table):
    ids = insert(table, 0, 1)
    held([], table, 1)
    table.delete(ids[:1])
    table.not_written()
    assert held([], table, 2) == (None, [1], [1])


@pytest.mark.parametrize("number", [5, None])
def test_loaded_entries_are_found_and_changes_go_on_if_their_checkpoint_is_named(table, number):
    entries = np.array([(7, 7, 6), (9, 9, 8)], ENTRY)
    ids = table.load(number, entries, np.array([1, 2], np.uint8))
    assert table.index.find(np.array([9], np.uint64))[1].tolist() == ids[1:].tolist()
    insert(table, 1)
    before, new = ([6, 8], [1]) if number else ([], [6, 8, 1])
    assert held(before, table, 6) == (number, new, [6, 8, 1])
    assert table.free == 5
