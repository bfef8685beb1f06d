"""The checkpointer: it writes the captured state, and continues after errors of the disk."""

import errno
import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.errors import DependencyError
from learner.checkpointing.checkpointer import CapturedState, Checkpointer
from learner.config import CheckpointSettings
from learner.metrics import LearnerMetrics
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoints
from learner.state_dir.folders import LocalStorage
from replay.background_store import BackgroundStore

ERRORS = [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES]


class FakeStore:
    """A fake background store with free slots, which records the arguments of `end_snapshot`."""

    def many_slots_wait(self, _checkpoints: int) -> bool:
        return False

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
        Checkpoints, "prune", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
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
