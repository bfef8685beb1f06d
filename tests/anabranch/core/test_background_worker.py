"""Work in the background: one piece at a time, in one thread, and no bug is lost."""

import threading
import weakref
from datetime import timedelta

import pytest

from anabranch.core.job_thread import BackgroundWorker
from anabranch.core.shutdown import Deadline
from tests.support.waiting import PATIENCE_SECONDS


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
