"""The whole of ingest against a real Kafka-protocol broker: what arrives, what does not, and how it fails."""

import contextlib
import json
import signal
import socket
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka import TopicPartition as KafkaPartition
from kafka.admin import NewPartitions
from kafka.errors import KafkaError

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError, GapError, RecreatedError
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.kafka.client import Lag
from anabranch.ingest.kafka.confluent.client import ConfluentClient
from anabranch.ingest.kafka.dead_letters import DeadLetter
from anabranch.ingest.kafka.kafka_python.client import KafkaPythonClient
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.reader import reader as silence
from anabranch.ingest.reader.ingest_process import PROGRAM
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import LagReport
from tests.faults.proxy import Fault, Proxy
from tests.support import dying_ingest
from tests.support.extend_pages import follow
from tests.support.waiting import PATIENCE_SECONDS, Patience, wait_until

pytestmark = pytest.mark.process

GOOD = {"x": [1, 2, 3], "y": 1}
SCHEMA = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}

CLASSES: dict[str, Any] = {"kafka-python": KafkaPythonClient, "confluent": ConfluentClient}
STREAM: dict[str, Any] = {}
"""What the settings of each test begin with."""


@pytest.fixture(params=sorted(CLIENTS), autouse=True)
def client(request, monkeypatch):
    """Each test here is one of every client."""
    monkeypatch.setitem(STREAM, "client", request.param)


ONE_CLIENT = pytest.mark.parametrize("client", ["kafka-python"], indirect=True)
"""For tests of the process around the client, or of what comes before there is one."""


@contextlib.contextmanager
def opened(bootstrap, topic, schema=None, positions=None, marks=None, program=PROGRAM, **stream):
    settings = {**STREAM, "bootstrap_servers": bootstrap, "topics": [topic], **stream}
    source = BlockReader(
        StreamSettings.model_validate(settings).resolved("test"),
        SchemaSettings.model_validate(schema or SCHEMA),
        HoldOut(fraction=0, seed=0),
        program,
    )
    try:
        source.open(positions, marks=marks)
        yield source
    finally:
        source.close()


def open_and_close(bootstrap):
    """Open the client in this process, with little patience for a broker that is not there."""
    settings = StreamSettings.model_validate({**STREAM, "bootstrap_servers": bootstrap, "topics": ["t"]})
    client = CLASSES[settings.client](settings.resolved("test"), timedelta(seconds=0.6))
    try:
        client.open()
    finally:
        client.close()


def read_for(source, timeout):
    """Return (partition, offset, row, outcome) of the events of the next block, if one comes in time."""
    block = source.poll(timeout)
    if block is None:
        return []
    columns = (block.columns[name].tolist() for name in ("partition", "offset", "row", "outcome"))
    seen = [(p, o, r, Outcome(k)) for p, o, r, k in zip(*columns, strict=True)]
    source.release(block)
    return seen


def read(source, events):
    """Return (partition, offset, row, outcome) of so many events, in the order of arrival."""
    seen: list[tuple[int, int, int, Outcome]] = []
    deadline = Patience()
    while len(seen) < events:
        deadline.check(f"{len(seen)} events of {events}; problem: {source.problem}")
        seen += read_for(source, timedelta(seconds=1))
    return seen


def cursors(source):
    """Return the position and the fingerprint of each partition."""
    positions = dict(source._cursors.positions)
    return positions, dict(zip(positions, source._cursors.fingerprints, strict=True))


def started():
    settings = StreamSettings.model_validate({**STREAM, "bootstrap_servers": "127.0.0.1:1", "topics": ["none"]})
    source = BlockReader(settings.resolved("test"), SchemaSettings.model_validate(SCHEMA), HoldOut(fraction=0, seed=0))
    source.start()
    return source


@ONE_CLIENT
def test_a_process_that_was_started_before_is_the_one_that_reads(kafka, make_topic, produce, monkeypatch):
    topic, begun = make_topic(), BlockReader.open

    def open_later(source, *arguments, **options):
        source.start()
        waiting = source._process.popen
        begun(source, *arguments, **options)
        assert source._process.popen is waiting

    monkeypatch.setattr(BlockReader, "open", open_later)
    produce(kafka.bootstrap, topic, [GOOD])
    with opened(kafka.bootstrap, topic) as source:
        assert len(read(source, 1)) == 1


@ONE_CLIENT
def test_a_process_that_died_before_it_began_to_read_is_replaced():
    source = started()
    first = source._process.popen
    assert first is not None
    first.kill()
    first.wait()
    try:
        source._begin()
        assert source._process.popen is not None
        assert source._process.popen.pid != first.pid
    finally:
        source.close()


