"""The checkpointer: it writes the captured state, and continues after errors of the disk."""

import errno
import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.errors import DependencyError
from learner.checkpointing.captured_state import CapturedState
from learner.checkpointing.checkpoint_pruning import CheckpointPruning
from learner.checkpointing.checkpointer import Checkpointer
from learner.config import CheckpointSettings
from learner.device_memory.host_staging import HostCopies, HostStaging
from learner.errors import CopyMemoryError
from learner.metrics import LearnerMetrics
from learner.runtime.background_worker import BackgroundWorker
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoints
from learner.state_dir.folders import LocalStorage
from replay.background_store import BackgroundStore
from tests.learner.learner_bench import NAME, ROWS, LearnerBench

ERRORS = [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES]


class FakeStore:
    """A fake background store with free slots, which records the arguments of `end_snapshot`."""

    def many_slots_wait(self, _checkpoints: int) -> bool:
        return False

    lacks_slots = many_slots_wait

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, bool]] = []

    def flush(self) -> "FakeStore":
        return self

    def has_room(self) -> bool:
        return True

    def end_snapshot(self, oldest: int | None, *, written: bool) -> None:
        self.calls.append((oldest, written))


def make(tmp_path: Path, background_store: FakeStore | None = None) -> tuple[Checkpointer, Checkpoints]:
    checkpoints = Checkpoints(tmp_path / "checkpoints", "schema", 1)
    settings = CheckpointSettings(every=timedelta(hours=1), keep=2)
    return Checkpointer(
        checkpoints, settings, cast("BackgroundStore | None", background_store), LearnerMetrics(CollectorRegistry())
    ), checkpoints


def captured(state: dict[str, Any]) -> CapturedState:
    return CapturedState(1, {"model": {"w": torch.zeros(2)}}, state, None)


def checkpoint(checkpointer: Checkpointer, state: dict[str, Any] | None = None) -> None:
    checkpointer.request()
    assert checkpointer.is_due()
    checkpointer.checkpoint(lambda _: captured(state or {}))
    checkpointer.wait(Deadline(timedelta(seconds=30)))


def test_a_checkpoint_has_the_captured_state_if_it_changes_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, checkpoints = make(tmp_path)
    live = {"kind": {"others": ["loss", "uniform"]}, "ledger": [[1, 2]]}
    real = os.fsync

    def later(descriptor: int) -> None:
        live["kind"]["others"].clear()  # type: ignore[call-overload]
        live["ledger"].append([3, 4])  # type: ignore[attr-defined]
        real(descriptor)

    monkeypatch.setattr("anabranch.core.atomic_files.os.fsync", later)
    checkpoint(checkpointer, live)
    assert live["kind"] == {"others": []}, "the state did not change meanwhile"
    found = json.loads((checkpoints.path / "1" / "rank-0" / "state.json").read_bytes())
    assert found == {"kind": {"others": ["loss", "uniform"]}, "ledger": [[1, 2]]}


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_checkpoint_folder_that_cannot_be_listed_is_a_problem_and_no_error(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    checkpointer, checkpoints = make(tmp_path, store)
    for _ in range(3):
        checkpoint(checkpointer)
    assert store.calls == [(1, True), (1, True), (2, True)]

    def fail(_: LocalStorage) -> list[int]:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "_directories", fail)
        checkpoint(checkpointer)
        assert (
            checkpointer.problem == f"old checkpoints cannot be deleted from {checkpoints.path}: {os.strerror(number)}"
        )
    assert store.calls[-1] == (2, True), "a slot was released that an existing checkpoint may use"
    checkpoint(checkpointer)
    assert checkpointer.problem is None
    assert store.calls[-1] == (4, True)
    assert checkpoints.numbers() == [4, 5]


def test_the_first_checkpoint_is_the_oldest_if_the_folder_cannot_be_listed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    checkpointer, _ = make(tmp_path, store)
    monkeypatch.setattr(
        CheckpointPruning, "prune", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    )
    checkpoint(checkpointer)
    assert store.calls == [(1, True)]


def test_a_new_checkpointer_has_number_and_time_of_the_newest_checkpoint(tmp_path: Path) -> None:
    checkpointer, checkpoints = make(tmp_path)
    checkpoint(checkpointer)
    again = Checkpointer(checkpoints, CheckpointSettings(), None, cast("LearnerMetrics", SimpleNamespace()))
    assert (again.number, again.time) == (1, checkpointer.time)


def test_the_first_checkpoint_has_the_start_positions_and_is_written_only_once(tmp_path: Path) -> None:
    store = FakeStore()
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


