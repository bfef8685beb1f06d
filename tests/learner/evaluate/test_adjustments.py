"""The learner probes old events, and responds to a drift."""

import threading

import pytest
import torch

from anabranch.core.shutdown import Deadline
from tests.learner.learner_bench import ROWS, LearnerBench, small_model
from tests.support.waiting import PATIENCE, PATIENCE_SECONDS


@pytest.mark.slow
def test_probing_old_events_does_not_change_the_weights(make_bench):
    """Old events are scored while none is replayed; the statistics of batch norm do not change."""
    bare = make_bench(60, learner={"replay_ratio": 0.0})
    bare.run()
    bare.close()
    measured = make_bench(60, learner={"replay_ratio": "auto", "old_weight": 0.0})
    measured.run()
    assert measured.loop.monitor.ratio.state()["old"][2] > 0, "nothing was scored"
    assert measured.loop.state.rows_replay == 0
    for name, value in bare.trainer.snapshot().items():
        assert torch.equal(measured.trainer.snapshot()[name], value), name


@pytest.mark.slow
def test_a_drift_raises_the_configured_factors_and_notifies_the_strategy(make_bench, monkeypatch):
    actions = {"actions": ["raise-lr", "raise-replay"], "lr_factor": 5.0, "replay_factor": 3.0, "steps": 50}
    bench = make_bench(400, learner={"drift": actions})
    bench.stream.drifts_at = 300 * ROWS
    notified, seen = list[int](), list[tuple[float, float]]()
    monkeypatch.setattr(bench.trainer.strategy, "on_drift", lambda: notified.append(bench.loop.state.steps))
    bench.run(lambda: seen.append((bench.trainer.update.rate(), bench.parts.replay.ratio)))
    assert notified == [bench.loop.monitor.drift.step]
    before, after = seen[: notified[0]], seen[notified[0] :]
    assert set(before[:-1]) == {(1e-3, 1.3)}
    assert before[-1] == (1e-3, pytest.approx(1.3 * 3.0)), "the next step replays more"
    assert after[0][0] == pytest.approx(5e-3)
    assert after[49:] == [(pytest.approx(1e-3), pytest.approx(1.3))] * len(after[49:])


@pytest.mark.slow
def test_a_drift_starts_a_checkpoint_that_has_the_state_before_the_response(make_bench, monkeypatch):
    """A learner that restores this checkpoint responds to the drift."""
    settings = {"drift": {"actions": ["checkpoint", "raise-lr"], "lr_factor": 5.0, "steps": 50}}
    bench, notified, rates = make_bench(400, learner=settings), list[int](), list[float]()
    bench.stream.drifts_at = 300 * ROWS
    monkeypatch.setattr(bench.trainer.strategy, "on_drift", lambda: notified.append(bench.loop.state.steps))
    bench.run(lambda: rates.append(bench.trainer.update.rate()))
    bench.checkpointer.wait(Deadline(PATIENCE))
    assert (bench.loop.monitor.drift.count, bench.checkpointer.number) == (1, 1)
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == notified[0] == bench.loop.monitor.drift.step
    assert found[1].state["trainer"]["groups"][0]["lr"] == 1e-3
    assert rates[: notified[0]] == [1e-3] * notified[0]
    assert max(rates) == rates[notified[0]] == pytest.approx(5e-3)
    bench.close()
    resumed = make_bench(400, learner=settings)
    monkeypatch.setattr(resumed.trainer.strategy, "on_drift", lambda: notified.append(resumed.loop.state.steps))
    resumed.resume()
    assert notified == [found[1].step] * 2
    assert resumed.loop.monitor.drift.factors[0] == 5.0


@pytest.mark.slow
def test_the_weights_do_not_depend_on_when_the_disk_has_written_a_checkpoint(tmp_path, schema):
    settings = {"drift": {"actions": ["checkpoint", "raise-lr", "raise-replay"], "steps": 50}}
    end, weights, monitors = threading.Event(), list[dict[str, torch.Tensor]](), list[object]()
    for name in ("idle", "busy"):
        torch.manual_seed(0)
        bench = LearnerBench(tmp_path / name, schema, small_model(), 400, learner=settings)
        bench.stream.drifts_at = 300 * ROWS
        if name == "busy":
            assert bench.checkpointer.run(lambda: end.wait(PATIENCE_SECONDS))
        bench.run()
        end.set()
        assert bench.loop.monitor.drift.count == 1
        weights.append({name: value.clone() for name, value in bench.trainer.snapshot().items()})
        monitors.append(bench.loop.monitor.state())
        bench.close()
        end.clear()
    assert monitors[0] == monitors[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
