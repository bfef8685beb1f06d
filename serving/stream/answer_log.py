"""The log of answers: what HTTP and gRPC answered goes to a topic, as CloudEvents 1.0 in Kafka's binary mode.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md

The event loop only enqueues what it has; a thread encodes and writes it. No answer waits for the log: what does not fit
is dropped and counted.

Legend: B rows of a request.
"""

import dataclasses
import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from anabranch.ingest.kafka.confluent.best_effort import BestEffortWriter
from anabranch.serving.metrics import LogMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.protocol.codec import Request, Signature
from anabranch.serving.protocol.tensors import Array
from anabranch.serving.reporting.report import LogReport
from anabranch.serving.settings import AnswerLogSettings

_EVERY = timedelta(milliseconds=100)
_MOST_BYTES = 32_000_000
_ROW_BYTES = 512
"""Counted for a row besides its numbers and strings."""
_SLICE = 16
"""Rows that are encoded before the event loop may run: it would wait for Python's switch interval, 5 ms, otherwise."""
_FLUSH = timedelta(seconds=5)
_RECENT_SECONDS = 60.0

log = logging.getLogger("anabranch.serving")


class _Answered(NamedTuple):
    """A request without its features, and what it was answered. It keeps no version, whose model takes memory."""

    signature: Signature
    request_id: str
    version: str
    progress: Mapping[str, str]
    request: Request
    answers: Mapping[str, Array]
    time: float
    size: int


