"""The job thread: order, bounds, waiting, and exceptions of jobs."""

import threading

import pytest

from anabranch.core.job_thread import JobThread, at_start_of_job_threads
from tests.support.waiting import PATIENCE_SECONDS


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
