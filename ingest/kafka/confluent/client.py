"""The client `confluent`: librdkafka, which fetches and parses in its own threads, without the GIL."""

import base64
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from operator import methodcaller
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from anabranch.ingest.errors import BrokerError, CredentialsError, RecreatedError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Lag, Messages
from anabranch.ingest.kafka.confluent.connection import brief, make, raise_if_fatal, reach, reason
from anabranch.ingest.kafka.dead_letters import LARGEST_LETTER, DeadLetter, DeadLetterWriter, DeliveryError, sanitize
from anabranch.ingest.kafka.diagnostics import (
    BAD_HEADER,
    RECREATED,
    check_gap,
    damaged,
    gone_topic,
    missing_topic,
    too_large,
    unresponsive_message,
)
from anabranch.ingest.kafka.unreadable import CorruptBatches, most_inflated, unreadable
from anabranch.ingest.settings.stream import StreamSettings

_REQUEST_SECONDS = 2.0
_GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)


class TopicMetadata:
    """The topics of a stream, with the ids and partitions that the broker returned last."""

    def __init__(self, settings: StreamSettings) -> None:
        self.is_recreated = False
        """Whether a topic has had another id since this was set to False."""
        self._settings = settings
        self._admin: Any = None
        self._topics: dict[str, Any] = {}

    def open(self, seconds: float) -> None:
        """Connect, and check that every topic exists; raises BrokerError."""
        self._admin = make(AdminClient, self._settings, {})
        try:
            self._topics = self._describe(seconds)
        except KafkaException as exc:
            why = reason(exc, self._admin, self._settings)
            raise BrokerError(f"cannot look up the topics: {why}") from exc
        for topic in (*self._settings.all_topics, self._settings.dead_letter_topic):
            if topic not in self._topics:
                raise BrokerError(missing_topic(topic, self._settings.bootstrap_servers))

    def partitions(self) -> list[TopicPartition]:
        """Return all partitions of the topics."""
        return [
            TopicPartition(topic, partition.id)
            for topic in self._settings.all_topics
            for partition in sorted(self._topics[topic].partitions, key=lambda each: each.id)
        ]

    def ids(self) -> dict[str, str]:
        """Return the id of each topic, 32 hexadecimal digits, where the broker gives them."""
        encoded = {topic: str(self._topics[topic].topic_id) for topic in self._settings.all_topics}
        ids = {topic: base64.urlsafe_b64decode(f"{each}==").hex() for topic, each in encoded.items()}
        return {topic: each for topic, each in ids.items() if each.strip("0")}

    def refresh(self) -> None:
        """Ask the broker again. Raises KafkaException without an answer, BrokerError when a topic is gone."""
        found = self._describe(_REQUEST_SECONDS)
        for topic in self._settings.all_topics:
            if topic not in found:
                raise BrokerError(gone_topic(topic, self._settings.bootstrap_servers))
            self.is_recreated |= str(found[topic].topic_id) != str(self._topics[topic].topic_id)
        self._topics = {**self._topics, **found}

    def offsets(
        self, partitions: Sequence[TopicPartition], spec: Any, isolation_level: str = ""
    ) -> dict[TopicPartition, int]:
        """Return an offset of each partition by an OffsetSpec; raises KafkaException."""
        level = {
            "read_committed": IsolationLevel.READ_COMMITTED,
            "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
        }[isolation_level or self._settings.isolation_level]
        asked = {KafkaPartition(p.topic, p.partition): spec for p in partitions}
        futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=_REQUEST_SECONDS)
        found = {(tp.topic, tp.partition): future.result().offset for tp, future in futures.items()}
        return {partition: int(found[partition.topic, partition.partition]) for partition in partitions}

    def _describe(self, seconds: float) -> dict[str, Any]:
        """Return the broker's descriptions of the topics that exist."""
        names = list(dict.fromkeys(map(str, (*self._settings.all_topics, self._settings.dead_letter_topic))))
        futures = self._admin.describe_topics(TopicCollection(names), request_timeout=seconds)
        found = {}
        for name, future in futures.items():
            try:
                found[name] = future.result()
            except KafkaException as exc:
                if exc.args[0].code() not in _GONE:
                    raise
        return found