@ONE_CLIENT
def test_a_process_that_has_not_begun_to_read_ends_with_the_learner_and_logs_nothing(capfd):
    closed, gone = started(), started()
    process = gone._process.popen
    assert process is not None
    assert gone._process.connection is not None
    gone._process.connection.close()  # as a kill of the learner does
    assert process.wait(PATIENCE_SECONDS) == 0
    closed.close()
    assert capfd.readouterr().err == ""


def test_a_format_of_the_configs_folder_is_found_by_the_process(kafka, make_topic, produce, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    topic, name = make_topic(), f"{follow('format', tmp_path)}:MessagePack"
    produce(kafka.bootstrap, topic, [msgspec.msgpack.encode(GOOD), GOOD])
    with opened(kafka.bootstrap, topic, format=name) as source:
        assert read(source, 2) == [(0, 0, 0, Outcome.PENDING), (0, 1, 0, Outcome.DEAD_LETTERED)]


def test_a_format_that_the_process_does_not_find_is_one_sentence(kafka, make_topic, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    name = follow("format", tmp_path)
    settings = {"format": f"{name}:MessagePack", "bootstrap_servers": kafka.bootstrap, "topics": [make_topic()]}
    stream = StreamSettings.model_validate({**STREAM, **settings}).resolved("test")
    (tmp_path / f"{name}.py").unlink()
    source = BlockReader(stream, SchemaSettings.model_validate(SCHEMA), HoldOut(fraction=0, seed=0))
    with pytest.raises(SettingsError, match=f"^no module named {name} on the Python path$"):
        source.open()
    source.close()


BAD = {
    "bad JSON": (b"not json", "malformed"),
    "wrong shape": ({"x": [1, 2], "y": 1}, "length >= 3"),
    "wrong type": ({"x": [1, 2, "3"], "y": 1}, "got `str`"),
    "label out of range": ({"x": [1, 2, 3], "y": 3}, "<= 2"),
    "NaN": (b'{"x": [1, 2, NaN], "y": 1}', "NaN is read as null"),
    "infinity": ({"x": [1, 2, 1e39], "y": 1}, "infinite"),
    "missing field": ({"y": 1}, "missing required field `x`"),
    "oversized": (json.dumps(GOOD).encode() + b" " * 2000, "oversized"),
    "null value": (None, "null value"),
}


def test_each_kind_of_bad_message_goes_to_the_dead_letter_topic(kafka, make_topic, produce, consume_all):
    topic = make_topic()
    values = [value for bad, _ in BAD.values() for value in (GOOD, bad)]
    produce(kafka.bootstrap, topic, values, key=b"k", headers=[("trace", b"1")])
    with opened(kafka.bootstrap, topic, max_message_bytes="1kB") as source:
        seen = read(source, len(values))
        assert [outcome for *_, outcome in seen] == [Outcome.PENDING, Outcome.DEAD_LETTERED] * len(BAD)
        letters = consume_all(kafka.bootstrap, f"{topic}.dead", len(BAD))
    assert len(letters) == len(BAD)
    for letter, (index, (value, reason)) in zip(letters, enumerate(BAD.values()), strict=True):
        headers = dict(letter.headers)
        assert letter.key == b"k"
        assert letter.value == (value if value is None or isinstance(value, bytes) else json.dumps(value).encode())
        assert reason in headers["anabranch-error"].decode()
        assert headers["anabranch-source"].decode() == f"{topic}[0]@{2 * index + 1}"
        assert headers["anabranch-time"].isdigit()
        assert headers["trace"] == b"1"


def test_a_message_without_key_value_and_header_value_can_be_dead_lettered(kafka, make_topic, produce, consume_all):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD])
    with opened(kafka.bootstrap, topic) as source:
        read(source, 1)
        headers = [("trace", None), ("empty", b""), ("trace", b"\xff")]
        letter = DeadLetter(None, None, headers, [("anabranch-error", b"null value")])
        client = CLIENTS[source._stream.client](source._stream)
        try:
            assert client.send_dead_letters([letter, letter], timedelta(seconds=20)) == 2
        finally:
            client.close()
    first, _ = consume_all(kafka.bootstrap, f"{topic}.dead", 2)
    assert (first.key, first.value) == (b"", None)
    assert first.headers == [*headers, ("anabranch-error", b"null value")]


