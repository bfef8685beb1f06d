"""A thread that repeats a piece of work: its pauses, how it is woken and stopped, and what ends it."""

import threading
from datetime import timedelta

import pytest

from anabranch.core.periodic_thread import PeriodicThread
from tests.support.waiting import PATIENCE_SECONDS, wait_until

LONG = 3600.0
SOON = timedelta(seconds=20)


def test_work_is_repeated_after_the_pause_that_it_returns():
    pauses, done = [0.0, 0.001, LONG], list[int]()

    def work():
        done.append(len(done))
        return pauses[len(done) - 1]

    with PeriodicThread("test", work, SOON) as thread:
        wait_until(lambda: len(done) == 3, "three times")
    assert not thread.alive
    assert done == [0, 1, 2]


def test_a_wake_ends_the_pause_also_the_first_one_and_one_that_comes_during_the_work():
    begun, may_end, done = threading.Event(), threading.Event(), list[int]()

    def work():
        done.append(len(done))
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return LONG

    with PeriodicThread("test", work, SOON, first=timedelta(seconds=LONG)) as thread:
        assert done == []
        thread.wake()
        assert begun.wait(PATIENCE_SECONDS)
        thread.wake()
        may_end.set()
        wait_until(lambda: len(done) == 2, "the work after a wake that came during the work before")


def test_a_stop_waits_for_the_work_for_no_longer_than_its_patience():
    begun, may_end = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return 0.0

    thread = PeriodicThread("test", work, timedelta(milliseconds=1)).start()
    assert begun.wait(PATIENCE_SECONDS)
    thread.stop()
    assert thread.alive
    may_end.set()
    thread.join(20)
    assert not thread.alive


def test_a_thread_that_was_stopped_before_its_first_work_does_none():
    done = list[int]()
    thread = PeriodicThread("test", lambda: done.append(1) or LONG, SOON)
    thread.stop()
    thread.start().join(20)
    assert done == []


def test_an_exception_of_the_work_ends_the_thread_and_is_handed_over():
    found = list[BaseException]()
    thread = PeriodicThread("test", lambda: 1 / 0, SOON, ended=found.append).start()
    thread.join(20)
    assert not thread.alive
    (exc,) = found
    assert isinstance(exc, ZeroDivisionError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_somebody_to_take_it_an_exception_is_raised_in_the_thread():
    raised = list[object]()
    before, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_type)
    try:
        PeriodicThread("test", lambda: 1 / 0, SOON).start().join(20)
    finally:
        threading.excepthook = before
    assert raised == [ZeroDivisionError]
