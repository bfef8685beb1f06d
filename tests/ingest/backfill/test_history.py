"""Files of rows as the worker reads them, without a broker: order, restarts, faults of rows and of files."""

import errno
import io
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.files import LocalFiles, Switch, switch_of
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.backfill.kafka_history import KafkaHistory
from anabranch.ingest.errors import HistoryAwayError, HistoryError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

SCHEMA: dict[str, Any] = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
WAIT = timedelta(seconds=20)


def parquet(path, numbers, **options):
    table = pa.table({"x": [[float(n), 0.0, 0.0] for n in numbers], "y": [n % 3 for n in numbers]})
    pq.write_table(table, path, **options)
    return path


def jsonl(path, numbers, end="\n"):
    path.write_text("\n".join(json.dumps({"x": [n, 0, 0], "y": n % 3}) for n in numbers) + end)
    return path


def csv(path, numbers, end="\n"):
    path.write_text("x.0,x.1,x.2,y\n" + "\n".join(f"{n},0,0,{n % 3}" for n in numbers) + end)
    return path


def make(path, numbers):
    """Write the file in the format of its suffix."""
    return {".parquet": parquet, ".jsonl": jsonl, ".csv": csv}[path.suffix](path, numbers)


def history(*files, schema=None, longest=1000, **settings):
    return FileHistory(
        BackfillSettings.model_validate({"files": [str(file) for file in files], **settings}),
        Schema(SchemaSettings.model_validate(schema or SCHEMA)),
        seed=7,
        longest=longest,
    )


def begun(*files, until_ms=None, **settings):
    new = history(*files, **settings)
    new.list_files(None if until_ms is None else Switch(until_ms))
    return new


def read(source):
    found = []
    while not source.done:
        rows = source.poll(WAIT)
        assert rows is not None
        found.append(rows)
    source.close()
    return found


def numbers(found):
    return [int(n) for rows in found for n in np.asarray(rows.decoded.columns["feature.x"])[:, 0]]


def offsets(found):
    return [(str(name), n) for rows in found for name in rows.counts for n in rows.offset.tolist()]


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def suffix(request):
    return str(request.param)


@pytest.fixture(params=[4, 65_536], ids=["small chunks", "large chunks"], autouse=True)
def chunk_rows(request, monkeypatch):
    for module in ("open_files", "jsonl_file", "csv_file"):
        monkeypatch.setattr(f"anabranch.ingest.backfill.{module}.CHUNK_ROWS", request.param)
    return int(request.param)


def test_files_are_read_by_name_and_rows_in_their_order(tmp_path, suffix):
    make(tmp_path / f"b.{suffix}", range(10, 25))
    make(tmp_path / f"a.{suffix}", range(10))
    found = read(begun(tmp_path / f"*.{suffix}"))
    assert numbers(found) == list(range(25))
    assert offsets(found) == [("history:0", n) for n in range(10)] + [("history:1", n) for n in range(15)]


def test_given_files_are_read_in_the_order_of_the_list_each_once(tmp_path, suffix):
    b, a = make(tmp_path / f"b.{suffix}", range(5)), make(tmp_path / f"a.{suffix}", range(5, 10))
    assert numbers(read(begun(b, a, tmp_path / f"*.{suffix}", order="given"))) == list(range(10))


def test_files_are_read_by_their_earliest_time(tmp_path):
    timed = {**SCHEMA, "time": {"name": "t"}}
    for name, first in (("a", 50), ("b", 10)):
        x = [[float(first + n), 0.0, 0.0] for n in range(5)]
        t = pa.array([(first + n) * 1_000_000 for n in (3, 1, 2, 0, 4)], pa.timestamp("us"))
        pq.write_table(pa.table({"x": x, "y": [0] * 5, "t": t}), tmp_path / f"{name}.parquet")
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"x": [n, 0, 0], "y": 0, "t": n}) + "\n" for n in range(30, 35))
    )
    files = (tmp_path / "*.parquet", tmp_path / "c.jsonl")
    found = read(begun(*files, schema=timed, order="time"))
    assert numbers(found) == [*range(10, 15), *range(30, 35), *range(50, 55)]
    assert found[0].time_ms.tolist()[:4] == [13_000, 11_000, 12_000, 10_000]