def test_a_first_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, checkpoints = make(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("anabranch.core.atomic_files.os.fsync", full)
    with pytest.raises(DependencyError, match=r"checkpoint 1 could not be written to .*: No space left.*; nothing is"):
        checkpointer.checkpoint_first({"ledger": []}, threading.Event(), [])
    assert checkpoints.numbers() == []


def test_a_stop_ends_the_wait_for_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, _ = make(tmp_path)
    stop, go = threading.Event(), threading.Event()
    monkeypatch.setattr("anabranch.core.atomic_files.os.fsync", lambda _: go.wait(30))
    checkpointer.checkpoint_first({"ledger": []}, stop, [stop.set])
    assert checkpointer.busy
    go.set()
    checkpointer.wait(Deadline(timedelta(seconds=30)))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"), MemoryError()]
)
@pytest.mark.parametrize("where", ["capture", "read"])
def test_a_checkpoint_for_which_there_is_no_memory_is_skipped_and_the_next_one_written(
    tmp_path: Path, error: Exception, where: str
) -> None:
    def fail(*_: object) -> Any:
        raise CopyMemoryError(str(error)) if where == "capture" else error

    checkpointer, checkpoints = make(tmp_path)
    checkpointer.request()
    copies = CapturedState(1, {"model": HostCopies(fail)}, {}, None)
    checkpointer.checkpoint(fail if where == "capture" else lambda _: copies)
    checkpointer.wait(Deadline(timedelta(seconds=30)))
    assert checkpointer.problem is not None
    assert "checkpoint 1 could not be made for lack of memory" in checkpointer.problem
    assert not checkpointer.is_due(), "the next one follows when it is due"
    checkpoint(checkpointer)
    assert checkpointer.problem is None
    assert checkpoints.numbers() == [2]


def test_other_errors_of_a_capture_are_raised(tmp_path: Path) -> None:
    """Out of memory too: other ranks may be in the middle of what they exchange for the checkpoint."""
    checkpointer, _ = make(tmp_path)
    for error in (RuntimeError("CUDA error: device-side assert"), torch.OutOfMemoryError("CUDA out of memory")):
        checkpointer.request()
        with pytest.raises(RuntimeError, match="CUDA"):
            checkpointer.checkpoint(lambda _, error=error: (_ for _ in ()).throw(error))


@pytest.mark.parametrize("failing", [range(1), range(1, 2), range(2, 6), range(1000)])
def test_copies_that_run_out_of_memory_lose_no_event_and_a_checkpoint_is_written_in_the_end(
    make_bench: Callable[..., LearnerBench], failing: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, copy = [0], HostStaging.copy

    def fail_at_times(*args: Any, **options: Any) -> Any:
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
def test_the_wait_for_free_slots_calls_what_must_not_stop_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep-alives of other ranks, reports and the check of the lease: a large checkpoint takes minutes."""
    store = FakeStore()
    checkpointer, checkpoints = make(tmp_path, store)
    write, third, calls = Checkpoints.write, threading.Event(), list[int]()

    def slow(*args: Any) -> Path:
        third.wait()
        return write(*args)

    def call() -> None:
        calls.append(1)
        if len(calls) == 3:
            third.set()

    monkeypatch.setattr(Checkpoints, "write", slow)
    monkeypatch.setattr(FakeStore, "has_room", lambda _: bool(checkpoints.numbers()))
    checkpointer.request()
    checkpointer.checkpoint(lambda _: captured({}), while_waiting=[call])
    assert len(calls) >= 3
    assert checkpoints.numbers() == [1]


def test_the_snapshot_of_a_checkpoint_that_ends_while_it_is_examined_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or slots would stay retired, and samples would be copied, until the next checkpoint."""
    store = FakeStore()
    checkpointer, _ = make(tmp_path, store)
    write, raise_bug, go_on = Checkpoints.write, BackgroundWorker.raise_bug, threading.Event()

    def slow(*args: Any) -> Path:
        go_on.wait()
        return write(*args)

    def after_the_end(worker: BackgroundWorker) -> None:
        go_on.set()
        worker.wait()
        raise_bug(worker)

    monkeypatch.setattr(Checkpoints, "write", slow)
    checkpointer.request()
    checkpointer.checkpoint(lambda _: captured({}))
    monkeypatch.setattr(BackgroundWorker, "raise_bug", after_the_end)
    assert [checkpointer.is_due() for _ in range(2)] == [False, False]
    assert store.calls == [(1, True)]
