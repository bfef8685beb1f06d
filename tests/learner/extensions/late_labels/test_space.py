"""Space for waiting events: the bound of the file, compaction, a disk that fails, damaged payload, other sizes."""

import errno
import os

import numpy as np
import pytest

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.extensions.late_labels.join_part import open_join
from anabranch.replay.tiers.disk import DiskTier
from tests.learner.extensions.late_labels.joins import (
    OUTPUT,
    SCHEMA,
    JoinBench,
    drain,
    events,
    labels,
    options,
    predictions,
    problem,
)

SLOTS = 76
"""Slots of a small file, each an extent."""
SMALL = 4096 + SLOTS * 112


def add(bench, begin, end, time=1000):
    offsets = list(range(begin, end))
    bench.join.add_events(
        events(offsets, [offset + 1000 for offset in offsets], [time] * len(offsets)), predictions(offsets)
    )


def label(bench, begin, end, time=1000):
    count = end - begin
    bench.join.add_labels(labels([offset + 1000 for offset in range(begin, end)], [1] * count, [time] * count))


@pytest.fixture
def bench(tmp_path):
    return JoinBench(tmp_path, options(bytes=SMALL))


@pytest.fixture
def failing(monkeypatch):
    """Lets calls of the system raise an error, by their names; none lets all work again."""

    def fail(*names, code=errno.ENOSPC):
        def fails(*_args):
            raise OSError(code, os.strerror(code))

        monkeypatch.undo()
        for name in names:
            monkeypatch.setattr(os, name, fails)

    return fail


def test_when_the_file_is_full_the_oldest_events_time_out_early(bench, caplog):
    add(bench, 0, 40, time=1000)
    add(bench, 40, 60, time=1010)
    assert (bench.join.ready, problem(bench.join)) == (0, None)
    add(bench, 60, 80, time=1020)
    assert bench.join.counts.early_timeouts == bench.join.counts.timed_out == 13
    assert [row[:2] for row in drain(bench.join)] == [(offset, "TIMED_OUT") for offset in range(13)]
    assert problem(bench.join) is not None
    assert "stream.labels.bytes: 67 events wait for labels, and there is no space for more" in problem(bench.join)
    assert caplog.messages == [problem(bench.join)]
    bench.join.advance(1121)
    drain(bench.join)
    add(bench, 80, 81)
    assert problem(bench.join) is None


def test_events_that_are_kept_for_a_late_label_go_first(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=SMALL, take_back=True))
    add(bench, 0, 60)
    bench.join.advance(1101)
    drain(bench.join)
    add(bench, 60, 120, time=1100)
    assert (bench.join.events.waiting, bench.join.counts.early_timeouts) == (60, 0)
    label(bench, 0, 60)
    assert bench.join.ready == 7


def test_events_that_a_label_could_still_take_back_and_that_have_no_space_are_a_problem(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=SMALL, take_back=True))
    add(bench, 0, 40, time=1000)
    bench.join.advance(1101)
    drain(bench.join)
    assert problem(bench.join) is None
    add(bench, 40, 80, time=1110)
    assert bench.join.counts.early_removals > 0
    assert "cannot be taken back any more" in (problem(bench.join) or "")


def test_events_beyond_the_file_are_in_memory_and_reach_it_later(bench):
    add(bench, 0, 60)
    bench.checkpoint()
    label(bench, 0, 60)
    drain(bench.join)
    add(bench, 60, 120)  # the slots of the checkpoint cannot be written yet
    assert bench.join.payload.needs_checkpoint
    bench.checkpoint()
    bench.restart()
    add(bench, 120, 125)
    bench.checkpoint()
    bench.checkpoint()
    assert not bench.join.payload.needs_checkpoint
    bench.join.advance(1001)
    bench.restart()
    label(bench, 60, 125)
    assert sorted(row[0] for row in drain(bench.join)) == list(range(60, 125))
    assert bench.join.counts.damaged == 0


def test_rows_in_memory_are_written_to_the_file_when_that_has_space(bench):
    add(bench, 0, 60)
    bench.checkpoint()
    label(bench, 0, 60)
    drain(bench.join)
    add(bench, 60, 120)
    file = bench.join.payload
    assert file._in_memory == 60 - (SLOTS - 60)
    for _ in range(3):
        bench.checkpoint()
    bench.join.advance(1001)
    assert file._in_memory == 60 - (SLOTS - 60) - 1  # an extent a call
    for _ in range(60):
        bench.join.advance(1001)
    assert file._in_memory == 0
    bench.checkpoint()
    bench.restart()
    label(bench, 60, 120)
    assert sorted(row[0] for row in drain(bench.join)) == list(range(60, 120))


