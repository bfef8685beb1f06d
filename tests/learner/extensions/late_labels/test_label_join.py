"""The join of events and labels that come late."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anabranch.learner.extensions.late_labels.extension import LateLabels
from anabranch.learner.extensions.late_labels.indexes import KeyIndex
from tests.learner.extensions.late_labels.joins import (
    WAIT,
    JoinBench,
    drain,
    events,
    labels,
    oldest_open,
    options,
    predictions,
    problem,
    rows_of,
    schema_with,
)


def add(join, offsets, keys, times):
    return join.add_events(events(offsets, keys, times), predictions(offsets)).tolist()


@pytest.fixture
def bench(tmp_path):
    return JoinBench(tmp_path)


def test_a_label_after_its_event_decides_it(bench):
    assert add(bench.join, [7, 8], [70, 80], [1000, 1001]) == [True, True]
    assert bench.join.take(10) is None
    bench.join.add_labels(labels([80], [2], [1050]))
    assert drain(bench.join) == [(8, "LABELLED", 2, 49)]
    assert bench.join.events.waiting == 1
    assert oldest_open(bench.join, 0) == {0: 7}


def test_a_label_before_its_event_is_kept_and_decides_it_at_once(bench):
    bench.join.add_labels(labels([70], [1], [950]))
    assert add(bench.join, [7, 8], [70, 80], [1000, 1000]) == [False, True]
    assert drain(bench.join) == [(7, "LABELLED", 1, -50)]


def test_the_first_label_wins_and_the_others_are_duplicates(bench):
    add(bench.join, [7], [70], [1000])
    bench.join.add_labels(labels([70, 70], [1, 2], [1020, 1010]))
    bench.join.add_labels(labels([70], [0], [1030]))
    assert drain(bench.join) == [(7, "LABELLED", 1, 20)]
    assert bench.join.counts.duplicate_labels == 2
    bench.join.add_labels(labels([90, 90], [2, 1], [1000, 999]))
    add(bench.join, [9], [90], [1000])
    assert drain(bench.join) == [(9, "LABELLED", 2, 0)]
    assert bench.join.counts.duplicate_labels == 3
    bench.join.advance(10_000)
    assert bench.join.counts.unmatched_labels == 0


def test_a_label_decides_all_events_of_its_key_within_the_wait(bench):
    add(bench.join, [1, 2, 3], [5, 5, 5], [1000, 1100, 1300])
    bench.join.add_labels(labels([5], [2], [1200]))
    assert drain(bench.join) == [(2, "LABELLED", 2, 100), (3, "LABELLED", 2, -100)]
    add(bench.join, [4], [5], [1250])
    assert drain(bench.join) == [(4, "LABELLED", 2, -50)]


def test_an_event_times_out_when_stream_time_passes_the_wait(bench):
    add(bench.join, [1, 2], [10, 20], [1000, 1001])
    bench.join.advance(1000 + WAIT)
    assert bench.join.take(10) is None
    bench.join.advance(1001 + WAIT)
    assert drain(bench.join) == [(1, "TIMED_OUT", -1, WAIT)]
    bench.join.add_labels(labels([20], [1], [1001 + WAIT]))
    assert drain(bench.join) == [(2, "LABELLED", 1, WAIT)]
    assert bench.join.events.waiting == 0


def test_labels_that_no_event_matches_are_counted_when_they_are_dropped(bench):
    bench.join.add_labels(labels([10, 0], [1, 1], [1000, 1000]))
    assert bench.join.counts.unmatched_labels == 1  # that without a key
    bench.join.advance(5000, events_ms=1000 + WAIT)
    assert len(bench.join.labels) == 1
    bench.join.advance(5000, events_ms=1001 + WAIT)
    assert (len(bench.join.labels), bench.join.counts.unmatched_labels) == (0, 2)


def test_a_label_of_an_event_that_has_timed_out_is_late_and_not_unmatched(bench):
    add(bench.join, [1, 2], [10, 20], [1000, 1000])
    bench.join.advance(1001 + WAIT, events_ms=1000)
    drain(bench.join)
    bench.join.add_labels(labels([10, 30], [1, 1], [1001 + WAIT] * 2))
    assert bench.join.take(1) is None
    bench.join.advance(5000)
    assert (bench.join.counts.late_labels, bench.join.counts.unmatched_labels) == (1, 1)


def test_events_that_lag_far_behind_their_labels_still_find_them(bench):
    bench.join.add_labels(labels([10, 20], [1, 2], [1000, 9000]))
    bench.join.advance(9000, events_ms=900)
    add(bench.join, [1], [10], [950])
    assert drain(bench.join) == [(1, "LABELLED", 1, 50)]


def test_events_without_a_key_wait_and_time_out(bench):
    add(bench.join, [1, 2], [0, 0], [1000, 1000])
    bench.join.add_labels(labels([0], [1], [1000]))
    bench.join.advance(2000)
    assert [row[:2] for row in drain(bench.join)] == [(1, "TIMED_OUT"), (2, "TIMED_OUT")]


def test_taken_events_stay_until_they_are_settled(bench):
    add(bench.join, [1, 2, 3], [10, 20, 30], [1000, 1000, 1000])
    bench.join.add_labels(labels([30, 10, 20], [1, 2, 0], [1001, 1001, 1001]))
    assert [row[0] for row in rows_of(bench.join.take(2))] == [3, 1]
    assert (bench.join.ready, bench.join.events.waiting) == (1, 3)
    bench.join.put_back()
    assert [row[0] for row in rows_of(bench.join.take(2))] == [3, 1]
    bench.join.settle()
    assert [row[0] for row in drain(bench.join)] == [2]


def test_with_early_a_label_corrects_the_events_that_waited(tmp_path):
    join = JoinBench(tmp_path, options(early=True)).join
    join.add_labels(labels([10], [1], [1000]))
    assert add(join, [1, 2, 3], [10, 20, 30], [1000, 1000, 1000]) == [False, True, True]
    join.add_labels(labels([20], [1], [1001]))
    join.advance(2000)
    ready = join.take(10)
    assert ready is not None
    assert ready.early.tolist() == [False, True, True]
    assert [row[1] for row in rows_of(ready)] == ["LABELLED", "CORRECTED", "TIMED_OUT"]


def test_with_take_back_a_late_label_corrects_an_event_that_timed_out(tmp_path):
    join = JoinBench(tmp_path, options(take_back=True)).join
    add(join, [1, 2], [10, 20], [1000, 1000])
    join.advance(1001 + WAIT)
    assert [row[1] for row in drain(join)] == ["TIMED_OUT", "TIMED_OUT"]
    assert (join.events.waiting, oldest_open(join, 0)) == (0, {})
    join.add_labels(labels([10], [2], [1000 + 2 * WAIT]))
    ready = join.take(10)
    assert rows_of(ready) == [(1, "CORRECTED", 2, 2 * WAIT)]
    assert ready is not None
    assert ready.taken_back.tolist() == [True]
    join.settle()
    join.advance(1001 + 2 * WAIT)
    join.add_labels(labels([20], [1], [1000 + 2 * WAIT]))
    assert join.take(10) is None
    join.advance(5000)
    assert (join.counts.late_labels, join.counts.taken_back, join.events.nbytes > 0) == (1, 1, True)


def test_a_label_that_comes_before_a_timed_out_event_is_settled_takes_it_back_then(tmp_path):
    join = JoinBench(tmp_path, options(take_back=True)).join
    add(join, [1], [10], [1000])
    join.advance(1001 + WAIT)
    join.add_labels(labels([10], [2], [1001 + WAIT]))
    assert drain(join) == [(1, "TIMED_OUT", -1, WAIT), (1, "CORRECTED", 2, WAIT + 1)]


@pytest.mark.parametrize("labels_first", [True, False])
def test_a_late_label_of_a_backlog_takes_its_event_back_once_that_is_settled(tmp_path, labels_first):
    join = JoinBench(tmp_path, options(take_back=True)).join
    late = labels([10, 20], [1, 2], [1001 + WAIT, 1000 + 2 * WAIT])
    if labels_first:
        join.add_labels(late)
        join.advance(9000, events_ms=1000)
    add(join, [1, 2], [10, 20], [1000, 1000])
    if not labels_first:
        join.add_labels(late)
    for _ in range(3):  # both topics are read to their ends long before the events are settled
        join.advance(9000)
    assert [row[1] for row in rows_of(join.take(10))] == ["TIMED_OUT", "TIMED_OUT"]
    join.advance(9000)
    join.settle()
    join.advance(9000)
    assert drain(join) == [(1, "CORRECTED", 1, WAIT + 1), (2, "CORRECTED", 2, 2 * WAIT)]
    assert (join.counts.taken_back, join.counts.late_labels, join.counts.unmatched_labels) == (2, 0, 0)
    join.advance(9000)
    assert len(join.labels) == 0


def test_labels_that_there_is_no_space_for_are_a_problem(bench, monkeypatch):
    monkeypatch.setattr(bench.join.labels, "limit", 3)
    bench.join.add_labels(labels([10, 20, 30], [1] * 3, [1001, 1000, 1002]))
    assert problem(bench.join) is None
    bench.join.add_labels(labels([40], [1], [1003]))
    assert (bench.join.counts.dropped_labels, bench.join.counts.unmatched_labels) == (1, 0)
    assert (problem(bench.join) or "").startswith("stream.labels: 3 labels are kept for events that come later, and")
    add(bench.join, [1, 2], [10, 20], [1000, 1000])
    assert drain(bench.join) == [(1, "LABELLED", 1, 1)]


def test_the_key_of_labels_may_differ_from_that_of_erasures(tmp_path):
    bench = JoinBench(tmp_path, schema=schema_with("order"))
    columns = {**events([1, 2], [10, 10], [1000, 1000]), "label_key": events([1, 2], [5, 6], [0, 0])["key_hash"]}
    bench.join.add_events(columns, None)
    bench.join.add_labels(labels([6, 10], [1, 2], [1000, 1000]))
    ready = bench.join.take(10)
    assert ready is not None
    assert ready.columns["offset"].tolist() == [2]
    assert ready.columns["key_hash"].tolist() == [10]


def test_of_many_labels_with_one_key_the_first_are_kept_and_health_warns_of_the_others(bench):
    bench.join.add_labels(labels([10] * 50 + [20], [2] + [1] * 50, range(1000, 1051)))
    bench.join.add_labels(labels([10] * 50, [1] * 50, [1010] * 50))
    assert (len(bench.join.labels), bench.join.counts.crowded_labels) == (64 + 1, 36)
    late: Any = SimpleNamespace(join=bench.join)
    assert (LateLabels.warning.fget(late) or "").startswith("36 labels were dropped, since there were 64 of their key")
    waits = bench.join.add_events(events([1, 2, 3], [10, 20, 10], [1000] * 3), predictions([1, 2, 3]))
    assert waits.tolist() == [False] * 3
    assert [row[:3] for row in drain(bench.join)] == [(1, "LABELLED", 2), (2, "LABELLED", 1), (3, "LABELLED", 2)]
    assert bench.join.counts.duplicate_labels == 63


def test_the_work_on_a_frequent_key_grows_with_the_number_of_its_events_and_labels_and_not_with_their_pairs(
    tmp_path, monkeypatch
):
    bench = JoinBench(tmp_path)
    found, find = 0, KeyIndex.find

    def counted(index, keys):
        nonlocal found
        position, ids = find(index, keys)
        found += len(ids)
        return position, ids

    monkeypatch.setattr(KeyIndex, "find", counted)
    bench.join.add_events(events(range(500), [10] * 500, [1000] * 500), predictions(range(500)))
    bench.join.add_labels(labels([10] * 500, [1] * 500, [1010] * 500))
    bench.join.add_labels(labels([10] * 500, [1] * 500, [1010] * 500))
    assert found <= 2 * (500 + 500 + 64)
    found = 0
    assert not bench.join.waits(events(range(500), [10] * 500, [1000] * 500)).any()
    assert found <= 64
    assert len(drain(bench.join)) == 500


def test_an_event_waits_unless_a_label_of_its_key_is_within_the_wait(bench):
    random = np.random.default_rng(0)
    keys, times = random.integers(1, 40, 200).tolist(), random.integers(0, 5000, 200).tolist()
    bench.join.add_labels(labels(keys, [1] * 200, times))
    asked, at = random.integers(1, 60, 300).tolist(), random.integers(-200, 5200, 300).tolist()
    by_key = {key: [time for other, time in zip(keys, times, strict=True) if other == key] for key in keys}
    near = [any(abs(each - time) <= WAIT for each in by_key.get(key, [])) for key, time in zip(asked, at, strict=True)]
    expected = [not is_near for is_near in near]
    assert bench.join.waits(events(range(300), asked, at)).tolist() == expected
    assert 0 < sum(expected) < 300
