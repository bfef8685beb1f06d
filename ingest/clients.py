"""The Kafka clients by name."""

from collections.abc import Callable

from ingest.client import Client
from ingest.config import StreamSettings
from ingest.kafka import KafkaPythonClient

CLIENTS: dict[str, Callable[[StreamSettings], Client]] = {"kafka-python": KafkaPythonClient}
