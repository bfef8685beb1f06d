"""Exponential back-off with jitter."""

import random
from datetime import timedelta

import pytest

from anabranch.core.backoff import Backoff

FIRST, LONGEST = timedelta(seconds=1), timedelta(seconds=30)


def test_a_delay_is_between_half_and_all_of_its_longest_and_uses_no_number_that_a_model_may_use():
    before = random.getstate()
    backoff = Backoff(timedelta(seconds=8), LONGEST)
    delays = [backoff.seconds_after(1) for _ in range(1000)]
    assert random.getstate() == before
    assert 4 <= min(delays) < 4.5 < 7.5 < max(delays) <= 8


@pytest.mark.parametrize("retry_at_once", [False, True])
def test_delays_double_up_to_the_longest_and_begin_again_after_a_reset(retry_at_once):
    backoff = Backoff(FIRST, LONGEST, retry_at_once=retry_at_once)
    for _ in range(3):
        for longest in ([0.0] if retry_at_once else []) + [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]:
            assert longest / 2 <= backoff.next() <= longest
        backoff.reset()


def test_a_delay_stays_finite_after_any_number_of_failures():
    assert 15 <= Backoff(FIRST, LONGEST).seconds_after(10_000) <= 30


def test_seconds_after_counts_no_failure():
    backoff = Backoff(FIRST, LONGEST)
    backoff.seconds_after(5)
    assert backoff.next() <= 1
