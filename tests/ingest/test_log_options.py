"""The processes that the learner starts write log lines as it does."""

import json
import logging
import socket
from collections.abc import Iterator

import pytest

from anabranch.core.logs import LogFormat, LogLevel, LogSettings, configure_logging
from ingest.config import StreamSettings
from ingest.transport.tcp import Remote

pytestmark = pytest.mark.process
REFUSED = "a connection was closed: its first message is not a learner's"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    configure_logging()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def lines_of_a_refusal(capfd: pytest.CaptureFixture[str], level: LogLevel, form: LogFormat) -> list[str]:
    """Return what an ingest process logs when something else than a learner connects to it."""
    configure_logging(LogSettings(level, form))
    remote = Remote(StreamSettings(topics=["a"]).resolved("test"), "127.0.0.1")
    try:
        host, _, port = remote.address.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall((3).to_bytes(4, "big") + b"abc")
            assert connection.recv(1) == b""  # closed after the line was written
    finally:
        remote.close()
    return capfd.readouterr().err.splitlines()


def test_the_format_is_that_of_the_learner(capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = lines_of_a_refusal(capfd, "info", "json")
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "ingest.transport.tcp", REFUSED)
    (line,) = lines_of_a_refusal(capfd, "info", "text")
    assert line.endswith(f"WARNING ingest.transport.tcp {REFUSED}")


def test_the_level_is_that_of_the_learner(capfd: pytest.CaptureFixture[str]) -> None:
    assert lines_of_a_refusal(capfd, "error", "text") == []
