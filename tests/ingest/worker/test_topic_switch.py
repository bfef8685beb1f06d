"""Where the topics begin when the history was read, and what retention removes before that."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import cast

import pytest
from typing_extensions import override

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Client, Messages
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.ingest.worker.history_feed import RetentionWatch
from anabranch.ingest.worker.partition_table import PartitionTable
from anabranch.ingest.worker.topic_switch import first_times, topics_begin

E0, E1, LABELS = TopicPartition("events", 0), TopicPartition("events", 1), TopicPartition("labels", 0)
BEGIN = 1_764_000_000_000
HOUR = 3_600_000


class Broker:
    """Has, of each partition, one record an hour from a time on; `removed` are gone before it."""

    def __init__(self, first_hours, removed):
        self._hours, self._removed = first_hours, removed
        self._assigned: Mapping[TopicPartition, int] = {}

    def partitions(self):
        return list(self._hours)

    def topic_ids(self):
        return {}

    def first_offsets(self, partitions, start, moment):
        at = 0 if moment is None else int(moment.timestamp() * 1000)
        late = {name: max(0, -(-(at - BEGIN) // HOUR) - self._hours[name]) for name in partitions}
        return {name: self._removed.get(name, 0) + (100 if start == "latest" else late[name]) for name in partitions}

    def log_ends(self, partitions):
        return {name: self._removed.get(name, 0) + 100 for name in partitions}

    def assign(self, positions, paused=()):
        self._assigned = positions

    def poll(self, timeout, most):
        hours = {name: self._hours[name] + at - self._removed.get(name, 0) for name, at in self._assigned.items()}
        return [
            Messages(n, [o], [BEGIN + hours[n] * HOUR], [None], [b""], [()], o + 1) for n, o in self._assigned.items()
        ]


def settings(start="earliest"):
    values = {
        "topics": ["events"],
        "format": "rows",
        "start": start,
        "labels": {"topics": ["labels"], "key": "k", "name": "y", "wait": "30d"},
        "backfill": {"files": ["/x/*.parquet"], "time": "ts"},
    }
    return StreamSettings.model_validate(values).resolved("p")


def switched(hours, removed):
    switch, lost = topics_begin(cast("Client", Broker(hours, removed)), settings(), timed=True)
    assert switch is not None
    assert lost == any(name in removed for name in (E0, E1))
    return (switch.until_ms - BEGIN) / HOUR


def test_the_partition_that_lost_most_decides():
    assert switched({E0: 5, E1: 7, LABELS: 0}, {E0: 10, E1: 10}) == 7


def test_a_partition_or_label_topic_that_began_late_skips_no_event_of_the_others():
    assert switched({E0: 5, E1: 50, LABELS: 90}, {E0: 10}) == 5
    assert switched({E0: 5, E1: 50, LABELS: 90}, {LABELS: 10}) == 5


def test_the_first_of_records_that_are_out_of_order_is_the_earliest_of_them():
    class Disordered(Broker):
        @override
        def poll(self, timeout, most):
            times = {0: 3_000, 1: 2_000, 2: 9_000}  # and so on, in order
            return [
                Messages(n, [o], [BEGIN + times.get(o, o * 60_000)], [None], [b""], [()], o + 1)
                for n, o in self._assigned.items()
            ]

    assert first_times(cast("Client", Disordered({E0: 0}, {})), {E0: 0}) == {E0: BEGIN + 2_000}


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_labels_are_read_from_their_beginning_as_rows_of_files_wait_for_them(start):
    client = cast("Client", Broker({E0: 50, LABELS: 0}, {E0: 10, LABELS: 3}))
    stream = settings(start)
    table = PartitionTable(stream, client)
    table.begin_at = datetime.fromtimestamp((BEGIN + 60 * HOUR) / 1000, UTC)
    table.refresh(stream.start, due=True)
    assert [table.positions[table.index[name]].offset for name in (E0, LABELS)][1] == 3
    if start == "earliest":
        assert table.positions[table.index[E0]].offset == 20


P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
NOW = 1_800_000_000.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def progress(rows_done, *, done=False):
    return HistoryProgress(1, 0, 10_000, rows_done, done)


def test_removal_before_the_expected_end_is_a_problem_in_time():
    clock = Clock()
    watch = RetentionWatch({P0: NOW + 5000, P1: NOW + 500}, 0, clock, lambda: NOW + clock.now)
    assert watch.problem(progress(0)) is None
    clock.now = 1
    assert watch.problem(progress(1)) is None, "the rate is not known yet"
    clock.now = 10
    sentence = watch.problem(progress(100))
    assert sentence is not None
    assert sentence.startswith("retention removes the first records of events[1] that wait for the history about 2027-")
    assert "expected to last until 2027-" in sentence
    clock.now = 20
    assert watch.problem(progress(2000)) is None, "it became faster"
    clock.now = 400
    assert watch.problem(progress(2000)) is not None
    assert watch.problem(progress(10_000, done=True)) is None


def test_without_retention_there_is_no_problem():
    clock = Clock()
    watch = RetentionWatch({}, 0, clock, lambda: NOW)
    assert watch.problem(progress(0)) is None
    clock.now = 1e6
    assert watch.problem(progress(1)) is None
    assert watch.problem(None) is None
