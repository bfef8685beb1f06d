"""The table of entries and its changes since the last checkpoint, against a list that is copied at each."""

import numpy as np
import pytest

from anabranch.learner.extensions.late_labels.durable_table import DurableTable

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
