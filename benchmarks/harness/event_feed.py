"""A continuous stream: a producer in a separate process, a little ahead of the learner that reads it."""

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import TracebackType

from anabranch.ingest.kafka.producer import EventProducer
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.status.report import read_report
from benchmarks.harness.pipeline import Stream

_AHEAD_ROWS = 8_000
_POLL_SECONDS = 0.02


class EventFeed:
    """Sends messages repeatedly, `rows` events each, at most about 8,000 events ahead of the learner."""

    def __init__(self, stream: Stream, messages: Sequence[bytes], rows: float, cores: set[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._read_rows = context.Value("q", 0)
        arguments = stream, messages, rows, cores, theirs, self._read_rows
        self._process = context.Process(target=_send, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "EventFeed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    def watch(self, state_dir: Path) -> None:
        """Start sending, at most 8,000 events ahead of the learner of that directory."""
        self._ours.send(state_dir)

    def pause(self) -> None:
        """Stop sending, and flush: a producer that is stopped while messages are in flight loses them."""
        self._ours.send(None)
        self._ours.recv()

    def read_by_others(self, rows: int) -> None:
        """Count events that another reader than the learner has read."""
        with self._read_rows.get_lock():
            self._read_rows.value += rows

    def go_on(self) -> None:
        """Continue after a pause."""
        self._ours.send(None)


def _send(
    stream: Stream,
    messages: Sequence[bytes],
    rows: float,
    cores: set[int] | None,
    connection: Connection,
    read_rows: "Synchronized[int]",
) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    state_dir: Path = connection.recv()
    producer = EventProducer(StreamSettings(bootstrap_servers=stream.bootstrap, topics=(stream.topic,)), stream.topic)
    producer.open()
    sent = 0.0
    for message in itertools.cycle(messages):
        while connection.poll() or sent > _finished(state_dir) + read_rows.value + _AHEAD_ROWS:
            if connection.poll(_POLL_SECONDS):
                connection.recv()
                producer.flush()
                connection.send(None)
                connection.recv()
        producer.send(message)
        sent += rows


def _finished(state_dir: Path) -> int:
    report = read_report(state_dir)
    return sum(report.outcomes.values()) if report is not None else 0
