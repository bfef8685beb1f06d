"""The formats that have a registry: how fast their messages become blocks, alone and after the poll of each client."""

import gc
import itertools
import statistics
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.kafka.client import Client, Messages
from anabranch.ingest.kafka.producer import EventProducer
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.pipeline import Stream, make_topic
from benchmarks.harness.registered_messages import FOUR, WIDE, builder, messages
from benchmarks.harness.results import Results, Target

KINDS = {"": (FOUR, 500_000), "_wide": (WIDE, 200_000)}
"""Events, and the least number of them a second, by the part of a key that names them."""
TARGETS = {
    f"{form}{kind}{key}": Target(bound, least=True)
    for form in ("avro", "protobuf")
    for kind, (_, rate) in KINDS.items()
    for key, bound in (
        ("_events_per_second", rate),
        ("_polled_events_per_second_confluent", rate),
        ("_over_poll_kafka_python", 0.9),  # whose poll takes most of the time
    )
}
FORMATS = ("avro", "protobuf", "json-schema", "json")
_FETCH = 5_000
"""Messages that are decoded together."""
_DISTINCT = 20_000
"""Different messages of a topic."""
_POLL = timedelta(milliseconds=10)
"""confluent-kafka waits for all of it where fewer than `_FETCH` messages are left."""


def decode(results: Results, rounds: int, seconds: float) -> None:
    """Measure messages in memory, which become the rows of a block."""
    results.title(f"decode: {_FETCH} messages at a time become rows of a block; json for comparison")
    stream = {"bootstrap_servers": "localhost:1", "topics": ["benchmark"]}
    for kind, (events, _) in KINDS.items():
        with ExitStack() as stack:
            arms: dict[str, Callable[[], float]] = {}
            busy: dict[str, list[float]] = {form: [] for form in FORMATS}
            for form in FORMATS:
                incoming = [Incoming(_fetched(messages(events, form, _FETCH)), 0, Position(0))]
                made = stack.enter_context(builder(events, form, stream))
                arms[form] = _repeated(made, incoming, seconds, busy[form])
            for form, rates in interleave(arms, rounds).items():
                remark = f"{statistics.median(busy[form]):.0f} a second of CPU time"
                results.add(f"{_key(form)}{kind}_events_per_second", Spread.of(rates), remark)


def poll(results: Results, rounds: int, seconds: float, count: int, bootstrap: str) -> None:
    """Measure what decoding costs after the poll of each client: the rate of both over that of the poll alone.

    A turn reads a topic of `count` messages until `seconds` are over.
    """
    for kind, (events, _) in KINDS.items():
        results.title(
            f"poll: {count} messages{' of 64 floats' if kind else ''} of a topic, polled, and decoded to blocks"
        )
        for form in ("avro", "protobuf"):
            name = f"{_key(form)}{kind}"
            stream = {"bootstrap_servers": bootstrap, "topics": [f"{name}-{uuid.uuid4().hex[:8]}"]}
            _send(stream, messages(events, form, min(count, _DISTINCT)), count)
            for client in CLIENTS:
                with ExitStack() as stack:
                    made = stack.enter_context(builder(events, form, {**stream, "client": client}))
                    reader = _Reader(StreamSettings.model_validate({**stream, "client": client}), count, seconds)
                    stack.callback(reader.close)
                    rates = interleave({"poll": reader.turn, "decoded": lambda m=made, r=reader: r.turn(m)}, rounds)
                polled, decoded = (statistics.median(reader.busy[is_decoded]) for is_decoded in (False, True))
                remark = f"{decoded:.0f} a second of CPU time of the thread"
                results.add(f"{name}_polled_events_per_second_{_key(client)}", Spread.of(rates["decoded"]), remark)
                remark = f"{decoded / polled:.3g} by CPU time of the thread"
                results.add(f"{name}_over_poll_{_key(client)}", ratio(rates["decoded"], rates["poll"]), remark)


class _Reader:
    """Reads a topic from its beginning to its end, again and again."""

    def __init__(self, settings: StreamSettings, count: int, seconds: float) -> None:
        self._client: Client = CLIENTS[settings.client](settings.resolved("benchmark"))
        self._client.open()
        self._partition = TopicPartition(settings.topics[0], 0)
        self._count = count
        self._seconds = seconds
        self.busy: dict[bool, list[float]] = {False: [], True: []}
        """Messages a second of CPU time of this thread, by turn, alone and decoded to blocks."""

    def turn(self, made: BlockBuilder | None = None) -> float:
        """Return the messages a second, decoded to blocks where `made` is given; the topic is read several times."""
        messages, seconds, begin_busy = 0, 0.0, time.thread_time()
        while seconds < self._seconds:
            count, passed = self._read(made)
            messages, seconds = messages + count, seconds + passed
        self.busy[made is not None].append(messages / (time.thread_time() - begin_busy))
        return messages / seconds

    def _read(self, made: BlockBuilder | None) -> tuple[int, float]:
        """Read the topic once, and return the messages after the first poll that returned some, and their seconds."""
        self._client.assign({self._partition: 0})
        while not (fetched := self._client.poll(_POLL, _FETCH)):
            pass
        first = fetched[-1].end
        begin = time.perf_counter()
        while not fetched or fetched[-1].end < self._count:
            fetched = self._client.poll(_POLL, _FETCH)
            if made is not None and fetched:
                made.assemble([Incoming(each, 0, Position(0)) for each in fetched])
        return self._count - first, time.perf_counter() - begin

    def close(self) -> None:
        self._client.close()


def _repeated(made: BlockBuilder, incoming: list[Incoming], seconds: float, busy: list[float]) -> Callable[[], float]:
    """Return a turn, which returns the events a second, and appends those of a second of CPU time to `busy`."""

    def turn() -> float:
        gc.collect()
        begin, begin_busy, events = time.perf_counter(), time.thread_time(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            events += len(made.assemble(incoming))
        busy.append(events / (time.thread_time() - begin_busy))
        return events / passed

    return turn


def _fetched(values: list[bytes]) -> Messages:
    n = len(values)
    partition, now = TopicPartition("benchmark", 0), int(time.time() * 1000)
    return Messages(partition, range(n), [now] * n, [None] * n, values, [()] * n, n)


def _send(stream: dict[str, Any], values: list[bytes], count: int) -> None:
    producer = EventProducer(
        make_topic(Stream(stream["bootstrap_servers"], stream["topics"][0], {}, 0)), stream["topics"][0]
    )
    producer.open()
    try:
        for value in itertools.islice(itertools.cycle(values), count):
            producer.send(value)
        producer.flush()
    finally:
        producer.close()


def _key(name: str) -> str:
    return name.replace("-", "_")
