"""Which events are beyond all that came before them, against a plain model."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.replay.reservoir.reservoir import Watermarks

Event = tuple[int, int, int]
"""Partition, offset and row."""
calls = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 2)), max_size=12), min_size=1, max_size=8
)


def columns(events):
    table = np.array(events, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].astype(np.int32)


def beyond(marks, events):
    found = marks.advance(*columns(events))
    return [True] * len(events) if found is None else found.tolist()


@given(calls)
def test_an_event_is_beyond_all_of_its_partition_that_came_before_it(added):
    marks, highest = Watermarks(), dict[int, tuple[int, int]]()
    for events in added:
        expected = []
        for partition, *index in events:
            expected.append(tuple(index) > highest.get(partition, (-1, -1)))
            highest[partition] = max(highest.get(partition, (-1, -1)), (index[0], index[1]))
        assert beyond(marks, events) == expected
        assert marks.highest == highest


@given(calls)
def test_the_number_of_events_of_a_call_does_not_matter(added):
    one, other = Watermarks(), Watermarks()
    separate = [each for events in added for each in beyond(one, events)]
    assert separate == beyond(other, [event for events in added for event in events])
    assert one.highest == other.highest


def test_ascending_events_are_not_examined_one_by_one():
    marks = Watermarks()
    assert marks.advance(*columns([(0, 1, 0), (1, 5, 0), (0, 1, 1), (0, 2, 0), (1, 6, 0)])) is None
    assert marks.advance(*columns([(0, 3, 0)])) is None
    assert marks.advance(*columns([(0, 3, 0)])) is not None
