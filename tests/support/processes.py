"""Child processes that end with the tests."""

import os
import signal
import subprocess
import sys
from typing import Protocol

import pytest

from tests import pipelines
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


def skip_or_fail(reason):
    """Skip the test because a service is not available; fail it under CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(reason)
    pytest.skip(reason)


class PipelineWriter(Protocol):
    """Writes a pipeline into `tmp_path` and returns the path of its config; see `pipelines.write_pipeline`."""

    def __call__(self, bootstrap, topic, rest, model=..., *, stream=..., width=...): ...


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
