"""Device sharing's files: what one process marks and another sees, and what is left when one dies."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.device.cpu_priority import can_restore
from anabranch.learner.device.lease import FOLDER, Field, Servers, hold_learner, hold_server, learners

SLO = timedelta(milliseconds=20)
PATIENCE = timedelta(hours=1)

HOLDER = """
import sys
from datetime import timedelta
from pathlib import Path
from anabranch.learner.device.lease import hold_learner, hold_server

with hold_server(Path(sys.argv[1]), timedelta(milliseconds=20)) as mark, hold_learner(Path(sys.argv[1])):
    with mark.waiting():
        mark.run()
        print("marked", flush=True)
        sys.stdin.readline()
    mark.rest()
    print("answered", flush=True)
    sys.stdin.readline()
"""


class Holder:
    """Another process, with a request that waits until `answer` is called."""

    def __init__(self, state_dir):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.expect("marked")

    def expect(self, word):
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def answer(self):
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.expect("answered")

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder(tmp_path):
    holder = Holder(tmp_path)
    yield holder
    holder.kill()


@contextmanager
def servers(state_dir, patience=PATIENCE):
    seen = Servers(state_dir, patience)
    seen.refresh()
    try:
        yield seen
    finally:
        seen.close()


def test_a_mark_is_seen_by_another_process_until_the_request_is_answered(holder, tmp_path):
    with servers(tmp_path) as seen:
        assert 0 < seen.since(Field.WAITING) <= seen.since(Field.RUNNING) <= time.monotonic_ns()
        assert (seen.alive, seen.total(Field.ANSWERED)) == (1, 0)
        holder.answer()
        assert (seen.since(Field.WAITING), seen.since(Field.RUNNING)) == (0, 0)
        assert (seen.alive, seen.total(Field.ANSWERED)) == (1, 1)


def test_a_dead_holder_waits_for_nothing_and_its_slot_is_taken_again(holder, tmp_path):
    with servers(tmp_path) as seen:
        assert seen.since(Field.WAITING)
        assert len(learners(tmp_path)) == 1
        os.kill(holder.process.pid, signal.SIGKILL)
        holder.process.wait()
        assert (seen.since(Field.WAITING), seen.since(Field.RUNNING), seen.alive) == (0, 0, 0)
        assert learners(tmp_path) == []
        with hold_server(tmp_path, SLO) as mark:
            assert len(list((tmp_path / FOLDER).glob("server-*"))) == 1
            assert (seen.alive, seen.since(Field.WAITING)) == (1, 0)
            with mark.waiting():
                assert seen.since(Field.WAITING)


def test_a_stopped_holder_is_waited_for_only_as_long_as_patience_lasts(holder, tmp_path):
    with servers(tmp_path) as waits, servers(tmp_path, timedelta(0)) as hasty:
        os.kill(holder.process.pid, signal.SIGSTOP)
        assert waits.since(Field.WAITING)
        assert hasty.since(Field.WAITING) == 0
        os.kill(holder.process.pid, signal.SIGCONT)


def test_each_server_has_a_slot_and_the_oldest_mark_counts(tmp_path):
    with hold_server(tmp_path, SLO) as first, hold_server(tmp_path, SLO) as second, servers(tmp_path) as seen:
        assert seen.alive == 2
        with second.waiting():
            oldest = seen.since(Field.WAITING)
            with first.waiting():
                assert seen.since(Field.WAITING) == oldest
        assert seen.since(Field.WAITING) == 0
        assert seen.total(Field.ANSWERED) == 2


def test_the_mark_is_that_of_the_oldest_request_that_is_left(tmp_path):
    with hold_server(tmp_path, SLO) as mark, servers(tmp_path) as seen:
        first, second = mark.waiting(), mark.waiting()
        first.__enter__()
        begin = seen.since(Field.WAITING)
        second.__enter__()
        assert seen.since(Field.WAITING) == begin
        first.__exit__(None, None, None)
        assert seen.since(Field.WAITING) >= begin
        second.__exit__(None, None, None)
        assert seen.since(Field.WAITING) == 0


def test_an_answer_is_late_that_takes_longer_than_the_slo_and_none_that_failed(tmp_path):
    with hold_server(tmp_path, timedelta(microseconds=1)) as mark, servers(tmp_path) as seen:
        with mark.waiting():
            begin = time.monotonic_ns()
            while time.monotonic_ns() < begin + 10_000:
                pass
        with pytest.raises(ValueError, match="broken"), mark.waiting():
            raise ValueError("broken")
        assert (seen.total(Field.ANSWERED), seen.total(Field.LATE)) == (1, 1)
        assert seen.since(Field.WAITING) == 0
    with hold_server(tmp_path, PATIENCE) as mark, servers(tmp_path) as seen:
        with mark.waiting():
            pass
        assert (seen.total(Field.ANSWERED), seen.total(Field.LATE)) == (1, 0)


@given(content=st.binary(max_size=200))
def test_what_is_no_slot_is_passed_by(tmp_path_factory, content):
    state_dir = tmp_path_factory.mktemp("torn")
    (state_dir / FOLDER).mkdir()
    (state_dir / FOLDER / "server-7").write_bytes(content)
    with servers(state_dir) as seen, hold_server(state_dir, SLO) as mark:
        seen.refresh()
        with mark.waiting():
            assert seen.since(Field.WAITING)
        assert (seen.since(Field.WAITING), seen.since(Field.RUNNING), seen.alive) == (0, 0, 1)


def test_a_slot_that_is_torn_is_made_whole_by_its_next_holder(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "server-0").write_bytes(b"\xff" * 30)
    with servers(tmp_path) as seen, hold_server(tmp_path, SLO) as mark:
        assert seen.alive == 0
        seen.refresh()
        assert (seen.alive, seen.since(Field.WAITING), seen.total(Field.ANSWERED)) == (1, 0, 0)
        with mark.waiting():
            assert seen.since(Field.WAITING)


def test_ranks_mark_that_they_yield(tmp_path):
    with hold_learner(tmp_path) as first, hold_learner(tmp_path) as second:
        first[Field.YIELDING], second[Field.ROWS] = 7, 32
        assert [(rank[Field.YIELDING], rank[Field.ROWS]) for rank in learners(tmp_path)] == [(7, 0), (0, 32)]
    assert learners(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / FOLDER).write_text("a file is in the way")
    with pytest.raises(SettingsError, match=r"state_dir: cannot write to .*device_sharing"), hold_server(tmp_path, SLO):
        pass


def test_a_disk_that_fails_is_no_fault_of_the_settings(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("anabranch.learner.device.lease.os.open", fails)
    with pytest.raises(DependencyError, match="Read-only"), hold_server(tmp_path, SLO):
        pass


def test_a_learner_goes_on_when_there_are_no_descriptors_to_find_servers(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(24, "Too many open files")

    servers = Servers(tmp_path, PATIENCE)
    with hold_server(tmp_path, SLO):
        for name in ("os.open", "mmap.mmap", "pathlib.Path.iterdir"):
            with monkeypatch.context() as patch:
                patch.setattr(name, fail)
                servers.refresh()
            assert servers.alive == 0
        servers.refresh()
        assert servers.alive == 1
    servers.close()


LEARNER = """
import sys, threading
from pathlib import Path
from anabranch.learner.device.lease import hold_learner

