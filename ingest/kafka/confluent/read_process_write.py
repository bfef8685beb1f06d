"""Read, process, write: a member of a consumer group, and the producer that writes what it makes of the messages.

With transactions, the records of a batch and the offsets behind it become visible together or not at all, and the
broker refuses those of a member whose partitions another one has by now (KIP-98, KIP-447).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.confluent.client import ConfluentClient, TopicMetadata
from anabranch.ingest.kafka.confluent.connection import brief, make
from anabranch.ingest.kafka.dead_letters import LARGEST_LETTER
from anabranch.ingest.settings.stream import StreamSettings

_A_MOMENT = timedelta(milliseconds=10)
_COMMITTED_SECONDS = 15.0
"""How long to ask for the group's offsets: longer than a transaction of a process that is gone stays open."""
_START_SECONDS = 30.0
_COMMIT_SECONDS = 30.0
_TRANSACTION_MS = 10_000
"""After which the broker aborts the transaction of a process that is gone, if that does not start again before."""
_SESSION_MS = 6_000
"""After which the group gives the partitions of a process that is gone to others: the least that brokers permit."""
_JOIN_MS = 60_000
"""How long a rebalance may take, and so after which a request to join that is lost is sent again: 5 minutes otherwise.
More than what may pass between two polls."""
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED)
_WITHOUT_TRANSACTIONS = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)
_DROPPED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
"""What is reported of the records that an abort drops."""
_FORBIDDEN = (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)

log = logging.getLogger(__name__)


class Record(NamedTuple):
    """A record to write."""

    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]


