"""A rate is held smoothly."""

import pytest

from anabranch.runtime.rate_limiter import Pacer


class Clock:
    """Time that passes only by waiting, and by `now` being set."""

    def __init__(self):
        self.now = 100.0
        self.waits = []

    def read(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_without_a_rate_nothing_waits(clock):
    pacer = Pacer(None, clock.read, clock.wait)
    for _ in range(1000):
        pacer.pace()
    assert clock.waits == []


@pytest.mark.parametrize("rate", [0.5, 10, 600, 20_000])
def test_the_rate_is_held_in_small_chunks(clock, rate):
    pacer = Pacer(rate, clock.read, clock.wait)
    events = max(10, int(rate * 3))
    for _ in range(events):
        pacer.pace()
    assert (events - 1) / (clock.now - 100.0) == pytest.approx(rate, rel=0.02)
    assert max(clock.waits) <= max(1 / rate, 0.03)


def test_lost_time_is_made_up_for_by_half_a_second_s_events_and_no_more(clock):
    pacer = Pacer(100, clock.read, clock.wait)
    pacer.pace()
    clock.now += 60
    at_once = 0
    while not clock.waits:
        pacer.pace()
        at_once += 1
    assert 40 <= at_once <= 60