with hold_learner(Path(sys.argv[1])) as slot:
    python_thread = threading.Thread(target=threading.Event().wait, daemon=True)
    python_thread.start()
    slot.publish_threads(19, 0)
    print(python_thread.native_id, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(not can_restore(), reason="priorities cannot be raised here")
@pytest.mark.process
def test_computing_threads_have_a_low_priority_while_any_server_runs_a_batch_and_no_longer(tmp_path):
    with (
        subprocess.Popen(
            [sys.executable, "-c", LEARNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as learner,
        hold_server(tmp_path, SLO) as first,
        hold_server(tmp_path, SLO) as second,
    ):
        assert learner.stdout is not None
        other_thread = int(learner.stdout.readline())

        def nice():
            return tuple(os.getpriority(os.PRIO_PROCESS, thread) for thread in (learner.pid, other_thread))

        for mark in (first, second):
            mark.run()
            mark.rest()  # maps what is there
        assert nice() == (0, 0)
        first.run()
        assert nice() == (19, 0)
        second.run()
        first.rest()
        assert nice() == (19, 0)
        second.rest()
        assert nice() == (0, 0)
        second.run()
        learner.kill()
        learner.wait()
        second.rest()


def test_a_process_of_another_pid_space_is_left_alone(tmp_path):
    with hold_learner(tmp_path) as slot, hold_server(tmp_path, SLO) as mark:
        slot.publish_threads(19, os.getpriority(os.PRIO_PROCESS, 0))
        slot[Field.STARTED] += 1
        for _ in range(2):
            mark.run()
            assert os.getpriority(os.PRIO_PROCESS, 0) != 19
            mark.rest()