def test_a_dead_letter_that_is_too_large_is_sent_without_its_contents(kafka, make_topic, consume_all):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker has no largest message")
    topic = make_topic()
    named = {**STREAM, "bootstrap_servers": kafka.bootstrap, "topics": [topic]}
    settings = StreamSettings.model_validate(named).resolved("test")
    client = CLIENTS[settings.client](settings)
    own = ("anabranch-source", b"events[0]@1")
    large = b"x" * 3_000_000
    letters = [
        DeadLetter(b"k", large, [], [own]),
        DeadLetter(large, b"v", [("trace", b"1"), ("anabranch-x", large)], [own]),
        DeadLetter(b"k", b"v", [], [("anabranch-error", large)]),
        DeadLetter(b"k", b"small", [], [own]),
    ]
    try:
        assert client.send_dead_letters(letters, timedelta(seconds=30)) == 4
        assert client.letters_dropped == 1
    finally:
        client.close()
    found = {
        (record.key, record.value): dict(record.headers) for record in consume_all(kafka.bootstrap, f"{topic}.dead", 3)
    }
    assert found[b"k", None]["anabranch-truncated"] == b"value"
    assert found[b"", None]["anabranch-truncated"] == b"key, value and headers"
    assert found[b"", None].keys() == {"anabranch-source", "anabranch-truncated"}
    assert (b"k", b"small") in found


class TestATopicThatIsRecreated:
    """It repeats offsets, with fewer events than were read of the old one, or with more."""

    @pytest.fixture(params=[2, 5])
    def again(self, request, kafka, make_topic, recreate_topic, produce):
        """A topic of which three events can be read, how many the next one has, and what makes that."""
        topic, events = make_topic(), int(request.param)
        produce(kafka.bootstrap, topic, [GOOD] * 3)

        def make():
            recreate_topic(kafka.bootstrap, topic)
            produce(kafka.bootstrap, topic, [GOOD] * events)

        return topic, events, make

    def test_while_it_is_read_ends_the_reading(self, kafka, again):
        topic, events, make = again
        if kafka.kind == "embedded" and (STREAM["client"] == "confluent" or events > 3):
            pytest.skip("the embedded broker has no topic ids, which distinguish topics of one name")
        with opened(kafka.bootstrap, topic) as source:
            read(source, 3)
            make()
            with pytest.raises(RecreatedError, match="deleted and created again"):
                read(source, 6)

    def test_while_it_is_read_is_read_from_its_beginning_where_gaps_are_allowed(self, kafka, again):
        topic, events, make = again
        if kafka.kind == "embedded" and (STREAM["client"] == "confluent" or events > 3):
            pytest.skip("the embedded broker has no topic ids, which distinguish topics of one name")
        with opened(kafka.bootstrap, topic, on_gap="earliest") as source:
            read(source, 3)
            make()
            seen: list[tuple[int, int]] = []
            while sum(partition for partition, _ in seen) < events:
                seen += [(partition, offset) for partition, offset, *_ in read(source, 1)]
            assert [partition.name.incarnation for partition in source.partitions] == [0, 1]
        # Records that librdkafka fetched before it received the new topic's metadata count as the old one's.
        assert all(offset >= 3 for partition, offset in seen if not partition)
        assert [offset for partition, offset in seen if partition] == list(range(events))

    @pytest.mark.parametrize("ids", [True, False], ids=["by its id", "by its last record"])
    def test_while_no_process_reads_is_noticed_at_the_start(self, kafka, again, ids):
        topic, events, make = again
        if kafka.kind == "embedded" and ids:
            pytest.skip("the embedded broker has no topic ids")
        with opened(kafka.bootstrap, topic) as source:
            read(source, 3)
            positions, known = cursors(source)
            marks = {name: mark if ids else PartitionFingerprint(None, mark.last) for name, mark in known.items()}
        assert all(mark.last is not None and mark.last.offset == 2 for mark in marks.values())
        with opened(kafka.bootstrap, topic, positions=positions, marks=marks) as source:
            assert read_for(source, timedelta(seconds=1)) == []
            assert [partition.name.incarnation for partition in source.partitions] == [0]
        make()
        with pytest.raises(RecreatedError, match="deleted and created again"):
            with opened(kafka.bootstrap, topic, positions=positions, marks=marks):
                pass
        with opened(kafka.bootstrap, topic, positions=positions, marks=marks, on_gap="earliest") as source:
            seen = [(partition, offset) for partition, offset, *_ in read(source, events)]
            positions, marks = cursors(source)
        assert seen == [(1, offset) for offset in range(events)]
        # Both have their index from then on, and only the newer one is read.
        with opened(kafka.bootstrap, topic, positions=positions, marks=marks) as source:
            assert [partition.name.incarnation for partition in source.partitions] == [0, 1]
            assert read_for(source, timedelta(seconds=1)) == []


def test_a_last_record_that_retention_has_taken_is_no_sign_of_another_topic(kafka, make_topic, produce):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD] * 5)
    with opened(kafka.bootstrap, topic) as source:
        read(source, 5)
        positions, marks = cursors(source)
    produce(kafka.bootstrap, topic, [GOOD])
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
        admin.delete_records({KafkaPartition(topic, 0): 5})
    with opened(kafka.bootstrap, topic, positions=positions, marks=marks) as source:
        assert [offset for _, offset, *_ in read(source, 1)] == [5]


