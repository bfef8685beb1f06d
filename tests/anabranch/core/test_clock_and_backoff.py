"""The clock by which a process bounds the times that others write, and exponential back-off with jitter."""

import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.backoff import Backoff
from anabranch.core.host_clock import HostClock

HOUR, CONFIRMED = 3600.0, 600.0


class Host:
    """Clocks of a host, of which the wall clock can be wrong by `error` seconds."""

    def __init__(self, error=0.0):
        self.true, self.error = 1_000_000.0, error
        self.clock = HostClock(lambda: self.true + self.error, lambda: self.true - 999_000.0)

    def run(self, seconds, every=1.0):
        """Let time pass, while the clock is asked as often as a loop does."""
        end = self.true + seconds
        while self.true < end:
            self.true = min(end, self.true + every)
            self.clock.now()


@pytest.mark.parametrize("ahead", [2.0, 2 * HOUR, 20 * 365 * 24 * HOUR])
def test_a_wall_clock_that_is_ahead_for_seconds_is_not_believed(ahead):
    host = Host()
    host.run(5)
    host.error = ahead
    host.run(4)
    assert host.clock.now() == pytest.approx(host.true)
    host.error = 0.0
    host.run(4)
    assert host.clock.now() == pytest.approx(host.true)


def test_a_wall_clock_that_stays_ahead_is_believed_after_some_minutes():
    host = Host(error=-2 * HOUR)
    host.run(5)
    host.error = 0.0
    host.run(CONFIRMED)
    assert host.clock.now() == pytest.approx(host.true - 2 * HOUR)
    host.run(2)
    assert host.clock.now() == pytest.approx(host.true)


def test_a_process_that_begins_with_a_clock_ahead_is_right_once_the_wall_clock_is():
    host = Host(error=2 * HOUR)
    host.run(CONFIRMED)
    host.error = 0.0
    assert host.clock.now() == pytest.approx(host.true)


def test_two_steps_forward_are_believed_one_after_the_other():
    host = Host()
    host.run(1)
    host.error = HOUR
    host.run(CONFIRMED / 2)
    host.error = 2 * HOUR
    host.run(CONFIRMED / 2 + 2)
    assert host.clock.now() == pytest.approx(host.true + HOUR)
    host.run(CONFIRMED + 2)
    assert host.clock.now() == pytest.approx(host.true + 2 * HOUR)


@given(
    st.lists(
        st.tuples(
            st.floats(-3 * HOUR, 3 * HOUR),  # the error of the wall clock
            st.floats(0.0, 2 * CONFIRMED),  # for how long
            st.floats(20.0, 2 * CONFIRMED),  # how often the clock is asked
        ),
        min_size=1,
        max_size=12,
    )
)
def test_steps_of_the_wall_clock_back_and_forth(steps):
    host = Host()
    before = host.clock.now()
    asked = [(host.true, host.error)]
    for error, seconds, every in steps:
        host.error, end = error, host.true + seconds
        while host.true < end:
            host.true = min(end, host.true + every)
            asked.append((host.true, error))
            now = host.clock.now()
            recent = [each for at, each in asked if at >= host.true - CONFIRMED]
            assert now <= host.true + min(recent) + 1e-6  # no error that was shorter than that has moved it
            if now < before:
                assert now == pytest.approx(host.true + error)  # it goes back with the wall clock alone
            before = now
    host.run(2 * CONFIRMED + 40, every=20.0)
    assert host.clock.now() == pytest.approx(host.true + host.error)


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
