"""The checkpointer: it writes the captured state, and continues after errors of the disk."""

import errno
import json
import os
import threading
from datetime import timedelta

import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.errors import DependencyError
from anabranch.core.job_thread import BackgroundWorker
from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.checkpointer import CapturedState, Checkpointer, CheckpointPruning
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.checkpoints.parts import CapturedPart, CheckpointPart, PackedPart
from anabranch.learner.device.host_staging import HostCopies, HostStaging
from anabranch.learner.errors import CopyMemoryError
from anabranch.learner.settings.learner import CheckpointSettings
from anabranch.learner.state_dir.folders import Storage
from anabranch.learner.status.metrics import LearnerMetrics
from tests.learner.learner_bench import NAME, ROWS
from tests.support.waiting import PATIENCE_SECONDS

IN_A_TIER = {"replay": {"file": {"name": "1.rows", "id": "a"}, "row_bytes": None}}
"""The state of a checkpoint whose rows are in a tier alone."""


def test_a_refused_checkpoint_does_not_count_as_one_that_is_kept(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    found = bench.checkpoints.newest()
    assert found is not None
    payload = bench.checkpoints.write(2, found[1], 0.0) / "rank-0" / "rng.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    checkpoints = Checkpoints(bench.checkpoints.path, bench.checkpoints.schema, 2)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0] == 1
    checkpoints.write(3, found[1], 0.0)
    CheckpointPruning(checkpoints, 2).prune()
    assert checkpoints.numbers() == [1, 2, 3], "it is kept until there are two newer ones"
    checkpoints.write(4, found[1], 0.0)
    CheckpointPruning(checkpoints, 2).prune()
    assert checkpoints.numbers() == [3, 4]


def test_the_last_complete_checkpoint_of_each_hour_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, "schema", 1)
    states = {5: IN_A_TIER, 8: IN_A_TIER}
    for number, hour in enumerate([0, 1, 1, 2, 2, 3, 3, 3], start=1):
        checkpoints.write(number, Checkpoint(number, {}, states.get(number, {})), 3600.0 * hour + number)
    pruning = CheckpointPruning(checkpoints, 1, hours=2)
    assert [number for number in checkpoints.numbers() if pruning.names_slots(number)] == [5, 8]
    assert pruning.prune() == 8
    assert checkpoints.numbers() == [4, 7, 8], "5 is the last of its hour, and the tier reuses its slots"
    assert pruning.recent() == {8}
    assert pruning.prune() == 8
    assert checkpoints.numbers() == [4, 7, 8]


ERRORS = [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES]


class FakePart(CheckpointPart):
    """A part with free slots, which records the arguments of `end`."""

    def __init__(self):
        self.calls: list[tuple[int | None, bool]] = []

    def capture(self, number):
        return FakeCapture()

    def end(self, oldest, *, written):
        self.calls.append((oldest, written))


class FakeCapture(CapturedPart):
    def pack(self, earlier, oldest):
        return PackedPart("fake", {}, {})


def make(tmp_path, part=None):
    checkpoints = Checkpoints(tmp_path / "checkpoints", "schema", 1)
    settings = CheckpointSettings(every=timedelta(hours=1), keep=2)
    metrics, parts = LearnerMetrics(CollectorRegistry()), [] if part is None else [part]
    return Checkpointer(checkpoints, settings, metrics.checkpoint, metrics.checkpoint_stall, parts), checkpoints


def captured(state):
    return CapturedState(1, {"model": {"w": torch.zeros(2)}}, state)


def checkpoint(checkpointer, state=None):
    checkpointer.request()
    assert checkpointer.is_due()
    checkpointer.checkpoint(lambda: captured(state or {}))
    checkpointer.wait(Deadline(timedelta(seconds=30)))