def test_every_event_of_every_partition_comes_once_and_in_order(kafka, make_topic, produce):
    topic = make_topic(partitions=3)
    for partition in range(3):
        produce(kafka.bootstrap, topic, [GOOD] * 200, partition=partition)
    with opened(kafka.bootstrap, topic) as source:
        seen = read(source, 600)
        names = [str(partition.name) for partition in source.partitions]
    assert names == [f"{topic}:{number}" for number in range(3)]
    for partition in range(3):
        assert [offset for index, offset, *_ in seen if index == partition] == list(range(200))


def test_a_message_larger_than_what_is_fetched_at_once_comes_all_the_same(kafka, make_topic, produce):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD, json.dumps(GOOD).encode() + b" " * 900_000, GOOD])
    with opened(kafka.bootstrap, topic, properties={"fetch.message.max.bytes": 1_000}) as source:
        assert [(o, k) for _, o, _, k in read(source, 3)] == [(offset, Outcome.PENDING) for offset in range(3)]


def test_an_answer_that_is_too_large_is_a_problem_whose_sentence_names_the_fix(kafka, make_topic, produce):
    if STREAM["client"] == "confluent":
        pytest.skip("librdkafka takes no bound below that of a fetch")
    topic = make_topic()
    produce(kafka.bootstrap, topic, [json.dumps(GOOD).encode() + b" " * 50_000] * 2)
    small = dict.fromkeys(("fetch.max.bytes", "fetch.message.max.bytes", "receive.message.max.bytes"), 20_000)
    with opened(kafka.bootstrap, topic, properties=small) as source:
        deadline = Patience()
        while "larger than receive.message.max.bytes, which stream.properties can raise" not in (source.problem or ""):
            deadline.check(source.problem)
            assert read_for(source, timedelta(seconds=0.2)) == []


def test_partitions_that_are_added_are_read_from_their_beginning(kafka, make_topic, produce):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker adds no partitions")
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD])
    with opened(kafka.bootstrap, topic, start="latest") as source:
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            admin.create_partitions({topic: NewPartitions(2)})
        produce(kafka.bootstrap, topic, [GOOD] * 3, partition=1)
        assert [(partition, offset) for partition, offset, *_ in read(source, 3)] == [(1, 0), (1, 1), (1, 2)]


def test_a_partition_that_is_held_is_not_read_until_it_is_released_by_another_process_either(
    kafka, make_topic, produce
):
    topic = make_topic(partitions=2)
    with opened(kafka.bootstrap, topic) as source:
        source.hold(frozenset({0}))
        for after_kill in range(2):
            if after_kill:
                assert source._process.popen is not None
                source._process.popen.kill()
                source._process.popen.wait()
            for _ in range(3):
                produce(kafka.bootstrap, topic, [GOOD] * 3, partition=0)
                produce(kafka.bootstrap, topic, [GOOD] * 3, partition=1)
                assert {partition for partition, *_ in read(source, 3)} == {1}
        source.hold(frozenset())
        assert [(partition, offset) for partition, offset, *_ in read(source, 18)] == [(0, n) for n in range(18)]
        assert source.problem is None


def test_partitions_that_are_held_in_turn_are_all_read(kafka, make_topic, produce):
    topic, count = make_topic(partitions=2), 6000
    for partition in range(2):
        produce(kafka.bootstrap, topic, [GOOD] * count, partition=partition)
    with opened(kafka.bootstrap, topic, buffer_bytes="1MB") as source:
        seen = read(source, 1)
        held = 1 - seen[0][0]
        for _ in range(4):
            held = 1 - held
            source.hold(frozenset({held}))
            # What was read ahead of the partition that is held comes first; the other one may end before 500 in a row.
            while (left := count - sum(partition != held for partition, *_ in seen)) and held in {
                partition for partition, *_ in seen[-500:]
            }:
                seen += read(source, min(500, left))
        source.hold(frozenset())
        seen += read(source, 2 * count - len(seen))
        assert source.problem is None
    assert Counter((p, o) for p, o, *_ in seen) == Counter((p, o) for p in range(2) for o in range(count))


def test_a_killed_ingest_process_loses_nothing_and_repeats_nothing(kafka, make_topic, produce):
    topic = make_topic(partitions=2)
    for partition in range(2):
        produce(kafka.bootstrap, topic, [GOOD] * 3000, partition=partition)
    with opened(kafka.bootstrap, topic, buffer_bytes="1MB") as source:
        seen = read(source, 1)
        for _ in range(3):
            assert source._process.popen is not None
            source._process.popen.kill()
            source._process.popen.wait()
            seen += read(source, 500)
        seen += read(source, 6000 - len(seen))
        assert source.problem is None
    assert Counter((p, o) for p, o, *_ in seen) == Counter((p, o) for p in range(2) for o in range(3000))


