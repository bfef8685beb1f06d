"""A learner that runs out of memory at any operation loses no event and trains on none twice.

Where it cannot continue, its process ends with exit code 1, and the next one goes on from the newest checkpoint.
"""

import functools
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from anabranch.core.shutdown import Deadline
from anabranch.learner.device import out_of_memory as handling
from anabranch.learner.device.out_of_memory import MemoryUse
from anabranch.learner.errors import MemoryShortageError
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train import trainer
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.tiers import memory
from tests.learner import learner_bench
from tests.learner.learner_bench import ROWS, LearnerBench, small_model
from tests.support.waiting import PATIENCE

BLOCKS = 4
OOM = "CUDA out of memory. Tried to allocate 2.00 MiB"
TRAINED = [offset for offset in range(BLOCKS * ROWS) if offset % ROWS != 5]


class OneFault(TorchDispatchMode):
    """Runs out of memory at the n-th operation that allocates; counts them."""

    def __init__(self, at, stopped):
        super().__init__()
        self.at = at
        self.count = 0
        self.was_stopped = False
        """Whether the learner had been stopped before it."""
        self._stopped = stopped

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(returned.alias_info is None for returned in func._schema.returns):
            self.count += 1
            if self.count == self.at:
                self.was_stopped = self._stopped()
                raise torch.OutOfMemoryError(OOM)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_a_shared_device(monkeypatch):
    """Let the CPU be a device that others use too, with a store whose work is done in this thread."""
    monkeypatch.setattr(handling, "is_shared", lambda _device: True)
    monkeypatch.setattr(handling, "memory_use", lambda _device: MemoryUse(10**9, 80 * 10**9, 10**9))
    monkeypatch.setattr(handling, "_BACKOFF", Backoff(timedelta(seconds=0.01), timedelta(seconds=0.01)))
    monkeypatch.setattr(memory, "is_host", lambda _device: False)
    monkeypatch.setattr(trainer, "overlaps", lambda _device: True)
    monkeypatch.setattr(learner_bench, "BackgroundStore", functools.partial(BackgroundStore, in_background=False))


def newest(bench):
    found = bench.checkpoints.newest()
    assert found is not None
    return found[1]


def live(make, at, checkpoint_at):
    """Run a learner with a fault and a checkpoint after a step, and others after it until one has reached the end.

    Returns the operations that allocate, of the first, and how many processes there were.
    """

    def checkpoint():
        if bench.loop.state.steps == checkpoint_at:
            bench.checkpointer.request()
        bench.checkpointer.wait(Deadline(PATIENCE))

    fault = OneFault(at, lambda: bench.stop.is_set())
    for processes in (1, 2):
        bench, error = make(), None
        if bench.found is not None:
            bench.resume()
        try:
            with fault:
                bench.run(checkpoint)
                bench.finish()
        except Exception as exc:  # noqa: BLE001 any error ends a process
            error = exc
        if error is None:
            break
        assert not isinstance(error, AnabranchError), "exit code 2 or 3"
        assert processes == 1, "without a fault"
        bench.close()
    (end,) = [account.position.offset for account in bench.loop.ledger.partitions]
    # One that is stopped leaves its last batch to the next process.
    assert end == BLOCKS * ROWS or (fault.was_stopped and end > (BLOCKS - 1) * ROWS)
    trained = [offset for offset in TRAINED if offset < end]
    assert bench.loop.state.rows_new == len(trained)
    assert sorted(bench.store.event_table.copy()["offset"].tolist()) == trained
    steps = {int(state["step"]) for state in bench.trainer.update.optimizer.state.values()}
    assert steps == {bench.loop.state.steps}, "no event is trained on twice"
    assert newest(bench).step == bench.loop.state.steps
    bench.close()
    return fault.count, processes


