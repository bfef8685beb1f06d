"""The client `kafka-python`."""

import contextlib
import logging
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetAndMetadata
from kafka import TopicPartition as KafkaPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec

from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.errors import BrokerError, CodecError, CredentialsError, RecreatedError, TruncatedError
from ingest.events.partition import TopicPartition
from ingest.kafka.client import CORRUPT_SECONDS, DeadLetter, Lag, Messages, most_inflated, sanitize, shrink, unreadable
from ingest.kafka.diagnostics import (
    BAD_HEADER,
    RECREATED,
    TRUNCATED,
    auth_error,
    check_gap,
    gone_topic,
    missing_topic,
    not_a_broker_message,
    unreachable,
    unresponsive_message,
)
from ingest.kafka.kafka_records import ReplacedNames, UnreadableError, bound
from ingest.kafka_properties import DEFAULTS, check, kafka_python_options

PATIENCE = timedelta(seconds=8)
"""How long to try to reach a broker."""
_REQUEST_MS = 2_000
_LARGEST_LETTER = 100_000_000
_CODECS = {"snappy": "python-snappy", "lz4": "lz4", "zstd": "zstandard"}
"""The packages that kafka-python needs, except for gzip, which is in Python."""
_REFUSALS = (kafka_errors.SaslAuthenticationFailedError, kafka_errors.UnsupportedSaslMechanismError)

_REFUSED_LETTERS = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.InvalidRecordError,
)
"""Errors that the letter itself causes: sending it again gives the same."""

log = logging.getLogger(__name__)


