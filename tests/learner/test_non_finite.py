"""Scores and weights that are not finite: they are not measured, and no checkpoint has them."""

import numpy as np
import pytest
import torch

from anabranch.core.shutdown import Deadline
from anabranch.learner.model.task import Classification
from tests.learner.learner_bench import ROWS
from tests.support.waiting import PATIENCE


class NonFiniteScores(Classification):
    """Returns NaN as the score of some steps."""

    def __init__(self, steps):
        self.left = list(steps)

    def score(self, output_B, label_B):
        step = self.left.pop(0) if self.left else 0
        return super().score(output_B, label_B) * (torch.nan if step % 3 else 1.0)


@pytest.mark.slow
def test_non_finite_scores_are_ignored_also_after_a_restart(make_bench, caplog):
    settings = {"replay_ratio": "auto", "drift": {"actions": ["raise-lr"]}}
    bench = make_bench(120, learner=settings, task=NonFiniteScores(range(60)))
    bench.run()
    bench.finish()
    assert sum("the task's score of its events is nan" in record.getMessage() for record in caplog.records) == 1
    overall = bench.loop.monitor.prequential.score.overall
    assert overall is not None
    assert 0 <= overall <= 1
    assert bench.loop.monitor.prequential.window < 100 * (ROWS - 1)
    assert (
        bench.versions.manifest(bench.versions.numbers()[-1]).metrics["now"] == bench.loop.monitor.prequential.score.now
    )
    bench.close()
    resumed = make_bench(160, learner=settings)
    resumed.resume()
    assert resumed.loop.monitor.prequential.score.overall == overall
    resumed.run()
    assert resumed.loop.state.steps == 160


@pytest.mark.slow
def test_non_finite_weights_are_not_saved_and_a_restart_restores_the_ones_before(make_bench):
    bench = _with_spoiled_weights(make_bench(20))
    bench.stream.blocks = 60
    _request_while_spoiled(bench)
    bench.finish()
    assert bench.loop.non_finite.in_a_row == 40
    assert bench.checkpoints.numbers() == [1]
    bench.close()
    resumed = make_bench(60)
    resumed.resume()
    assert resumed.loop.state.steps == 20
    resumed.run()
    resumed.finish()
    assert resumed.loop.ledger.totals.outcomes["trained"] == 60 * (ROWS - 1)
    assert resumed.checkpoints.numbers() == [1, 2]


def test_no_checkpoint_is_written_after_a_few_non_finite_steps(make_bench):
    """They are too few for the learner to be unhealthy, but long steps would allow a checkpoint after each."""
    bench = _with_spoiled_weights(make_bench(20))
    bench.stream.blocks = 25
    bench.stop.clear()
    bench.run(lambda: bench.checkpointer.request() if bench.loop.non_finite.in_a_row else None)
    bench.checkpointer.wait(Deadline(PATIENCE))
    assert 0 < bench.loop.non_finite.in_a_row < 10
    assert bench.checkpoints.numbers() == [1]


def test_checkpoints_are_written_again_after_non_finite_events(make_bench):
    bench = make_bench(60)
    _poison(bench, range(21, 41))
    _request_while_spoiled(bench)
    bench.finish()
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == 60
    assert bench.loop.ledger.totals.skipped == {"non_finite": 20 * (ROWS - 1)}


def test_the_stream_is_read_while_non_finite_weights_prevent_checkpoints(make_bench):
    bench = make_bench(200)
    bench.stream.unlabelled = set(range(32, 200))
    _poison(bench, range(21, 33))
    _request_while_spoiled(bench)
    bench.finish()
    assert bench.loop.non_finite.spoiled
    assert bench.loop.ledger.partitions[0].position.offset == 200 * ROWS


def _request_while_spoiled(bench):
    """Run, and request a checkpoint after each step with spoiled weights."""

    def at_boundary():
        if bench.loop.non_finite.spoiled:
            assert not bench.checkpointer.busy
            bench.checkpointer.request()

    bench.stop.clear()
    bench.run(at_boundary)


def _with_spoiled_weights(bench):
    """Run, write a checkpoint, and then set all weights to NaN."""
    bench.run()
    bench.finish()
    with torch.no_grad():
        for weight in bench.trainer.model.parameters():
            weight.fill_(torch.nan)
    return bench


def _poison(bench, blocks):
    """Make the features of some blocks infinite."""

    def change(columns):
        if bench.stream.next in blocks:
            columns["feature.x"][:] = np.inf

    bench.stream.change = change
