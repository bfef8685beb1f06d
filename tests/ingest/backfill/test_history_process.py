"""History, then the topic, through the ingest process and a broker: every row exactly once, also after SIGKILL."""

import contextlib
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPartition
from kafka.admin import ConfigResource, ConfigResourceType

from anabranch.ingest.errors import HistoryError
from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.ingest_process import PROGRAM
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from tests.support import dying_ingest
from tests.support.waiting import Patience, wait_until

pytestmark = pytest.mark.process

LATELY = int(time.time()) - 3600
"""Seconds since 1970 that are recent enough for the retention of a broker."""
SCHEMA = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}


def write_parquet(path, first, rows, **options):
    """Write rows whose feature begins with their number, from `first` on."""
    numbers = range(first, first + rows)
    table = pa.table({"x": [[float(n), 0.0, 0.0] for n in numbers], "y": [n % 3 for n in numbers]})
    pq.write_table(table, path, **options)
    return path


def message(number):
    return json.dumps({"x": [number, 0, 0], "y": number % 3}).encode()


@contextlib.contextmanager
def opened(
    bootstrap, topic, files, *, fraction=0, positions=None, marks=None, backfill=None, program=PROGRAM, **stream
):
    files = [str(each) for each in ([files] if isinstance(files, Path | str) else files)]
    settings = {
        "bootstrap_servers": bootstrap,
        "topics": [topic],
        "backfill": {"files": files, **(backfill or {})},
        **stream,
    }
    source = BlockReader(
        StreamSettings.model_validate(settings).resolved("test"),
        SchemaSettings.model_validate(SCHEMA),
        HoldOut(fraction=fraction, seed=0),
        program,
    )
    try:
        source.open(positions, marks=marks)
        yield source
    finally:
        source.close()


def read(source, count, after=lambda rows: None):
    """Read `count` events: the name of the partition of each, and the first value of its feature."""
    found: list[tuple[str, int]] = []
    deadline = Patience()
    while len(found) < count:
        deadline.check(f"{len(found)} of {count} events came: {source.problem}")
        block = source.poll(timedelta(seconds=0.5))
        if block is None:
            continue
        names = [str(partition.name) for partition in source.partitions]
        found += [
            (names[index], int(value))
            for index, value in zip(
                block.columns["partition"].tolist(), block.columns["feature.x"][:, 0].tolist(), strict=True
            )
        ]
        source.release(block)
        after(len(found))
    return found


def test_files_come_first_in_order_then_the_topic(kafka, make_topic, produce, tmp_path):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [message(10_000 + n) for n in range(5)])
    write_parquet(tmp_path / "b.parquet", 100, 100)
    write_parquet(tmp_path / "a.parquet", 0, 100, row_group_size=30)
    with opened(kafka.bootstrap, topic, tmp_path / "*.parquet") as source:
        found = read(source, 205)
        partitions = [(str(each.name), each.start, each.end) for each in source.partitions]
        assert partitions[:2] == [("history:0", 0, 100), ("history:1", 0, 100)]
    assert found == [
        *[("history:0", n) for n in range(100)],
        *[("history:1", n) for n in range(100, 200)],
        *[(f"{topic}:0", 10_000 + n) for n in range(5)],
    ]


def test_sigkill_anywhere_loses_no_row_and_brings_none_twice(kafka, make_topic, produce, tmp_path):
    """In the middle of a file, at the edges of row groups and files, and at the switch."""
    topic = make_topic()
    produce(kafka.bootstrap, topic, [message(n) for n in range(30_000, 30_050)])
    write_parquet(tmp_path / "a.parquet", 0, 10_000, row_group_size=4096)
    lines = b"".join(message(n) + b"\n" for n in range(10_000, 20_000))
    (tmp_path / "b.jsonl").write_bytes(lines)
    write_parquet(tmp_path / "c.parquet", 20_000, 10_000, row_group_size=1000)
    left = [1, 4096, 8192, 10_000, 13_000, 20_000, 22_000, 29_000, 30_000, 30_020]
    files = [tmp_path / "*.parquet", tmp_path / "*.jsonl"]
    with opened(kafka.bootstrap, topic, files, backfill={"order": "name"}) as source:

        def kill(rows):
            if left and rows >= left[0]:
                while left and rows >= left[0]:
                    left.pop(0)
                process = source._process.popen
                assert process is not None
                process.kill()  # one that has ended is left as it is

        found = read(source, 30_050, kill)
        assert left == []
    assert [value for _, value in found] == [*range(30_050)]


def test_a_file_that_ends_the_ingest_process_again_and_again_is_named(kafka, make_topic, tmp_path):
    write_parquet(tmp_path / "a.parquet", 0, 100)
    write_parquet(tmp_path / "b.parquet", dying_ingest.FATAL_ROW, 100)
    program = (str(Path(dying_ingest.__file__)),)
    with opened(kafka.bootstrap, make_topic(), tmp_path / "*.parquet", program=program) as source:
        seen = read(source, 100)
        with pytest.raises(HistoryError, match=r"three times while it read rows from row 100 of all files on; leave"):
            read(source, 1)
    assert len(seen) == 100