UNREADABLE = (KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG)
REMOVED = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_SEARCH_SECONDS = 15.0
_HEADERS = methodcaller("headers")


def headers_of(records: Sequence[Any]) -> tuple[list[Sequence[tuple[str, bytes]]], dict[int, str]]:
    """Return the headers of records, and by index the fault of each record with a name that is not UTF-8.

    Each record is asked once: confluent-kafka raises where it cannot decode a name, and a second call would return an
    incomplete list. `methodcaller` is needed: where the interpreter calls the method itself, it does not check whether
    an error is set, which then appears at a later record.
    """
    headers: list[Sequence[tuple[str, bytes]]] = []
    faults: dict[int, str] = {}
    for index, record in enumerate(records):
        try:
            headers.append(_HEADERS(record) or ())
        except (UnicodeDecodeError, SystemError):
            headers.append(())
            faults[index] = BAD_HEADER
    return headers, faults


def batch_end(consumer: Any, partition: TopicPartition, begin: int, base: int, log_end: int) -> int:
    """Return the first offset after the batch at `base`, which librdkafka does not report.

    A broker returns the whole batch for any of its offsets: the end is found by a galloping, then a binary search.
    After some seconds the search ends with an offset that is known to be in the batch.
    """
    deadline = time.monotonic() + _SEARCH_SECONDS
    inside, beyond = begin, log_end
    step = 1
    while beyond - inside > 1 and time.monotonic() < deadline:
        middle = (inside + beyond) // 2
        asked = min(inside + step, middle) if step else middle
        if _is_of(consumer, partition, asked, base):
            inside, step = asked, 2 * step
        else:
            beyond, step = asked, 0
    return inside + 1


def _is_of(consumer: Any, partition: TopicPartition, offset: int, base: int) -> bool:
    """Whether an offset is in the unreadable batch at `base`; raises BrokerError when no broker answers in time."""
    asked = KafkaPartition(partition.topic, partition.partition, offset)
    consumer.assign([asked])
    deadline, answer = time.monotonic() + _SEARCH_SECONDS, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        for message in consumer.consume(1, left):
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                return False
            if error.code() in UNREADABLE:
                return bool(message.offset() == base)
            answer = error.str()
            if error.code() in REMOVED and message.offset() != offset:
                consumer.assign([asked])  # parsing on behind a damaged batch, librdkafka asked for an offset at random
            elif error.code() in REMOVED:
                deadline = 0.0
            else:
                raise_if_fatal(error)
    name = f"{partition.topic}[{partition.partition}]@{base}"
    raise BrokerError(f"cannot read {name}, nor find where it ends: {answer}")


_LETTER_MS = 10_000
_REFUSED = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD)


