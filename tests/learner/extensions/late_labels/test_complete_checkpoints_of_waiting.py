"""With `[storage]` a checkpoint has the payload of events that wait for labels: a host without their file goes on."""

import shutil

import pytest

from anabranch.core.errors import SettingsError
from anabranch.learner.checkpoints.erase_checkpoints import Eraser
from anabranch.learner.extensions.late_labels.payload_file import NO_SLOT
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents
from tests.learner.extensions.late_labels.joins import (
    JoinBench,
    drain,
    events,
    labels,
    options,
    predictions,
)

COMPLETE = options(complete=True)


def add(bench, offsets):
    times = [1000] * len(offsets)
    bench.join.add_events(events(list(offsets), list(offsets), times), predictions(list(offsets)))


def label(bench, offsets):
    count = len(offsets)
    bench.join.add_labels(labels(list(offsets), [1] * count, [1000] * count))


def replaced(bench):
    """Let events come and go over several checkpoints, and return those that wait."""
    for begin in range(1, 401, 50):
        add(bench, range(begin, begin + 50))
        label(bench, range(max(1, begin - 40), begin + 10))
        drain(bench.join)
        bench.checkpoint()
    return range(361, 401)


def rows_files(bench):
    files = bench.checkpoints.manifest(bench.number).files
    return sorted(name for name in files if name.startswith("rank-0/rows-"))


@pytest.mark.parametrize("after", [COMPLETE, options(complete=True, bytes=2**15)], ids=["same size", "fewer slots"])
def test_events_wait_on_a_fresh_host_with_their_payload(tmp_path, after):
    bench = JoinBench(tmp_path, COMPLETE)
    waiting = replaced(bench)
    bench.restart_on_a_fresh_host(after)
    label(bench, waiting)
    assert [row[0] for row in drain(bench.join)] == list(waiting)
    assert bench.join.counts.damaged == 0


def test_the_next_checkpoint_of_a_fresh_host_has_the_changes_alone(tmp_path):
    bench = JoinBench(tmp_path, COMPLETE)
    waiting = replaced(bench)
    before = set(rows_files(bench))
    bench.restart_on_a_fresh_host()
    add(bench, range(401, 403))
    bench.checkpoint()
    assert set(rows_files(bench)) == before | {f"rank-0/rows-labels-{bench.number}.safetensors"}
    bench.restart_on_a_fresh_host()
    label(bench, range(waiting.start, 403))
    assert [row[0] for row in drain(bench.join)] == list(range(waiting.start, 403))


def test_events_in_memory_are_restored_too(tmp_path):
    """The file is full: some payload is in memory, and some of that in earlier checkpoints."""
    bench = JoinBench(tmp_path, options(complete=True, bytes=12_000))
    for begin in (1, 81, 121):
        add(bench, range(begin, begin + (80 if begin == 1 else 40)))
        bench.checkpoint()
    file = bench.join.payload
    assert 0 < file._in_memory < 160
    bench.restart_on_a_fresh_host()
    waiting = bench.join.events.waiting
    label(bench, range(1, 161))
    assert len(drain(bench.join)) == waiting > file.slots
    assert bench.join.counts.damaged == 0


@pytest.mark.parametrize("complete", [True, False])
def test_after_the_setting_has_changed_the_next_checkpoint_has_all_payload_or_none(tmp_path, *, complete):
    bench = JoinBench(tmp_path, options(complete=not complete))
    add(bench, range(1, 101))
    bench.checkpoint()
    bench.restart(options(complete=complete))
    add(bench, range(101, 103))
    bench.checkpoint()
    assert rows_files(bench) == (["rank-0/rows-labels-2.safetensors"] if complete else [])
    if not complete:
        with pytest.raises(SettingsError, match="cannot be opened"):
            bench.restart_on_a_fresh_host()
        return
    bench.restart_on_a_fresh_host()
    label(bench, range(1, 103))
    assert [row[0] for row in drain(bench.join)] == list(range(1, 103))


def test_erased_events_are_in_no_file_of_a_checkpoint(tmp_path):
    bench = JoinBench(tmp_path, COMPLETE)
    bench.ledger = [{"topic": "events", "partition": 0, "incarnation": 0, "history": 0}]
    waiting = replaced(bench)
    payload = [events([offset], [offset], [1000])["feature.x"].tobytes() for offset in (370, 371)]
    erased = ErasedEvents([ByRange(time=0, by="command", partition="events#0[0]", first=370, last=371)])
    files = lambda: [path.read_bytes() for path in bench.checkpoints.path.rglob("*") if path.is_file()]  # noqa: E731
    assert all(any(row in file for file in files()) for row in payload)
    Eraser(bench.checkpoints, erased).run()
    assert not any(row in file for file in files() for row in payload)
    bench.restart_on_a_fresh_host()
    label(bench, waiting)
    assert [row[0] for row in drain(bench.join)] == [offset for offset in waiting if offset not in (370, 371)]


def test_a_slot_without_payload_is_no_slot_of_a_fresh_file(tmp_path):
    """An event whose payload was lost before is counted as damaged on the fresh host, as where it was lost."""
    bench = JoinBench(tmp_path, COMPLETE)
    add(bench, range(1, 11))
    waiting = bench.join.events
    waiting.set("slot", waiting.ids()[4:5], NO_SLOT)
    bench.checkpoint()
    bench.restart_on_a_fresh_host()
    label(bench, range(1, 11))
    assert [row[0] for row in drain(bench.join)] == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert bench.join.counts.damaged == 1


def test_the_file_of_a_backup_is_not_used_for_a_later_checkpoint(tmp_path):
    bench = JoinBench(tmp_path, COMPLETE)
    add(bench, range(1, 51))
    bench.checkpoint()
    bench.join.payload.tier.close()
    shutil.copytree(bench.folder, tmp_path / "backup")
    bench.part = bench.open(bench.checkpoints.newest())
    add(bench, range(51, 101))
    bench.checkpoint()
    bench.join.payload.tier.close()
    shutil.rmtree(bench.folder)
    (tmp_path / "backup").rename(bench.folder)
    bench.part = bench.open(bench.checkpoints.newest())
    label(bench, range(1, 101))
    assert [row[0] for row in drain(bench.join)] == list(range(1, 101))
    assert bench.join.counts.damaged == 0
