"""How long the thread that loads a version waits for requests."""

from datetime import timedelta

import pytest

from serving.rollout.idle_wait import IdleWait


class Clock:
    """Time passes only while the thread sleeps."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait_of(clock: Clock, busy_until: float) -> IdleWait:
    return IdleWait(lambda: clock.now >= busy_until, timedelta(milliseconds=250), clock, clock.sleep)


def test_it_waits_while_requests_run_and_no_longer(clock: Clock) -> None:
    wait = wait_of(clock, 5.1)
    wait()
    assert clock.now == pytest.approx(5.1, abs=0.002)
    before = clock.now
    wait()
    assert clock.now == before


def test_under_a_load_that_does_not_end_it_waits_its_time_once(clock: Clock) -> None:
    wait = wait_of(clock, 100.0)
    for _ in range(50):
        wait()
    assert clock.now == pytest.approx(5.25, abs=0.002)