class KafkaPythonClient:
    """Reads with kafka-python's consumer and writes dead letters with its producer, created with the first letter."""

    def __init__(self, settings: StreamSettings, patience: timedelta = PATIENCE) -> None:
        """`patience` is how long `open` tries to reach a broker."""
        self._settings = settings
        self._patience = patience
        self._connections = contextlib.ExitStack()
        self._producer: Any = None
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
        self._corrupt: dict[Any, float] = {}
        """When a partition first returned a batch with a wrong checksum."""
        self.letters_dropped = 0

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
        for topic in (*settings.topics, settings.dead_letter_topic):
            with _translated(f"cannot look up topic {topic}"):
                found = self._consumer.partitions_for_topic(topic)
            if not found:
                raise BrokerError(missing_topic(topic, settings.bootstrap_servers))

    def partitions(self) -> list[TopicPartition]:
        """All partitions of the topics, by the metadata of the last few seconds."""
        with _translated("cannot look up the partitions"):
            return [
                TopicPartition(topic, partition)
                for topic in self._settings.topics
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
        with _translated("cannot look up offsets"):
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
        with _translated("cannot look up the ends of partitions"):
            admin = connect(KafkaAdminClient, self._settings)
            with contextlib.closing(admin):
                found = admin.list_partition_offsets(dict.fromkeys(theirs, OffsetSpec.LATEST))
        return {theirs[tp]: int(each.offset) for tp, each in found.items()}

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions from these offsets on."""
        self._incarnations = {(partition.topic, partition.partition): partition for partition in positions}
        self._consumer.assign([_theirs(partition) for partition in positions])
        self._positions = {_theirs(partition): offset for partition, offset in positions.items()}
        for partition, offset in self._positions.items():
            self._consumer.seek(partition, offset)

    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return at most `limit` messages."""
        if self._undecodable is not None:
            # kafka-python itself raises it once, and then returns nothing, as if no message had come.
            raise self._undecodable
        removed: dict[Any, int] = {}
        try:
            with _translated("cannot read the topics"):
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
            # The client keeps the fetched records, and would search them for a good one for ever.
            self._consumer._fetcher.close()
            if exc.end is None and not self._given_up(exc):
                raise kafka_errors.CorruptRecordError(str(exc)) from exc
            raise
        return polled

    def _given_up(self, exc: UnreadableError) -> bool:
        """Whether a batch with a wrong checksum, and no good record of its partition, has come for long enough."""
        first = self._corrupt.setdefault(exc.partition, time.monotonic())
        return time.monotonic() - first >= CORRUPT_SECONDS

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
            servers = self._settings.bootstrap_servers
            gone = [topic for topic in self._settings.topics if not self._consumer.partitions_for_topic(topic)]
            return Lag({}, gone_topic(gone[0], servers) if gone else unresponsive_message(servers, _brief(exc)))
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
            log.debug("positions were not committed for lag tools: %s", _brief(exc))

    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Send and wait; a letter that is too large for the broker is sent with less in it, or dropped."""
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            futures = [self._send(letter) for letter in letters]
            for done, (letter, future) in enumerate(zip(letters, futures, strict=True)):
                if not self._acknowledged(letter, future, deadline):
                    return done
        except (kafka_errors.KafkaError, BrokerError) as exc:
            log.warning("dead letters wait: %s", _brief(exc))
            return 0
        return len(letters)

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
        found = {topic: self._consumer._client.cluster.topic_id(topic) for topic in self._settings.topics}
        return {topic: each.hex for topic, each in found.items() if each is not None and each.int}

    def _pass_gap(self, offsets: Mapping[Any, int]) -> dict[Any, int]:
        """Continue from the earliest offset where the next one to read is gone, or raise."""
        with _translated("cannot look up the earliest offsets"):
            earliest = self._consumer.beginning_offsets(list(offsets))
        removed = {tp: int(earliest[tp]) - offset for tp, offset in offsets.items()}
        for tp, missing in removed.items():
            check_gap(f"{tp.topic}[{tp.partition}]@{offsets[tp]}", missing, self._settings.on_gap)
            self._consumer.seek(tp, earliest[tp])
        return removed

    def _position(self, tp: Any) -> int:
        with _translated(f"cannot find the position of {tp.topic}[{tp.partition}]"):
            position = self._consumer.position(tp, timeout_ms=_REQUEST_MS)
        return self._positions[tp] if position is None else int(position)

    def _messages(self, tp: Any, records: Sequence[Any], removed: int) -> Messages:
        self._positions[tp] = records[-1].offset + 1 if records else self._position(tp)
        if records:
            self._corrupt.pop(tp, None)
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
                max_request_size=_LARGEST_LETTER,
            )
            self._connections.callback(self._producer.close, timeout=1)
        sent, topic = sanitize(letter), self._settings.dead_letter_topic
        try:
            return self._producer.send(topic, key=sent.key, value=sent.value, headers=sent.headers)
        except _REFUSED_LETTERS as exc:
            return exc

    def _acknowledged(self, letter: DeadLetter, sent: Any, deadline: float) -> bool:
        """Wait for a letter; a refused one is sent again with less in it, at last with nothing, or dropped."""
        less = shrink(letter)
        while True:
            try:
                if isinstance(sent, kafka_errors.KafkaError):
                    raise sent
                sent.get(timeout=max(0.01, deadline - time.monotonic()))
            except _REFUSED_LETTERS as exc:
                bare = next(less, None)
                if bare is None:
                    log.debug("a dead letter is refused even without its contents: %s", _brief(exc))
                    self.letters_dropped += 1
                    return True
                sent = self._send(bare)
            except kafka_errors.KafkaError as exc:
                log.warning("dead letters wait: %s", _brief(exc))
                return False
            else:
                return True


def client_options(kind: Any, settings: StreamSettings, patience: timedelta = PATIENCE, **ours: Any) -> dict[str, Any]:
    """Return kafka-python's options for a client of the given class: `[stream.properties]`, and above them ours."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings.bootstrap_servers.split(",")],
        "bootstrap_timeout_ms": int(patience / timedelta(milliseconds=1)),
    }
    for name, value in DEFAULTS.items():
        options |= kafka_python_options(name, value)
    for name, secret in settings.properties.items():
        try:
            check("kafka-python", name, secret.get_secret_value())
        except ValueError as exc:
            raise SettingsError(f"stream.properties: what writes events is kafka-python, and {exc}") from exc
        options |= kafka_python_options(name, secret.get_secret_value())
    return {name: value for name, value in options.items() if name in kind.DEFAULT_CONFIG} | ours