def sweep(schema, path, strategy, first, stride, sampling="uniform", batch_size=ROWS - 1):
    """Run out of memory at each `stride`-th operation; return how many processes each run took."""
    # A learner of the bench cannot resume within a block.
    checkpoint_at = 3 if batch_size == ROWS - 1 else None

    def learner_in(folder):
        def make():
            torch.manual_seed(0)
            options: dict[str, Any] = {"strategy": STRATEGIES[strategy](), "replay": {"sampling": sampling}}
            learner = {"batch_size": batch_size, "max_delay": "1h"}
            return LearnerBench(folder, schema, small_model(), BLOCKS, learner=learner, **options)

        return make

    total, _ = live(learner_in(path / "0"), 0, checkpoint_at)
    assert total > 100
    return [live(learner_in(path / str(at)), at, checkpoint_at)[1] for at in range(first, total + 1, stride)]


@pytest.mark.timeout(60)
def test_memory_that_runs_out_anywhere_loses_no_event(schema, tmp_path):
    processes = sweep(schema, tmp_path, "er", first=1, stride=151)
    assert 1 in processes, "most faults are survived"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "sampling"), [("er", "loss"), ("der", "uniform")])
def test_memory_that_runs_out_at_any_operation_loses_no_event(schema, tmp_path, strategy, sampling):
    processes = sweep(schema, tmp_path, strategy, first=2, stride=17, sampling=sampling)
    assert processes.count(1) > len(processes) / 2, "most faults are survived"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_that_runs_out_while_a_batch_is_taken_early_loses_no_event(schema, tmp_path):
    processes = sweep(schema, tmp_path, "er", first=2, stride=29, batch_size=10)
    assert processes.count(1) > len(processes) / 2, "most faults are survived"


def test_a_learner_that_is_stopped_while_it_waits_for_memory_saves_its_progress(make_bench, monkeypatch):
    bench = make_bench(BLOCKS)
    step, steps = bench.trainer.step, [0]

    def short(*given):
        steps[0] += 1
        if steps[0] > 2:
            raise MemoryShortageError("cpu has too little memory", undone=True)
        return step(*given)

    monkeypatch.setattr(bench.trainer, "step", short)
    monkeypatch.setattr(handling, "_BACKOFF", Backoff(timedelta(hours=1), timedelta(hours=1)))
    monkeypatch.setattr(bench.loop, "_while_waiting", [bench.stop.set])
    bench.run()
    bench.finish()
    assert newest(bench).step == 2
    bench.close()
    other = make_bench(BLOCKS)
    other.resume()
    other.run()
    other.finish()
    assert other.loop.state.rows_new == len(TRAINED)
    assert sorted(other.store.event_table.copy()["offset"].tolist()) == TRAINED


def test_a_checkpoint_without_memory_to_read_the_store_is_skipped_and_the_next_one_is_written(make_bench, monkeypatch):
    bench, errors = make_bench(BLOCKS), [torch.OutOfMemoryError(OOM) for _ in range(2)]  # the last one has two tries
    bench.run()
    read = memory.DeviceRows.read

    def short(rows, *given):
        if errors:
            raise errors.pop()
        return read(rows, *given)

    monkeypatch.setattr(memory.DeviceRows, "read", short)
    bench.finish()
    assert not errors
    assert bench.checkpointer.problem is not None
    assert f"no memory to read the stored events: {OOM}" in bench.checkpointer.problem
    assert bench.checkpoints.newest() is None
    bench.finish()
    assert bench.checkpointer.problem is None
    assert newest(bench).step == BLOCKS
    bench.close()
    other = make_bench(BLOCKS)
    other.resume()
    assert sorted(other.store.event_table.copy()["offset"].tolist()) == TRAINED


def test_a_shortage_that_lasts_ends_the_learner_without_a_checkpoint_of_the_middle_of_a_step(make_bench, monkeypatch):
    bench = make_bench(BLOCKS)

    def fail(*_):
        raise torch.OutOfMemoryError(OOM)

    monkeypatch.setattr(bench.loop._replay, "add", fail)
    with pytest.raises(MemoryShortageError, match=f"cpu has too little memory.*{OOM}") as raised:
        bench.run()
    assert not raised.value.undone, "the weights have changed"
    assert bench.checkpoints.newest() is None