def test_a_checkpoint_has_the_captured_state_if_it_changes_while_it_is_written(tmp_path, monkeypatch):
    checkpointer, checkpoints = make(tmp_path)
    live = {"kind": {"others": ["loss", "uniform"]}, "ledger": [[1, 2]]}
    real = os.fsync

    def later(descriptor):
        live["kind"]["others"].clear()  # type: ignore[call-overload]
        live["ledger"].append([3, 4])  # type: ignore[attr-defined]
        real(descriptor)

    monkeypatch.setattr("anabranch.core.atomic_files.os.fsync", later)
    checkpoint(checkpointer, live)
    assert live["kind"] == {"others": []}, "the state did not change meanwhile"
    found = json.loads((checkpoints.path / "1" / "rank-0" / "state.json").read_bytes())
    assert found == {"kind": {"others": ["loss", "uniform"]}, "ledger": [[1, 2]]}


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_checkpoint_folder_that_cannot_be_listed_is_a_problem_and_no_error(tmp_path, number, monkeypatch):
    store = FakePart()
    checkpointer, checkpoints = make(tmp_path, store)
    for _ in range(3):
        checkpoint(checkpointer)
    assert store.calls == [(1, True), (1, True), (2, True)]

    def fail(_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "_directories", fail)
        checkpoint(checkpointer)
        assert (
            checkpointer.problem == f"old checkpoints cannot be deleted from {checkpoints.path}: {os.strerror(number)}"
        )
    assert store.calls[-1] == (2, True), "a slot was released that an existing checkpoint may use"
    checkpoint(checkpointer)
    assert checkpointer.problem is None
    assert store.calls[-1] == (4, True)
    assert checkpoints.numbers() == [4, 5]


def test_the_first_checkpoint_is_the_oldest_if_the_folder_cannot_be_listed_afterwards(tmp_path, monkeypatch):
    store = FakePart()
    checkpointer, _ = make(tmp_path, store)
    monkeypatch.setattr(
        CheckpointPruning, "prune", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    )
    checkpoint(checkpointer)
    assert store.calls == [(1, True)]


def test_a_new_checkpointer_has_number_and_time_of_the_newest_checkpoint(tmp_path):
    checkpointer, _ = make(tmp_path)
    checkpoint(checkpointer)
    again, _ = make(tmp_path)
    assert (again.number, again.time) == (1, checkpointer.time)


def test_the_first_checkpoint_has_the_start_positions_and_is_written_only_once(tmp_path):
    store = FakePart()
    checkpointer, checkpoints = make(tmp_path, store)
    checkpointer.checkpoint_first({"ledger": [1]}, threading.Event(), [])
    assert (checkpointer.number, checkpoints.numbers(), store.calls, checkpointer.problem) == (1, [1], [], None)
    found = Checkpoints(checkpoints.path, "another schema", 2).newest()
    assert found is not None
    assert (found[1].begins, found[1].step, found[1].state) == (True, 0, {"ledger": [1]})
    checkpointer.checkpoint_first({"ledger": [2]}, threading.Event(), [])
    assert checkpoints.numbers() == [1]
    checkpoint(checkpointer)
    found = checkpoints.newest()
    assert found is not None
    assert (found[0], found[1].begins) == (2, False)


def test_a_first_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    checkpointer, checkpoints = make(tmp_path)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("anabranch.core.atomic_files.os.fsync", full)
    with pytest.raises(DependencyError, match=r"checkpoint 1 could not be written to .*: No space left.*; nothing is"):
        checkpointer.checkpoint_first({"ledger": []}, threading.Event(), [])
    assert checkpoints.numbers() == []