class GroupClient(ConfluentClient):
    """Reads committed messages of those partitions that a consumer group gives it.

    Used by one thread, but for `commit_sync`, `membership` and `is_member`.
    """

    def __init__(self, settings: StreamSettings, start: str, before_revoked: Callable[[], bool]) -> None:
        """Prepare.

        Args:
            settings: names the topics and the group.
            start: where partitions without an offset of the group begin: `earliest` or `latest`.
            before_revoked: called in `poll` before partitions are given up; returns once nothing of them is unwritten,
                or False where that took too long.
        """
        tuned = {"session.timeout.ms": _SESSION_MS, "heartbeat.interval.ms": _SESSION_MS // 3}
        tuned["max.poll.interval.ms"] = _JOIN_MS
        super().__init__(settings.model_copy(update={"isolation_level": "read_committed"}), tuned=tuned)
        self._start = start
        self._before_revoked = before_revoked
        self._failure: Exception | None = None

    @override
    def open(self) -> None:
        super().open()
        self._consumer.subscribe(
            list(self._settings.topics),
            on_assign=lambda _, partitions: self._on_assign(partitions),
            on_revoke=lambda *_: self._on_revoke(),
            on_lost=lambda *_: self._on_lost(),
        )

    @override
    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return at most `limit` messages as soon as there are any.

        Raises:
            BrokerError, GapError, RecreatedError: as `Client.poll`; BrokerError also where the group gave the
                partitions to another member before all was written: what was read of them is not to be written.
        """
        found = super().poll(timeout, limit)
        if self._failure is not None:
            raise self._failure
        return found

    def rest(self) -> list[Messages]:
        """Stay a member of the group and read no more; called again and again, so that partitions can be given up.

        Returns what was read all the same, as of partitions that are new. Raises as `poll` does.
        """
        if self._positions and not self._paused:
            self.assign(self._positions, self._positions)
        return self.poll(_A_MOMENT, 2)

    def go_on(self) -> None:
        """Read again after a rest."""
        if self._paused:
            self.assign(self._positions)

    def assigned(self) -> int:
        """Return how many partitions this member has."""
        return len(self._positions)

    def membership(self) -> Any:
        """Return what names this member in its group's present generation, for `TransactionalWriter.write`."""
        return self._consumer.consumer_group_metadata()

    def behind(self) -> tuple[int, str | None]:
        """Return how many offsets are unread of its partitions, and what keeps it from reading."""
        if not self._positions:
            return 0, None
        found = self.lag()
        return sum(max(0, end - self._positions[name]) for name, end in found.ends.items()), found.problem

    def commit_sync(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of the group; raises BrokerError where it is no member any more, or no broker answers."""
        try:
            self._consumer.commit(offsets=_offsets(positions), asynchronous=False)
        except KafkaException as exc:
            raise BrokerError(f"cannot commit offsets of the group {self._settings.group_id}: {brief(exc)}") from exc

    @override
    def _consume(self, timeout: timedelta, limit: int) -> list[Any]:
        first = self._consumer.poll(timeout.total_seconds())  # `consume` would wait for as many as the limit
        return [] if first is None else [first, *self._consumer.consume(limit - 1, 0)]

    def _on_assign(self, partitions: Sequence[Any]) -> None:
        names = [TopicPartition(each.topic, each.partition) for each in partitions]
        try:
            found = self._consumer.committed(list(partitions), timeout=_COMMITTED_SECONDS) if names else []
            faulty = next((each.error for each in found if each.error is not None), None)
            if faulty is not None:
                raise KafkaException(faulty)
            offsets = {TopicPartition(each.topic, each.partition): each.offset for each in found}
            new = [name for name in names if offsets[name] < 0]
            firsts = self.first_offsets(new, self._start, None) if new else {}
            self.assign({**offsets, **firsts})
            if firsts:
                self.commit_sync(firsts)
        except KafkaException as exc:
            self._failure = BrokerError(
                f"cannot look up the offsets of the group {self._settings.group_id}: {brief(exc)}"
            )
        except BrokerError as exc:
            self._failure = exc

    def _on_revoke(self) -> None:
        if not self._before_revoked():
            self._failure = BrokerError("partitions were given up before all that was read of them was answered")
        self._drop_partitions()

    def _on_lost(self) -> None:
        self._failure = BrokerError(f"the group {self._settings.group_id} has given the partitions to other members")
        self._drop_partitions()

    def _drop_partitions(self) -> None:
        self._partitions, self._positions = {}, {}
        self._consumer.unassign()


class Writer:
    """Writes records, and commits the offsets of the messages that they answer. Used by one thread.

    A crash in between makes a restart answer these messages again: at least once.
    """

    def __init__(self, settings: StreamSettings, topic: str, reader: GroupClient) -> None:
        self._settings = settings
        self._topic = topic
        self._reader = reader
        self._error: KafkaError | None = None
        self._producer: Any = None

    def open(self) -> None:
        """Connect.

        Raises:
            SettingsError: the broker has no transactions, or this user has no right to them.
            BrokerError: the topic does not exist, or no broker answers.
        """
        topics = {"topics": (*self._settings.topics, self._topic)}
        TopicMetadata(self._settings.model_copy(update=topics)).open(_START_SECONDS)
        self._producer = make(
            Producer,
            self._settings,
            {
                "acks": "all",
                "linger.ms": 0,  # a batch of answers is written at once
                "partitioner": "murmur2_random",  # that of Java's clients, so that topics can be joined by key
                "message.max.bytes": LARGEST_LETTER,
                **self._promise(),
            },
        )

    def write(self, records: Sequence[Record], positions: Mapping[TopicPartition, int], membership: Any) -> None:  # noqa: ARG002
        """Write records, and commit the offsets up to which the messages were read.

        Args:
            records: the answers.
            positions: for each partition, the first offset that is not answered.
            membership: of the reader, from when it read the messages.

        Raises:
            BrokerError: nothing is committed, or it is unknown whether it is: read again from the group's offsets.
        """
        self._send(records)
        if self._producer.flush(_COMMIT_SECONDS):
            raise BrokerError(f"{self._topic}: the broker has not acknowledged answers for {_COMMIT_SECONDS:.0f} s")
        self._raise_error()
        self._reader.commit_sync(positions)

    def close(self) -> None:
        """Drop what is not written."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(0)

    def _promise(self) -> dict[str, Any]:
        """Return properties of the producer."""
        return {}

    def _send(self, records: Sequence[Record]) -> None:
        """Hand over records."""
        produce, on_delivery = self._producer.produce, self._on_delivery
        for record in records:
            while True:
                try:
                    produce(self._topic, record.value, record.key, headers=record.headers, on_delivery=on_delivery)
                except BufferError:
                    self._producer.poll(0.1)
                except KafkaException as exc:  # larger than any that this client sends
                    raise self._refusal(exc.args[0]) from exc
                else:
                    break
        self._producer.poll(0)

    def _on_delivery(self, error: KafkaError | None, _: Any) -> None:
        if error is not None and error.code() not in _DROPPED:
            self._error = self._error or error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise self._refusal(error)

    def _refusal(self, error: KafkaError) -> BrokerError:
        large = error.code() in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
        way_out = "; raise its max.message.bytes" if large else ""
        return BrokerError(f"{self._topic} does not take answers: {error.str()}{way_out}")


class TransactionalWriter(Writer):
    """Writes records and offsets in one transaction: exactly once for whoever reads committed records."""

    def __init__(self, settings: StreamSettings, topic: str, reader: GroupClient, transactional_id: str) -> None:
        """`transactional_id` names the process: a start with the same one ends what the one before left open."""
        super().__init__(settings, topic, reader)
        self._id = transactional_id

    @override
    def open(self) -> None:
        super().open()
        servers = self._settings.bootstrap_servers
        way_out = 'set serving.stream.delivery = "at-least-once" to do without'
        try:
            self._producer.init_transactions(_START_SECONDS)
        except KafkaException as exc:
            code = exc.args[0].code()
            if code in _WITHOUT_TRANSACTIONS:
                raise SettingsError(f"the Kafka broker at {servers} has no transactions; {way_out}") from exc
            if code in _FORBIDDEN:
                raise SettingsError(
                    f"the user of [stream.properties] may not use the transactional id {self._id} at {servers}: "
                    f"let it write transactional ids, or {way_out}"
                ) from exc
            raise BrokerError(
                f"transactions cannot begin at {servers}: {brief(exc)} (are there as many brokers as "
                f"transaction.state.log.replication.factor says?); {way_out}"
            ) from exc

    @override
    def write(self, records: Sequence[Record], positions: Mapping[TopicPartition, int], membership: Any) -> None:
        """Write in a transaction, in this order; a crash before the last step leaves nothing:

        1. begin; 2. send the records; 3. add the offsets; 4. commit, which first waits for the records.
        """
        try:
            self._producer.begin_transaction()
            self._send(records)
            self._producer.send_offsets_to_transaction(_offsets(positions), membership, _COMMIT_SECONDS)
            self._producer.commit_transaction(_COMMIT_SECONDS)
        except KafkaException as exc:
            self._abort()  # which waits for the reports of all records: of one that the topic refused among them
            self._raise_error()
            error = exc.args[0]
            if error.code() in _FENCED:
                raise BrokerError(
                    f"another process has taken over the transactional id {self._id}: two servers need different "
                    "host names or ports"
                ) from exc
            raise BrokerError(f"a transaction with answers for {self._topic} failed: {brief(exc)}") from exc
        self._raise_error()

    @override
    def _promise(self) -> dict[str, Any]:
        return {"transactional.id": self._id, "transaction.timeout.ms": _TRANSACTION_MS}

    @override
    def close(self) -> None:
        """Abort what is open, if the broker answers at once: otherwise it does so itself."""
        if self._producer is not None:
            self._abort()
        super().close()

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(1.0)
        except KafkaException as exc:
            log.debug("no transaction was aborted: %s", brief(exc))


def _offsets(positions: Mapping[TopicPartition, int]) -> list[Any]:
    return [KafkaPartition(name.topic, name.partition, offset) for name, offset in positions.items()]
