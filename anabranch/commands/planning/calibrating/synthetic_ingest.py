"""The ingest process on synthetic messages: at a rate without a broker, and as fast as possible from a synthetic one.

Run as a module, it takes the arguments of `python -m ingest` after its own.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ingest import __main__ as ingest_main
from ingest.config import StreamSettings
from ingest.kafka import synthetic_broker
from ingest.kafka.client import Client
from ingest.kafka.registry import CLIENTS
from ingest.kafka.synthetic import SyntheticClient

_POLL_SECONDS = 0.1
KAFKA_PYTHON = "kafka-python"
"""The client that the synthetic broker answers."""
_OF_BROKERS = ("security.", "sasl.", "ssl.")
"""Prefixes of the properties that depend on the broker."""


class _Gate:
    """Whether a file exists, asked for at most ten times a second."""

    def __init__(self, path: Path) -> None:
        self._path, self._open, self._due = path, False, 0.0

    def __call__(self) -> bool:
        if not self._open and time.monotonic() >= self._due:
            self._open, self._due = self._path.exists(), time.monotonic() + _POLL_SECONDS
        return self._open


def main() -> int:
    """Read the messages of a file as if they were those of a topic."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--flood", type=Path, required=True)
    options, others = parser.parse_known_args()

    kafka_python = CLIENTS[KAFKA_PYTHON]
    brokers: list[subprocess.Popen[bytes]] = []
    """Each ends when its stdin is closed: with this process."""

    def client(settings: StreamSettings) -> Client:
        values = msgspec.msgpack.decode(options.messages.read_bytes(), type=list[bytes])
        flood = None
        if settings.client == KAFKA_PYTHON:
            flood = kafka_python(_of_broker(settings, options.messages, brokers))
        return SyntheticClient(settings.topics[0], values, options.rate, _Gate(options.flood), time.time, flood)

    CLIENTS.update(dict.fromkeys(CLIENTS, client))
    sys.argv[1:] = others
    return ingest_main.main()


def _of_broker(settings: StreamSettings, messages: Path, brokers: list[subprocess.Popen[bytes]]) -> StreamSettings:
    """Start a broker with the messages and add it to `brokers`; return the settings of a client that reads it."""
    assert settings.dead_letter_topic is not None
    command = [sys.executable, "-P", "-m", synthetic_broker.__name__, str(messages)]
    broker = subprocess.Popen(
        [*command, settings.topics[0], settings.dead_letter_topic], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    brokers.append(broker)
    assert broker.stdout is not None
    address = f"{synthetic_broker.HOST}:{int(broker.stdout.readline())}"
    properties = {name: value for name, value in settings.properties.items() if not name.startswith(_OF_BROKERS)}
    return settings.model_copy(update={"bootstrap_servers": address, "properties": properties})


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
