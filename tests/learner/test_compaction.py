"""A running learner compacts a long erasure log."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anabranch.core.errors import DependencyError
from anabranch.ingest.events.identity import base_of
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure
from anabranch.learner.checkpoints.format import ERASED
from anabranch.learner.loop.erasure import Erasure
from anabranch.replay.erasure.erased_events import ByKey
from anabranch.replay.erasure.erasure_log import Applied, ErasureLog


class Checkpoints:
    """A fake of checkpoints and checkpointer, which runs work at once."""

    busy = False
    parts = ()

    def numbers(self):
        return [1]

    def manifest(self, number):
        return SimpleNamespace(number=number, begins=False)

    def state(self, _manifest):
        return {ERASED: 8000}

    def run(self, work):
        work()
        return True


def test_a_long_log_is_compacted_and_an_unreadable_one_is_tried_again(tmp_path, monkeypatch):
    written = ErasureLog(tmp_path / "erasures.log")
    records = [ByKey(time=0.0, by=f"e#0[0]@{n}", key_hash=f"{n:016x}", up_to={"e#0[0]": n}) for n in range(1, 9000)]
    written.append(records)
    written.append(Applied(time=0.0, through=written.count, store=0, holdout=0))
    assert written.is_long
    checkpoints: Any = Checkpoints()
    erasure = Erasure(written, BackgroundErasure(written, checkpoints, checkpoints), checkpoints)
    before = written.path.stat().st_size

    def unreachable(*_arguments):
        raise DependencyError("erasures.log cannot be read: Stale file handle")

    monkeypatch.setattr("anabranch.learner.checkpoints.background_erasure._RETRY_SECONDS", 0.0)
    monkeypatch.setattr("anabranch.learner.loop.erasure._EVERY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ErasureLog, "compact", unreachable)
        for _ in range(5):
            erasure.poll_if_due()
    assert written.path.stat().st_size == before
    for _ in range(5):
        erasure.poll_if_due()
    assert written.path.stat().st_size < before / 2
    assert not written.is_long
    fresh = ErasureLog(written.path)
    fresh.refresh()
    assert (fresh.count, fresh.through) == (written.count, written.through)


def test_records_below_the_log_start_and_the_position_of_their_partition_are_dropped(tmp_path, monkeypatch):
    """An earlier incarnation of a partition counts as read up to the log start of the latest one."""
    monkeypatch.setattr("anabranch.learner.loop.erasure._EVERY_SECONDS", 0.0)
    monkeypatch.setattr(ErasureLog, "is_long", True)
    names = [TopicPartition("e", 0), TopicPartition("e", 1), TopicPartition("e", 0, 1), TopicPartition("gone", 0)]
    ends = [{"e#0[0]": 50}, {"e#0[0]": 51}, {"e#1[0]": 50}, {"e#1[0]": 51}, {"e#0[1]": 30}, {"e#0[1]": 31}]
    ends += [{"gone#0[0]": 1}]
    written = ErasureLog(tmp_path / "erasures.log")
    written.append([ByKey(time=0.0, by="command", key_hash=f"{n:016x}", up_to=each) for n, each in enumerate(ends)])
    written.append(Applied(time=0.0, through=written.count, store=0, holdout=0))
    checkpoints: Any = Checkpoints()
    erasure = Erasure(written, BackgroundErasure(written, checkpoints, checkpoints), checkpoints)
    starts = [None, 40, 50, None]
    positions = dict(zip(names, map(Position, [5, 30, 70, 9]), strict=True))
    found = [Partition(name, 0, 99, None, start) for name, start in zip(names, starts, strict=True)]
    erasure.register_partitions(found, lambda: positions)
    for _ in range(5):
        erasure.poll_if_due()

    def is_left(number, name):
        event = {"partition": np.zeros(1, np.int32), "offset": np.zeros(1, np.int64)}
        event["key_hash"] = np.array([number], np.uint64)
        return bool(written.erased.covers(np.array([base_of(name)], np.uint64), event)[0])

    left = [number for number, each in enumerate(ends) if is_left(number, *each)]
    assert left == [1, 3, 5, 6]
    assert written.dropped == 5


@pytest.mark.parametrize("has_history", [True, False])
def test_files_hold_records_back_until_the_history_is_removed_from_the_settings(tmp_path, monkeypatch, *, has_history):
    """A learner that begins again reads them, with the events that are erased."""
    monkeypatch.setattr("anabranch.learner.loop.erasure._EVERY_SECONDS", 0.0)
    monkeypatch.setattr(ErasureLog, "is_long", True)
    names = [TopicPartition("history", 0, 0, 1), TopicPartition("history.2", 0, 0, 2), TopicPartition("e", 0)]
    written = ErasureLog(tmp_path / "erasures.log")
    up_to = {"history#0[0]": 1000, "e#0[0]": 20}
    for number, ends in enumerate(({"e#0[0]": 20}, up_to, up_to | {"e#0[0]": 60})):
        written.append([ByKey(time=0.0, by="command", key_hash=f"{number:016x}", up_to=ends)])
    written.append(Applied(time=0.0, through=written.count, store=0, holdout=0))
    checkpoints: Any = Checkpoints()
    files = BackgroundErasure(written, checkpoints, checkpoints, has_history=has_history)
    erasure = Erasure(written, files, checkpoints)
    positions = dict(zip(names, map(Position, [100, 100, 50]), strict=True))
    found = [Partition(name, 0, 100, None, 40 if name.topic == "e" else None) for name in names]
    erasure.register_partitions(found, lambda: positions)
    for _ in range(5):
        erasure.poll_if_due()
    assert written.dropped == (0 if has_history else 2)