@ONE_CLIENT
@pytest.mark.parametrize("hostile", [dying_ingest.CRASH, dying_ingest.ENDLESS], ids=["crash", "endless"])
def test_a_message_that_ends_the_ingest_process_is_dead_lettered_undecoded_and_all_others_are_read(
    hostile, kafka, make_topic, produce, consume_all, caplog
):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD] * 20 + [hostile] + [GOOD] * 20)
    program = (str(Path(dying_ingest.__file__)),)
    with opened(kafka.bootstrap, topic, program=program) as source:
        seen = read(source, 41)
    outcomes = [Outcome.PENDING] * 20 + [Outcome.DEAD_LETTERED] + [Outcome.PENDING] * 20
    assert seen == [(0, offset, 0, outcome) for offset, outcome in enumerate(outcomes)]
    (letter,) = consume_all(kafka.bootstrap, f"{topic}.dead", 1)
    assert letter.value == hostile
    assert dict(letter.headers)["anabranch-error"] == b"internal: decoding it ended the ingest process twice"
    how = "died" if hostile == dying_ingest.CRASH else "took too much CPU time"
    assert f"the ingest process {how} while it decoded {topic}[0]@20; another one is started" in caplog.messages
    assert any(f"{topic}[0]@20: the ingest process ended twice" in each for each in caplog.messages)


@ONE_CLIENT
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no signal that stops a process")
def test_an_ingest_process_that_hangs_is_a_problem_and_another_one_continues(kafka, make_topic, produce, monkeypatch):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD] * 10)
    with opened(kafka.bootstrap, topic) as source:
        seen = read(source, 10)
        assert source._process.popen is not None
        source._process.popen.send_signal(signal.SIGSTOP)
        produce(kafka.bootstrap, topic, [GOOD] * 10)
        deadline = Patience()
        with monkeypatch.context() as impatient:  # the process that is started next may take longer than that
            impatient.setattr(silence, "SILENT_SECONDS", 8.0)
            while source.problem is None:
                deadline.check("no problem is reported")
                seen += read_for(source, timedelta(seconds=0.2))
        assert source.problem == "the ingest process hangs; another one is started"
        seen += read(source, 20 - len(seen))
        assert source.problem is None
    assert [offset for _, offset, *_ in seen] == list(range(20))


@ONE_CLIENT
def test_an_ingest_process_with_nothing_to_send_is_not_restarted(kafka, make_topic, monkeypatch):
    """It stops reporting after eight reports to a learner that sends no messages, and reports again when asked."""
    now, reports, update = 0.0, list[LagReport](), BlockReader._update_lag

    def update_and_count(source, report):
        reports.append(report)
        update(source, report)

    monkeypatch.setattr(BlockReader, "_update_lag", update_and_count)
    with opened(kafka.bootstrap, make_topic()) as source:
        source._hang_detector, process = silence.HangDetector(lambda: now), source._process.popen

        def has_reported(count):
            assert source.poll(timedelta(seconds=0.2)) is None
            return len(reports) >= count

        wait_until(lambda: has_reported(8))
        while now < silence.SILENT_SECONDS / 2:
            now += 1.0
            assert source.poll(timedelta(0)) is None
        wait_until(lambda: has_reported(9))
        assert source._process.popen is process
        assert source.problem is None


def test_a_batch_that_is_damaged_on_the_network_is_fetched_again(kafka, make_topic, produce):
    """In messages that are large compared with their headers, which have no checksum.

    What is damaged may be an answer's length: the client then waits for `socket.timeout.ms`, by default half a minute.
    """
    topic, messages, each = make_topic(), 10, 50
    properties = {"socket.timeout.ms": "3000"}
    schema = {"features": {"x": {"dtype": "int32", "shape": [1000]}}, "label": {"name": "y", "classes": 3}}
    rows = np.zeros(messages * each, [("x", "<i4", (1000,)), ("y", "<i8")])
    rows["x"] = np.arange(len(rows))[:, None]
    with (
        Proxy(kafka.bootstrap) as proxy,
        opened(proxy.address, topic, schema, format="rows", properties=properties) as source,
    ):
        proxy.suffer(Fault(corrupted=1.0))
        produce(kafka.bootstrap, topic, [part.tobytes() for part in np.split(rows, messages)])
        found: list[tuple[int, int]] = []
        deadline = Patience()
        while len(found) < len(rows):
            deadline.check(f"{len(found)} events; problem: {source.problem}")
            block = source.poll(timedelta(milliseconds=100))
            if block is not None:
                x = block.columns["feature.x"]
                found += zip(x.min(axis=1).tolist(), x.max(axis=1).tolist(), strict=True)
                source.release(block)
            if proxy.corruptions:
                proxy.heal()
        assert proxy.corruptions
    assert found == [(index, index) for index in range(len(rows))]


