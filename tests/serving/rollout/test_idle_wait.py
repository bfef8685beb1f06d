"""How long the thread that loads a version waits for requests."""

from datetime import timedelta

import pytest

from anabranch.serving.rollout.candidate_loader import IdleWait


class Clock:
    """Time passes only while the thread sleeps."""

    def __init__(self):
        self.now = 5.0
        self.rests = 0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.rests += 1
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def wait_of(clock, busy_until):
    return IdleWait(lambda: clock.now >= busy_until, timedelta(milliseconds=250), clock, clock.sleep)


def test_it_waits_while_requests_run_and_no_longer(clock):
    wait = wait_of(clock, 5.1)
    wait()
    assert clock.now == pytest.approx(5.1, abs=0.002)
    before = clock.now
    wait()
    assert clock.now == before


def test_under_a_load_that_does_not_end_it_waits_its_time_once(clock):
    wait = wait_of(clock, 100.0)
    for _ in range(50):
        wait()
    assert clock.now == pytest.approx(5.25, abs=0.002)


def test_it_rests_between_pieces_of_some_length_so_that_a_request_that_arrives_is_noticed(clock):
    wait = wait_of(clock, 0.0)
    wait()
    clock.now += 0.0001
    wait()
    assert clock.rests == 0, "the pieces are short"
    clock.now += 0.0002
    wait()
    assert clock.rests == 1
    wait()
    assert clock.rests == 1, "it has just rested"


def test_a_request_that_was_noticed_while_it_rested_runs_before_the_next_piece(clock):
    arrived = clock.now + 0.00101
    wait = IdleWait(lambda: not arrived <= clock.now < arrived + 0.05, timedelta(milliseconds=250), clock, clock.sleep)
    clock.now += 0.001
    wait()
    assert clock.now == pytest.approx(arrived + 0.05, abs=0.002)


def test_it_rests_no_longer_once_its_time_is_over(clock):
    wait = wait_of(clock, 100.0)
    wait()
    rests = clock.rests
    clock.now += 1
    wait()
    assert clock.rests == rests