class ConfluentDeadLetters(DeadLetterWriter):
    """Writes dead letters with librdkafka's producer."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__()
        self._topic = settings.dead_letter_topic
        self._producer = make(
            Producer,
            settings,
            {
                "acks": "all",
                "linger.ms": 1,
                # Small, so that a letter that is too large fails without others that share its batch.
                "batch.size": 16_384,
                "message.max.bytes": LARGEST_LETTER,
                "message.timeout.ms": _LETTER_MS,
            },
        )

    def _deliver(self, letters: Sequence[DeadLetter], deadline: float) -> list[DeliveryError | None]:
        return [
            None if error is None else DeliveryError(error.str(), error.code() in _REFUSED)
            for error in self._delivered(letters, deadline)
        ]

    def _delivered(self, letters: Sequence[DeadLetter], deadline: float) -> list[KafkaError | None]:
        """Send letters, and return the error of each, or None when the broker has acknowledged it."""
        errors: list[KafkaError | None] = [KafkaError(KafkaError._TIMED_OUT)] * len(letters)

        def on_delivery(index: int) -> Any:
            def set_error(error: KafkaError | None, _: Any) -> None:
                errors[index] = error

            return set_error

        for index, letter in enumerate(letters):
            try:
                self._produce(sanitize(letter), on_delivery(index), deadline)
            except KafkaException as exc:
                errors[index] = exc.args[0]
            except BufferError:
                break
        if self._producer.flush(max(0.0, deadline - time.monotonic())):
            # The caller sends unacknowledged letters again; duplicates are allowed, an endless queue is not.
            self._producer.purge()
        return errors

    def _produce(self, letter: DeadLetter, on_delivery: Any, deadline: float) -> None:
        while True:
            try:
                self._producer.produce(
                    self._topic, letter.value, letter.key, headers=letter.headers, on_delivery=on_delivery
                )
            except BufferError:
                if time.monotonic() > deadline:
                    raise
                self._producer.poll(0.1)
            else:
                return


_PATIENCE = timedelta(seconds=8)

log = logging.getLogger(__name__)

_INFLATED = "its batch is damaged, or larger than receive.message.max.bytes once it is decompressed"


class ConfluentClient:
    """Reads with librdkafka's consumer, asks with its admin client, and writes dead letters with its producer.

    The consumer names a group, since it commits for lag tools, but never joins it.
    """

    def __init__(
        self, settings: StreamSettings, patience: timedelta = _PATIENCE, tuned: Mapping[str, Any] | None = None
    ) -> None:
        """`patience` is how long `open` tries to reach a broker, `tuned` are further properties of the consumer."""
        self._settings = settings
        self._tuned = dict(tuned or {})
        self._patience = patience.total_seconds()
        self._errors: list[KafkaError] = []
        self._consumer: Any = None
        self._metadata = TopicMetadata(settings)
        self._letters: ConfluentDeadLetters | None = None
        self._partitions: dict[tuple[str, int], TopicPartition] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._paused: frozenset[TopicPartition] = frozenset()
        self._most = most_inflated(settings)
        self._corrupt = CorruptBatches()

    def open(self) -> None:
        """Connect, and check that every topic exists."""
        settings = self._settings
        self._consumer = make(
            Consumer,
            settings,
            {
                "group.id": settings.group_id,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": settings.isolation_level,
                "allow.auto.create.topics": False,
                # Messages that were fetched and not yet polled; one more response of a broker may be in flight.
                "queued.max.messages.kbytes": 16_384,
                "error_cb": self._errors.append,
                **self._tuned,
            },
        )
        reach(self._consumer, settings, self._errors, self._patience)
        self._metadata.open(self._patience)

    def partitions(self) -> list[TopicPartition]:
        """All partitions of the topics; while the broker is away, those that existed before."""
        with contextlib.suppress(KafkaException, BrokerError):
            self._metadata.refresh()
        return self._metadata.partitions()

    def topic_ids(self) -> dict[str, str]:
        """The topics' ids, as last received."""
        self._metadata.is_recreated = False
        return self._metadata.ids()

    def first_offsets(
        self, partitions: Sequence[TopicPartition], start: str, moment: datetime | None
    ) -> dict[TopicPartition, int]:
        """Where to begin; a moment after the last record begins at the end."""
        try:
            if moment is None:
                return self._metadata.offsets(
                    partitions, OffsetSpec.latest() if start == "latest" else OffsetSpec.earliest()
                )
            found = self._metadata.offsets(partitions, OffsetSpec.for_timestamp(int(moment.timestamp() * 1000)))
            ends = self._metadata.offsets(partitions, OffsetSpec.latest())
        except KafkaException as exc:
            raise BrokerError(f"cannot look up offsets: {reason(exc, self._consumer, self._settings)}") from exc
        return {partition: ends[partition] if offset < 0 else offset for partition, offset in found.items()}

    def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Ask independently of the consumer's isolation level."""
        try:
            return self._metadata.offsets(partitions, OffsetSpec.latest(), "read_uncommitted")
        except KafkaException as exc:
            raise BrokerError(
                f"cannot look up the ends of partitions: {reason(exc, self._consumer, self._settings)}"
            ) from exc

    def assign(self, positions: Mapping[TopicPartition, int], paused: Collection[TopicPartition] = ()) -> None:
        """Read exactly these partitions from these offsets on; of those that are `paused`, only the lag."""
        self._partitions = {(partition.topic, partition.partition): partition for partition in positions}
        self._positions, self._paused = dict(positions), frozenset(paused)
        # Without its pause and resume: their version and that of an assignment are given out by two threads, and where
        # an older one arrives last, all that is fetched of the partition is dropped, until the next assignment.
        read = [(partition, offset) for partition, offset in positions.items() if partition not in self._paused]
        self._consumer.assign([KafkaPartition(p.topic, p.partition, offset) for p, offset in read])

    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return at most `limit` messages."""
        if self._metadata.is_recreated:
            raise RecreatedError(RECREATED)
        try:
            polled = self._consume(timeout, limit)
        except KafkaException as exc:
            raise BrokerError(f"cannot read the topics: {reason(exc, self._consumer, self._settings)}") from exc
        self._errors.clear()
        try:
            return self._taken(polled, limit)
        except BrokerError:
            # The messages that were polled together with the error must be fetched again.
            self.assign(self._positions, self._paused)
            raise

    def lag(self, *, log_starts: bool = False) -> Lag:
        """Ask for the end offsets, and for the first ones, and whether the topics are still the same.

        Each request takes two seconds at most.
        """
        try:
            self._metadata.refresh()
            ends = self._metadata.offsets(list(self._positions), OffsetSpec.latest())
            starts = self._metadata.offsets(list(self._positions), OffsetSpec.earliest()) if log_starts else {}
        except KafkaException as exc:
            return Lag({}, unresponsive_message(self._settings, brief(exc)))
        except BrokerError as exc:
            return Lag({}, str(exc))
        # A broker may report less than it has already delivered, so what was delivered counts as well.
        ends_of = {partition: max(end, self._positions[partition]) for partition, end in ends.items()}
        return Lag(ends_of, log_starts=starts)

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit in the background, for lag tools."""
        offsets = [KafkaPartition(p.topic, p.partition, offset) for p, offset in positions.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as exc:
            log.debug("positions were not committed for lag tools: %s", brief(exc))

    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Send and wait, with a producer that is created with the first letter."""
        if self._letters is None:
            try:
                self._letters = ConfluentDeadLetters(self._settings)
            except CredentialsError as exc:
                log.warning("dead letters wait: %s", exc)
                return 0
        return self._letters.send(letters, timeout)

    @property
    def letters_dropped(self) -> int:
        """Dead letters so far that the broker refuses in each of their forms."""
        return 0 if self._letters is None else self._letters.dropped

    def close(self) -> None:
        """Disconnect."""
        if self._consumer is not None:
            self._consumer.close()

    def _consume(self, timeout: timedelta, limit: int) -> list[Any]:
        """Return messages and events of the library; raises KafkaException."""
        found: list[Any] = self._consumer.consume(limit, timeout.total_seconds())
        return found

    def _taken(self, polled: Sequence[Any], limit: int) -> list[Messages]:
        """Sort what was polled, messages and events, by partition."""
        # By name and number: a TopicPartition takes about as long to hash as a message to poll.
        records: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
        bad: dict[tuple[str, int], Any] = {}
        ends: dict[TopicPartition, int] = {}
        removed: dict[TopicPartition, int] = {}
        stopped = False
        for message in polled:
            key, error = (message.topic(), message.partition()), message.error()
            if bad and key in bad:
                continue  # librdkafka silently continues after a batch with a wrong checksum
            if error is None:
                records[key].append(message)
                continue
            partition = self._partitions.get(key)
            if partition is not None and error.code() == KafkaError._PARTITION_EOF:
                ends[partition] = message.offset()
            elif partition is not None and error.code() in UNREADABLE:
                bad[key] = message
            elif partition is not None and error.code() in REMOVED:
                stopped = True
                # A gap after messages is reported again once they are handled.
                if key not in records and partition not in ends and (gone := self._pass_gap(partition)):
                    removed[partition] = gone
            else:
                raise_if_fatal(error)
        batches = {self._partitions[key]: batch for key, batch in records.items() if key in self._partitions}
        reached = dict.fromkeys((*batches, *ends, *removed))
        found = [self._messages(p, batches.get(p, ()), ends.get(p, -1), removed.get(p, 0)) for p in reached]
        unread = {self._partitions[key]: message for key, message in bad.items()}
        found += self._unread({p: message for p, message in unread.items() if p not in reached}, limit)
        if bad and not found:
            message = next(iter(bad.values()))
            raise BrokerError(f"cannot read {message.topic()}[{message.partition()}]: {message.error().str()}")
        if stopped or bad:
            # A partition with such an error has stopped, and ignores a seek.
            self.assign(self._positions, self._paused)
        return found

    def _unread(self, bad: Mapping[TopicPartition, Any], limit: int) -> list[Messages]:
        """Skip batches that are given up, of partitions of which nothing else was polled."""
        return [
            self._skip_unreadable(partition, message.error(), message.offset(), limit)
            for partition, message in bad.items()
            if self._is_permanent(partition, message.error())
        ]

    def _pass_gap(self, partition: TopicPartition) -> int:
        """Return how many offsets from the next one to read on are gone, or raise.

        Zero where the topic has that offset: after a batch with a wrong checksum librdkafka may take other bytes for
        the next offset, and report that one as gone.
        """
        position = self._positions[partition]
        earliest = self.first_offsets([partition], "earliest", None)[partition]
        name = f"{partition.topic}[{partition.partition}]@{position}"
        if earliest <= position <= self.log_ends([partition])[partition]:
            log.info("%s is not removed, although the client reported so: it is read again", name)
            return 0
        check_gap(name, earliest - position, self._settings.on_gap)
        return earliest - position

    def _is_permanent(self, partition: TopicPartition, error: KafkaError) -> bool:
        """Return whether fetching an unreadable batch again would most likely return the same."""
        return self._corrupt.is_permanent(partition) or error.code() == KafkaError._BAD_COMPRESSION

    def _skip_unreadable(self, partition: TopicPartition, error: KafkaError, base: int, limit: int) -> Messages:
        """Skip a batch that cannot be read, or the first `limit` offsets of it."""
        begin = max(self._positions[partition], base)
        log_end = self._metadata.offsets([partition], OffsetSpec.latest())[partition]
        end = min(begin + limit, batch_end(self._consumer, partition, begin, base, log_end))
        compressed = error.code() == KafkaError._BAD_COMPRESSION
        reason = f"too-large: {_INFLATED}" if compressed else damaged(error.str())
        log.debug("%s[%d]: %d to %d are passed over: %s", partition.topic, partition.partition, begin, end - 1, reason)
        self._positions[partition] = end
        return unreadable(partition, range(begin, end), int(time.time() * 1000), reason)

    def _messages(self, partition: TopicPartition, records: Sequence[Any], end: int, removed: int) -> Messages:
        last = (records[-1].offset() + 1 if records else self._positions[partition]) + removed
        self._positions[partition] = max(last, end)
        if records:
            self._corrupt.remove(partition)
        headers, faults = headers_of(records)
        values = [record.value() for record in records]
        if max(map(len, records), default=0) > self._most:
            large = [index for index, record in enumerate(records) if len(record) > self._most]
            faults |= dict.fromkeys(large, too_large(self._most))
            for index in large:
                values[index] = None  # a dead letter could not carry a value of this size either
        return Messages(
            partition=partition,
            offsets=[record.offset() for record in records],
            times_ms=[record.timestamp()[1] for record in records],
            keys=[record.key() for record in records],
            values=values,
            headers=headers,
            end=self._positions[partition],
            removed=removed,
            faults=faults,
        )
