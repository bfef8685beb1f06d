"""The client `kafka-python`."""

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetAndMetadata
from kafka import TopicPartition as KafkaPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec

from anabranch.ingest.errors import BrokerError, CodecError, RecreatedError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Lag, Messages
from anabranch.ingest.kafka.dead_letters import LARGEST_LETTER, DeadLetter, DeadLetterWriter, DeliveryError, sanitize
from anabranch.ingest.kafka.diagnostics import (
    BAD_HEADER,
    RECREATED,
    check_gap,
    gone_topic,
    missing_topic,
    unresponsive_message,
)
from anabranch.ingest.kafka.kafka_python.connection import PATIENCE, brief, client_options, connect, translated
from anabranch.ingest.kafka.kafka_python.null_headers import sendable
from anabranch.ingest.kafka.kafka_python.records import ReplacedNames, UnreadableError, bound
from anabranch.ingest.kafka.unreadable import CorruptBatches, most_inflated, unreadable
from anabranch.ingest.settings.stream import StreamSettings

_REFUSED = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.InvalidRecordError,
)


class KafkaPythonDeadLetters(DeadLetterWriter):
    """Writes dead letters with kafka-python's producer."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__()
        self._settings = settings
        self._producer: Any = None

    def close(self) -> None:
        """Disconnect; unsent letters are lost."""
        if self._producer is not None:
            self._producer.close(timeout=1)

    def _deliver(self, letters: Sequence[DeadLetter], deadline: float) -> Iterator[DeliveryError | None]:
        try:
            sent = [self._send(sanitize(letter)) for letter in letters]
        except (kafka_errors.KafkaError, BrokerError) as exc:
            yield DeliveryError(brief(exc), refused=False)
            return
        for future in sent:
            try:
                if isinstance(future, kafka_errors.KafkaError):
                    raise future
                future.get(timeout=max(0.01, deadline - time.monotonic()))
            except kafka_errors.KafkaError as exc:
                yield DeliveryError(brief(exc), refused=isinstance(exc, _REFUSED))
            else:
                yield None

    def _send(self, letter: DeadLetter) -> Any:
        """Return the future of a letter, or the error where the producer itself finds it too large."""
        if self._producer is None:
            # Not idempotent: after a message that is too large, kafka-python's idempotent producer answers every later
            # one with the same error. Dead letters are at least once anyway.
            self._producer = connect(
                KafkaProducer,
                self._settings,
                acks="all",
                enable_idempotence=False,
                linger_ms=1,
                max_request_size=LARGEST_LETTER,
            )
        topic = self._settings.dead_letter_topic
        try:
            return self._producer.send(topic, key=letter.key, value=letter.value, headers=sendable(letter.headers))
        except _REFUSED as exc:
            return exc


_REQUEST_MS = 2_000
log = logging.getLogger(__name__)


class KafkaPythonClient:
    """Reads with kafka-python's consumer and writes dead letters with its producer, created with the first letter."""

    def __init__(self, settings: StreamSettings, patience: timedelta = PATIENCE) -> None:
        """`patience` is how long `open` tries to reach a broker."""
        self._settings = settings
        self._patience = patience
        self._connections = contextlib.ExitStack()
        self._letters = KafkaPythonDeadLetters(settings)
        self._connections.callback(self._letters.close)
        self._consumer: Any = None
        self._admin: Any = None
        self._committing: threading.Thread | None = None
        self._incarnations: dict[tuple[str, int], TopicPartition] = {}
        self._positions: dict[Any, int] = {}
        self._behind: list[Any] = []
        self._unmoved: set[Any] = set()
        """Those of `_behind` whose position did not change between the last two calls of `lag`."""
        self._before: dict[Any, int] = {}
        self._topic_ids: dict[str, str] = {}
        self._undecodable: CodecError | None = None
        self._corrupt = CorruptBatches()

    def open(self) -> None:
        """Connect, and check that every topic exists."""
        settings = self._settings
        self._consumer = connect(
            KafkaConsumer,
            settings,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level=settings.isolation_level,
            allow_auto_create_topics=False,
            patience=self._patience,
        )
        bound(self._consumer, most_inflated(settings))
        self._connections.callback(self._consumer.close, autocommit=False)
        for topic in (*settings.all_topics, settings.dead_letter_topic):
            with translated(f"cannot look up topic {topic}", self._consumer, self._settings):
                found = self._consumer.partitions_for_topic(topic)
            if not found:
                raise BrokerError(missing_topic(topic, settings.bootstrap_servers))

    def partitions(self) -> list[TopicPartition]:
        """All partitions of the topics, by the metadata of the last few seconds."""
        with translated("cannot look up the partitions", self._consumer, self._settings):
            return [
                TopicPartition(topic, partition)
                for topic in self._settings.all_topics
                for partition in sorted(self._consumer.partitions_for_topic(topic) or ())
            ]

    def topic_ids(self) -> dict[str, str]:
        """The topics' ids, by the metadata of the last few seconds."""
        self._topic_ids = self._ids()
        return dict(self._topic_ids)

    def first_offsets(
        self, partitions: Sequence[TopicPartition], start: str, moment: datetime | None
    ) -> dict[TopicPartition, int]:
        """Where to begin; a moment after the last record begins at the end."""
        theirs = {_theirs(partition): partition for partition in partitions}
        with translated("cannot look up offsets", self._consumer, self._settings):
            ends = self._consumer.end_offsets(list(theirs))
            if moment is not None:
                found = self._consumer.offsets_for_times({tp: int(moment.timestamp() * 1000) for tp in theirs})
                offsets = {tp: found[tp].offset if found.get(tp) else ends[tp] for tp in theirs}
            else:
                offsets = ends if start == "latest" else self._consumer.beginning_offsets(list(theirs))
        return {theirs[tp]: int(offset) for tp, offset in offsets.items()}

    def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Ask with an admin client, since the consumer applies its isolation level."""
        theirs = {_theirs(partition): partition for partition in partitions}
        with translated("cannot look up the ends of partitions", self._consumer, self._settings):
            admin = connect(KafkaAdminClient, self._settings)
            with contextlib.closing(admin):
                found = admin.list_partition_offsets(dict.fromkeys(theirs, OffsetSpec.LATEST))
        return {theirs[tp]: int(each.offset) for tp, each in found.items()}

    def assign(self, positions: Mapping[TopicPartition, int], paused: Collection[TopicPartition] = ()) -> None:
        """Read exactly these partitions from these offsets on; of those that are `paused`, only the lag."""
        self._incarnations = {(partition.topic, partition.partition): partition for partition in positions}
        self._consumer.assign([_theirs(partition) for partition in positions])
        self._positions = {_theirs(partition): offset for partition, offset in positions.items()}
        for partition, offset in self._positions.items():
            self._consumer.seek(partition, offset)
        # What was fetched is fetched again. The client would keep that of a paused partition aside, and after it is
        # resumed would neither return it nor fetch the partition.
        self._consumer._fetcher.close()
        self._consumer.resume(*self._consumer.paused())
        self._consumer.pause(*map(_theirs, paused))

    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return at most `limit` messages."""
        if self._undecodable is not None:
            # kafka-python itself raises it once, and then returns nothing, as if no message had come.
            raise self._undecodable
        removed: dict[Any, int] = {}
        try:
            with translated("cannot read the topics", self._consumer, self._settings):
                batches = self._polled(int(timeout.total_seconds() * 1000), limit)
        except UnreadableError as exc:
            return [self._skip_unreadable(exc, limit)]
        except CodecError as exc:
            self._undecodable = exc
            raise
        except kafka_errors.OffsetOutOfRangeError as exc:
            removed = self._pass_gap(exc.args[0])
            batches = {tp: [] for tp in removed}
        self._refuse_recreated()
        if self._behind:
            # Markers and aborted records at the end of a partition move its position without a record. Asking for a
            # position costs 0.4 ms, so that only partitions are asked for that lag while nothing comes, or of which
            # nothing came for a second.
            asked = [tp for tp in self._behind if not batches or (tp in self._unmoved and tp not in batches)]
            batches |= {tp: [] for tp in asked if self._position(tp) != self._positions[tp]}
            self._behind = []
        return [self._messages(tp, records, removed.get(tp, 0)) for tp, records in batches.items()]

    def _polled(self, timeout_ms: int, limit: int) -> dict[Any, list[Any]]:
        try:
            polled: dict[Any, list[Any]] = self._consumer.poll(timeout_ms, max_records=limit)
        except UnreadableError as exc:
            # The client keeps the fetched records, and would search them for a good one without end.
            self._consumer._fetcher.close()
            if exc.end is None and not self._corrupt.is_permanent(exc.partition):
                raise kafka_errors.CorruptRecordError(str(exc)) from exc
            raise
        return polled

    def _skip_unreadable(self, exc: UnreadableError, limit: int) -> Messages:
        """Skip at most `limit` unreadable offsets, or a single one where their end is unknown."""
        tp, begin = exc.partition, exc.begin
        end = begin + 1 if exc.end is None else max(begin, min(exc.end, begin + limit))
        log.debug("%s[%d]: offsets %d to %d are passed over: %s", tp.topic, tp.partition, begin, end - 1, exc.reason)
        self._consumer.seek(tp, end)
        self._positions[tp] = end
        partition = self._incarnations[tp.topic, tp.partition]
        return unreadable(partition, range(begin, end), exc.time_ms, exc.reason)

    def lag(self, *, log_starts: bool = False) -> Lag:
        """Ask for the end offsets, and for the first ones, within two seconds each."""
        partitions, starts = list(self._incarnations.values()), {}
        try:
            ends = self._consumer.end_offsets([_theirs(p) for p in partitions], timeout_ms=_REQUEST_MS)
            if log_starts:
                starts = self._consumer.beginning_offsets([_theirs(p) for p in partitions], timeout_ms=_REQUEST_MS)
        except kafka_errors.KafkaError as exc:
            settings = self._settings
            gone = [topic for topic in settings.all_topics if not self._consumer.partitions_for_topic(topic)]
            why = (
                gone_topic(gone[0], settings.bootstrap_servers) if gone else unresponsive_message(settings, brief(exc))
            )
            return Lag({}, why)
        self._behind = [tp for tp, end in ends.items() if end > self._positions[tp]]
        self._unmoved = {tp for tp in self._behind if self._positions[tp] == self._before.get(tp)}
        self._before = dict(self._positions)
        # A broker may report less than it has already delivered, so what was delivered counts as well.
        ends_of = {p: max(int(ends[_theirs(p)]), self._positions[_theirs(p)]) for p in partitions}
        return Lag(ends_of, log_starts={p: int(starts[_theirs(p)]) for p in partitions if _theirs(p) in starts})

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit in a separate thread, for lag tools; does nothing while the previous commit is not done.

        The consumer itself belongs to no group: a coordinator that is away, or a missing right to the group, must not
        keep events from being read.
        """
        if self._committing is None or not self._committing.is_alive():
            offsets = {_theirs(p): OffsetAndMetadata(offset, "", -1) for p, offset in positions.items()}
            self._committing = threading.Thread(target=self._commit, args=(offsets,), name="commit", daemon=True)
            self._committing.start()

    def _commit(self, offsets: Mapping[Any, Any]) -> None:
        try:
            if self._admin is None:
                self._admin = KafkaAdminClient(**client_options(KafkaAdminClient, self._settings))
                self._connections.callback(self._admin.close)
            self._admin.alter_group_offsets(self._settings.group_id, offsets)
        except kafka_errors.KafkaError as exc:
            log.debug("positions were not committed for lag tools: %s", brief(exc))

    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Send letters, and wait for the broker."""
        return self._letters.send(letters, timeout)

    @property
    def letters_dropped(self) -> int:
        """Dead letters that the broker refuses in each of their forms."""
        return self._letters.dropped

    def close(self) -> None:
        """Disconnect, once the last commit is done or a second is over."""
        if self._committing is not None:
            self._committing.join(1)
        with contextlib.suppress(kafka_errors.KafkaError):
            self._connections.close()

    def _refuse_recreated(self) -> None:
        """Raise RecreatedError when the metadata, a few seconds old at most, have another topic of the name.

        A broker hands out the new one's records by name and offset, as if nothing had happened.
        """
        for topic, found in self._ids().items():
            if self._topic_ids.setdefault(topic, found) != found:
                raise RecreatedError(RECREATED)

    def _ids(self) -> dict[str, str]:
        """Return the topics' ids by the metadata; brokers without them, and topics that are just gone, give none."""
        found = {topic: self._consumer._client.cluster.topic_id(topic) for topic in self._settings.all_topics}
        return {topic: each.hex for topic, each in found.items() if each is not None and each.int}

    def _pass_gap(self, offsets: Mapping[Any, int]) -> dict[Any, int]:
        """Continue from the earliest offset where the next one to read is gone, or raise."""
        with translated("cannot look up the earliest offsets", self._consumer, self._settings):
            earliest = self._consumer.beginning_offsets(list(offsets))
        removed = {tp: int(earliest[tp]) - offset for tp, offset in offsets.items()}
        for tp, missing in removed.items():
            check_gap(f"{tp.topic}[{tp.partition}]@{offsets[tp]}", missing, self._settings.on_gap)
            self._consumer.seek(tp, earliest[tp])
        return removed

    def _position(self, tp: Any) -> int:
        with translated(f"cannot find the position of {tp.topic}[{tp.partition}]", self._consumer, self._settings):
            position = self._consumer.position(tp, timeout_ms=_REQUEST_MS)
        return self._positions[tp] if position is None else int(position)

    def _messages(self, tp: Any, records: Sequence[Any], removed: int) -> Messages:
        self._positions[tp] = records[-1].offset + 1 if records else self._position(tp)
        if records:
            self._corrupt.remove(tp)
        return Messages(
            partition=self._incarnations[tp.topic, tp.partition],
            offsets=[record.offset for record in records],
            times_ms=[record.timestamp for record in records],
            keys=[record.key for record in records],
            values=[record.value for record in records],
            headers=[record.headers for record in records],
            end=self._positions[tp],
            removed=removed,
            faults={i: BAD_HEADER for i, record in enumerate(records) if type(record.headers) is ReplacedNames},
        )


def _theirs(partition: TopicPartition) -> Any:
    return KafkaPartition(partition.topic, partition.partition)