def test_a_stop_ends_the_wait_for_the_first_checkpoint(tmp_path, monkeypatch):
    checkpointer, _ = make(tmp_path)
    stop, go = threading.Event(), threading.Event()
    monkeypatch.setattr("anabranch.core.atomic_files.os.fsync", lambda _: go.wait(PATIENCE_SECONDS))
    checkpointer.checkpoint_first({"ledger": []}, stop, [stop.set])
    assert checkpointer.busy
    go.set()
    checkpointer.wait(Deadline(timedelta(seconds=30)))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"), MemoryError()]
)
@pytest.mark.parametrize("where", ["capture", "read"])
def test_a_checkpoint_for_which_there_is_no_memory_is_skipped_and_the_next_one_written(tmp_path, error, where):
    def fail(*_):
        raise CopyMemoryError(str(error)) if where == "capture" else error

    checkpointer, checkpoints = make(tmp_path)
    checkpointer.request()
    copies = CapturedState(1, {"model": HostCopies(fail)}, {})
    checkpointer.checkpoint(fail if where == "capture" else lambda: copies)
    checkpointer.wait(Deadline(timedelta(seconds=30)))
    assert checkpointer.problem is not None
    assert "checkpoint 1 could not be made for lack of memory" in checkpointer.problem
    assert not checkpointer.is_due(), "the next one follows when it is due"
    checkpoint(checkpointer)
    assert checkpointer.problem is None
    assert checkpoints.numbers() == [2]


def test_other_errors_of_a_capture_are_raised(tmp_path):
    """Out of memory too: other ranks may be in the middle of what they exchange for the checkpoint."""
    checkpointer, _ = make(tmp_path)
    for error in (RuntimeError("CUDA error: device-side assert"), torch.OutOfMemoryError("CUDA out of memory")):
        checkpointer.request()
        with pytest.raises(RuntimeError, match="CUDA"):
            checkpointer.checkpoint(lambda error=error: (_ for _ in ()).throw(error))


@pytest.mark.parametrize("failing", [range(1), range(1, 2), range(2, 6), range(1000)])
def test_copies_that_run_out_of_memory_lose_no_event_and_a_checkpoint_is_written_in_the_end(
    make_bench, failing, monkeypatch
):
    calls, copy = [0], HostStaging.copy

    def fail_at_times(*args, **options):
        calls[0] += 1
        if calls[0] - 1 in failing:
            raise CopyMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return copy(*args, **options)

    monkeypatch.setattr(HostStaging, "copy", fail_at_times)
    bench = make_bench(30, every="1ms")
    bench.run()
    assert calls[0] > failing.start, "nothing has failed"
    calls[0] = 1000
    bench.finish()
    assert bench.loop.state.steps == 30
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == 30
    assert bench.publisher.problem is None
    assert bench.loop.ledger.positions[NAME].offset == 30 * ROWS


@pytest.mark.slow
def test_the_wait_for_free_slots_calls_what_must_not_stop_meanwhile(tmp_path, monkeypatch):
    """Keep-alives of other ranks, reports and the check of the lease: a large checkpoint takes minutes."""
    part = FakePart()
    part.has_room = lambda: bool(checkpoints.numbers())  # type: ignore[method-assign]
    checkpointer, checkpoints = make(tmp_path, part)
    write, third, calls = Checkpoints.write, threading.Event(), list[int]()

    def slow(*args):
        third.wait()
        return write(*args)

    def call():
        calls.append(1)
        if len(calls) == 3:
            third.set()

    monkeypatch.setattr(Checkpoints, "write", slow)
    checkpointer.request()
    checkpointer.checkpoint(lambda: captured({}), while_waiting=[call])
    assert len(calls) >= 3
    assert checkpoints.numbers() == [1]


def test_the_snapshot_of_a_checkpoint_that_ends_while_it_is_examined_is_ended(tmp_path, monkeypatch):
    """Or slots would stay retired, and samples would be copied, until the next checkpoint."""
    store = FakePart()
    checkpointer, _ = make(tmp_path, store)
    write, raise_bug, go_on = Checkpoints.write, BackgroundWorker.raise_bug, threading.Event()

    def slow(*args):
        go_on.wait()
        return write(*args)

    def after_the_end(worker):
        go_on.set()
        worker.wait()
        raise_bug(worker)

    monkeypatch.setattr(Checkpoints, "write", slow)
    checkpointer.request()
    checkpointer.checkpoint(lambda: captured({}))
    monkeypatch.setattr(BackgroundWorker, "raise_bug", after_the_end)
    assert [checkpointer.is_due() for _ in range(2)] == [False, False]
    assert store.calls == [(1, True)]