def test_another_learner_continues_from_positions_and_marks(kafka, make_topic, produce, tmp_path):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [message(n) for n in range(5000, 5010)])
    (tmp_path / "a.jsonl").write_bytes(b"".join(message(n) + b"\n" for n in range(5000)))
    with opened(kafka.bootstrap, topic, tmp_path / "a.jsonl") as source:
        first = read(source, 1)
        positions, fingerprints = dict(source._cursors.positions), source._cursors.fingerprints
    produce(kafka.bootstrap, topic, [message(n) for n in range(5010, 5020)])
    (tmp_path / "b.jsonl").write_bytes(message(77))
    marks = dict(zip(positions, fingerprints, strict=True))
    assert positions[TopicPartition("history", 0, history=1)] == Position(len(first))
    with opened(kafka.bootstrap, topic, tmp_path / "*.jsonl", positions=positions, marks=marks) as source:
        rest = read(source, 5020 - len(first))
    assert [value for _, value in [*first, *rest]] == [*range(5020)]


def test_bad_rows_are_dead_lettered_as_json_with_their_source(kafka, make_topic, consume_all, tmp_path):
    topic = make_topic()
    pq.write_table(pa.table({"x": [[1.0, 2.0, 3.0], None], "y": [0, 1]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(b"{\n" + message(5))
    with opened(
        kafka.bootstrap, topic, [tmp_path / "a.parquet", tmp_path / "b.jsonl"], backfill={"epochs": 2}
    ) as source:
        read(source, 8)
    letters = consume_all(kafka.bootstrap, f"{topic}.dead", at_least=2)
    found = [(letter.value, dict(letter.headers)["anabranch-source"]) for letter in letters]
    assert found == [(b'{"x": null, "y": 1}', b"history[0]@1"), (b"{", b"history[1]@0")]
    assert [dict(letter.headers)["anabranch-format"] for letter in letters] == [b"json"] * 2


def outcomes(source, count):
    """Read `count` events: partition, offset, outcome and reason of each."""
    found: list[tuple[str, int, int, int]] = []
    while len(found) < count:
        block = source.poll(timedelta(seconds=20))
        assert block is not None, source.problem
        names = [str(partition.name) for partition in source.partitions]
        columns = [block.columns[name].tolist() for name in ("partition", "offset", "outcome", "reason")]
        found += [(names[index], *rest) for index, *rest in zip(*columns, strict=True)]
        source.release(block)
    return found


def test_later_passes_repeat_what_is_trained_on_and_skip_all_else(kafka, make_topic, tmp_path):
    topic = make_topic()
    table = pa.table({"x": [[float(n), 0.0, 0.0] for n in range(1000)], "y": [None, *[n % 3 for n in range(999)]]})
    pq.write_table(table, tmp_path / "a.parquet")
    with opened(
        kafka.bootstrap, topic, tmp_path / "a.parquet", fraction=0.3, unlabelled="store", backfill={"epochs": 3}
    ) as source:
        found = outcomes(source, 3000)
    passes = [found[begin : begin + 1000] for begin in (0, 1000, 2000)]
    assert [{name for name, *_ in each} for each in passes] == [{"history:0"}, {"history.2:0"}, {"history.3:0"}]
    held_out = {offset for _, offset, outcome, _ in passes[0] if outcome == Outcome.HELD_OUT}
    assert 200 < len(held_out) < 400
    for again in passes[1:]:
        skipped = {offset for _, offset, outcome, _ in again if outcome == Outcome.SKIPPED}
        assert skipped == held_out | {0}
        assert {reason for *_, reason in again} == {SkipReason.REPEATED}


def test_rows_that_the_topic_has_too_are_left_to_it(kafka, make_topic, produce, tmp_path):
    """The topics begin where the first of their partitions has a record, as none of them has lost any."""
    topic = make_topic(2)
    for partition, second in ((0, 500), (0, 900), (1, 700), (1, 1000)):
        produce(kafka.bootstrap, topic, [message(second)], partition=partition, timestamp_ms=(LATELY + second) * 1000)
    x = [[float(n), 0.0, 0.0] for n in range(1000)]
    at = list(range(LATELY, LATELY + 1000))
    pq.write_table(pa.table({"x": x, "y": [0] * 1000, "at": at}), tmp_path / "a.parquet")
    with opened(kafka.bootstrap, topic, tmp_path / "a.parquet", backfill={"time": "at"}) as source:
        found = outcomes(source, 1004)
    rows = [outcome for name, _, outcome, _ in found if name == "history:0"]
    assert rows == [Outcome.PENDING] * 500 + [Outcome.SKIPPED] * 500
    assert sorted((name, offset) for name, offset, *_ in found if name != "history:0") == [
        (f"{topic}:0", 0),
        (f"{topic}:0", 1),
        (f"{topic}:1", 0),
        (f"{topic}:1", 1),
    ]


def test_a_time_ends_the_history_and_begins_the_topics(kafka, make_topic, produce, tmp_path):
    topic = make_topic()
    for second in (100, 200, 300):
        produce(kafka.bootstrap, topic, [message(second)], timestamp_ms=(LATELY + second) * 1000)
    x = [[float(n), 0.0, 0.0] for n in range(300)]
    at = list(range(LATELY, LATELY + 300))
    pq.write_table(pa.table({"x": x, "y": [0] * 300, "at": at}), tmp_path / "a.parquet")
    until = datetime.fromtimestamp(LATELY + 150, UTC).isoformat()
    with opened(kafka.bootstrap, topic, tmp_path / "a.parquet", backfill={"time": "at", "until": until}) as source:
        found = outcomes(source, 302)
    assert [outcome for name, _, outcome, _ in found if name == "history:0"].count(Outcome.PENDING) == 150
    assert [(name, offset) for name, offset, *_ in found if name != "history:0"] == [
        (f"{topic}:0", 1),
        (f"{topic}:0", 2),
    ]


def test_times_that_are_out_of_order_make_no_event_come_twice_or_never_also_after_a_restart(
    kafka, make_topic, produce, tmp_path
):
    topic, count = make_topic(), 400
    at = [LATELY + n + (37 * n) % 20 for n in range(count)]
    times = [second * 1000 for second in at]
    produce(kafka.bootstrap, topic, list(map(message, range(count))), timestamp_ms=times)
    x = [[float(n), 0.0, 0.0] for n in range(count)]
    pq.write_table(pa.table({"x": x, "y": [0] * count, "at": at}), tmp_path / "a.parquet")
    until = datetime.fromtimestamp(LATELY + 200, UTC).isoformat()
    section, files = {"time": "at", "until": until}, tmp_path / "a.parquet"
    with opened(kafka.bootstrap, topic, files, backfill=section) as source:
        found = outcomes(source, count + 10)
        positions = dict(source._cursors.positions)
        marks = dict(zip(positions, source._cursors.fingerprints, strict=True))
    left = count - positions[TopicPartition(topic, 0)].offset
    with opened(kafka.bootstrap, topic, files, positions=positions, marks=marks, backfill=section) as source:
        found += outcomes(source, left) if left else []
    read = sorted(offset for _, offset, outcome, _ in found if outcome == Outcome.PENDING)
    assert read == [*range(count)]
    reasons = {reason for *_, outcome, reason in found if outcome == Outcome.SKIPPED}
    assert reasons == {SkipReason.LEFT_TO_TOPICS, SkipReason.LEFT_TO_FILES}


def test_records_that_arrive_while_files_are_read_are_read_after_them(kafka, make_topic, produce, tmp_path):
    """Also from `latest` on: where a topic begins is decided before the files are listed."""
    topic = make_topic()
    produce(kafka.bootstrap, topic, [message(1)])
    write_parquet(tmp_path / "a.parquet", 0, 100)
    with opened(kafka.bootstrap, topic, tmp_path / "a.parquet", start="latest") as source:
        produce(kafka.bootstrap, topic, [message(n) for n in range(100, 110)])
        assert [value for _, value in read(source, 110)] == [*range(110)]


def test_the_history_lasts_until_all_rows_are_read(kafka, make_topic, tmp_path):
    topic = make_topic()
    write_parquet(tmp_path / "a.parquet", 0, 200_000)
    with opened(kafka.bootstrap, topic, tmp_path / "a.parquet", buffer_bytes=1_000_000) as source:
        block = source.poll(timedelta(seconds=20))
        assert block is not None
        while source.history is None:
            source.poll(timedelta(seconds=0.1))
        assert source.reads_history
        assert (source.history.files, source.history.rows, source.history.file) == (
            1,
            200_000,
            str(tmp_path / "a.parquet"),
        )
        source.release(block)
        while source.reads_history:
            block = source.poll(timedelta(seconds=1))
            if block is not None:
                source.release(block)
        assert source.history.rows_done == 200_000


def test_a_changed_file_ends_reading_with_its_sentence(kafka, make_topic, tmp_path):
    topic = make_topic()
    write_parquet(tmp_path / "a.parquet", 0, 100)
    write_parquet(tmp_path / "b.parquet", 0, 100)
    with opened(kafka.bootstrap, topic, tmp_path / "*.parquet") as source:
        positions = {name: Position(10) for name, _ in source._cursors.positions}
        marks = dict(zip(positions, source._cursors.fingerprints, strict=True))
    os.utime(tmp_path / "a.parquet", ns=(1, 1))
    with opened(kafka.bootstrap, topic, tmp_path / "*.parquet", positions=positions, marks=marks) as source:
        with pytest.raises(HistoryError, match=r"a.parquet was changed after the history was listed; put back"):
            read(source, 1)


def test_storage_that_is_away_is_a_problem_until_it_answers(kafka, make_topic, tmp_path):
    topic = make_topic()
    folder = tmp_path / "mounted"
    folder.mkdir()
    write_parquet(folder / "a.parquet", 0, 100)
    with opened(kafka.bootstrap, topic, folder / "*.parquet") as source:
        positions = dict(source._cursors.positions)
        marks = dict(zip(positions, source._cursors.fingerprints, strict=True))
    folder.rename(tmp_path / "away")
    with opened(kafka.bootstrap, topic, folder / "*.parquet", positions=positions, marks=marks) as source:
        wait_until(
            lambda: source.poll(timedelta(seconds=0.1)) is None and "its folder is missing" in (source.problem or "")
        )
        (tmp_path / "away").rename(folder)
        assert [value for _, value in read(source, 100)] == [*range(100)]


def write_events(path, numbers, **options):
    """Write rows of partition 0 of a topic, whose offset is their number."""
    x = [[float(n), 0.0, 0.0] for n in numbers]
    table = pa.table({"x": x, "y": [n % 3 for n in numbers], "p": [0] * len(numbers), "o": list(numbers)})
    pq.write_table(table, path, **options)
    return path


IDENTITY = {"identity": {"partition": "p", "offset": "o"}}


def test_rows_with_offsets_are_events_of_the_topic_and_are_read_once(kafka, make_topic, produce, tmp_path):
    """The files overlap each other and the topic, and every process is killed some time."""
    topic = make_topic()
    produce(kafka.bootstrap, topic, [message(n) for n in range(12_000)])
    write_events(tmp_path / "a.parquet", range(6000), row_group_size=1000)
    write_events(tmp_path / "b.parquet", range(5500, 9000), row_group_size=1000)
    left = [500, 5000, 5600, 8999, 9000, 9001, 11_000]
    with opened(kafka.bootstrap, topic, tmp_path / "*.parquet", backfill=IDENTITY) as source:

        def kill(rows):
            process = source._process.popen
            assert process is not None
            # A process that was killed before may have left blocks behind.
            if left and rows >= left[0] and process.poll() is None:
                while left and rows >= left[0]:
                    left.pop(0)
                process.kill()

        found = read(source, 12_000, kill)
        positions = dict(source._cursors.positions)
        marks = dict(zip(positions, source._cursors.fingerprints, strict=True))
    assert found == [(f"{topic}:0", n) for n in range(12_000)]
    # After the switch the files are not needed any more.
    (tmp_path / "a.parquet").unlink()
    produce(kafka.bootstrap, topic, [message(n) for n in range(12_000, 12_010)])
    with opened(
        kafka.bootstrap, topic, tmp_path / "*.parquet", positions=positions, marks=marks, backfill=IDENTITY
    ) as source:
        assert read(source, 10) == [(f"{topic}:0", n) for n in range(12_000, 12_010)]


def test_rows_of_files_reach_the_offsets_that_retention_removed_meanwhile(kafka, make_topic, produce, tmp_path):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [message(n) for n in range(30_000)])
    write_events(tmp_path / "a.parquet", [n for n in range(30_000) if n != 25_000])
    with opened(kafka.bootstrap, topic, tmp_path / "*.parquet", backfill=IDENTITY, buffer_bytes=1_000_000) as source:
        # The ring has room for fewer rows than come before the one that the file lacks.
        _delete_before(kafka.bootstrap, topic, 28_000)
        assert [value for _, value in read(source, 29_999)] == [n for n in range(30_000) if n != 25_000]


def _delete_before(bootstrap, topic, offset):
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        admin.delete_records({KafkaPartition(topic, 0): offset})
    finally:
        admin.close()


def test_retention_that_runs_out_before_the_switch_is_a_problem(kafka, make_topic, produce, tmp_path):
    topic = make_topic()
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    try:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "7200000"})])
    finally:
        admin.close()
    produce(kafka.bootstrap, topic, [message(1)], timestamp_ms=(int(time.time()) - 7080) * 1000)
    write_parquet(tmp_path / "a.parquet", 0, 300_000)
    with opened(kafka.bootstrap, topic, tmp_path / "*.parquet", buffer_bytes=1_000_000) as source:

        def removing():
            source.receive()
            source.poll(timedelta(seconds=0.1))
            return f"removes the first records of {topic}[0]" in (source.problem or "")

        # No block is released, so that reading ends once the ring is full.
        wait_until(removing, lambda: source.problem)
