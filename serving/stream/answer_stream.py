"""Answers the messages of topics: reads and decodes as ingest does, predicts by the batcher and the versions of HTTP.

Of two threads one reads and decodes, and the other writes what is answered, in the order of reading. Between them the
event loop predicts. Each round of the writer is one transaction, with all that is answered by then.

Legend: B rows that a model answers, M messages.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.ingest.errors import BrokerError, GapError
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Reject
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.confluent.read_process_write import GroupClient, Record, TransactionalWriter, Writer
from anabranch.ingest.kafka.dead_letters import DeadLetter
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import HoldOut
from anabranch.ingest.worker.block_builder import Assembled, BlockBuilder, Incoming, dead_letter
from anabranch.serving.errors import BadRequestError, FailedError, TooManyRequestsError, UnavailableError
from anabranch.serving.inference.service import Service
from anabranch.serving.metrics import StreamMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.protocol.codec import Request
from anabranch.serving.protocol.tensors import Array
from anabranch.serving.reporting.report import AnswersReport
from anabranch.serving.settings import ServingSettings

_POLL = timedelta(milliseconds=100)
_LAG_SECONDS = 2.0
_REST_SECONDS = 1.0
"""How long nothing may be read until the group is polled all the same: short pauses are usual."""
_MOST_READ = 1024
"""Messages that are decoded together."""
_MOST_BYTES = 32_000_000
"""Bytes of messages that are read and not answered yet; beyond them reading pauses."""
_AT_ONCE = 2
"""Batches in the batcher: one runs, and one waits, so that requests over HTTP wait for two at most."""
_LETTER_TIMEOUT = timedelta(seconds=10)
_REVOKED_SECONDS = 30.0
"""How long partitions that go to another member are held back until what was read of them is answered."""
_SOURCE = "anabranch-source"
_PEER = "serving.stream"

log = logging.getLogger("anabranch.serving")


class AnswerStream:
    """Answers messages from `start` to `stop`; what ends a membership of the group is retried with a new one."""

    def __init__(
        self,
        deployment: Deployment,
        settings: ServingSettings,
        service: Service,
        metrics: StreamMetrics,
        on_error: Callable[[BaseException], None],
        instance: str,
    ) -> None:
        """Prepare.

        Args:
            deployment: says where events come from, and how they are decoded.
            settings: with the section `stream`.
            service: predicts, in the event loop's thread.
            metrics: gets the counts.
            on_error: gets errors that end the process, in a thread.
            instance: names this process among those that answer.
        """
        assert settings.stream is not None
        assert deployment.source is not None
        self.settings = settings.stream
        self.source = deployment.source.model_copy(
            update={
                "topics": settings.stream.topics,
                "group_id": settings.stream.group_of(deployment.name),
                "labels": None,
                "backfill": None,
                "unlabelled": "store",  # an event that is to be answered has no label
            }
        )
        self.transactional_id = f"{self.source.group_id}-{instance}"
        self.metrics = metrics
        self.schemas = writer_schemas(self.source)
        self.builder = BlockBuilder(deployment.schema, self.source, HoldOut(fraction=0, seed=0), self.schemas)
        self.features = [feature.name for feature in deployment.schema.features]
        self.stopping = threading.Event()
        self.problems: dict[str, str] = {}
        """One sentence for each part that cannot go on: `broker`, `registry`, `letters` or `model`."""
        self.lag, self.partitions = 0, 0
        self._service = service
        self._max_batch = min(settings.max_batch, settings.max_queue)
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name="serving-stream", daemon=True)

    def start(self) -> None:
        """Start the threads; called in the event loop, in which predictions run."""
        self.loop = asyncio.get_running_loop()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._thread.start()

    def stop(self) -> None:
        """Read no more, write what is answered, and leave the group; called in another thread than the loop's."""
        self.stopping.set()
        self._thread.join()

    def has_version(self) -> bool:
        """Return whether there is a version to answer by. Thread-safe."""
        return self._service.version is not None

    def report(self) -> AnswersReport:
        """Return its state. Called in the event loop's thread about once a second."""
        p50, p99 = self.metrics.percentiles()
        return AnswersReport(
            topics=list(self.settings.topics),
            output=self.settings.output,
            partitions=self.partitions,
            messages=self.metrics.messages(),
            per_second=self.metrics.answers_per_second(),
            lag=self.lag,
            p50_seconds=p50,
            p99_seconds=p99,
        )

    async def predict(self, features: Mapping[str, Array], rows: int, is_over: Callable[[], bool]) -> "Predicted":
        """Return the answers to `rows` events, all by one version; wait while there is none, or it answers nothing.

        Raises:
            RequestError: `is_over` returned that nobody waits for the answers any more.
        """
        backoff = Backoff(timedelta(milliseconds=10), timedelta(seconds=1))
        async with self._turns:
            while True:
                refused: dict[int, str] = {}
                try:
                    version = self._service.resident(self._service.name)
                    edges = [*range(0, rows, self._max_batch), rows]
                    parts = [
                        part
                        for begin, end in itertools.pairwise(edges)
                        for part in await self._parts(version, features, begin, end, refused)
                    ]
                except (UnavailableError, TooManyRequestsError, FailedError) as exc:
                    if is_over():
                        raise
                    if not isinstance(exc, TooManyRequestsError):
                        self.problems["model"] = f"messages wait for their answers: {exc}"
                else:
                    self.problems.pop("model", None)
                    outputs = (
                        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
                    )
                    return Predicted(version, outputs, refused)
                await asyncio.sleep(backoff.next())

    async def _parts(
        self, version: ServedVersion, features: Mapping[str, Array], begin: int, end: int, refused: dict[int, str]
    ) -> list[dict[str, Array]]:
        """Predict rows `[begin, end)`; add to `refused` the rows on which the model fails, found by bisection."""
        part = {name: column[begin:end] for name, column in features.items()}
        request = Request(part, end - begin, None, {}, {}, None)
        try:
            answers = await self._service.predict_by(version, request, _PEER)
        except BadRequestError as exc:
            if end - begin == 1:
                refused[begin] = str(exc)
                return []
            middle = (begin + end) // 2
            return [
                *await self._parts(version, features, begin, middle, refused),
                *await self._parts(version, features, middle, end, refused),
            ]
        self._service.compare(version, request, answers)
        return [answers]

    def _run(self) -> None:
        """Be a member of the group, again and again; the body of the thread."""
        backoff = Backoff(timedelta(seconds=0.1), timedelta(seconds=10))
        try:
            while not self.stopping.is_set():
                try:
                    _Membership(self, partial(self._recover, backoff)).run()
                except AnabranchError as exc:
                    if isinstance(exc, SettingsError) and not isinstance(exc, GapError):
                        raise
                    if self.problems.get("broker") != str(exc):
                        log.warning("serving.stream: %s", exc)
                    self.problems["broker"] = str(exc)
                    self.stopping.wait(backoff.next())
        except BaseException as exc:  # the top of a thread
            if not isinstance(exc, AnabranchError):
                log.exception("the thread of serving.stream ended")
            self._on_error(exc)
        finally:
            if self.schemas is not None:
                self.schemas.close()

    def _recover(self, backoff: Backoff) -> None:
        backoff.reset()
        self.problems.pop("broker", None)


