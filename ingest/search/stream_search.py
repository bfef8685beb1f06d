"""Finds messages of the pipeline's topics by time, header or key. Joins no group, commits nothing, sends nothing."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Self

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.errors import BrokerError, RegistryError
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.kafka.client import Client, Messages
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.ingest.worker.value_decoder import ValueDecoder

_POLL = timedelta(milliseconds=200)
_AT_ONCE = 10_000
_SILENT_SECONDS = 30.0
"""How long to wait for the next message."""

Matches = Callable[[Messages], NDArray[np.bool_]]
"""Returns which of M messages match, bool `[M]`."""
Progress = Callable[[int, int], object]
"""Called with the number of offsets that were read, and of all that will be."""


class StreamSearch:
    """A connection to the broker; a context manager, used by one thread.

    All methods, and entering the context, raise BrokerError where the broker does not answer.
    """

    def __init__(self, settings: StreamSettings, client: Client | None = None) -> None:
        self._settings = settings
        self._client = CLIENTS[settings.client](settings) if client is None else client

    def __enter__(self) -> Self:
        self._client.open()
        self.partitions: Sequence[TopicPartition] = self._client.partitions()
        self.log_starts = self._client.first_offsets(self.partitions, "earliest", None)
        """The first offset that the broker has of each partition."""
        self.log_ends = self._client.first_offsets(self.partitions, "latest", None)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def offsets_at(self, moment: datetime) -> dict[TopicPartition, int]:
        """Return of each partition the first offset whose record is not older; the end where there is none."""
        return self._client.first_offsets(self.partitions, "latest", moment)

    def matching(
        self,
        begins: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        matches: Matches,
        progress: Progress,
    ) -> dict[TopicPartition, list[int]]:
        """Read partitions from `begins` to before `ends`, and return the offsets of messages that match."""
        positions = {name: begin for name, begin in begins.items() if begin < ends[name]}
        total = sum(ends[name] - begin for name, begin in positions.items())
        found: dict[TopicPartition, list[int]] = {name: [] for name in positions}
        self._client.assign(positions)
        received = time.monotonic()
        while left := sum(max(0, ends[name] - position) for name, position in positions.items()):
            progress(total - left, total)
            for messages in self._client.poll(_POLL, _AT_ONCE):
                name, received = messages.partition, time.monotonic()
                positions[name] = max(positions[name], messages.end)
                matched = np.flatnonzero(matches(messages)).tolist() if len(messages) else []
                found[name] += [offset for at in matched if (offset := messages.offsets[at]) < ends[name]]
            if time.monotonic() - received > _SILENT_SECONDS:
                raise BrokerError(
                    f"{self._settings.bootstrap_servers} has sent nothing for {_SILENT_SECONDS:.0f} s, with {left} "
                    "offsets left to read"
                )
            self._client.lag()  # markers at the end of a partition move the position only after this
        progress(total, total)
        return {name: offsets for name, offsets in found.items() if offsets}


def with_header(header: str, value: str) -> Matches:
    """Match messages that have a header of this name with this value, as UTF-8."""
    expected = (header, value.encode())
    return lambda messages: np.array([expected in map(tuple, each) for each in messages.headers], np.bool_)


def with_key(keys: Sequence[bytes], settings: SchemaSettings, stream: StreamSettings) -> Matches:
    """Match messages that have an event with one of these values of `[schema.key]`.

    Messages that cannot be decoded, tombstones and those of label topics match none.

    Raises:
        SettingsError: the format cannot hold the schema, or needs an extra that is not installed.
        DependencyError: in what it returns, where the registry with the schema of a message does not answer.
    """
    schema, hashes, writers = Schema(settings, stream.labels), hash_texts(list(keys)), writer_schemas(stream)
    decoder = ValueDecoder(make_format(stream, schema, writers), schema, int(stream.max_message_bytes))

    def matches(messages: Messages) -> NDArray[np.bool_]:
        matched = np.zeros(len(messages), np.bool_)
        if messages.partition.topic in stream.topics:
            decoded, _ = decoder.decode(messages.values, messages.headers, messages.faults)
            if decoded.deferred:
                name, at = messages.partition, messages.offsets[decoded.deferred[0]]
                why = "does not answer" if writers is None or writers.problem is None else writers.problem
                raise RegistryError(f"the schema registry is needed for {name.topic}[{name.partition}]@{at}: {why}")
            matched[decoded.message[np.isin(decoded.columns["key_hash"], hashes)]] = True
        return matched

    return matches
