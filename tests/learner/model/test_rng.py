"""Generators are restored exactly, whatever was used in a step and after it."""

import random
from itertools import product

import numpy as np
import pytest
import torch

from anabranch.learner.model.rng import GeneratorStates

CPU = torch.device("cpu")


def random_numbers(count):
    return [float(each) for _ in range(count) for each in (np.random.randn(), random.random(), torch.rand(()))]


@pytest.mark.parametrize("first", range(2))
def test_states_before_and_after_a_step_are_restored_by_turns(first):
    """Of two normal numbers that numpy makes at once, the second may be kept before, in and after a step."""
    for in_step, *later in product(range(3), repeat=3):
        np.random.seed(first)
        random.seed(first)
        random_numbers(first)
        before = GeneratorStates(CPU)
        step, follows = random_numbers(in_step), GeneratorStates(CPU)
        expected = random_numbers(3)
        follows.restore()
        before.restore()
        assert random_numbers(in_step) == step
        after = GeneratorStates(CPU, before)
        for count in later:
            before.restore()
            numbers = random_numbers(count)
            assert numbers[: len(step)] == step[: len(numbers)]
        after.restore()
        assert random_numbers(3) == expected


@pytest.mark.parametrize("between", range(3))
def test_states_of_a_step_may_be_those_after_the_step_before(between):
    """Numbers may be taken between the steps, too."""
    np.random.seed(0)
    random.seed(0)
    after: GeneratorStates | None = None
    for in_step, in_other in product(range(3), repeat=2):
        random_numbers(between)
        before = GeneratorStates(CPU, after)
        step = random_numbers(in_step)
        after = GeneratorStates(CPU, before)
        expected = random_numbers(3)
        before.restore()
        assert random_numbers(in_other)[: len(step)] == step[: 3 * in_other]
        after.restore()
        assert random_numbers(3) == expected
        after.restore()
