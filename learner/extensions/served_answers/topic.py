"""Reads the answers that servers wrote to a topic. Joins no group and commits no offset: positions are in checkpoints.

Legend: N answers of a poll, K numbers of an output.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.ingest.errors import BrokerError, GapError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Client, Messages
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.evaluate.measures import Kind

_POLL = timedelta(milliseconds=200)
_AT_ONCE = 1000
_MOST_WAITING = 20_000
"""Answers that are read and not taken; beyond them reading pauses."""
_ASK_SECONDS = 1.0
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MOST = float(np.nextafter(np.float32(1), np.float32(0)))
_PATIENCE = timedelta(seconds=5)

log = logging.getLogger(__name__)


class ReadAnswers(NamedTuple):
    """N answers: to which event, by which version, when, and outputs as the task has them, float32 `[N, K]`."""

    source: list[tuple[str, int]]
    """Topic and partition of each event."""
    offset: list[int]
    row: list[int]
    version: list[int]
    time_ms: list[int]
    output_NK: NDArray[np.float32]


class _Value(msgspec.Struct):
    prediction: Any = None
    probabilities: Any = None


class AnswerDecoder:
    """Decodes the messages of `[serving.stream]`."""

    def __init__(self, kind: Kind, columns: int) -> None:
        """`columns`: numbers of an output, K: of classes one each, else 1."""
        self._kind, self._columns = kind, columns
        self._one, self._several = msgspec.json.Decoder(_Value), msgspec.json.Decoder(list[_Value | None])

    def decode(self, messages: Messages) -> tuple[ReadAnswers, int]:
        """Return the answers of messages, and how many of these cannot be read."""
        found, numbers, unreadable = ReadAnswers([], [], [], [], [], np.empty(0, np.float32)), list[Any](), 0
        for index in range(len(messages)):
            try:
                source, offset, version = _of_headers(dict(messages.headers[index]))
                outputs = self._outputs(messages.values[index] or b"")
            except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # msgspec's too
                unreadable += 1
                continue
            for row, output in outputs:
                found.source.append(source)
                found.offset.append(offset)
                found.row.append(row)
                found.version.append(version)
                found.time_ms.append(messages.times_ms[index])
                numbers.append(output)
        output_NK = np.array(numbers, np.float64).reshape(len(numbers), self._columns)
        return found._replace(output_NK=self._as_outputs(output_NK).astype(np.float32)), unreadable

    def _outputs(self, value: bytes) -> list[tuple[int, list[float]]]:
        """Return the numbers of each event of a message that has an answer, by its row."""
        several = value.startswith(b"[")
        values = self._several.decode(value) if several else [self._one.decode(value)]
        found = []
        for row, each in enumerate(values):
            if each is not None:
                output = [each.prediction] if self._kind == "number" else each.probabilities
                numbers = [float(number) for number in output]
                if len(numbers) != self._columns or not all(abs(number) <= _LARGEST for number in numbers):
                    raise ValueError("another number of classes, or a number that is not finite")
                found.append((row, numbers))
        return found

    def _as_outputs(self, values_NK: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what a model would have output: of which the task's predictions are these."""
        if self._kind == "number":
            return values_NK
        if self._kind == "labels":
            part_NK = values_NK.clip(_LEAST, _MOST)
            return np.asarray(np.log(part_NK) - np.log1p(-part_NK))
        return np.log(np.maximum(values_NK, _LEAST))


def _of_headers(headers: Mapping[str, bytes]) -> tuple[tuple[str, int], int, int]:
    """Return topic and partition of the event, its offset, and the version; raises what `decode` catches."""
    name, _, at = headers["anabranch-source"].decode().rpartition("@")
    topic, _, number = name.removesuffix("]").rpartition("[")
    offset, version = int(at), int(headers["model_version"])
    if not (0 <= offset < 1 << 63 and 0 < version < 1 << 63):
        raise ValueError("no offset, or no version")
    return (topic, int(number)), offset, version