def test_positions_are_committed_for_lag_tools(kafka, make_topic, produce):
    topic = make_topic()
    produce(kafka.bootstrap, topic, [GOOD] * 5)
    deadline = Patience()
    with (
        opened(kafka.bootstrap, topic, group_id=topic) as source,
        contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin,
    ):
        read(source, 5)
        committed: dict[Any, Any] = {}
        while KafkaPartition(topic, 0) not in committed:
            deadline.check()
            source.commit({0: 5})
            source.poll(timedelta(milliseconds=200))
            # A coordinator that is still loading refuses; the next commit comes all the same.
            with contextlib.suppress(KafkaError):
                committed = admin.list_group_offsets({topic: None})[topic]
    assert committed[KafkaPartition(topic, 0)].offset == 5


@pytest.mark.parametrize("start", ["latest", "time"])
def test_reading_starts_at_the_configured_offset(kafka, make_topic, produce, start):
    topic = make_topic()
    moment = datetime.now(UTC) - timedelta(days=1)  # not older than the broker's retention, a week
    before, after = (int((moment + timedelta(hours=hours)).timestamp() * 1000) for hours in (-1, 1))
    produce(kafka.bootstrap, topic, [GOOD] * 5, timestamp_ms=before)
    if start == "time":
        if kafka.kind == "embedded":
            pytest.skip("the embedded broker finds offsets by its own clock")
        produce(kafka.bootstrap, topic, [GOOD], timestamp_ms=after)
    with opened(kafka.bootstrap, topic, start=start if start == "latest" else moment.isoformat()) as source:
        assert source.partitions[0].start == 5
        if start == "latest":
            produce(kafka.bootstrap, topic, [GOOD])
        assert [offset for _, offset, *_ in read(source, 1)] == [5]


def test_aborted_and_open_transactions_are_gaps(kafka, make_topic, consume_all):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker has no transactions")
    topic = make_topic()
    value = json.dumps(GOOD).encode()
    with contextlib.closing(KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)) as producer:
        producer.init_transactions()
        for commits in (True, False, True):
            producer.begin_transaction()
            for _ in range(2):
                producer.send(topic, value)
            producer.flush()
            producer.commit_transaction() if commits else producer.abort_transaction()
    with opened(kafka.bootstrap, topic) as source:
        seen = read(source, 4)
    # Two events and a marker each: the aborted two and all markers are offsets without an event.
    assert [offset for _, offset, *_ in seen] == [0, 1, 6, 7]


def test_the_end_of_a_log_does_not_depend_on_what_is_committed(kafka, make_topic):
    topic = make_topic()
    named = {**STREAM, "bootstrap_servers": kafka.bootstrap, "topics": [topic]}
    settings = StreamSettings.model_validate(named).resolved("test")
    transaction = {} if kafka.kind == "embedded" else {"transactional_id": topic}
    partition = TopicPartition(topic, 0)
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(
            contextlib.closing(KafkaProducer(bootstrap_servers=kafka.bootstrap, **transaction))
        )
        if transaction:
            producer.init_transactions()
            producer.begin_transaction()
        for _ in range(3):
            producer.send(topic, b"{}")
        producer.flush()
        client = CLIENTS[settings.client](settings)
        stack.callback(client.close)
        client.open()
        assert client.log_ends([partition]) == {partition: 3}
        if transaction:
            assert client.first_offsets([partition], "latest", None) == {partition: 0}


def test_a_lag_report_has_log_starts_when_they_are_asked_for(kafka, make_topic, produce):
    topic = make_topic(partitions=2)
    named = {**STREAM, "bootstrap_servers": kafka.bootstrap, "topics": [topic]}
    settings = StreamSettings.model_validate(named).resolved("test")
    produce(kafka.bootstrap, topic, [{}] * 9)
    one, two = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with contextlib.closing(CLIENTS[settings.client](settings)) as reader:
        reader.open()
        reader.assign({one: 9, two: 0})
        assert reader.lag(log_starts=True).log_starts == {one: 0, two: 0}
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            admin.delete_records({KafkaPartition(topic, 0): 5})
        lag = reader.lag(log_starts=True)
        assert (lag.ends, lag.log_starts) == ({one: 9, two: 0}, {one: 5, two: 0})
        assert reader.lag() == Lag({one: 9, two: 0})


def test_an_aborted_transaction_at_the_end_is_not_waited_for(kafka, make_topic):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker has no transactions")
    topic = make_topic()
    with contextlib.closing(KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)) as producer:
        producer.init_transactions()
        for commits in (True, False):
            producer.begin_transaction()
            producer.send(topic, json.dumps(GOOD).encode())
            producer.flush()
            producer.commit_transaction() if commits else producer.abort_transaction()
    with opened(kafka.bootstrap, topic) as source:
        reached, deadline = 0, Patience()
        while reached < 4:
            deadline.check()
            block = source.poll(timedelta(seconds=1))
            if block is not None:
                reached = block.coverage[0].end
                source.release(block)


