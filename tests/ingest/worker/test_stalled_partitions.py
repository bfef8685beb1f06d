"""A stalled position is reported within 30 s, and nothing else is."""

import contextlib
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import LagReport, receive_in_learner
from anabranch.ingest.worker import lag_reporter
from anabranch.ingest.worker.lag_reporter import STALLED_SECONDS, LagReporter, StallDetector
from anabranch.ingest.worker.partition_table import PartitionTable

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)


def check(stalls, times, *, position=100, end=201, seconds=1.0):
    """Check `times` times while `events[0]` is stalled; `events[1]` is read to its end."""
    positions = {P0: Position(position), P1: Position(9)}
    return [stalls.check(positions, {P0: end, P1: 9}, seconds) for _ in range(times)]


def test_a_stalled_position_is_reported_with_partition_offset_and_end_within_30_s():
    sentence = check(StallDetector(), 30)
    assert sentence[:20] == [None] * 20
    assert sentence[20] is not None
    assert sentence[20].startswith("events[0] is stalled at offset 100, while it ends at 201: the broker has returned")
    assert None not in sentence[20:]


def test_a_topic_that_goes_no_further_and_a_position_that_moves_are_well():
    assert check(StallDetector(), 100, position=201) == [None] * 100
    stalls = StallDetector()
    for position in range(100):
        assert check(stalls, 1, position=position) == [None]
    rows = StallDetector()
    assert [rows.check({P0: Position(1, row)}, {P0: 9}, 1.0) for row in range(100)] == [None] * 100


def test_it_is_well_again_once_it_moves():
    stalls = StallDetector()
    assert check(stalls, 21)[-1] is not None
    assert check(stalls, 20, position=101) == [None] * 20
    assert check(stalls, 1, position=101)[0] is not None


def test_time_in_which_nothing_was_read_does_not_count():
    stalls = StallDetector()
    assert check(stalls, 1000, seconds=0.0) == [None] * 1000
    # A broker that was away, or a process that was suspended, does not stall a partition.
    assert check(stalls, 1, seconds=3600.0) == [None]


def test_several_stalls_are_reported_in_one_sentence_the_longest_first():
    stalls, positions = StallDetector(), {P0: Position(1), P1: Position(5)}
    stalls.check({P1: Position(5)}, {P1: 6}, 1.0)
    for _ in range(int(STALLED_SECONDS) + 1):
        sentence = stalls.check(positions, {P0: 2, P1: 6}, 1.0)
    assert sentence is not None
    assert sentence.startswith("events[1] is stalled at offset 5, while it ends at 6")
    assert sentence.endswith("; 1 more partition likewise")


@pytest.mark.parametrize("ends", [{}, {P1: 9}])
def test_a_partition_without_a_known_end_is_not_reported(ends):
    stalls = StallDetector()
    assert [stalls.check({P0: Position(1)}, ends, 1.0) for _ in range(50)] == [None] * 50


def test_topics_that_wait_for_the_history_are_not_stalled(monkeypatch):
    now = 0.0
    monkeypatch.setattr(lag_reporter, "time", SimpleNamespace(monotonic=lambda: now))
    client = FakeClient({P0: FakePartition(end=201)})
    table = PartitionTable(StreamSettings(topics=("events",)), client)
    table.refresh("earliest", due=True)
    history: Any = SimpleNamespace(done=False, ends={}, progress=None)
    here, there = Pipe()
    with contextlib.closing(here), contextlib.closing(there):
        reporter = LagReporter(client, table, there, history)

        def problems(seconds):
            nonlocal now
            found = []
            for _ in range(seconds):
                now += 1.0
                reporter.reset_unanswered()
                reporter.add_poll(few_rows=True)
                reporter.report_if_due()
                report = receive_in_learner(here)
                assert isinstance(report, LagReport)
                found.append(report.problem)
            return found

        assert problems(300) == [None] * 300
        history.done = True
        after = problems(30)
        assert after[:20] == [None] * 20, "nothing counts from before the switch"
        assert after[-1] is not None
        assert after[-1].startswith("events[0] is stalled at offset 0")