class AnswersReader:
    """Reads in a thread from `start` to `stop`; what it cannot read now it reads later."""

    def __init__(
        self, stream: StreamSettings, topic: str, since: timedelta, decoder: AnswerDecoder, rest: Callable[[], object]
    ) -> None:
        """Prepare.

        Args:
            stream: says where the brokers are.
            topic: of the answers.
            since: how far back reading begins at first.
            decoder: of messages.
            rest: called by the thread between two polls.
        """
        changes = {"topics": (topic,), "labels": None, "backfill": None, "on_gap": "earliest", "start": "earliest"}
        self._settings = stream.model_copy(update={**changes, "isolation_level": "read_committed"})
        self._topic, self._since, self._decoder, self._rest = topic, since, decoder, rest
        self.positions: dict[int, int] = {}
        """By partition, the first offset that was not taken."""
        self.problem: str | None = None
        """One sentence while the topic cannot be read."""
        self.unreadable = 0
        """Messages of this process that are no answers of this task."""
        self._lock = threading.Lock()
        self._read: list[ReadAnswers] = []
        self._waiting = 0
        self._next: dict[int, int] = {}
        self._caught_up = float("-inf")
        self._asked_at, self._ends = float("-inf"), dict[TopicPartition, int]()
        """When the broker was asked for ends of partitions that are not all reached yet, and these."""
        self._client: Client | None = None
        self._ask_at, self._count = 0.0, 0
        self._backoff = Backoff(timedelta(seconds=0.2), timedelta(seconds=10))
        self._thread: PeriodicThread | None = None

    def restore(self, positions: Mapping[int, int]) -> None:
        """Begin at the positions of a checkpoint; called before `start`."""
        self.positions, self._next = dict(positions), dict(positions)

    def start(self) -> None:
        """Start the thread, unless it was."""
        if self._thread is None:
            self._thread = PeriodicThread("served-answers", self._run, _PATIENCE).start()

    def stop(self) -> None:
        """End the thread, and disconnect."""
        if self._thread is not None:
            self._thread.stop()
            if not self._thread.alive:
                self._close()

    def take(self) -> tuple[list[ReadAnswers], float]:
        """Return what was read since the last call, and when all that was written by then had been read."""
        with self._lock:
            read, self._read, self._waiting = self._read, [], 0
            self.positions = dict(self._next)
            return read, self._caught_up

    def _run(self) -> float:
        try:
            if self._client is None:
                self._client = self._open()
            if self._waiting < _MOST_WAITING:
                self._poll(self._client)
            self.problem = None
            self._backoff.reset()
            self._rest()
        except AnabranchError as exc:
            if self.problem is None:
                log.warning("served answers: %s", exc)
            self.problem = f'answers of "{self._topic}" are not measured for now: {exc}'
            if isinstance(exc, GapError):  # it is another topic by now, or lost its end
                self._next, self._ends, self._asked_at = {}, {}, float("-inf")
            self._close()
            return self._backoff.next()
        except Exception as exc:  # the top of a thread: training does not depend on it
            log.exception("the thread that reads answers has failed")
            self.problem = f'answers of "{self._topic}" are not measured for now: {exc!r}'
            self._close()
            return self._backoff.next()
        return 0.0 if self._waiting < _MOST_WAITING else _POLL.total_seconds()

    def _open(self) -> Client:
        client = CLIENTS[self._settings.client](self._settings)
        try:
            client.open()
            client.topic_ids()
            self._assign(client, client.partitions())
        except BaseException:
            client.close()
            raise
        return client

    def _assign(self, client: Client, partitions: Sequence[TopicPartition]) -> None:
        """Read these partitions: new ones from their beginning, and at first all of them from `since` ago."""
        if new := [each for each in partitions if each.partition not in self._next]:
            moment = None if self._next else datetime.now(UTC) - self._since
            found = client.first_offsets(new, "earliest", moment)
            self._next = {**self._next, **{each.partition: offset for each, offset in found.items()}}
        client.assign({each: self._next[each.partition] for each in partitions})
        self._count = len(partitions)

    def _poll(self, client: Client) -> None:
        found = client.poll(_POLL, _AT_ONCE)
        for messages in found:
            answers, unreadable = self._decoder.decode(messages)
            self.unreadable += unreadable
            with self._lock:
                self._read.append(answers)
                self._waiting += len(answers.offset)
                self._next = {**self._next, messages.partition.partition: messages.end}
        if (now := time.monotonic()) >= self._ask_at:
            self._ask_at, lag = now + _ASK_SECONDS, client.lag()
            if lag.problem is not None:
                raise BrokerError(lag.problem)
            if self._asked_at <= self._caught_up:  # else those of the question before come first
                self._asked_at, self._ends = now, lag.ends
            if len(partitions := client.partitions()) > self._count:
                self._assign(client, partitions)
        if all(self._next[each.partition] >= end for each, end in self._ends.items()):
            with self._lock:
                self._caught_up = self._asked_at

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
