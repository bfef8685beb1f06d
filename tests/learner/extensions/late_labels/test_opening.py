"""A join that is opened with a checkpoint of other times or other settings."""

import time

import pytest

from anabranch.core.errors import SettingsError
from tests.learner.extensions.late_labels.joins import JoinBench, events, labels, predictions, schema_with


def test_restored_stream_time_is_not_ahead_of_the_clock(tmp_path):
    bench, now = JoinBench(tmp_path), int(time.time() * 1000)
    bench.join.advance(now + 20 * 3_600_000)
    bench.checkpoint()
    bench.restart()
    bench.join.add_events(events([1], [10], [now + 3_600_000]), predictions([1]))
    bench.join.advance(now)
    assert (bench.join.events.waiting, bench.join.ready) == (1, 0)


def test_events_that_wait_need_the_key_by_which_they_came(tmp_path):
    bench = JoinBench(tmp_path, schema=schema_with("order"))
    bench.join.add_events(events([1], [10], [1000]), predictions([1]))
    bench.join.add_labels(labels([20], [1], [1000]))
    bench.checkpoint()
    bench.schema = schema_with("user")
    with pytest.raises(SettingsError, match=r'1 events wait for labels of the key "order", which is "user" now'):
        bench.restart()
    bench.schema = schema_with("order")
    bench.part = bench.open(bench.checkpoints.newest())
    assert (bench.join.events.waiting, len(bench.join.labels)) == (1, 1)


def test_labels_of_another_key_are_dropped_where_no_event_waits(tmp_path):
    bench = JoinBench(tmp_path, schema=schema_with("order"))
    bench.join.add_labels(labels([20], [1], [1000]))
    bench.checkpoint()
    bench.schema = schema_with("user")
    bench.restart()
    assert len(bench.join.labels) == 0
    assert bench.join.add_events(events([2], [20], [1000]), predictions([2])).tolist() == [True]
