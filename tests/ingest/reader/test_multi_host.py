"""A stream that two hosts read, the second one a separate process on loopback, against a real broker."""

import contextlib
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewPartitions

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import RecreatedError
from ingest.reader import hang_detector as silence
from ingest.reader.multi_host import MultiHostReader
from ingest.transport.protocol import Begin, Stop
from ingest.transport.tcp import Remote, learners
from tests.faults.proxy import Fault, Proxy

GOOD = {"x": [1, 2, 3], "y": 1}
SCHEMA = SchemaSettings.model_validate(
    {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
)
LOOPBACK = "127.0.0.1"

Seen = Counter[tuple[int, int]]
Reading = tuple[MultiHostReader, Remote]


@contextlib.contextmanager
def reading(bootstrap: str, topic: str, there: str = "", **stream: Any) -> Iterator[Reading]:
    """Two hosts that read a topic; the second one `there`, if another address of the broker is given."""
    settings = StreamSettings.model_validate({"bootstrap_servers": bootstrap, "topics": [topic], **stream})
    elsewhere = settings.model_copy(update={"bootstrap_servers": there or bootstrap})
    remote = Remote(elsewhere.resolved("test"), LOOPBACK)
    sources = MultiHostReader(settings.resolved("test"), SCHEMA, HoldOut(fraction=0, seed=0), [remote.address])
    try:
        sources.open({}, threading.Event(), {})
        yield sources, remote
    finally:
        sources.close()
        remote.close()


def read(sources: MultiHostReader, seen: Seen, events: int, partitions: Sequence[int] = range(4)) -> None:
    """Count events by (partition, offset) until there are so many of these partitions; they come in order."""
    deadline = time.monotonic() + 60
    last: dict[int, int] = {}
    while count(seen, partitions) < events:
        assert time.monotonic() < deadline, f"{seen.total()} events of {events} after 60 s; problem: {sources.problem}"
        block = sources.poll(timedelta(seconds=1))
        if block is not None:
            assert (block.columns["feature.x"] == [1, 2, 3]).all()
            for partition, offset in zip(
                *(block.columns[name].tolist() for name in ("partition", "offset")), strict=True
            ):
                assert last.get(partition, -1) < offset
                last[partition] = offset
                seen[partition, offset] += 1
            sources.release(block)


def idle(sources: MultiHostReader, seconds: float) -> None:
    """Poll as a learner does while nothing comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert sources.poll(timedelta(milliseconds=100)) is None


def until(sources: MultiHostReader, condition: Callable[[], bool], seconds: float = 30) -> None:
    """Poll while nothing comes, until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, sources.problem
        idle(sources, 0.1)


def count(seen: Seen, partitions: Sequence[int]) -> int:
    return sum(times for (partition, _), times in seen.items() if partition in partitions)


def once(seen: Seen, partitions: int, each: int) -> bool:
    return seen == Counter((p, o) for p in range(partitions) for o in range(each))


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_partitions_go_from_host_to_host_and_every_event_comes_once(
    kafka: Any, make_topic: Callable[..., str], produce: Callable[..., list[int]], client: str
) -> None:
    topic, seen = make_topic(partitions=4), Counter[tuple[int, int]]()
    for partition in range(4):
        produce(kafka.bootstrap, topic, [GOOD] * 6000, partition=partition)
    with reading(kafka.bootstrap, topic, client=client, buffer_bytes="1MB") as (sources, remote):
        read(sources, seen, 500)
        sources.rebalance([300.0, 200.0, 200.0, 200.0])
        assert sources._assignment == [0, 1, 1, 0]
        read(sources, seen, count(seen, (1, 2)) + 100, (1, 2))
        sources.rebalance([1.0, 900.0, 900.0, 1.0])
        assert sources._assignment == [0, 0, 1, 1]
        read(sources, seen, count(seen, (2,)) + 100, (2,))
        remote.close()
        read(sources, seen, 24000)
        assert once(seen, 4, 6000)
        until(sources, lambda: sources._assignment == [0] * 4)  # what it had read already may have been all
        assert sources.problem is not None
        assert "another host does not read its part of the stream" in sources.problem
        for partition in range(4):
            produce(kafka.bootstrap, topic, [GOOD] * 100, partition=partition)
        read(sources, seen, 24400)
        assert once(seen, 4, 6100)


def test_a_partition_that_is_added_is_read_and_all_ends_are_known(
    kafka: Any, make_topic: Callable[..., str], produce: Callable[..., list[int]]
) -> None:
    topic, seen = make_topic(partitions=2), Counter[tuple[int, int]]()
    for partition in range(2):
        produce(kafka.bootstrap, topic, [GOOD] * 100, partition=partition)
    with reading(kafka.bootstrap, topic) as (sources, _):
        sources.rebalance([1.0, 1.0])
        assert sorted(sources._assignment) == [0, 1]
        read(sources, seen, 200)
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            admin.create_partitions({topic: NewPartitions(3)})
        produce(kafka.bootstrap, topic, [GOOD] * 100, partition=2)
        read(sources, seen, 300)
        assert once(seen, 3, 100)
        deadline = time.monotonic() + 20
        while [each.end for each in sources.partitions] != [100] * 3:
            assert time.monotonic() < deadline, sources.partitions
            assert sources.poll(timedelta(seconds=1)) is None


def test_a_host_that_is_idle_for_long_still_reports_that_its_broker_is_away(
    kafka: Any, make_topic: Callable[..., str]
) -> None:
    """It stops reporting to a learner that sends no messages, after eight reports, one a second."""
    with Proxy(kafka.bootstrap) as proxy, reading(kafka.bootstrap, make_topic(partitions=2), proxy.address) as (it, _):
        it.rebalance([1.0, 1.0])
        assert it._assignment == [0, 1]
        for second in range(10):
            idle(it, 1)
            if not second % 3:
                it.commit({0: 0, 1: 0})
        assert it.problem is None
        proxy.suffer(Fault(closed=True))
        until(it, lambda: proxy.address in str(it.problem), 10)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no signal that stops a process")
def test_a_host_that_was_lost_reads_again_and_no_problem_remains(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost are the connection to it, its ingest process, and that process while it hangs."""
    topic, seen, sent = make_topic(partitions=2), Counter[tuple[int, int]](), 0
    rates = [1.0, 1.0]

    with reading(kafka.bootstrap, topic) as (sources, remote):
        sources.rebalance(rates)

        def learn() -> None:
            nonlocal sent
            sent += 100
            for partition in range(2):
                produce(kafka.bootstrap, topic, [GOOD] * 100, partition=partition)
            read(sources, seen, 2 * sent)

        def lost() -> bool:
            return "another host does not read its part of the stream" in str(sources.problem)

        def well() -> bool:
            remote.keep()
            sources.rebalance(rates)
            return sources.problem is None and sources._assignment == [0, 1]

        learn()
        (relay,) = (each._process.popen for each in sources._others)
        assert relay is not None
        relay.kill()
        until(sources, lost)
        assert sources._assignment == [0, 0]
        learn()
        until(sources, well)
        learn()

        remote._process.kill()
        until(sources, lost)
        until(sources, well)
        learn()

        monkeypatch.setattr(silence, "SILENT_SECONDS", 8.0)
        remote._process.send_signal(signal.SIGSTOP)
        until(sources, lost)
        assert "hangs" in str(sources.problem)
        learn()
        remote._process.send_signal(signal.SIGCONT)
        until(sources, well)
        learn()
    assert once(seen, 2, sent)


def test_partitions_are_assigned_again_while_the_broker_is_away_and_nothing_ends(
    kafka: Any, make_topic: Callable[..., str], produce: Callable[..., list[int]]
) -> None:
    topic, seen = make_topic(partitions=4), Counter[tuple[int, int]]()

    def send() -> None:
        for partition in range(4):
            produce(kafka.bootstrap, topic, [GOOD] * 100, partition=partition)

    with Proxy(kafka.bootstrap) as proxy:
        with reading(proxy.address, topic, kafka.bootstrap) as (sources, remote):
            send()
            sources.rebalance([300.0, 200.0, 200.0, 200.0])
            read(sources, seen, 400)
            proxy.suffer(Fault(closed=True))
            sources.rebalance([1.0, 900.0, 900.0, 1.0])
            assert sources._assignment == [0, 0, 1, 1], "no reader has reported yet that the broker is away"
            until(sources, lambda: proxy.address in str(sources.problem))
            sources.rebalance([1.0, 1.0, 900.0, 900.0])
            assert sources._assignment == [0, 0, 1, 1]
            remote.close()
            until(sources, lambda: sources._assignment == [0] * 4)
            until(sources, lambda: proxy.address in str(sources.problem))
            send()
            proxy.heal()
            read(sources, seen, 800)
    assert once(seen, 4, 200)


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
@pytest.mark.parametrize("events", [2, 5])
@pytest.mark.parametrize("on_gap", ["earliest", "fail"])
def test_a_topic_that_is_recreated_while_two_hosts_read_is_read_from_its_beginning_by_both_or_ends_the_reading(
    kafka: Any,
    make_topic: Callable[..., str],
    recreate_topic: Callable[..., None],
    produce: Callable[..., list[int]],
    client: str,
    events: int,
    on_gap: str,
) -> None:
    """It has fewer events than were read of the old one, or more."""
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker has no topic ids, and makes a topic that is asked for with one partition")
    topic, seen = make_topic(partitions=2), Counter[tuple[int, int]]()

    def send(count: int) -> None:
        for partition in range(2):
            produce(kafka.bootstrap, topic, [GOOD] * count, partition=partition)

    send(3)
    with reading(kafka.bootstrap, topic, client=client, on_gap=on_gap) as (sources, _):
        sources.rebalance([1.0, 1.0])
        assert sources._assignment == [0, 1]
        read(sources, seen, 6)
        recreate_topic(kafka.bootstrap, topic, 2)
        send(events)
        if on_gap == "fail":
            with pytest.raises(RecreatedError, match="deleted and created again"):
                read(sources, seen, 7, (2, 3))
            return
        read(sources, seen, 2 * events, (2, 3))
        assert [partition.name.incarnation for partition in sources.partitions] == [0, 0, 1, 1]
        sources.rebalance([0.0, 0.0, 900.0, 900.0])
        assert sorted(sources._assignment[2:]) == [0, 1]
        send(100)
        read(sources, seen, 2 * (events + 100), (2, 3))
    # Records that librdkafka fetched before it received the new topic's metadata count as the old one's.
    recreated = Counter({(partition, offset): times for (partition, offset), times in seen.items() if partition > 1})
    assert recreated == Counter((partition, offset) for partition in (2, 3) for offset in range(events + 100))


def test_a_host_that_cannot_read_leaves_all_to_the_first(
    kafka: Any, make_topic: Callable[..., str], produce: Callable[..., list[int]], free_port: Callable[[], int]
) -> None:
    topic, seen = make_topic(partitions=2), Counter[tuple[int, int]]()
    for partition in range(2):
        produce(kafka.bootstrap, topic, [GOOD] * 100, partition=partition)
    settings = StreamSettings(bootstrap_servers=kafka.bootstrap, topics=(topic,)).resolved("test")
    nowhere = f"{LOOPBACK}:{free_port()}"
    remote = Remote(settings.model_copy(update={"bootstrap_servers": nowhere}), LOOPBACK)
    sources = MultiHostReader(
        settings, SCHEMA, HoldOut(fraction=0, seed=0), [f"{LOOPBACK}:{free_port()}", remote.address]
    )
    with contextlib.closing(remote), contextlib.closing(sources):
        sources.open({}, threading.Event(), {})
        sources.rebalance([1.0, 1.0])
        read(sources, seen, 200)
        assert once(seen, 2, 100)
        assert nowhere in str(sources.problem)


@pytest.fixture
def listening() -> Iterator[tuple[tuple[str, int], "Future[Begin]"]]:
    """The address of an ingest process with half a second of patience, and the first learner's message."""
    server = socket.create_server((LOOPBACK, 0))
    address: tuple[str, int] = server.getsockname()
    with ThreadPoolExecutor(1) as thread:

        def first() -> Begin:
            with contextlib.closing(learners(server.detach(), 0.5)) as coming:
                return next(coming)[1]

        yield address, thread.submit(first)


def test_a_peer_that_is_no_learner_is_disconnected_and_the_next_one_is_served(
    listening: tuple[tuple[str, int], "Future[Begin]"],
) -> None:
    address, learner = listening
    good = {"stream": "", "schema": SCHEMA.model_dump_json(), "positions": [], "marks": []}
    first = [
        b"nonsense",
        msgspec.msgpack.encode(Stop()),
        msgspec.msgpack.encode(Begin(**good | {"schema": "{}"}, hold_out="{}")),
        msgspec.msgpack.encode(Begin(**good, hold_out="{")),
    ]
    for message in first:
        with contextlib.closing(_connected(address)) as connection:
            connection.send_bytes(message)
            assert connection.poll(30)
            with pytest.raises(EOFError):
                connection.recv_bytes()
    _is_served(address, learner)


def test_a_peer_that_sends_less_than_a_message_is_disconnected_and_the_next_one_is_served(
    listening: tuple[tuple[str, int], "Future[Begin]"],
) -> None:
    """Half of one, one that comes byte by byte, and one whose length is too large: the start of a GET."""
    address, learner = listening
    begun, get = struct.pack("!i", 1000), b"GET / HTTP/1.1\r\n\r\n"
    for message, more in ((begun + b"half", b""), (begun, b"x"), (get, b"")):
        with contextlib.closing(socket.create_connection(address)) as connection:
            connection.sendall(message)
            assert _hung_up(connection, more, 30), message
    _is_served(address, learner)


def _hung_up(connection: socket.socket, more: bytes, seconds: float) -> bool:
    """Send `more` again and again, and return whether the other side hangs up in time."""
    deadline = time.monotonic() + seconds
    connection.settimeout(0.1)
    while time.monotonic() < deadline:
        try:
            if not connection.recv(1):
                return True
        except TimeoutError:
            with contextlib.suppress(OSError):
                connection.sendall(more)
        except OSError:
            return True
    return False


def _is_served(address: tuple[str, int], learner: "Future[Begin]") -> None:
    """Assert that a learner's first message is received."""
    begin = {"stream": "", "schema": SCHEMA.model_dump_json(), "positions": [], "marks": []}
    message = Begin(**begin, hold_out=HoldOut(fraction=0, seed=0).model_dump_json())
    with contextlib.closing(_connected(address)) as connection:
        connection.send_bytes(msgspec.msgpack.encode(message))
        assert learner.result(60) == message


def _connected(address: tuple[str, int]) -> Connection:
    return Connection(socket.create_connection(address).detach())