class Predicted(NamedTuple):
    """What a version answers to B rows: outputs of those that it answers, and reasons for the others, by row."""

    version: ServedVersion
    outputs: dict[str, Array]
    refused: dict[int, str]


@dataclass(frozen=True, eq=False)
class _ReadBatch:
    """Messages that were read together, and their answers to come."""

    assembled: Assembled
    answered: NDArray[np.bool_]
    """Which rows the model is asked about."""
    answers: "concurrent.futures.Future[Predicted]"
    membership: Any
    size: int

    @property
    def messages(self) -> int:
        return sum(len(each.messages) for each in self.assembled.incoming)


class _Membership:
    """One membership of the group, from joining it to leaving it or to the first error.

    Committed offsets and transactions are all that outlives it: another one, here or elsewhere, goes on from them.
    """

    def __init__(self, stream: AnswerStream, on_healthy: Callable[[], None]) -> None:
        """`on_healthy` is called once answers are written, or there is nothing to answer."""
        self._stream, self._on_healthy = stream, on_healthy
        self._changed = threading.Condition()
        self._batches: deque[_ReadBatch] = deque()
        """Read and not written yet, in the order of reading."""
        self._in_flight = 0
        self._bytes = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        """Set when nothing more is to be written: all is, or another member may do it."""

    def run(self) -> None:
        """Join the group, and answer until the stream stops.

        Raises:
            SettingsError: the broker has no transactions, or messages are gone.
            BrokerError: a topic or a broker is gone, or the group has given the partitions away.
        """
        stream = self._stream
        source, topic = stream.source, stream.settings.output
        with ExitStack() as stack:
            reader = GroupClient(source, stream.settings.start, self._wait_until_written)
            stack.callback(reader.close)
            writer = (
                Writer(source, topic, reader)
                if stream.settings.delivery == "at-least-once"
                else TransactionalWriter(source, topic, reader, stream.transactional_id)
            )
            stack.callback(writer.close)
            writer.open()
            if not self._wait_for_version():
                return
            reader.open()
            thread = threading.Thread(target=self._write, args=(reader, writer), name="serving-answers", daemon=True)
            thread.start()
            try:
                self._read(reader)
                self._wait_until_written()
            finally:
                with self._changed:
                    self._over.set()
                    self._changed.notify_all()
                thread.join()
                stream.partitions = stream.lag = 0
            self._raise_error()

    def _wait_for_version(self) -> bool:
        """Return once there is a version, before partitions are taken; False if the stream stops before."""
        while not self._stream.has_version():
            if self._stream.stopping.wait(_POLL.total_seconds()):
                return False
        return True

    def _read(self, reader: GroupClient) -> None:
        stream, lag_due, read = self._stream, 0.0, time.monotonic()
        while not stream.stopping.is_set():
            with self._changed:
                may_read = self._changed.wait_for(self._may_read, _POLL.total_seconds())
                self._raise_error()
            if may_read:
                read = time.monotonic()
                reader.go_on()
                polled = reader.poll(_POLL, min(_MOST_READ, stream.settings.max_in_flight - self._in_flight))
            elif time.monotonic() > read + _REST_SECONDS:
                polled = reader.rest()
            else:
                continue
            fetched = [each for each in polled if len(each)]
            if fetched:
                self._take(fetched, reader)
            if time.monotonic() >= lag_due or stream.partitions != reader.assigned():
                unread, problem = reader.behind()
                if reader.assigned() and not unread and not self._in_flight:
                    self._on_healthy()
                stream.lag, stream.partitions = unread + self._in_flight, reader.assigned()
                stream.metrics.lag.set(stream.lag)
                if problem is not None:
                    stream.problems["broker"] = problem
                lag_due = time.monotonic() + _LAG_SECONDS

    def _may_read(self) -> bool:
        room = self._in_flight < self._stream.settings.max_in_flight and self._bytes < _MOST_BYTES
        return room or self._error is not None

    def _take(self, fetched: Sequence[Messages], reader: GroupClient) -> None:
        """Decode messages, and let them be answered; wait while the registry does not return their schemas."""
        stream, left = self._stream, list(fetched)
        while left:
            assembled = stream.builder.assemble([Incoming(each, index) for index, each in enumerate(left)])
            done = [len(each.messages) for each in assembled.incoming]
            if any(done):
                self._ask(assembled, reader)
            left = [each.part(begin, len(each)) for each, begin in zip(left, done, strict=True) if begin < len(each)]
            if left:
                why = (stream.schemas and stream.schemas.problem) or "the registry has not answered yet"
                stream.problems["registry"] = f"messages wait for the schemas that they name: {why}"
                if stream.stopping.wait(_POLL.total_seconds()):
                    return
        stream.problems.pop("registry", None)

    def _ask(self, assembled: Assembled, reader: GroupClient) -> None:
        stream = self._stream
        asked = np.asarray(assembled.columns["outcome"] == Outcome.PENDING)
        rows = int(asked.sum())
        columns = {name: assembled.columns[f"feature.{name}"] for name in stream.features}
        if rows < len(asked):
            columns = {name: column[asked] for name, column in columns.items()}
        answers = asyncio.run_coroutine_threadsafe(stream.predict(columns, rows, self._is_over), stream.loop)
        size = sum(len(value or b"") for each in assembled.incoming for value in each.messages.values)
        batch = _ReadBatch(assembled, asked, answers, reader.membership(), size)
        with self._changed:
            self._batches.append(batch)
            self._in_flight += batch.messages
            self._bytes += size
            self._changed.notify_all()

    def _write(self, reader: GroupClient, writer: Writer) -> None:
        """Write what is answered, round after round; the body of the second thread."""
        try:
            while batches := self._answered():
                self._write_round(batches, reader, writer)
                with self._changed:
                    for batch in batches:
                        self._batches.popleft()
                        self._in_flight -= batch.messages
                        self._bytes -= batch.size
                    self._changed.notify_all()
        except BaseException as exc:  # noqa: BLE001 raised again by the thread that reads
            with self._changed:
                self._error = exc
                self._changed.notify_all()

    def _answered(self) -> list[_ReadBatch]:
        """Wait for the oldest batch, and return it with those after it that are answered too; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._over.is_set())
            if self._over.is_set():
                return []
            oldest = self._batches[0]
        while not oldest.answers.done() and not self._over.is_set():
            concurrent.futures.wait([oldest.answers], _POLL.total_seconds())
        with self._changed:
            if self._over.is_set():
                return []  # other members may answer it by now
            return list(itertools.takewhile(lambda batch: batch.answers.done(), self._batches))

    def _write_round(self, batches: Sequence[_ReadBatch], reader: GroupClient, writer: Writer) -> None:
        """Write the answers to batches, in this order; a crash after the first step writes its letters again:

        1. the dead letters; 2. the answers with the offsets, in one transaction.
        """
        records: list[Record] = []
        letters: list[DeadLetter] = []
        times_ms: list[int] = []
        for batch in batches:
            _add_answers(
                batch, batch.answers.result(), self._stream.source.format_kind.several, records, letters, times_ms
            )
            letters += batch.assembled.letters
        self._send_letters(letters, reader)
        positions = {
            each.messages.partition: each.messages.end for batch in batches for each in batch.assembled.incoming
        }
        writer.write(records, positions, batches[0].membership)
        self._on_healthy()
        now_ms = time.time() * 1000
        self._stream.metrics.answered(np.sort(np.maximum(0, now_ms - np.array(times_ms, np.float64)) / 1000))
        self._stream.metrics.dead_lettered(len(letters))

    def _send_letters(self, letters: Sequence[DeadLetter], reader: GroupClient) -> None:
        backoff, left = Backoff(timedelta(seconds=0.1), timedelta(seconds=10)), list(letters)
        while left:
            left = left[reader.send_dead_letters(left, _LETTER_TIMEOUT) :]
            topic = self._stream.source.dead_letter_topic
            _set(self._stream.problems, "letters", f'dead letters cannot be written to "{topic}"' if left else None)
            if left and (self._over.is_set() or self._stream.stopping.wait(backoff.next())):
                raise BrokerError(f'dead letters cannot be written to "{topic}"')

    def _wait_until_written(self) -> bool:
        """Return whether all that was read is written, at the latest after a while."""
        with self._changed:
            self._changed.wait_for(lambda: not self._batches or self._error or self._over.is_set(), _REVOKED_SECONDS)
            return not self._batches

    def _is_over(self) -> bool:
        return self._over.is_set() or self._stream.stopping.is_set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _add_answers(
    batch: _ReadBatch,
    predicted: Predicted,
    several: bool,
    records: list[Record],
    letters: list[DeadLetter],
    times_ms: list[int],
) -> None:
    """Add a record for each message that has an answer, and a dead letter for each on which the model fails.

    The value is a JSON object of the outputs by name; with `several` events a message, a list of them, null where an
    event has no answer. `times_ms` gets the times of the answered messages.
    """
    progress = [(name, value.encode()) for name, value in predicted.version.progress.items()]
    headers = [("model_version", predicted.version.name.encode()), *progress]
    values = _values(predicted, int(batch.answered.sum()))
    row, asked, row_numbers = 0, batch.answered.tolist(), batch.assembled.columns["row"].tolist()
    offsets, begin = batch.assembled.columns["offset"], 0
    reasons = iter(predicted.refused[number] for number in sorted(predicted.refused))
    for each, rows in zip(batch.assembled.incoming, batch.assembled.rows, strict=True):
        messages, name = each.messages, each.messages.partition
        of_message = np.searchsorted(messages.offsets, offsets[begin : begin + rows])
        counts = np.bincount(of_message, minlength=len(messages)).tolist()
        begin += rows
        for index, count in enumerate(counts):
            texts: list[bytes | None] = []
            rejects: list[Reject] = []
            for at in range(row, row + count):
                text = next(values) if asked[at] else None
                texts.append(text)
                if asked[at] and text is None:
                    rejects.append(Reject(index, row_numbers[at] if several else WHOLE_MESSAGE, next(reasons)))
            row += count
            if rejects:
                letters.append(dead_letter(messages, index, rejects))
            if not any(texts):
                continue
            value = b"[" + b",".join(text or b"null" for text in texts) + b"]" if several else texts[0]
            assert value is not None
            source = f"{name.topic}[{name.partition}]@{messages.offsets[index]}".encode()
            records.append(Record(messages.keys[index], value, [*headers, (_SOURCE, source)]))
            times_ms.append(messages.times_ms[index])


def _values(predicted: Predicted, rows: int) -> Iterator[bytes | None]:
    """Yield the JSON of each row's answer; None for a row on which the model fails."""
    encode, names = msgspec.json.Encoder().encode, list(predicted.outputs)
    answers = zip(*(array.tolist() for array in predicted.outputs.values()), strict=True)
    for row in range(rows):
        yield None if row in predicted.refused else encode(dict(zip(names, next(answers), strict=True)))


def _set(problems: dict[str, str], part: str, sentence: str | None) -> None:
    if sentence is None:
        problems.pop(part, None)
    else:
        problems[part] = sentence
