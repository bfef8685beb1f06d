"""Child processes that end with the tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest

from tests import pipelines
from tests.support.ports import first_free_port

PATIENCE_SECONDS = 60


def start_bound(command: Sequence[str], log: Path, *, new_session: bool = False) -> subprocess.Popen[bytes]:
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
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: with models as small as those of tests, more only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test because a service is not available; fail it under CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(reason)
    pytest.skip(reason)


class PipelineWriter(Protocol):
    """Writes a pipeline into `tmp_path` and returns the path of its config; see `pipelines.write_pipeline`."""

    def __call__(
        self, bootstrap: str, topic: str, rest: str, model: str = ..., *, stream: str = ..., width: int = ...
    ) -> Path: ...


@pytest.fixture
def write_pipeline(tmp_path: Path) -> PipelineWriter:
    """Writes a pipeline: `write_pipeline(bootstrap, topic, rest, model=LINEAR, *, stream="", width=3) -> Path`."""

    def write(bootstrap: str, topic: str, rest: str, model: str = pipelines.LINEAR, **more: Any) -> Path:
        status = f"127.0.0.1:{first_free_port()}"
        return pipelines.write_pipeline(tmp_path, bootstrap, topic, rest, model=model, status=status, **more)

    return write


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let Ctrl-C end the tests' processes, also where a shell started the tests in the background and ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
