"""What a write costs is found among steps that are slow for other reasons."""

import numpy as np
import pytest

from tests.faults.cost import lost
from tests.faults.cost_program import NOTE

STEP, SLOW, WAITED = 0.010, 0.004, 0.003


def test_the_cost_of_a_write_is_told_from_the_noise_of_the_machine() -> None:
    """Each write has the loop wait 3 ms and slows three steps by 4 ms; one step in ten is ten times as long anyway."""
    dice = np.random.default_rng(0)
    notes = np.zeros(40_000, NOTE)
    took = dice.normal(STEP, 0.001, len(notes)) + np.where(dice.random(len(notes)) < 0.1, 9 * STEP, 0)
    for number, place in enumerate(range(50, len(notes) - 50, 40), start=1):
        notes["version"][place : place + 3] = number  # the step after the third is beside it for a part
        notes["blocked"][place] = WAITED
        took[place] += WAITED
        took[place : place + 3] += SLOW
    notes["end"] = np.cumsum(took)
    found = lost(notes, "version")
    assert found.mean() == pytest.approx(WAITED + 3 * SLOW, abs=0.006)
    assert found.waited.mean() == pytest.approx(WAITED)
    assert found.shams.mean() > 0.02, "the noise of the machine is not looked at"
