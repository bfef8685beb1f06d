"""The next batch is taken and copied while the device computes a step, and nothing else changes."""

from collections import Counter

import numpy as np
import torch

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.erasure.erased_events import ByRange
from tests.learner.learner_bench import ROWS, LearnerBench, small_model
from tests.support.cuda_recorder import CudaRecorder

BLOCKS, BATCH = 6, 10


def run(schema, path, *tasks):
    """Run a learner; return it and the order in which batches are copied and steps are taken."""
    torch.manual_seed(0)
    bench = LearnerBench(path, schema, small_model(), BLOCKS, learner={"batch_size": BATCH, "max_delay": "1h"})
    order, step, copy = list[str](), bench.trainer.step, bench.trainer.examples

    def stepped(*given):
        order.append("step")
        result = step(*given)
        order.append("wait")
        return result

    def copied(columns):
        order.append(f"copy {columns['offset'][0]}")
        return copy(columns)

    bench.trainer.step, bench.loop._source._copy = stepped, copied  # type: ignore[method-assign]
    if bench.loop._step.copied == copy:
        bench.loop._step.copied = copied
    bench.run(*(lambda task=task: task(bench) for task in tasks))  # type: ignore[misc]
    return bench, order


def test_a_full_batch_is_copied_before_the_step_before_it_is_waited_for_and_the_weights_are_the_same(
    schema, tmp_path, monkeypatch
):
    plain, order = run(schema, tmp_path / "plain")
    assert order[:4] == ["copy 0", "step", "wait", "copy 11"]
    monkeypatch.setattr("anabranch.learner.loop.training_loop.overlaps", lambda _device: True)
    early, order = run(schema, tmp_path / "early")
    assert order[:5] == ["copy 0", "step", "copy 11", "wait", "step"]
    copies = Counter(name for name in order if name.startswith("copy"))
    assert set(copies.values()) == {1}, "no batch is copied twice"
    expected = plain.trainer.snapshot()
    assert all(torch.equal(value, expected[name]) for name, value in early.trainer.snapshot().items())
    assert early.loop.ledger.state() == plain.loop.ledger.state()
    assert early.store.event_table.copy().tobytes() == plain.store.event_table.copy().tobytes()
    for bench in (plain, early):
        bench.close()


def test_events_that_are_erased_after_their_batch_was_copied_are_not_trained_on(schema, tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.learner.loop.training_loop.overlaps", lambda _device: True)
    done = []

    def erase(bench):
        if not done:
            assert bench.loop._source._copied is not None, "the second batch is on the device"
            done.append(bench.log.append([ByRange(time=0.0, by="test", partition="events#0[0]", first=12, last=13)]))
            bench.erasure.poll()

    bench, order = run(schema, tmp_path, erase)
    assert order.count("copy 11") == 2, "the rest of the batch is copied again"
    assert not set(bench.store.event_table.copy()["offset"].tolist()) & {12, 13}
    assert bench.loop.state.rows_new == BLOCKS * (ROWS - 1) - 2
    bench.close()


def test_a_batch_that_was_taken_early_is_trained_on_by_the_next_learner_after_a_stop(
    schema, tmp_path, monkeypatch, make_bench
):
    monkeypatch.setattr("anabranch.learner.loop.training_loop.overlaps", lambda _device: True)
    bench, _ = run(schema, tmp_path, lambda bench: bench.stop.set())
    assert bench.loop._source._ahead
    bench.finish()
    found = bench.checkpoints.newest()
    assert found is not None
    assert [found[1].step, bench.loop.ledger.partitions[0].position.offset] == [1, 11]
    bench.close()


def test_the_copies_of_the_next_batch_are_queued_before_the_wait_for_a_step(schema):
    cuda_device = torch.device("cuda")
    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}, "precision": "fp32"})
    columns = fake_columns(schema, range(16), label=[0, 1, 2])
    with CudaRecorder() as cuda:
        parts = (small_model().to("cuda"), Classification(), STRATEGIES["none"](), schema, options, cuda_device)
        learner = Trainer(TrainingSetup(*parts, choose_precision("fp32", cuda_device)))
        learner.step(learner.examples(columns))
        ahead = list[Examples]()
        learner.runner.before_wait = lambda: ahead.append(learner.examples(columns))
        new = learner.examples(columns)
        begin = len(cuda.log)
        learner.step(new)
        log = cuda.log[begin:]
        copied = [entry.name for entry in log].index("cpu to cuda, non_blocking")
        # Fused SGD brings its flag to the weights' device, which is the CPU here.
        waits = [i for i, entry in enumerate(log) if entry.kind == "wait" and "OptimizerStep.apply" not in entry.site]
        assert len(ahead) == 1
        assert waits
        assert copied < waits[0]
        assert np.array_equal(ahead[0].label_B.cpu().numpy(), columns["label"])
        ahead.clear()
        del new
    cuda.check()
