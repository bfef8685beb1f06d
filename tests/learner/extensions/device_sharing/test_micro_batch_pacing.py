"""Device sharing's two rules, on a clock that is simulated."""

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from anabranch.learner.extensions.device_sharing.micro_batch_pacing import (
    LEAST_ROWS,
    MicroBatchController,
    TrainingBudget,
)

SLO = 0.02
INTERVAL = 0.5


@dataclass
class Machine:
    """A device on which a micro-batch of n events takes `fixed + n * each` seconds, and a request `answer`."""

    each: float
    fixed: float = 0.0002
    answer: float = 0.003
    rate: float = 200.0

    def interval(self, rows, generator):
        """Return how many requests were answered, how many too late, and the longest wait for training."""
        waits = [generator.random() * (self.fixed + rows * self.each) for _ in range(int(self.rate * INTERVAL))]
        late = sum(wait + self.answer > SLO for wait in waits)
        return len(waits), late, max(waits, default=0.0)


def run(machine, step, intervals, seed=0):
    """Return the sizes over time, and the part of the later half's answers that was late."""
    pace, generator, rows = MicroBatchController(SLO), random.Random(seed), step
    sizes, answered, late = [], 0, 0
    for interval in range(intervals):
        counts = machine.interval(rows, generator)
        rows = pace.interval(step, *counts) or step
        sizes.append(rows)
        if interval >= intervals // 2:
            answered, late = answered + counts[0], late + counts[1]
    return sizes, late / max(1, answered)


@given(
    each=st.floats(1e-6, 1e-3), step=st.integers(4, 2000), seed=st.integers(0, 1000), answer=st.floats(0.0005, 0.012)
)
def test_the_slo_is_kept_where_micro_batches_can_be_small_enough(each, step, seed, answer):
    machine = Machine(each, answer=answer)
    sizes, late = run(machine, step, 400, seed)
    assert all(LEAST_ROWS <= rows <= step for rows in sizes)
    small_enough = machine.fixed + 4 * each + answer < SLO
    if small_enough:
        assert late <= 0.015
    largest = (SLO - answer - machine.fixed) / each
    if largest > step:
        assert sizes[-1] == step, "a step that is never in the way is left whole"
    elif small_enough:
        assert sum(sizes[200:]) / 200 >= 0.25 * largest, "training keeps what the slo leaves it"


@given(data=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 10)), max_size=200))
def test_no_history_makes_a_micro_batch_smaller_than_two_events(data):
    pace = MicroBatchController(SLO)
    for answered, late, wait in data:
        rows = pace.interval(64, max(answered, late), late, wait)
        assert rows is None or LEAST_ROWS <= rows < 64


def test_late_answers_that_are_not_trainings_doing_make_nothing_smaller():
    pace = MicroBatchController(SLO)
    assert [pace.interval(64, 100, 100, 0.001) for _ in range(50)] == [None] * 50


def test_the_size_falls_at_once_and_comes_back_when_requests_end():
    pace = MicroBatchController(SLO)
    assert pace.interval(64, 100, 50, 0.05) == 32
    assert pace.interval(64, 100, 50, 0.05) == 16
    sizes = [pace.interval(64, 0, 0, 0.0) for _ in range(200)]
    assert sizes[-1] is None
    whole = [rows or 64 for rows in sizes]
    assert whole == sorted(whole)


def test_a_limit_of_another_kind_is_kept():
    pace = MicroBatchController(SLO)
    assert pace.interval(64, 0, 0, 0.0) is None
    assert pace.interval(64, 100, 50, 0.05) == 32
    assert pace.interval(8, 0, 0, 0.0) is None
    assert pace.interval(2, 100, 100, 1.0) is None


@given(
    fraction=st.floats(0.05, 0.95),
    steps=st.lists(st.floats(1e-4, 0.3), min_size=1, max_size=100),
)
def test_training_gets_its_fraction_in_a_flood_of_requests(fraction, steps):
    """Requests always wait, so that training yields whenever it may."""
    allowance, trained, yielded, too_long = TrainingBudget(fraction), 0.0, 0.0, 0.0
    for seconds in steps:
        if allowance.left > 0:
            too_long = seconds / 10
            yielded += allowance.left + too_long
            allowance.yielded(allowance.left + too_long)
        trained += seconds
        allowance.trained(seconds)
        assert trained >= fraction * (trained + yielded - 1.0 - too_long) - 1e-9, "but for the one second at the begin"


@given(steps=st.lists(st.floats(1e-4, 0.05), min_size=50, max_size=100))
def test_requests_get_the_rest(steps):
    allowance, yielded = TrainingBudget(0.25), 0.0
    for seconds in steps:
        yielded += allowance.left
        allowance.yielded(allowance.left)
        allowance.trained(seconds)
    assert yielded >= 3 * sum(steps[:-1])


def test_without_a_fraction_requests_have_the_device_while_there_are_any():
    allowance = TrainingBudget(0.0)
    allowance.yielded(1e9)
    allowance.trained(0.01)
    assert allowance.left == float("inf")
