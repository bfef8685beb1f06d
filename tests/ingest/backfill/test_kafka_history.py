"""Files whose rows are events of the topics: each offset once, from a file or from the topic."""

import random
import threading
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.kafka_history import KafkaHistory
from anabranch.ingest.backfill.kafka_index import KafkaIndex
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from tests.support.waiting import PATIENCE_SECONDS

SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float64"}}, "label": {"name": "y", "classes": 3}})
)
IDENTITY = {"topic": "t", "partition": "p", "offset": "o"}
P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
Event = tuple[int, int]
"""Partition and offset."""


def write(path, events, topic="events", **options):
    table = pa.table(
        {
            "x": pa.array([float(1000 * partition + offset) for partition, offset in events], pa.float64()),
            "y": pa.array([0] * len(events), pa.int64()),
            "t": pa.array([topic] * len(events), pa.string()),
            "p": pa.array([partition for partition, _ in events], pa.int32()),
            "o": pa.array([offset for _, offset in events], pa.int64()),
        }
    )
    pq.write_table(table, path, **options)
    return path


def history(pattern, **backfill):
    stream = {"topics": ["events"], "backfill": {"files": [str(pattern)], "identity": IDENTITY, **backfill}}
    return KafkaHistory(StreamSettings.model_validate(stream), SCHEMA)


def read(source, most=10**9):
    """Read at most so many chunks; checks rows against their identity."""
    found: list[Event] = []
    while not source.done and most > 0:
        rows = source.poll(timedelta(seconds=20))
        if rows is None:
            continue
        most -= 1
        names = [name for name, count in rows.counts.items() for _ in range(count)]
        found += [(name.partition, offset) for name, offset in zip(names, rows.offset.tolist(), strict=True)]
        values = rows.decoded.columns["feature.x"].tolist()
        assert values == [1000 * name.partition + n for name, n in zip(names, rows.offset.tolist(), strict=True)]
    source.close()
    return found


def rising(found):
    return all(
        [offset for p, offset in found if p == partition] == sorted({offset for p, offset in found if p == partition})
        for partition in (0, 1)
    )


def test_the_topic_is_read_from_the_first_offset_that_no_file_has(tmp_path):
    write(tmp_path / "a.parquet", [(0, n) for n in range(100)], row_group_size=30)
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    begins = source.plan({P0: 60, P1: 5}, {P0: 60, P1: 5}, {P0: 200, P1: 9}, first=True)
    assert begins == {P0: 0, P1: 5}
    assert read(source) == [(0, n) for n in range(100)]


def test_the_files_are_indexed_once_for_all_plans(tmp_path, monkeypatch):
    """At the switch, where thousands of files would be opened again."""
    write(tmp_path / "a.parquet", [(0, n) for n in range(100)])
    indexed, make = [], KafkaIndex._groups
    monkeypatch.setattr(KafkaIndex, "_groups", lambda self, file: indexed.append(file) or make(self, file))
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    source.plan({P0: 50}, {P0: 50}, {P0: 200}, first=True)
    assert read(source) == [(0, n) for n in range(100)]
    assert source.plan({P0: 100}, {P0: 50}, {P0: 200}, first=False) == {P0: 100}
    assert source.done
    assert indexed == [0]


def test_a_restart_reads_the_offsets_of_several_partitions_at_once(tmp_path, monkeypatch):
    """In an object store, thousands of files would be read one after another."""
    write(tmp_path / "a.parquet", [(0, n) for n in range(100)])
    write(tmp_path / "b.parquet", [(1, n) for n in range(100)])
    both, read_group = threading.Barrier(2, timeout=PATIENCE_SECONDS), KafkaIndex.read

    def read_together(self, *arguments, **options):
        both.wait()
        return read_group(self, *arguments, **options)

    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    monkeypatch.setattr(KafkaIndex, "read", read_together)
    source.plan({P0: 10, P1: 20}, {P0: 10, P1: 20}, {P0: 200, P1: 200}, first=False)
    monkeypatch.undo()
    assert sorted(read(source)) == [*((0, n) for n in range(10, 100)), *((1, n) for n in range(20, 100))]


@pytest.mark.parametrize(
    ("log_start", "read_from_files"),
    [
        (0, range(40)),  # the topic has it
        (40, range(40)),
        (41, [*range(40), *range(41, 100)]),  # it does not: compaction, or a marker of a transaction
        (100, [*range(40), *range(41, 100)]),
        (150, [*range(40), *range(41, 100)]),
    ],
)
def test_an_offset_that_no_file_has_is_read_from_the_topic_if_it_is_still_there(tmp_path, log_start, read_from_files):
    write(tmp_path / "a.parquet", [(0, n) for n in range(100) if n != 40])
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    source.plan({P0: log_start}, {P0: log_start}, {P0: 200}, first=True)
    assert read(source) == [(0, n) for n in read_from_files]


@pytest.mark.parametrize(
    ("asked", "begin", "from_files"),
    [(0, 0, []), (200, 50, range(50, 100))],
    ids=["from the log's start: the topic has all that the files have", "from latest: without a gap"],
)
def test_where_the_topic_begins_decides_what_is_read_from_files(tmp_path, asked, begin, from_files):
    write(tmp_path / "a.parquet", [(0, n) for n in range(50, 100)])
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    assert source.plan({P0: asked}, {P0: 0}, {P0: 200}, first=True) == {P0: begin}
    assert read(source) == [(0, n) for n in from_files]