def connect(kind: Any, settings: StreamSettings, patience: timedelta = PATIENCE, **options: Any) -> Any:
    """Return a kafka-python client of the given class, or raise BrokerError with the reason.

    Tries to reach a broker for up to `patience`. kafka-python itself only raises that it could not bootstrap. The
    broker's answer is in its log, so the log of the attempt is read.
    """
    error: Exception | None = None
    with _logged_errors() as logged:
        # A broker may close the connection before its refusal is read: a second attempt may find the reason.
        for _ in range(2 if "sasl.username" in settings.properties else 1):
            try:
                return kind(**client_options(kind, settings, patience, **options))
            except kafka_errors.KafkaError as exc:
                error = exc
            except (OSError, ValueError, AssertionError) as exc:
                raise BrokerError(f"invalid stream.properties: {exc}") from exc
            if any(isinstance(cause, _REFUSALS) for cause in logged):
                break
    assert error is not None
    raise _explained(settings.bootstrap_servers, settings.properties, error, logged) from error


def _explained(
    servers: str, properties: Container[str], error: Exception, logged: Sequence[BaseException]
) -> BrokerError:
    for cause in logged:
        if isinstance(cause, _REFUSALS):
            return auth_error(servers, mechanism=isinstance(cause, kafka_errors.UnsupportedSaslMechanismError))
    # kafka-python throws a refusal away when it reads it together with the end of the connection.
    if "sasl.username" in properties and any("socket disconnected" in str(cause) for cause in logged):
        return CredentialsError(
            f"the Kafka broker at {servers} hangs up: it seems that it refuses the credentials, or the sasl.mechanism, "
            "in stream.properties"
        )
    return BrokerError(unreachable(servers) or not_a_broker_message(servers, _brief(logged[-1] if logged else error)))


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[BaseException]]:
    """Collect the errors that kafka-python logs."""
    causes: list[BaseException] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            arguments = record.args if isinstance(record.args, tuple) else ()
            causes.extend(value for value in arguments if isinstance(value, BaseException))

    theirs = logging.getLogger("kafka")
    level, collector = theirs.level, Collector(logging.WARNING)
    unresponsive_message = logging.NullHandler()
    theirs.addHandler(collector)
    theirs.addHandler(unresponsive_message)
    propagate, theirs.propagate = theirs.propagate, False
    theirs.setLevel(logging.WARNING)
    try:
        yield causes
    finally:
        theirs.removeHandler(collector)
        theirs.removeHandler(unresponsive_message)
        theirs.propagate = propagate
        theirs.setLevel(level)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn kafka-python's errors into ours, but for those that the caller deals with."""
    try:
        yield
    except (kafka_errors.OffsetOutOfRangeError, UnreadableError):
        raise
    except kafka_errors.LogTruncationError as exc:
        raise TruncatedError(TRUNCATED) from exc
    except kafka_errors.UnsupportedCodecError as exc:
        raise undecodable(exc) from exc
    except kafka_errors.KafkaError as exc:
        raise BrokerError(f"{what}: {_brief(exc)}") from exc


def undecodable(error: kafka_errors.UnsupportedCodecError) -> CodecError:
    """Return the error that names the package that kafka-python needs for a codec."""
    codec = next((name for name in _CODECS if name in str(error)), None)
    if codec is None:
        return CodecError(f"messages are compressed in a way that kafka-python does not know ({error})")
    return CodecError(
        f"messages are compressed with {codec}, which kafka-python reads with the package {_CODECS[codec]} alone: "
        f'"pip install \'anabranch[codecs]\'", or set stream.client = "confluent"'
    )


def _brief(error: BaseException) -> str:
    if "Invalid frame length" in str(error):
        return f"its answer is larger than receive.message.max.bytes, which stream.properties can raise: {error}"
    return str(error) or type(error).__name__


def _theirs(partition: TopicPartition) -> Any:
    return KafkaPartition(partition.topic, partition.partition)
