"""A state directory has one learner at a time."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.start_report import read_start, starting
from anabranch.learner.errors import SecondLearnerError, StateBusyError
from anabranch.learner.state_dir import lock
from anabranch.learner.state_dir.lock import GENERATION, LOCK, check_generation, is_locked, lock_state_directory
from tests.support.waiting import PATIENCE_SECONDS, wait_until


def test_a_second_learner_is_refused_while_the_first_is_alive(tmp_path):
    with lock_state_directory(tmp_path), pytest.raises(SecondLearnerError, match=str(tmp_path)):
        with lock_state_directory(tmp_path):
            pass


def test_the_generation_increases_with_every_holder(tmp_path):
    generations = []
    for _ in range(3):
        with lock_state_directory(tmp_path / "var") as generation:
            generations.append(generation)
    assert generations == [1, 2, 3]


def test_a_new_generation_is_larger_than_all_known_ones_if_its_file_was_lost(tmp_path):
    with lock_state_directory(tmp_path, known=lambda: 7) as generation:
        assert generation == 8
    with lock_state_directory(tmp_path, known=lambda: 3) as generation:
        assert generation == 9


def test_a_holder_that_has_lost_its_lock_is_detected_by_the_generation(tmp_path):
    with lock_state_directory(tmp_path) as first:
        check_generation(tmp_path, first)
        (tmp_path / LOCK).unlink()  # as a network file system may release it
        with lock_state_directory(tmp_path) as second:
            check_generation(tmp_path, second)
            with pytest.raises(SecondLearnerError, match="lost its lock"):
                check_generation(tmp_path, first)


def test_an_unreadable_generation_is_no_error(tmp_path):
    check_generation(tmp_path, 1)
    (tmp_path / GENERATION).write_text("torn")
    check_generation(tmp_path, 1)


@pytest.mark.process
def test_the_lock_of_a_killed_holder_is_released(tmp_path):
    code = (
        "import sys; from pathlib import Path; from anabranch.learner.state_dir.lock import lock_state_directory\n"
        "with lock_state_directory(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SecondLearnerError), lock_state_directory(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock_state_directory(tmp_path) as generation:
            assert generation == 2


def test_the_error_names_a_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="state_dir"), lock_state_directory(tmp_path / "file" / "var"):
        pass


def test_a_learner_waits_for_one_that_is_stopping(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(lock, "_UNTIL_MARKED", timedelta(milliseconds=50))
    caplog.set_level("INFO", "anabranch.learner.state_dir.lock")

    def hold():
        with lock_state_directory(tmp_path, threading.Event(), timedelta(seconds=60)) as generation:
            return generation

    stop = threading.Event()
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as first:
        first.enter_context(lock_state_directory(tmp_path, stop))
        with pytest.raises(SecondLearnerError):
            hold()
        stop.set()
        wait_until(lambda: (tmp_path / LOCK).read_bytes() == b"stopping")
        second = pool.submit(hold)
        wait_until(lambda: "waiting for its end" in caplog.text)
        assert not second.done()
        first.close()
        assert second.result(PATIENCE_SECONDS) == 2


def test_the_mark_of_a_stopped_holder_does_not_apply_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_UNTIL_MARKED", timedelta(milliseconds=50))
    stop = threading.Event()
    stop.set()
    with lock_state_directory(tmp_path, stop):
        wait_until(lambda: (tmp_path / LOCK).read_bytes() == b"stopping")
    with lock_state_directory(tmp_path), pytest.raises(SecondLearnerError):
        with lock_state_directory(tmp_path, threading.Event(), timedelta(hours=1)):
            pass


def test_a_learner_with_short_patience_waits_for_a_command(tmp_path, caplog):
    caplog.set_level("INFO", "anabranch.learner.state_dir.lock")

    def hold():
        with lock_state_directory(tmp_path, threading.Event(), timedelta(microseconds=1)) as generation:
            return generation

    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as command:
        command.enter_context(starting(tmp_path, "learner"))
        command.enter_context(lock_state_directory(tmp_path, command="anabranch erase"))
        learner = pool.submit(hold)
        wait_until(lambda: "`anabranch erase` is at work" in caplog.text)
        start = read_start(tmp_path, "learner")
        assert start is not None
        assert start.doing == f"waits, since `anabranch erase` is at work in {tmp_path}"
        assert not learner.done()
        command.close()
        assert learner.result(PATIENCE_SECONDS) == 2
    assert caplog.text.count("waiting for") == 1


def test_the_wait_for_a_command_is_limited_and_ends_with_a_dependency_error(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_LONGEST_COMMAND", timedelta(milliseconds=1))
    with lock_state_directory(tmp_path, command="anabranch erase"):
        with pytest.raises(StateBusyError, match="anabranch erase"):
            with lock_state_directory(tmp_path, threading.Event(), timedelta(hours=1)):
                pass


def test_a_stopping_learner_does_not_wait_for_a_command(tmp_path):
    stop = threading.Event()
    stop.set()
    with lock_state_directory(tmp_path, command="anabranch erase"), pytest.raises(StateBusyError):
        with lock_state_directory(tmp_path, stop, timedelta(hours=1)):
            pass


def test_a_learner_without_patience_does_not_wait_for_a_command(tmp_path):
    with lock_state_directory(tmp_path, command="anabranch erase"), pytest.raises(StateBusyError):
        with lock_state_directory(tmp_path):
            pass


@pytest.mark.slow
def test_a_learner_waits_for_a_command_that_has_no_mark_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_UNTIL_MARKED", timedelta(minutes=1))

    def hold():
        with lock_state_directory(tmp_path, threading.Event(), timedelta(hours=1)) as generation:
            return generation

    with ThreadPoolExecutor() as pool, (tmp_path / LOCK).open("wb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        waiting = pool.submit(hold)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        assert waiting.result(PATIENCE_SECONDS) == 1


def test_is_held_neither_locks_nor_creates_the_file(tmp_path):
    assert not is_locked(tmp_path)
    assert not (tmp_path / LOCK).exists()
    with lock_state_directory(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("call", ["open", "ftruncate", "pwrite"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, SettingsError) for number in (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)),
        *(
            (number, DependencyError)
            for number in (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOLCK)
        ),
    ],
)
def test_only_errors_that_a_person_has_to_fix_are_settings_errors(tmp_path, monkeypatch, call, number, kind):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"anabranch.learner.state_dir.lock.os.{call}", fails)
    with pytest.raises(kind, match=os.strerror(number)), lock_state_directory(tmp_path):
        pass
    monkeypatch.undo()
    with lock_state_directory(tmp_path):  # nothing of the one that failed is left
        pass


@pytest.mark.parametrize(
    "call",
    [
        "anabranch.learner.state_dir.lock.Path.read_text",
        "anabranch.core.atomic_files.os.fsync",
        "anabranch.learner.state_dir.lock.fcntl.flock",
    ],
)
def test_a_failing_disk_at_the_lock_or_the_generation_is_a_dependency_error(tmp_path, monkeypatch, call):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(call, fails)
    with pytest.raises(DependencyError, match="Input/output error"), lock_state_directory(tmp_path):
        pass
