"""Child processes that end with the tests."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import forkserver, pipelines
from tests.support.ports import first_free_port


def start_bound(command, log, *, new_session=False):
    """Start a command that writes to a log file and ends with the tests, also if they are killed.

    Closing its stdin ends it.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "anabranch.core.die_with_parent", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=new_session,
        )


@pytest.fixture
def one_thread():
    """Let torch compute with one thread: with models as small as those of tests, more only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Lives:
    """A program of the tests that calls `serve_lives`: it has imported everything, and forks one life after another."""

    def __init__(self, *command):
        self._process = forkserver.start([*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, *how):
        """Start a life with arguments that JSON can hold, and return its pid."""
        return int(self._send(json.dumps(how)))

    def await_end(self):
        """Wait for the end of the life, which is killed."""
        assert int(self._send()) == -signal.SIGKILL, "it ended by itself"

    def close(self):
        """End the program."""
        self._process.communicate()

    def _send(self, line=""):
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def serve_lives(live):
    """Fork for each line of arguments on stdin, call `live` with them there, and print the pid; after that its end."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            live(*json.loads(line))
            os._exit(0)
        print(pid, flush=True)  # noqa: T201
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def skip_or_fail(reason):
    """Skip the test because a service is not available; fail it under CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def write_pipeline(tmp_path):
    """Writes a pipeline: `write_pipeline(bootstrap, topic, rest, model=LINEAR, *, stream="", width=3) -> Path`."""

    def write(bootstrap, topic, rest, model=pipelines.LINEAR, **more):
        status = f"127.0.0.1:{first_free_port()}"
        return pipelines.write_pipeline(tmp_path, bootstrap, topic, rest, model=model, status=status, **more)

    return write


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Let Ctrl-C end the tests' processes, also where a shell started the tests in the background and ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