def test_the_order_by_time_needs_a_column(tmp_path):
    with pytest.raises(SettingsError, match=r"order = \"time\" needs stream.backfill.time or \[schema.time\]"):
        history(parquet(tmp_path / "a.parquet", range(5)), order="time")


@pytest.mark.parametrize("a_second", [1_000, 1_000_000, 1_000_000_000])
def test_times_in_another_unit_than_seconds_are_refused(tmp_path, suffix, a_second):
    """Else all rows would be left to the topics, which do not have them."""
    timed, path = {**SCHEMA, "time": {"name": "t"}}, tmp_path / f"a.{suffix}"

    def write(times):
        x = [[float(n), 0.0, 0.0] for n in range(len(times))]
        pq.write_table(pa.table({"x": x, "y": [0] * len(times), "t": times}), path)
        if suffix == "jsonl":
            rows = pq.read_table(path).to_pylist()
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if suffix == "csv":
            path.write_text("x,y,t\n" + "".join(f'"[{n}, 0, 0]",0,{t}\n' for n, t in enumerate(times)))

    times = [0, *(1_700_000_000 + n for n in range(9))]
    write([n * a_second for n in times])
    sentence = f"{path} has only times more than a day ahead of now in t, which is read as seconds since 1970"
    with pytest.raises(SettingsError, match=sentence):
        begun(path, schema=timed)
    write([*times, 1_700_000_000 * a_second])  # one that is wrong is rejected alone
    assert numbers(read(begun(path, schema=timed))) == [float(n) for n in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 1, 6, 100])
def test_a_restart_at_any_row_returns_the_rows_that_are_left(tmp_path, suffix, window):
    make(tmp_path / f"a.{suffix}", range(11))
    make(tmp_path / f"b.{suffix}", range(11, 20))
    settings = {"shuffle": window, "epochs": 2}
    first = begun(tmp_path / f"*.{suffix}", **settings)
    all_rows = read(first)
    expected = list(zip(offsets(all_rows), numbers(all_rows), strict=True))
    assert sorted(numbers(all_rows)) == sorted([*range(20), *range(20)])
    assert (numbers(all_rows)[:20] == list(range(20))) == (window <= 1)
    for done in range(len(expected) + 1):
        positions, hints = dict.fromkeys(first.partitions, 0), {}
        for (name, offset), _ in expected[:done]:
            positions[next(each for each in first.partitions if str(each) == name)] = offset + 1
        for rows in all_rows:
            hints |= {name: hint for name, hint in rows.hints.items() if rows.ends[name] <= positions[name]}
        marks = [
            PartitionFingerprint(mark.topic_id, hints.get(name))
            for name, mark in zip(first.partitions, first.marks, strict=True)
        ]
        again = history(tmp_path / f"*.{suffix}", **settings)
        again.restore([(name, Position(positions[name])) for name in first.partitions], marks)
        left = read(again)
        assert list(zip(offsets(left), numbers(left), strict=True)) == expected[done:]


def test_row_groups_are_no_bounds_of_chunks_and_a_restart_within_one_seeks(tmp_path):
    parquet(tmp_path / "a.parquet", range(50), row_group_size=7)
    source = begun(tmp_path / "a.parquet")
    for first in range(0, 50, 3):
        again = history(tmp_path / "a.parquet")
        again.restore([(name, Position(first)) for name in source.partitions], source.marks)
        assert numbers(read(again)) == list(range(first, 50))


def test_a_file_that_came_later_is_not_read(tmp_path, suffix):
    make(tmp_path / f"b.{suffix}", range(10))
    source = begun(tmp_path / f"*.{suffix}")
    make(tmp_path / f"a.{suffix}", range(100, 110))
    again = history(tmp_path / f"*.{suffix}")
    again.restore([(name, Position(4)) for name in source.partitions], source.marks)
    assert numbers(read(again)) == list(range(4, 10))


