"""Rounds of a whole learner on a device, under the recorder: what is launched, copied and waited for."""

import contextlib
import threading
from collections import Counter

import pytest
import torch

from anabranch.learner.strategies.registry import STRATEGIES
from tests.learner.learner_bench import LearnerBench
from tests.learner.train.test_operations import perceptron
from tests.support.cuda_recorder import CudaRecorder

CUDA = torch.device("cuda", 0)
STEPS = 7
"""Of a round; a block has eight, of which the last waits for the next block."""
pytestmark = pytest.mark.timeout(120)


def run(path, schema, *, graphs, blocks=7, poison=None, recorded=True):
    """Return what a learner of the MLP of 22 layers with batch norm has learned, and what each round has queued."""
    rounds: list[tuple[int, Counter[str]]] = []
    with CudaRecorder() if recorded else contextlib.nullcontext() as cuda:
        torch.manual_seed(0)
        learner = {"batch_size": 4, "max_delay": "1h", "replay_ratio": 1.0, "precision": "fp32"}
        given = {"learner": learner, "strategy": STRATEGIES["er"](), "device": CUDA, "graphs": graphs}
        path.mkdir()
        bench = LearnerBench(path, schema, perceptron(batch_norm=True), blocks, **given)
        bench.stream.change = poison
        bench.parts.replay._ahead = 2 * STEPS
        bench.loop._steps_of_round = lambda: STEPS
        step, take = bench.loop._step, bench.loop._step.take

        def counted(batch, names):
            begin, before = len(cuda.log), bench.loop.state.steps
            taken = take(batch, names)
            queued = [each for each in cuda.log[begin:] if each.thread == threading.current_thread().name]
            kinds = Counter(each.kind if each.kind != "copy" else each.name.partition(",")[0] for each in queued)
            rounds.append((bench.loop.state.steps - before, kinds))
            return taken

        step.take = take if cuda is None else counted
        bench.run()
        bench.finish()
        learned = {**bench.trainer.model.state_dict(), **bench.trainer.update.tensors()[0]}
        skipped = bench.metrics.learner.non_finite._value.get()
        bench.close()
        refused = bench.trainer.runner.without_graphs
    if cuda is not None:
        cuda.check()
    assert refused == ""
    return learned, rounds, skipped


def poison(columns):
    """Let one step be not finite."""
    if columns["offset"][0] == 96:
        columns["feature.x"][9] = torch.nan


@pytest.mark.slow
def test_a_step_is_one_launch_and_a_round_waits_once(schema, tmp_path):
    _, rounds, _ = run(tmp_path / "graphs", schema, graphs=True)
    rounds = rounds[6:]  # without those that have few events to replay, or whose steps are recorded
    full = [kinds for steps, kinds in rounds if steps == STEPS]
    assert len(full) >= 3
    assert sum(kinds["cpu to cuda"] for _, kinds in rounds) <= len(rounds) + 1, "one may be for the round after them"
    for kinds in full:
        assert (kinds["launch"], kinds["wait"], kinds["cuda to cpu"]) == (STEPS, 1, 1), kinds
        assert kinds["op"] < 40, "of the whole round, for its inputs and outputs"


@pytest.mark.slow
def test_rounds_by_graphs_learn_what_plain_ones_learn(schema, tmp_path):
    """Bit for bit, where one step of a round is not finite, and is skipped on the device alone."""
    expected, _, skipped = run(tmp_path / "plain", schema, graphs=False, poison=poison)
    found, rounds, also_skipped = run(tmp_path / "graphs", schema, graphs=True, poison=poison)
    assert sum(kinds["launch"] for _, kinds in rounds) > 2 * STEPS
    assert (skipped, also_skipped) == (1, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_rounds_of_a_whole_learner_on_a_gpu_learn_what_plain_ones_learn(schema, tmp_path):
    expected, _, _ = run(tmp_path / "plain", schema, graphs=False, blocks=30, poison=poison, recorded=False)
    found, _, skipped = run(tmp_path / "graphs", schema, graphs=True, blocks=30, poison=poison, recorded=False)
    assert skipped == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
