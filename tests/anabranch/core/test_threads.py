"""Threads for jobs, for work in the background and for repeated work: order, bounds, waiting, and exceptions."""

import threading
import weakref
from datetime import timedelta

import pytest

from anabranch.core.job_thread import BackgroundWorker, JobThread, at_start_of_job_threads
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.core.shutdown import Deadline
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def thread():
    thread = JobThread("test", 64_000_000)
    yield thread
    thread.close()


def test_jobs_run_in_order(thread):
    done: list[int] = []
    for number in range(200):
        thread.submit(lambda number=number: done.append(number), 1)
    thread.wait()
    assert done == list(range(200))


def test_submit_blocks_while_too_many_bytes_are_pending(thread):
    gate, second = threading.Event(), threading.Event()
    thread.submit(gate.wait, 60_000_000)
    sender = threading.Thread(target=lambda: (thread.submit(lambda: None, 10_000_000), second.set()))
    sender.start()
    assert not second.wait(0.05), "more bytes are pending than the bound allows"
    gate.set()
    sender.join()
    assert second.is_set()


def test_a_job_larger_than_the_bound_is_accepted_alone(thread):
    assert thread.submit(lambda: None, 10**9) == 0.0
    thread.wait()


def test_a_bug_is_kept_and_later_jobs_run(thread):
    done = threading.Event()
    thread.submit(lambda: 1 // 0)
    thread.submit(done.set)
    thread.wait()
    assert done.is_set()
    with pytest.raises(ZeroDivisionError):
        thread.raise_bug()


def test_wait_ends_with_its_deadline_and_with_the_jobs_submitted_before_it(thread, monkeypatch):
    first, second, waits = threading.Event(), threading.Event(), threading.Event()
    thread.submit(first.wait)
    assert thread.wait(0.01) >= 0.01
    assert thread.busy
    wait_for = thread._wait_for
    monkeypatch.setattr(thread, "_wait_for", lambda *arguments: (waits.set(), wait_for(*arguments))[1])
    waiter = threading.Thread(target=thread.wait)
    waiter.start()
    waits.wait()  # else the second job may come before it
    thread.submit(second.wait)
    first.set()
    waiter.join(PATIENCE_SECONDS)
    assert not waiter.is_alive(), "it waits for a job that was submitted later"
    assert thread.busy
    second.set()
    thread.wait()
    assert not thread.busy


def test_close_runs_the_jobs_that_were_submitted():
    thread, done = JobThread("test"), list[int]()
    for number in range(50):
        thread.submit(lambda number=number: done.append(number))
    thread.close()
    assert done == list(range(50))
    JobThread("idle").close()


def test_a_thread_makes_the_calls_of_its_start_first():
    done: list[object] = []
    before, within, after = JobThread("before"), JobThread("within"), JobThread("after")
    before.start()
    with at_start_of_job_threads(lambda: done.append(threading.current_thread().name)):
        for each in (before, within):
            each.submit(lambda: done.append("job"))
            each.wait()
    after.submit(lambda: done.append("job"))
    for each in (before, within, after):
        each.close()
    assert done == ["job", "within", "job", "job"]


def test_a_call_at_the_start_that_fails_is_a_bug_of_the_thread():
    thread, done = JobThread("test"), list[int]()
    with at_start_of_job_threads(lambda: 1 / 0):
        thread.submit(lambda: done.append(1))
        thread.close()
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        thread.raise_bug()


class Payload:
    """Data that a job has copied."""


def test_jobs_run_in_one_thread_that_waits_for_the_next():
    background, threads = BackgroundWorker("test"), []
    assert not background.busy
    for _ in range(3):
        background.start(lambda: threads.append(threading.current_thread()))
        background.wait()
        assert not background.busy
    assert len(set(threads)) == 1
    assert threads[0].is_alive()


def test_waiting_ends_at_the_deadline_while_the_worker_is_busy():
    background, go_on = BackgroundWorker("test"), threading.Event()
    background.start(go_on.wait)
    background.wait(Deadline(timedelta(0)))
    assert background.busy
    go_on.set()
    background.wait()
    assert not background.busy


def test_a_bug_is_raised_and_the_next_job_runs_anyway():
    background, done = BackgroundWorker("test"), threading.Event()
    background.start(lambda: 1 / 0)
    background.wait()
    with pytest.raises(ZeroDivisionError):
        background.raise_bug()
    background.start(done.set)
    background.wait()
    assert done.is_set()


def test_no_job_runs_that_the_check_before_it_forbids():
    done = threading.Event()
    background = BackgroundWorker("test", lambda: 1 / 0)
    background.start(done.set)
    background.wait()
    assert not done.is_set()
    with pytest.raises(ZeroDivisionError):
        background.raise_bug()


def test_no_reference_to_the_data_of_a_job_is_kept_once_it_is_done():
    background, payload = BackgroundWorker("test"), Payload()
    gone = threading.Event()
    weakref.finalize(payload, gone.set)
    background.start(lambda held=payload: held)  # type: ignore[misc]
    del payload
    background.wait()
    assert gone.wait(PATIENCE_SECONDS)


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
    thread.join(PATIENCE_SECONDS)
    assert not thread.alive


def test_a_thread_that_was_stopped_before_its_first_work_does_none():
    done = list[int]()
    thread = PeriodicThread("test", lambda: done.append(1) or LONG, SOON)
    thread.stop()
    thread.start().join(PATIENCE_SECONDS)
    assert done == []


def test_an_exception_of_the_work_ends_the_thread_and_is_handed_over():
    found = list[BaseException]()
    thread = PeriodicThread("test", lambda: 1 / 0, SOON, ended=found.append).start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.alive
    (exc,) = found
    assert isinstance(exc, ZeroDivisionError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_somebody_to_take_it_an_exception_is_raised_in_the_thread():
    raised = list[object]()
    before, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_type)
    try:
        PeriodicThread("test", lambda: 1 / 0, SOON).start().join(PATIENCE_SECONDS)
    finally:
        threading.excepthook = before
    assert raised == [ZeroDivisionError]