def test_files_in_no_order_that_overlap_are_merged(tmp_path):
    """Sinks name files by their first offset without leading zeros, and write a part again after a crash."""
    both = [(p, n) for n in range(100) for p in (0, 1)]
    write(tmp_path / "events+9.parquet", [(0, n) for n in range(9, 60)], row_group_size=7)
    write(tmp_path / "events+0.parquet", [(0, n) for n in range(9)])
    write(tmp_path / "events+40.parquet", [each for each in both if each[1] >= 40], row_group_size=11)
    write(tmp_path / "events+1.parquet", [(1, n) for n in range(55)][::-1])
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    source.plan({P0: 0, P1: 0}, {P0: 100, P1: 100}, {P0: 100, P1: 100}, first=True)
    found = read(source)
    assert rising(found)
    assert sorted(found) == sorted(both)


_FEW_GROUPS = 8
"""Rows of a group, at least, where a file is shuffled: its groups overlap with all of the others, and 64 may."""


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9))
def test_any_files_and_any_restarts_give_each_offset_once(tmp_path_factory, seed, files, group_rows):
    choose = random.Random(seed)
    folder = tmp_path_factory.mktemp("files")
    topic = {(p, n) for p in (0, 1) for n in range(60) if choose.random() < 0.95}
    have: set[Event] = set()
    shuffled = [choose.random() < 0.3 for _ in range(files)]
    rows = max(group_rows, _FEW_GROUPS) if any(shuffled) else group_rows
    for number in range(files):
        first, last = sorted(choose.sample(range(61), 2))
        events = [each for each in topic if first <= each[1] < last and choose.random() < choose.choice([1.0, 0.9])]
        if shuffled[number]:
            choose.shuffle(events)
        else:
            events.sort(key=lambda each: (each[1], each[0]))
        if events:
            write(folder / f"{number}.parquet", events, row_group_size=rows)
            have |= set(events)
    if not have:
        return
    ends = {P0: 60, P1: 60}
    starts = {P0: choose.randrange(60), P1: choose.randrange(60)}
    source = history(folder / "*.parquet")
    source.list_files(None)
    positions = source.plan(starts, starts, ends, first=True)
    marks = [*source.marks]
    begins = dict(positions)
    found: list[Event] = []
    while True:
        found += read(source, most=choose.choice([0, 1, 2, 10**9]))
        if source.done:
            break
        # SIGKILL: another process continues from the positions, and the topic has lost some of its oldest records.
        positions = {name: max([begins[name], *(n + 1 for p, n in found if p == name.partition)]) for name in (P0, P1)}
        starts = {name: min(60, start + choose.randrange(3)) for name, start in starts.items()}
        source = history(folder / "*.parquet")
        names = [(TopicPartition("history", at, 0, 1), Position(0)) for at in range(len(marks))]
        source.restore(names, marks)
        source.plan(positions, starts, ends, first=False)
    from_topic = {name: max([begins[name], *(n + 1 for p, n in found if p == name.partition)]) for name in (P0, P1)}
    found += [
        (p, n)
        for p, n in sorted(topic)
        if n >= max(from_topic[TopicPartition("events", p)], starts[P0 if p == 0 else P1])
    ]
    assert rising(found)
    there = {(p, n) for p, n in topic if n >= (starts[P0] if p == 0 else starts[P1])}
    expected = {(p, n) for p, n in have | there if n >= begins[P0 if p == 0 else P1]}
    assert expected <= set(found)


def refused(tmp_path, write_files, ends):
    write_files()
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    with pytest.raises(SettingsError) as raised:
        source.plan(dict.fromkeys(ends, 0), dict.fromkeys(ends, 0), ends, first=True)
    return str(raised.value)


def test_rows_that_no_topic_has_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    why = refused(tmp_path, lambda: write(path, [(0, 1)], topic="others"), {P0: 9})
    assert "rows of others[0], which is none of the partitions of stream.topics" in why
    why = refused(tmp_path, lambda: write(path, [(7, 1)]), {P0: 9})
    assert "rows of events[7]" in why
    why = refused(tmp_path, lambda: write(path, [(0, 50)]), {P0: 9})
    assert "have events[0]@50, and the topic ends at 8: it was created again" in why


def test_columns_that_name_no_offset_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    good = {"x": [1.0], "y": [0], "t": ["events"], "p": [0], "o": [1]}
    for changed, sentence in (
        ({"o": ["1"]}, "names the column o: it is of Arrow type string"),
        ({"t": [5]}, "names the column t: it is of Arrow type int64"),
        ({"o": None}, "names the column o: it is missing"),
        ({"o": pa.array([None], pa.int64())}, "has a row without o"),
    ):
        table = {name: values for name, values in {**good, **changed}.items() if values is not None}
        why = refused(tmp_path, lambda table=table: pq.write_table(pa.table(table), path), {P0: 9})
        assert sentence in why


def test_files_whose_offsets_are_all_mixed_are_refused_before_they_fill_the_memory(tmp_path):
    events = [(0, n) for n in range(700)]
    random.Random(0).shuffle(events)
    write(tmp_path / "a.parquet", events, row_group_size=7)
    source = history(tmp_path / "*.parquet")
    source.list_files(None)
    source.plan({P0: 0}, {P0: 700}, {P0: 700}, first=True)
    with pytest.raises(SettingsError, match="overlap with those of 99 others; sort the files by offset"):
        read(source)


def test_the_only_topic_needs_no_column(tmp_path):
    write(tmp_path / "a.parquet", [(0, n) for n in range(10)])
    source = history(tmp_path / "*.parquet", identity={"partition": "p", "offset": "o"})
    source.list_files(None)
    source.plan({P0: 10}, {P0: 10}, {P0: 10}, first=True)
    assert read(source) == [(0, n) for n in range(10)]