def test_extents_with_few_rows_are_moved_when_space_runs_low(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=2**17))
    file = bench.join.payload
    assert file.rows > 8
    count = file.slots * 13 // 16
    add(bench, 0, count)
    kept = set(range(0, count, 8))
    label_keys = [offset + 1000 for offset in range(count) if offset not in kept]
    bench.join.add_labels(labels(label_keys, [1] * len(label_keys), [1000] * len(label_keys)))
    drain(bench.join)
    assert file._free < file.slots // 4
    for _ in range(40):
        bench.join.advance(1001)
    assert file._free > file.slots // 4
    bench.checkpoint()
    bench.restart()
    label(bench, 0, count)
    assert sorted(row[0] for row in drain(bench.join)) == sorted(kept)


def test_a_checkpoint_after_a_move_has_the_new_slots(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=2**17), keep=1)
    file = bench.join.payload
    count = file.slots * 13 // 16
    add(bench, 0, count)
    bench.checkpoint()
    gone = [offset + 1000 for offset in range(count) if offset % 8]
    bench.join.add_labels(labels(gone, [1] * len(gone), [1000] * len(gone)))
    drain(bench.join)
    for _ in range(8):
        bench.join.advance(1001)
        bench.checkpoint()
    add(bench, count, count + file.slots // 2)
    bench.checkpoint()
    bench.restart()
    label(bench, 0, count + file.slots // 2)
    rows = [row[0] for row in drain(bench.join)]
    assert len(rows) == len(set(rows)) == -(-count // 8) + file.slots // 2
    assert bench.join.counts.damaged == 0


def test_a_disk_that_cannot_be_written_loses_no_event(bench, failing):
    add(bench, 0, 10)
    failing("pwritev")
    add(bench, 10, 20)
    assert problem(bench.join) is not None
    assert problem(bench.join).startswith("stream.labels: ")
    assert problem(bench.join).endswith("No space left on device; events wait for their labels in memory")
    assert bench.join.events.room > 0
    label(bench, 0, 20)
    assert [row[0] for row in drain(bench.join)] == list(range(20))
    failing()
    add(bench, 20, 30)
    assert problem(bench.join) is None


def test_a_checkpoint_has_the_rows_that_are_in_memory(bench, failing):
    failing("pwritev")
    add(bench, 0, 5)
    failing()
    bench.checkpoint()
    bench.restart()
    label(bench, 0, 5)
    assert [row[0] for row in drain(bench.join)] == list(range(5))


def test_a_checkpoint_fails_while_the_payload_cannot_be_made_durable(bench, failing):
    add(bench, 0, 5)
    failing("fsync", code=errno.EIO)
    captured = bench.capture()
    with pytest.raises(OSError, match="Input/output error"):
        captured.pack(bench.checkpoints.part)
    failing()
    bench.part.end(None, written=False)
    bench.checkpoint()
    bench.restart()
    assert bench.join.events.waiting == 5


def test_while_the_file_cannot_be_read_nothing_is_taken_and_nothing_is_lost(bench, failing, monkeypatch):
    add(bench, 0, 3)
    label(bench, 0, 3)
    failing("preadv", "pread", code=errno.EIO)
    assert bench.join.take(10) is None
    assert problem(bench.join) is not None
    assert "no event that waited for its label is trained on" in problem(bench.join)
    failing()
    monkeypatch.setattr("anabranch.learner.extensions.late_labels.label_join._RETRY_SECONDS", 0.0)
    assert [row[0] for row in drain(bench.join)] == [0, 1, 2]
    assert problem(bench.join) is None


def test_damaged_payload_is_counted_and_not_returned(bench):
    add(bench, 0, 3)
    bench.checkpoint()
    path = bench.folder / bench.join.payload.tier.file.name
    content = path.read_bytes()
    at = content.index(np.array([1, 1.25, 1.5], np.float32).tobytes())
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    bench.restart()
    label(bench, 0, 3)
    ready = bench.join.take(10)
    assert ready is not None
    assert ready.columns["offset"].tolist() == [0, 1, 2]
    assert ready.damaged.tolist() == [False, True, False]
    bench.join.put_back()
    ready = bench.join.take(10)
    bench.join.settle()
    assert (bench.join.counts.damaged, bench.join.events.waiting, bench.join.take(10)) == (1, 0, None)


def test_events_of_a_damaged_segment_are_counted_and_the_others_go_on(bench):
    add(bench, 0, 8)
    bench.checkpoint()
    add(bench, 8, 10)
    label(bench, 0, 1)
    label(bench, 9, 10)
    bench.checkpoint()
    (segment,) = (bench.checkpoints.path / "2").rglob("segment-labels-1*")
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.unlink()
    segment.write_bytes(content)
    bench.checkpoints.storage.set_aside(1)
    bench.restart()
    assert bench.join.counts.damaged == 8
    assert [row[0] for row in drain(bench.join)] == [9]
    label(bench, 8, 9)
    assert [row[0] for row in drain(bench.join)] == [8]


@pytest.mark.parametrize("size", [2**13 * 3, 2**16], ids=["larger", "much larger"])
def test_the_events_move_to_a_file_of_another_size(bench, size):
    add(bench, 0, 30)
    label(bench, 5, 10)
    bench.checkpoint()
    bench.restart(options(bytes=size))
    assert [row[0] for row in drain(bench.join)] == [5, 6, 7, 8, 9]
    bench.checkpoint()
    assert len(list(bench.folder.glob("*.rows"))) == 2  # the first checkpoint names the old one
    bench.checkpoint()
    assert len(list(bench.folder.glob("*.rows"))) == 1
    bench.restart()
    label(bench, 10, 30)
    assert len(drain(bench.join)) == 20


def test_a_file_that_is_too_small_for_the_events_is_refused(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=2**17))
    add(bench, 0, 200)
    bench.checkpoint()
    with pytest.raises(SettingsError, match=r"stream\.labels\.bytes has space for 76 events, and 200 wait for labels"):
        bench.restart(options(bytes=SMALL))


def test_a_size_for_few_events_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"stream\.labels\.bytes = 8192 has space for 36 events of .* raise it"):
        open_join(options(bytes=8192).settings, SCHEMA, OUTPUT, tmp_path, None, first=True)


def test_another_output_of_the_model_is_refused(bench):
    add(bench, 0, 3)
    bench.checkpoint()
    with pytest.raises(SettingsError, match="have other columns than"):
        open_join(bench.options.settings, SCHEMA, (7,), bench.folder, bench.checkpoints.newest(), first=False)


def test_a_missing_file_is_refused(bench):
    bench.checkpoint()
    (bench.folder / bench.join.payload.tier.file.name).unlink()
    with pytest.raises(SettingsError, match=r"the events that wait for labels are in .*, which cannot be opened"):
        bench.open(bench.checkpoints.newest())


def test_a_file_that_cannot_be_read_now_is_a_dependency(bench, monkeypatch):
    bench.checkpoint()

    def fails(*_args, **_options):
        raise DependencyError("it cannot be read now")

    monkeypatch.setattr(DiskTier, "open", fails)
    with pytest.raises(DependencyError, match="cannot be read now"):
        bench.open(bench.checkpoints.newest())


def test_a_learner_without_its_checkpoints_keeps_the_file_aside(bench):
    add(bench, 0, 3)
    bench.checkpoint()
    bench.join.payload.tier.close()
    bench.checkpoints.path.rename(bench.checkpoints.path.with_name("moved"))
    bench.checkpoints.path.mkdir()
    bench.part = bench.open(None)
    assert bench.join.events.waiting == 0
    assert [path.name for path in sorted(bench.folder.iterdir())] == ["1.rows.before", "2.rows"]


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [0.25, 0.4])
def test_a_file_of_extents_that_are_half_in_use_makes_room_early(tmp_path, monkeypatch, labelled):
    slots = 64 * 40
    monkeypatch.setattr("anabranch.learner.extensions.late_labels.payload_file._MEMORY_BYTES", 112 * slots // 16)
    bench = JoinBench(tmp_path, options(bytes=4096 + 112 * slots))
    count, stops, random = bench.join.payload.slots // 32, 0, np.random.default_rng(0)
    for begin in range(0, 200 * count, count):
        while bench.join.events.room < 2 * count:
            stops += 1
            assert stops < 200
            bench.join.make_room(2 * count)
            drain(bench.join)
            bench.join.advance(1001)
            if bench.join.payload.needs_checkpoint:
                bench.checkpoint()
        add(bench, begin, begin + count)
        chosen = (begin + np.flatnonzero(random.random(count) < labelled)).tolist()
        bench.join.add_labels(labels([offset + 1000 for offset in chosen], [1] * len(chosen), [1000] * len(chosen)))
        drain(bench.join)
        bench.join.advance(1001)
    assert bench.join.counts.damaged == 0
    assert bench.join.events.waiting > slots // 3
    assert problem(bench.join) is not None
    assert "there is no space for more" in problem(bench.join)


def test_room_that_checkpoints_give_lets_no_event_time_out(tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.learner.extensions.late_labels.payload_file._MEMORY_BYTES", 0)
    bench = JoinBench(tmp_path, options(bytes=SMALL), keep=2)
    add(bench, 0, 60)
    bench.checkpoint()
    label(bench, 0, 60)
    drain(bench.join)
    add(bench, 60, 76)
    for _ in range(2):
        assert bench.join.payload.needs_checkpoint
        bench.join.make_room(2)
        assert bench.join.counts.early_timeouts == 0
        bench.checkpoint()
    assert bench.join.events.room == 60