def test_a_broker_that_is_killed_and_comes_back_costs_nothing(mortal_kafka, create_topic, produce):
    """Two topics, one with many partitions, bad messages among the good ones, and a killing while they are read."""
    server, topics = mortal_kafka.bootstrap, {"narrow": 1, "wide": 100}
    for topic, partitions in {**topics, "narrow.dead": 1}.items():
        create_topic(server, topic, partitions)
    for topic in topics:
        produce(server, topic, [GOOD, b"bad"] * 3000)
    with opened(server, "narrow", topics=list(topics), buffer_bytes="1MB") as source:
        process = source._process.popen
        seen = read(source, 1)
        mortal_kafka.kill()
        while source.problem is None:
            # Fetched messages still come, also while no broker takes the dead letters.
            seen += read_for(source, timedelta(seconds=1))
        assert "dead letters cannot be written" in source.problem or "does not answer" in source.problem
        mortal_kafka.start()
        for topic in topics:
            produce(server, topic, [GOOD] * 100, partition=0)
        seen += read(source, 2 * 6100 - len(seen))
        deadline = Patience()
        while source.problem is not None:
            deadline.check(source.problem)
            seen += read_for(source, timedelta(seconds=1))
        assert source._process.popen is process
        names = [partition.name for partition in source.partitions]
    counted = Counter((names[p].topic, o) for p, o, *_ in seen if names[p].partition == 0)
    assert counted == Counter((topic, offset) for topic in topics for offset in range(6100))
    assert len(names) == 101


class TestFailures:
    def test_nothing_listens(self, free_port):
        server = f"127.0.0.1:{free_port()}"
        with pytest.raises(BrokerError, match=f"no Kafka broker can be reached at {server}"):
            open_and_close(server)

    def test_no_such_host(self):
        with pytest.raises(BrokerError, match=r"no Kafka broker can be reached at no-such-host.invalid:9092"):
            open_and_close("no-such-host.invalid:9092")

    def test_something_else_listens(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(BrokerError, match=f"something listens at {address}"):
                open_and_close(address)

    def test_a_missing_topic_is_named(self, kafka, make_topic):
        with pytest.raises(BrokerError, match=r'topic "no-such-topic" does not exist on .*; create it'):
            with opened(kafka.bootstrap, "no-such-topic"):
                pass
        with pytest.raises(BrokerError, match=r'topic "no-dead-letters" does not exist'):
            with opened(kafka.bootstrap, make_topic(), dead_letter_topic="no-dead-letters"):
                pass

    @pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("bob", "secret")])
    def test_wrong_credentials_are_named_as_such(self, sasl_kafka, user, password):
        properties = {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": password,
        }
        with pytest.raises(BrokerError, match="refuses the credentials") as caught:
            with opened(sasl_kafka.bootstrap, "t", properties=properties):
                pass
        assert password not in str(caught.value)

    def test_an_unknown_mechanism_is_named_as_such(self, sasl_kafka):
        properties = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "alice",
            "sasl.password": "secret",
        }
        with (
            pytest.raises(BrokerError, match=r"sasl\.mechanism"),
            opened(sasl_kafka.bootstrap, "t", properties=properties),
        ):
            pass

    def test_a_missing_security_protocol_is_guessed_at(self, sasl_kafka):
        with pytest.raises(BrokerError, match=r"security\.protocol"), opened(sasl_kafka.bootstrap, "t"):
            pass

    def test_right_credentials_read(self, sasl_kafka, create_topic, produce):
        events = f"sasl-{STREAM['client']}"
        for topic in (events, f"{events}.dead"):
            create_topic(sasl_kafka.plain, topic)
        produce(sasl_kafka.plain, events, [GOOD, b"bad"])
        properties = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": sasl_kafka.user,
            "sasl.password": sasl_kafka.password,
        }
        with opened(sasl_kafka.bootstrap, events, properties=properties) as source:
            assert [outcome for *_, outcome in read(source, 2)] == [Outcome.PENDING, Outcome.DEAD_LETTERED]

    @ONE_CLIENT
    def test_rows_refuse_a_schema_with_strings(self, kafka, make_topic):
        schema = {
            "features": {"c": {"dtype": "string", "encode": {"hash": 8}}},
            "label": {"name": "y", "classes": 3},
        }
        with pytest.raises(SettingsError, match=r"cannot hold schema.features.c"):
            with opened(kafka.bootstrap, make_topic(), schema, format="rows"):
                pass


