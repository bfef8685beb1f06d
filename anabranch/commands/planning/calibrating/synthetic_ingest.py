"""The ingest process on synthetic messages, without a broker.

Run as a module, it takes the arguments of `python -m ingest` after its own.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from ingest import __main__ as ingest_main
from ingest.config import StreamSettings
from ingest.kafka.client import Client
from ingest.kafka.registry import CLIENTS
from ingest.kafka.synthetic import SyntheticClient

_POLL_SECONDS = 0.1


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

    def client(settings: StreamSettings) -> Client:
        values = msgspec.msgpack.decode(options.messages.read_bytes(), type=list[bytes])
        return SyntheticClient(settings.topics[0], values, options.rate, _Gate(options.flood), time.time)

    CLIENTS.update(dict.fromkeys(CLIENTS, client))
    sys.argv[1:] = others
    return ingest_main.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
