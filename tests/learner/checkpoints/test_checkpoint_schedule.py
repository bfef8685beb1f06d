"""When a learner writes checkpoints, and how it continues where one cannot be written."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.errors import SecondLearnerError
from anabranch.learner.state_dir.lock import GENERATION
from anabranch.replay.erasure.erased_events import ByKey
from tests.learner.learner_bench import ROWS, each_tier, no_space
from tests.support.waiting import PATIENCE, PATIENCE_SECONDS


@each_tier
@pytest.mark.slow
def test_checkpoints_are_written_during_training(make_bench, replay):
    bench = make_bench(100, every="1ms", replay=replay)

    def wait_at_times():
        if bench.loop.state.steps % 20 == 0:  # else a slow disk writes one or two in all these steps
            bench.checkpointer.wait(Deadline(PATIENCE))

    bench.run(wait_at_times)
    bench.finish()
    numbers = bench.checkpoints.numbers()
    assert len(numbers) == 3, "there are more or fewer than checkpoints.keep"
    assert numbers[-1] == bench.checkpointer.number > 3
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == bench.loop.state.steps
    output_field = bench.store.tiers.slots - len(bench.store) - bench.store.slots.free
    assert output_field == 0 or replay, "slots are kept after the last checkpoint, which has the payload"


@pytest.mark.parametrize("replay", [{"device_bytes": "170kB"}, {"disk": {"bytes": "250kB"}}], ids=["device", "disk"])
def test_large_steps_wait_for_free_slots(make_bench, replay):
    """Most events are stored, and there are few spare slots: the learner waits for checkpoints and loses no event."""
    replay = {"capacity": 100_000, "admission": "recent", "half_life": "10ms", **replay}
    learner = {"batch_size": 48 * (ROWS - 1), "max_delay": "1h"}
    bench = make_bench(288, every="1ms", replay=replay, learner=learner)
    bench.run()
    bench.finish()
    assert bench.loop.state.steps == 6
    assert bench.store.lost == 0


def test_an_idle_learner_writes_no_checkpoint_until_its_state_changes(make_bench):
    """An erasure and a change of the ledger are changes, also without a step."""
    bench = make_bench(4)

    def checkpoint_if_due():
        bench.checkpointer.request()
        bench.loop.checkpoint_if_due()
        bench.checkpointer.wait(Deadline(PATIENCE))
        return bench.checkpoints.numbers()

    bench.run()
    bench.finish()  # its version, which comes after its checkpoint, is scored
    assert checkpoint_if_due() == [1, 2]
    assert checkpoint_if_due() == [1, 2]
    bench.finish()
    assert bench.checkpoints.numbers() == [1, 2]
    bench.loop.ledger.partitions[0].passed += 1
    assert checkpoint_if_due() == [1, 2, 3]
    bench.log.append([ByKey(time=0.0, by="command", key_hash="0" * 16, up_to={})])
    bench.loop._parts.erasure.poll()
    assert checkpoint_if_due() == [2, 3, 4]
    assert checkpoint_if_due() == [2, 3, 4]


def test_a_learner_that_lost_its_lock_writes_no_more_checkpoints(make_bench, tmp_path):
    bench = make_bench(4)
    (tmp_path / GENERATION).write_text("1")
    bench.run()
    bench.finish()
    (tmp_path / GENERATION).write_text("2")
    with pytest.raises(SecondLearnerError):
        bench.checkpointer.checkpoint_last(bench.loop.state.capture, Deadline(PATIENCE))
    assert bench.checkpoints.numbers() == [1]


def test_a_full_disk_stops_neither_training_nor_deletes_earlier_checkpoints(make_bench, monkeypatch):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.core.atomic_files.os.fsync", no_space)
        bench.checkpointer.checkpoint_last(bench.loop.state.capture, Deadline(PATIENCE))
    assert bench.checkpointer.problem is not None
    assert "No space left" in bench.checkpointer.problem
    assert bench.checkpoints.numbers() == [1]
    bench.checkpointer.checkpoint_last(bench.loop.state.capture, Deadline(PATIENCE))
    assert bench.checkpointer.problem is None
    assert bench.checkpoints.numbers() == [1, 3], "the number of a failed checkpoint was used again"
    (histogram,) = bench.metrics.learner.checkpoint.collect()
    assert [sample.value for sample in histogram.samples if sample.name.endswith("_count")] == [2]


def test_a_checkpoint_on_a_hanging_disk_is_a_problem_until_it_is_written(make_bench, monkeypatch):
    bench = make_bench(4, every="45s")
    bench.run()
    now, go, sync = [1000.0], threading.Event(), os.fsync
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
        patch.setattr("anabranch.core.job_thread.time", clock)
        patch.setattr(
            "anabranch.core.atomic_files.os.fsync", lambda descriptor: (go.wait(PATIENCE_SECONDS), sync(descriptor))[1]
        )
        bench.checkpointer.request()
        bench.loop.checkpoint_if_due()
        now[0] += 90
        assert bench.checkpointer.problem is None
        now[0] += 1
        assert bench.checkpointer.problem is not None
        assert f"{bench.checkpoints.path} has taken more than 90 s" in bench.checkpointer.problem
        go.set()
        bench.checkpointer.wait(Deadline(PATIENCE))
        assert bench.checkpointer.problem is None
    assert bench.checkpoints.numbers() == [1]


def test_a_failed_checkpoint_is_written_again_without_a_change(make_bench, monkeypatch):
    bench = make_bench(4)
    bench.run()
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.core.atomic_files.os.fsync", no_space)
        bench.finish()
    assert bench.checkpoints.numbers() == []
    bench.finish()
    assert bench.checkpoints.numbers() == [2]


def test_new_checkpoints_are_written_if_old_ones_cannot_be_deleted(make_bench, monkeypatch):
    bench = make_bench(4)
    bench.run()
    monkeypatch.setattr(CheckpointPruning, "prune", lambda *_: no_space(0))
    for _ in range(2):
        bench.checkpointer.checkpoint_last(bench.loop.state.capture, Deadline(PATIENCE))
    assert bench.checkpoints.numbers() == [1, 2]
    assert bench.checkpointer.problem is not None
    assert "old checkpoints cannot be deleted" in bench.checkpointer.problem


def test_a_bug_while_a_checkpoint_is_written_stops_the_loop(make_bench, monkeypatch):
    bench = make_bench(4)
    bench.run()
    monkeypatch.setattr(Checkpoints, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.finish()
