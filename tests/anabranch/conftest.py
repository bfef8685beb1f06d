"""What the tests of the command line share: waiting for a condition, an example pipeline, commands as processes."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from anabranch import cli
from anabranch.commands.init.command import write_example
from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory):
    """What a test imports from its folders is not what the next one finds by the same name."""
    path, folder = sys.path[:], str(tmp_path_factory.getbasetemp())
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture
def until():
    """Returns the first true value of a callable: `until(condition, "what is awaited")`."""
    return wait_until


@pytest.fixture
def is_gone():
    """Whether a process has ended; one that nobody has waited for counts as ended."""

    def has_ended(pid):
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return has_ended


@pytest.fixture
def anabranch(capsys):
    """Runs a command in this process; returns exit code, stdout and stderr."""

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def example(tmp_path):
    """The example pipeline, in its own folder."""
    folder = tmp_path / "example"
    write_example(folder)
    return folder


@pytest.fixture
def spawn():
    """Starts `python -c/-m ...` with pipes, in a new session; what is left of it is killed at the end.

    What is of `anabranch` is forked.
    """
    processes = []

    def start(*arguments, environment=None, **options):
        command = [str(each) for each in arguments]
        process = (forkserver.start if command[:2] == ["-m", "anabranch"] else start_python)(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            **options,
        )
        processes.append(process)
        return process

    def start_python(command, **options):
        return subprocess.Popen([sys.executable, *command], **options)

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A child in another session, which a failing test has left behind, keeps the pipes open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=PATIENCE_SECONDS)