def test_empty_files_have_no_rows(tmp_path, suffix):
    for name, count in (("a", 0), ("b", 3), ("c", 0)):
        make(tmp_path / f"{name}.{suffix}", range(count))
    if suffix == "jsonl":
        (tmp_path / "a.jsonl").write_bytes(b"")
        (tmp_path / "c.jsonl").write_bytes(b"")
    else:
        empty = pa.schema([("x", pa.list_(pa.float32())), ("y", pa.int64())]).empty_table()
        pq.write_table(empty, tmp_path / "a.parquet")
        pq.write_table(empty, tmp_path / "c.parquet")
    source = begun(tmp_path / f"*.{suffix}")
    assert list(source.ends.values()) == [0, 3, 0]
    assert numbers(read(source)) == [0, 1, 2]
    assert source.progress.done


def test_the_last_line_needs_no_end(tmp_path):
    assert numbers(read(begun(jsonl(tmp_path / "a.jsonl", range(7), end="")))) == list(range(7))


def test_no_matching_file_is_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match=r'no file matches ".*\*\.parquet"; correct it, or remove'):
        begun(tmp_path / "*.parquet")


def test_another_schema_is_one_sentence_that_names_file_and_column(tmp_path):
    pq.write_table(pa.table({"x": ["a"], "y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SettingsError, match=r"a.parquet does not fit \[schema\]: its column x is of Arrow type string"):
        begun(tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SettingsError, match=r"a.parquet does not fit \[schema\]: it has no column x"):
        begun(tmp_path / "a.parquet")
    parquet(tmp_path / "a.parquet", range(3))
    with pytest.raises(SettingsError, match=r"it has no column t, which stream.backfill.time names"):
        begun(tmp_path / "a.parquet", time="t")


def test_a_truncated_or_foreign_file_is_damaged_at_the_first_start(tmp_path):
    path = parquet(tmp_path / "a.parquet", range(100))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(HistoryError, match=r"a.parquet is damaged: .*; write it again"):
        begun(path)


def changed(path):
    new = parquet(path.with_suffix(".new"), [n + 1 for n in range(100)], row_group_size=10)
    os.utime(new, ns=(1, 1))
    new.rename(path)


def shorter(path):
    path.write_bytes(path.read_bytes()[:-30])


CHANGES = {
    "is missing": Path.unlink,
    "was changed after the history was listed": changed,
    r"has \d+ bytes, and had \d+ when": shorter,
}


@pytest.mark.parametrize(("sentence", "change"), CHANGES.items(), ids=["missing", "changed", "shorter"])
@pytest.mark.parametrize("when", ["at a restart", "while it is read"])
def test_a_file_that_is_not_as_it_was_is_refused(tmp_path, monkeypatch, sentence, change, when):
    path = parquet(tmp_path / "a.parquet", range(100), row_group_size=10)
    (tmp_path / "another").touch()
    source = begun(path)
    if when == "at a restart":
        again = history(path)
        again.restore([(name, Position(5)) for name in source.partitions], source.marks)
        source = again
    else:
        monkeypatch.setattr("anabranch.ingest.backfill.open_files.CHUNK_ROWS", 4)
        source = begun(path)
        assert source.poll(WAIT) is not None
    change(path)
    with pytest.raises(HistoryError, match=rf"a.parquet {sentence}"):
        read(source)


def test_bytes_that_are_flipped_without_a_change_of_time_are_damage(tmp_path):
    path = parquet(tmp_path / "a.parquet", range(2000), row_group_size=1000, compression="gzip")
    source = begun(path)
    status, contents = path.stat(), bytearray(path.read_bytes())
    contents[len(contents) // 4] ^= 0xFF
    path.write_bytes(contents)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(HistoryError, match=r"a.parquet is damaged"):
        read(source)


@pytest.mark.parametrize("mount_point", [False, True], ids=["no folder", "empty folder"])
def test_storage_that_is_away_is_tried_again_and_loses_nothing(tmp_path, suffix, mount_point):
    folder = tmp_path / "mounted"
    folder.mkdir()
    make(folder / f"a.{suffix}", range(10))
    make(folder / f"b.{suffix}", range(10, 20))
    source = begun(folder / f"*.{suffix}")
    folder.rename(tmp_path / "away")
    if mount_point:
        folder.mkdir()
    with pytest.raises(HistoryAwayError, match=r"cannot be read: its folder is missing or empty"):
        read_until_error(source)
    (tmp_path / "away").rename(folder)
    left = read(source)
    assert numbers(left) == list(range(20))[-len(numbers(left)) :]
    assert source.progress.rows_done == 20


def test_a_folder_that_comes_back_during_a_search_lacks_no_file(tmp_path, monkeypatch):
    folder, away, stat = tmp_path / "mounted", tmp_path / "away", Path.stat
    away.mkdir()
    (away / "a.parquet").touch()

    def stat_and_mount(path, **options):
        try:
            return stat(path, **options)
        finally:
            if path.name == "a.parquet" and away.exists():
                away.rename(folder)

    monkeypatch.setattr(Path, "stat", stat_and_mount)
    assert LocalFiles().find(str(folder / "a.parquet")) is not None


class _Failing(io.BufferedReader):
    """A file of a server that went away."""

    def read(self, *arguments):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    readline = readinto = read


def test_a_read_that_the_file_system_fails_is_no_damage(tmp_path, suffix, monkeypatch):
    path = make(tmp_path / f"a.{suffix}", range(10))
    source = begun(path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "open", lambda _, mark: _Failing(io.FileIO(mark.name)))
        with pytest.raises(HistoryAwayError, match=r"cannot be read: Stale file handle; reading it is tried again"):
            read_until_error(source)
    assert numbers(read(source)) == [*range(10)]


def read_until_error(source):
    while not source.done:
        source.poll(WAIT)


def test_nulls_and_values_that_do_not_fit_are_rejected_by_row(tmp_path):
    x = [[1.0, 2.0, 3.0], None, [1.0], [1.0, None, 3.0], [float("nan"), 0.0, 0.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    pq.write_table(pa.table({"x": x, "y": [0, 1, 2, 0, 1, 9, None]}), tmp_path / "a.parquet")
    found = read(begun(tmp_path / "a.parquet"))
    rejected = [
        (int(rows.offset[reject.message]), reject.reason, json.loads(rows.text(reject.message)))
        for rows in found
        for reject in rows.decoded.rejects
    ]
    assert [(offset, why) for offset, why, _ in rejected] == [
        (1, "x is null"),
        (2, "x does not fit float32 of shape [3]"),
        (3, "x does not fit float32 of shape [3]"),
        (4, "x is NaN, infinite or too large"),
        (5, "y is not in 0..2"),
    ]
    assert rejected[0][2] == {"x": None, "y": 1}
    labelled = [bool(each) for rows in found for each in rows.decoded.columns["labelled"]]
    assert (numbers(found), labelled) == ([1, 7], [True, False])


def test_lines_that_cannot_be_used_are_rejected_by_row(tmp_path):
    good = b'{"x": [1, 2, 3], "y": 1}'
    lines = [good, b"", b"{", b'{"y": 1}', b'"' + b"a" * 2000 + b'"', b"\xff", good]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = read(begun(tmp_path / "a.jsonl"))
    rejected = {
        int(rows.offset[reject.message]): (reject.reason, rows.text(reject.message))
        for rows in found
        for reject in rows.decoded.rejects
    }
    assert sorted(rejected) == [1, 2, 3, 4]
    assert rejected[3][0] == "oversized: more than 1000 bytes"
    assert rejected[1][1] == b"{"
    assert numbers(found) == [1, 1]


def test_text_that_is_not_utf_8_is_rejected_by_row(tmp_path):
    schema = {"features": {"w": {"dtype": "string", "encode": {"hash": 100}}}, "label": {"name": "y", "classes": 3}}
    words = pa.array([b"a", b"\xff\xfe", b"b"], pa.binary())
    table = pa.table({"w": words, "y": [0, 1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    # The same bytes, as a column of text.
    invalid = pa.StringArray.from_buffers(3, words.buffers()[1], words.buffers()[2])
    pq.write_table(pa.table({"w": invalid, "y": [0, 1, 2]}), tmp_path / "a.parquet")
    found = read(begun(tmp_path / "a.parquet", schema=schema))
    assert [int(rows.offset[r.message]) for rows in found for r in rows.decoded.rejects] == [1]


def test_any_row_can_be_written_as_a_dead_letter(tmp_path):
    """Also one with values that Python does not have."""
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xffa"))
    columns = {
        "nanoseconds": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        "zoned": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC")),
        "far": pa.array([10**18], pa.timestamp("us")),
        "farthest": pa.array([10**17], pa.timestamp("s", "UTC")),
        "day": pa.array([10**17], pa.date64()),
        "duration": pa.array([2**62], pa.duration("s")),
        "text": bad,
        "word": bad.dictionary_encode(),
        "texts": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), bad),
    }
    source = begun(parquet(tmp_path / "a.parquet", range(1)))
    decoder = source._open_files.decoder(source._files[0])
    row = json.loads(decoder.text(pa.table(columns), 0))
    assert {name: row[name] for name in ("nanoseconds", "text")} == {
        "nanoseconds": "2023-11-14 22:13:20.123456789",
        "text": "\ufffda",
    }
    assert row["texts"] == "a value of Arrow type list<item: string> that cannot be written"
    assert list(row) == list(columns)
    source.close()


def test_nested_dictionary_and_wide_columns_fit_shapes(tmp_path):
    schema = {
        "features": {
            "m": {"dtype": "float32", "shape": [2, 2]},
            "w": {"dtype": "string", "encode": {"vocab": ["red", "green"]}},
            "wide": {"dtype": "float64", "shape": [500]},
        },
        "label": {"name": "y", "classes": ["no", "yes"]},
    }
    nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float64())))
    table = pa.table(
        {
            "extra": [{"a": 1}, {"a": 2}],
            "m": nested,
            "w": pa.array(["green", "blue"]).dictionary_encode(),
            "wide": pa.array([list(range(500)), list(range(500))], pa.list_(pa.float64(), 500)),
            "y": pa.array(["yes", "no"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (rows,) = read(begun(tmp_path / "a.parquet", schema=schema))
    assert rows.decoded.columns["feature.m"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert rows.decoded.columns["feature.w"].tolist() == [2, 0]
    assert rows.decoded.columns["feature.wide"].sum() == 2 * sum(range(500))
    assert rows.decoded.columns["label"].tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["timestamp", "seconds", "jsonl"])
def test_rows_from_the_switch_on_are_left_to_the_topics(tmp_path, kind):
    seconds = [5, 30, 10, 40, 20, None]
    if kind == "jsonl":
        lines = [json.dumps({"x": [n, 0, 0], "y": 0, "at": s}) for n, s in enumerate(seconds)]
        lines[2] = json.dumps({"x": [2, 0, 0], "y": 0, "at": datetime.fromtimestamp(10, UTC).isoformat()})
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(lines))
    else:
        times = pa.array([None if s is None else s * 1000 for s in seconds], pa.timestamp("ms"))
        x = [[float(n), 0.0, 0.0] for n in range(6)]
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"x": x, "y": [0] * 6, "at": times if kind == "timestamp" else seconds}), path)
    found = read(begun(path, time="at", until_ms=20_000))
    left = [n for rows in found if rows.left is not None for n in rows.offset[rows.left].tolist()]
    assert (numbers(found), left) == ([0, 2, 5], [1, 3, 4])


def hourly(path, first, last):
    """Write a row for each second."""
    seconds = list(range(first, last + 1))
    x = [[0.0, 0.0, 0.0]] * len(seconds)
    pq.write_table(pa.table({"x": x, "y": [0] * len(seconds), "at": seconds}), path)
    return path


@pytest.mark.parametrize(
    ("last", "lost", "until"),
    [
        (5000, True, 2300),  # five minutes after the first record: those that are gone are from before
        (2100, True, 2050),  # files end soon after the first record: neither side has all there
        (1500, True, 1500.001),  # a gap between both: each has what the other has not
        (5000, False, 2000),
        (1500, False, 1500.001),
        (5000, None, 2000),  # as the settings say
        (1500, None, 2000),
    ],
)
def test_the_topics_begin_where_both_they_and_the_files_have_all_events(tmp_path, last, lost, until):
    source = history(hourly(tmp_path / "a.parquet", 0, last), time="at")
    switch = source.list_files(Switch(2_000_000, ends={"events:0": 7}), lost=lost)
    assert switch == Switch(round(until * 1000), False, {"events:0": 7})
    (mark,) = source.marks
    partitions = [TopicPartition("events", 0), *source.partitions]
    assert switch_of(partitions, [PartitionFingerprint(), mark]) == switch


def test_a_history_is_not_added_after_the_topics(tmp_path):
    source = history(parquet(tmp_path / "a.parquet", range(3)))
    with pytest.raises(SettingsError, match="history comes first"):
        source.restore([(TopicPartition("events", 0), Position(5))], [PartitionFingerprint()])


def test_a_shuffle_depends_on_seed_and_file_and_stays_in_its_window(tmp_path):
    for name in "ab":
        parquet(tmp_path / f"{name}.parquet", range(40))
        os.utime(tmp_path / f"{name}.parquet", ns=(ord(name), ord(name)))
    found = numbers(read(begun(tmp_path / "*.parquet", shuffle=10)))
    for begin in range(0, 80, 10):
        assert sorted(found[begin : begin + 10]) == list(range(begin % 40, begin % 40 + 10))
    assert found[:40] != found[40:]


def test_what_decides_which_row_an_offset_is_stays_as_it_was_at_the_first_start(tmp_path):
    path = parquet(tmp_path / "a.parquet", range(50))
    first = begun(path, shuffle=10)
    expected = numbers(read(begun(path, shuffle=10)))
    again = FileHistory(
        BackfillSettings(files=(str(path),), shuffle=7), Schema(SchemaSettings.model_validate(SCHEMA)), 99, 1000
    )
    again.restore([(name, Position(25)) for name in first.partitions], first.marks)
    assert numbers(read(again)) == expected[25:]


def test_rows_do_not_become_events_of_the_topics_later(tmp_path):
    first = begun(parquet(tmp_path / "a.parquet", range(5)))
    stream = {"files": ["a.parquet"], "identity": {"partition": "p", "offset": "o"}}
    later = KafkaHistory(
        StreamSettings.model_validate({"topics": ["events"], "backfill": stream}),
        Schema(SchemaSettings.model_validate(SCHEMA)),
    )
    with pytest.raises(SettingsError, match="identity was absent when the history began; put it back so"):
        later.restore([(name, Position(2)) for name in first.partitions], first.marks)


def test_files_without_the_label_are_refused_where_rows_need_one(tmp_path):
    x = [[0.0, 0.0, 0.0]] * 3
    (tmp_path / "y=1").mkdir()
    pq.write_table(pa.table({"x": x}), tmp_path / "y=1" / "a.parquet")
    settings = BackfillSettings(files=(f"{tmp_path}/**/*.parquet",))
    schema = Schema(SchemaSettings.model_validate(SCHEMA))
    sentence = r"no file has a value in the column y of \[schema.label\], .*; their paths have it \(y=1\)"
    with pytest.raises(SettingsError, match=sentence):
        FileHistory(settings, schema, 0, 1000, need_label=True).list_files(None)
    assert numbers(read(begun(tmp_path / "**/*.parquet"))) == [0, 0, 0]
    for nulls in (pa.nulls(3), pa.array([None] * 3, pa.int64())):
        pq.write_table(pa.table({"x": x, "y": nulls}), tmp_path / "y=1" / "b.parquet")
        with pytest.raises(SettingsError, match=sentence):
            FileHistory(settings, schema, 0, 1000, need_label=True).list_files(None)
    pq.write_table(pa.table({"x": x, "y": [1, 2, 0]}), tmp_path / "y=1" / "b.parquet")
    FileHistory(settings, schema, 0, 1000, need_label=True).list_files(None)
