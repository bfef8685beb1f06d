"""`python -m anabranch.demo.producer`: sends the demo's stream, in its own process like a user's producer.

It begins with the first byte on stdin and stops when stdin ends. It reports its progress as JSON lines on stdout.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

from anabranch.config.loader import load_config
from anabranch.core.logs import configure_logging
from anabranch.demo.dataset import Message, load_digits, messages
from anabranch.runtime.lifecycle import run, stop_on_signals, stop_with_parent
from anabranch.runtime.rate_limiter import Pacer
from ingest.kafka.producer import EventProducer

SAMPLE_EVERY = 10
_PROGRESS_SECONDS = 0.2
_STOP_PATIENCE = timedelta(seconds=5)
"""The embedded broker stops too where the demo was killed, and acknowledges nothing more."""
_STDOUT = 1


class Acknowledged(msgspec.Struct, frozen=True, tag="acknowledged"):
    """The broker has an event that was sent at `time`, in seconds since 1970; reported for every tenth event."""

    partition: str
    """As `topic:partition`."""
    offset: int
    time: float


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The number of messages sent, and the class that the stream is at."""

    sent: int
    phase: int
    poisoned: bool = False
    """Whether labels are wrong on purpose now."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Everything was sent and acknowledged; the last offsets are by `topic:partition`."""

    sent: int
    last_offsets: dict[str, int]


ProducerReport = Acknowledged | Progress | Done


def send(stream: Iterator[Message], rate: float, producer: EventProducer, topic: str, stop: threading.Event) -> int:
    """Send the stream until it ends or `stop` is set, and return how many messages were sent."""
    pacer = Pacer(rate, wait=stop.wait)
    sent, next_progress = 0, 0.0
    for message in stream:
        pacer.pace()
        if stop.is_set():
            break
        sampled = sent % SAMPLE_EVERY == 0 and not message.malformed
        producer.send(message.value, partial(_acknowledged, topic, time.time()) if sampled else None)
        sent += 1
        if time.monotonic() >= next_progress:
            _report(Progress(sent, message.phase, message.poisoned))
            next_progress = time.monotonic() + _PROGRESS_SECONDS
    producer.flush(_STOP_PATIENCE if stop.is_set() else None)
    return sent


def main() -> None:
    """Parse the command line, connect, wait for the word to go, and send."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--events", type=int)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    configure_logging()
    settings = load_config(arguments.config).pipeline.stream
    topic = settings.topics[0]
    producer = EventProducer(settings, topic)
    digits = load_digits(arguments.seed)
    with stop_on_signals() as stop:
        try:
            producer.open()
            if not os.read(sys.stdin.fileno(), 1):
                return
            stop_with_parent(stop)
            stream = messages(digits, arguments.seed, arguments.events)
            sent = send(stream, arguments.rate, producer, topic, stop)
            _report(Done(sent, producer.last_offsets))
        finally:
            producer.close()


def _acknowledged(topic: str, moment: float, partition: int, offset: int) -> None:
    _report(Acknowledged(f"{topic}:{partition}", offset, moment))


def _report(report: ProducerReport) -> None:
    # One write of less than PIPE_BUF is not mixed with those of other threads.
    os.write(_STDOUT, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    sys.exit(run(main))
