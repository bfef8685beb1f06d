"""The random numbers of a step: the same whenever they are asked for, and others for another step or seed."""

import numpy as np

from anabranch.replay.sample_plan import StepRng


def numbers(seed, step):
    return StepRng(seed).for_step(step).integers(0, 2**62, 8).tolist()


def test_numbers_are_a_function_of_seed_and_step():
    chance = StepRng(7)
    for step in (3, 0, 3, 10**12):
        assert chance.for_step(step).integers(0, 2**62, 8).tolist() == numbers(7, step)


def test_another_seed_or_step_has_other_numbers():
    seeds = (0, 1, 2, -1, 2**63, 12345)
    assert len({tuple(numbers(seed, step)) for seed in seeds for step in range(5)}) == len(seeds) * 5


def test_numbers_of_neighbouring_seeds_and_steps_have_nothing_to_do_with_each_other():
    samples = np.array([StepRng(seed).for_step(step).random(200) for seed in range(4) for step in range(4)])
    correlation = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlation).max() < 5 / np.sqrt(200)
