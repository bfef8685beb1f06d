"""The cost of a write is found among steps that are slow for other reasons."""

import numpy as np
import pytest

from tests.faults.cost import lost, recorded
from tests.faults.cost_program import RECORD

STEP, SLOW, WAITED = 0.010, 0.004, 0.003


@pytest.mark.slow
def test_the_cost_of_a_write_is_distinguished_from_the_noise_of_the_machine():
    """Each write blocks the loop for 3 ms and slows three steps by 4 ms; one step in ten takes ten times as long."""
    dice = np.random.default_rng(0)
    records = np.zeros(40_000, RECORD)
    took = dice.normal(STEP, 0.001, len(records)) + np.where(dice.random(len(records)) < 0.1, 9 * STEP, 0)
    for number, step in enumerate(range(50, len(records) - 50, 40), start=1):
        records["version"][step : step + 3] = number  # the step after the third overlaps with it
        records["blocked"][step] = WAITED
        took[step] += WAITED
        took[step : step + 3] += SLOW
    records["end"] = np.cumsum(took)
    costs = lost(records, "version")
    assert costs.mean() == pytest.approx(WAITED + 3 * SLOW, abs=0.006)
    assert costs.waited.mean() == pytest.approx(WAITED)
    assert costs.shams.mean() > 0.02, "the noise of the machine is not measured"


@pytest.mark.slow
@pytest.mark.any_broker
def test_a_real_learner_is_recorded_at_the_end_of_each_step(kafka, tmp_path):
    records = recorded(tmp_path, kafka.bootstrap, seconds=3, checkpoint_seconds=1, stored=200)
    assert len(records) > 10
    assert np.all(np.diff(records["steps"]) >= 0)
    for kind in ("version", "checkpoint"):
        assert records[kind].max() >= 1, f"no {kind} was being written at any boundary"