class TestGaps:
    """Offsets that retention removed while the pipeline was down."""

    @pytest.fixture
    def shortened(self, kafka, make_topic, produce):
        """A topic with offsets 8 to 11, of which this pipeline has read 0 and 1."""
        topic = make_topic()
        produce(kafka.bootstrap, topic, [GOOD] * 12)
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            admin.delete_records({KafkaPartition(topic, 0): 8})
        return topic

    def test_fail_stops_with_one_sentence(self, kafka, shortened):
        positions = {TopicPartition(shortened, 0): Position(2)}
        with opened(kafka.bootstrap, shortened, positions=positions) as source:
            with pytest.raises(GapError, match=r"@2 and 5 offsets after it were removed by retention.*on_gap"):
                read(source, 1)

    def test_earliest_continues_and_counts_the_missing_offsets(self, kafka, shortened):
        positions = {TopicPartition(shortened, 0): Position(2)}
        removed, seen = 0, list[int]()
        with opened(kafka.bootstrap, shortened, positions=positions, on_gap="earliest") as source:
            deadline = Patience()
            while len(seen) < 4 and deadline.lasts():
                block = source.poll(timedelta(seconds=1))
                if block is not None:
                    seen += block.columns["offset"].tolist()
                    removed += sum(cover.removed for cover in block.coverage)
                    source.release(block)
        assert (seen, removed) == ([8, 9, 10, 11], 6)

    def test_a_broker_that_goes_away_at_a_gap_costs_no_message(self, kafka, shortened, produce, monkeypatch):
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            admin.create_partitions({shortened: NewPartitions(2)})
        produce(kafka.bootstrap, shortened, [GOOD] * 5, partition=1)
        named = {**STREAM, "bootstrap_servers": kafka.bootstrap, "topics": [shortened], "on_gap": "earliest"}
        settings = StreamSettings.model_validate(named).resolved("test")
        client = CLIENTS[settings.client](settings)
        asked = (client._metadata, "offsets") if isinstance(client, ConfluentClient) else (client, "_pass_gap")

        def away(*_):
            monkeypatch.undo()
            raise BrokerError("away")

        monkeypatch.setattr(*asked, away)
        seen: list[tuple[int, int]] = []
        deadline = Patience()
        with contextlib.closing(client):
            client.open()
            client.assign({TopicPartition(shortened, 0): 2, TopicPartition(shortened, 1): 0})
            while len(seen) < 9:
                deadline.check(seen)
                with contextlib.suppress(BrokerError):
                    for batch in client.poll(timedelta(milliseconds=500), 100):
                        seen += [(batch.partition.partition, offset) for offset in batch.offsets]
        assert sorted(seen) == [(0, offset) for offset in range(8, 12)] + [(1, offset) for offset in range(5)]

    def test_a_gap_after_messages_is_counted_after_them(self, kafka, shortened, produce, monkeypatch):
        """Removed offsets are those before a batch's first message, however the client learns of them."""
        if STREAM["client"] != "confluent":
            pytest.skip("kafka-python reports a gap only when no message is left before it")
        named = {**STREAM, "bootstrap_servers": kafka.bootstrap, "topics": [shortened], "on_gap": "earliest"}
        settings = StreamSettings.model_validate(named).resolved("test")
        client: Any = CLIENTS[settings.client](settings)

        class Before:
            """Message 1, which had been fetched when retention took it and those after it."""

            def __getattr__(self, name):
                known = {"topic": shortened, "partition": 0, "offset": 1, "timestamp": (1, 0), "headers": ()}
                return lambda: known.get(name)

            def error(self):
                return None

            def __len__(self):
                return 1

        batches: list[Any] = []
        deadline = Patience()
        with contextlib.closing(client):
            client.open()
            client.assign({TopicPartition(shortened, 0): 2})
            taken = client._taken
            client._positions[TopicPartition(shortened, 0)] = 1

            def with_one_before(polled, limit):
                if polled and not batches:
                    return taken([Before(), *polled], limit)
                return taken(polled, limit)

            monkeypatch.setattr(client, "_taken", with_one_before)
            while sum(map(len, batches)) < 5:
                deadline.check(batches)
                batches += client.poll(timedelta(milliseconds=500), 100)
        batches = [batch for batch in batches if len(batch) or batch.removed]
        assert [(list(batch.offsets), batch.removed) for batch in batches][:2] == [([1], 0), ([], 6)]
        assert [offset for batch in batches for offset in batch.offsets] == [1, 8, 9, 10, 11]

    def test_a_position_beyond_the_end_is_never_waited_for(self, kafka, make_topic, produce):
        topic = make_topic()
        produce(kafka.bootstrap, topic, [GOOD] * 2)
        with opened(kafka.bootstrap, topic, positions={TopicPartition(topic, 0): Position(50)}) as source:
            with pytest.raises(GapError, match=r"@50 is beyond the topic's end"):
                read(source, 1)