class AnswerLog:
    """Logs answers from `start` to `stop`. `add` and `report` belong to the event loop's thread."""

    def __init__(self, deployment: Deployment, settings: AnswerLogSettings, metrics: LogMetrics, instance: str) -> None:
        """Prepare; `instance` names this process among those that answer. Raises SettingsError for properties."""
        assert deployment.source is not None
        self._settings = settings
        self._key = deployment.schema.key
        self._metrics = metrics
        self._headers = [
            ("ce_specversion", b"1.0"),
            ("ce_source", f"/anabranch/{deployment.name}/{instance}".encode()),
            ("ce_type", b"anabranch.answer"),
            ("content-type", b"application/json"),
        ]
        self._progress: Mapping[str, str] | None = None
        self._fragment = b""
        """What each value has of the version with this progress."""
        self._second, self._time = 0, b""
        """A time in seconds since 1970, and as RFC 3339 without a zone."""
        self._below = int(settings.sample * 2**64)
        self._waiting: deque[_Answered] = deque()
        self._added = self._taken = 0
        """Bytes, each counted by one thread."""
        self._too_many = self._too_late = 0
        """Rows that are dropped, each counted by one thread."""
        self._dropped_at: float | None = None
        self._reported = (0, 0)
        self._encode = msgspec.json.Encoder().encode
        self._writer = BestEffortWriter(deployment.source, settings.topic)
        self._end = math.inf
        """When to write no more, by the monotonic clock."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-log", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what was answered, for five seconds at most, and end; blocks, once no request is answered any more."""
        self._end = time.monotonic() + _FLUSH.total_seconds()
        self._stopping.set()
        self._thread.join()

    def add(
        self,
        signature: Signature,
        request_id: str,
        version: ServedVersion,
        request: Request,
        answers: Mapping[str, Array],
    ) -> None:
        """Log answers `[B, ...]` to a request if the hash of its id says so; returns at once.

        `request_id` counts where the request itself names none. All servers choose the same requests.
        """
        name = request.id or request_id
        if self._settings.sample < 1 and _hash(name) >= self._below:
            return
        size = request.rows * _ROW_BYTES + sum(map(_size, (*answers.values(), *request.given.values())))
        if self._added - self._taken + size > _MOST_BYTES:
            self._too_many += request.rows
            return
        self._added += size
        kept = dataclasses.replace(request, features={})
        self._waiting.append(
            _Answered(signature, name, version.name, version.progress, kept, answers, time.time(), size)
        )

    def report(self) -> LogReport:
        """Return its state."""
        return LogReport(topic=self._settings.topic, answers=self._metrics.answers())

    @property
    def problem(self) -> str | None:
        """One sentence if answers were dropped in the last minute."""
        if self._dropped_at is None or time.monotonic() > self._dropped_at + _RECENT_SECONDS:
            return None
        why = self._writer.problem or "they come faster than this server can write them"
        return f'answers are missing in "{self._settings.topic}", the topic of [serving.log]: {why}'

    def _run(self) -> None:
        """Write what is enqueued, again and again; the body of the thread."""
        try:
            while not self._stopping.wait(_EVERY.total_seconds()):
                self._write()
            self._write()
            self._writer.close(timedelta(seconds=max(0.0, self._end - time.monotonic())))
            self._count()
        except Exception:  # the top of a thread: answers do not depend on it
            log.exception("the thread of serving.log ended")
            self._writer.problem = "the thread that writes them has ended; see the log"
            self._dropped_at = float("inf")

    def _write(self) -> None:
        """Write the answers that are enqueued by now; after the end drop them."""
        rows = 0
        for _ in range(len(self._waiting)):
            answered = self._waiting.popleft()
            for key, value, headers in self._events(answered):
                if time.monotonic() > self._end:
                    self._too_late += 1
                    continue
                self._writer.write(key, value, headers)
                rows += 1
                if rows % _SLICE == 0:
                    time.sleep(0)
            self._taken += answered.size
        self._count()

    def _count(self) -> None:
        written, dropped = self._writer.counts()
        now = written, dropped + self._too_many + self._too_late
        if now[1] > self._reported[1]:
            self._dropped_at = time.monotonic()
        self._metrics.count(now[0] - self._reported[0], now[1] - self._reported[1])
        self._reported = now

    def _events(self, answered: _Answered) -> Iterator[tuple[bytes | None, bytes, list[tuple[str, bytes]]]]:
        """Yield key, value and headers of the CloudEvent of each row."""
        signature, name, version, progress, request, answers, seconds, _ = answered
        encode, given = self._encode, request.given
        outputs = {each: signature.answer(request, answers, each) for each in request.outputs}
        keys = given[self._key].tolist() if self._key is not None and self._key in given else None
        logged = [each for each in given if each in signature.features] if self._settings.features else ()
        if progress is not self._progress:  # how far it has learned is as long as the topics have partitions
            fragment = encode({"model_version": version, **progress})[1:-1]
            self._progress, self._fragment = progress, b"," + fragment + b',"outputs":'
        if (second := int(seconds)) != self._second:
            self._second = second
            self._time = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}".encode()
        when = b"%b.%03dZ" % (self._time, 1000 * (seconds - second))
        begin, id_ = b'{"request_id":' + encode(name), name.encode()
        for first in range(0, request.rows, _SLICE):
            part = slice(first, first + _SLICE)
            answered_part = {each: array[part].tolist() for each, array in outputs.items()}
            given_part = {each: given[each][part].tolist() for each in logged}
            for index in range(len(range(request.rows)[part])):
                number = b"%d" % (first + index)
                key = None if keys is None else str(keys[first + index])
                value = b"".join(
                    (
                        *(begin, b',"row":', number, b',"key":', encode(key), self._fragment),
                        encode({each: rows[index] for each, rows in answered_part.items()}),
                        *(
                            (b',"features":', encode({e: rows[index] for e, rows in given_part.items()}))
                            if logged
                            else ()
                        ),
                        b"}",
                    )
                )
                headers = [("ce_id", b"%b-%b" % (id_, number)), ("ce_time", when), *self._headers]
                yield None if key is None else key.encode(), value, headers


def _size(array: Array) -> int:
    """Return how much memory an array takes, with the characters of its strings."""
    return array.nbytes + (sum(map(len, array.reshape(-1).tolist())) if array.dtype.kind == "O" else 0)


def _hash(name: str) -> int:
    """Return a uniform number below 2**64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
