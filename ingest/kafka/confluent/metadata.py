"""Topics and offsets, as librdkafka's admin client returns them."""

import base64
from collections.abc import Sequence
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.confluent.connection import make, reason
from anabranch.ingest.kafka.diagnostics import gone_topic, missing_topic
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
