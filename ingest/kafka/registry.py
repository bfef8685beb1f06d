"""The Kafka clients by name; each is imported when it is needed, since one is an extra."""

from collections.abc import Callable

from anabranch.core.extras import needs
from anabranch.ingest.kafka.client import Client
from anabranch.ingest.settings.stream import StreamSettings


def _kafka_python(settings: StreamSettings) -> Client:
    from anabranch.ingest.kafka.kafka_python.client import KafkaPythonClient

    return KafkaPythonClient(settings)


def _confluent(settings: StreamSettings) -> Client:
    with needs('stream.client = "confluent"', "confluent-kafka", "fast"):
        from anabranch.ingest.kafka.confluent.client import ConfluentClient
    return ConfluentClient(settings)


CLIENTS: dict[str, Callable[[StreamSettings], Client]] = {"kafka-python": _kafka_python, "confluent": _confluent}
