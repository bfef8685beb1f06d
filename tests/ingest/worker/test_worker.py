"""The ingest process' loop against a client without Kafka, with a real ring and a real connection."""

import contextlib
import itertools
import socket
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.errors import GapError
from anabranch.ingest.events.block import Block, BlockLayout, Coverage, Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint, Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import RowsFormat, pack_rows
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.settings.stream import FieldSettings, HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import (
    BlockReady,
    Commit,
    LagReport,
    PartitionsOpened,
    PausePartitions,
    Ping,
    Release,
    SkippedToEnd,
    SkipToEnd,
    send,
)
from anabranch.ingest.transport.shared_ring import SharedRing
from anabranch.ingest.worker import lag_reporter
from anabranch.ingest.worker import lag_reporter as stalls
from anabranch.ingest.worker import worker as worker_module
from anabranch.ingest.worker.block_builder import BlockBuilder
from anabranch.ingest.worker.worker import IngestWorker, _portions
from tests.ingest.running_worker import RunningWorker
from tests.support.waiting import PATIENCE_SECONDS, wait_until

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)
STREAM = StreamSettings.model_validate({"topics": ["events"], "format": "rows"}).resolved("test")
KEYED = Schema(SCHEMA.settings.model_copy(update={"key": FieldSettings(name="id")}))
LATE = {"topics": ["events"], "format": "rows", "labels": {"topics": ["labels"], "wait": "1h"}}
WITH_LABELS = StreamSettings.model_validate(LATE).resolved("test")


class Learner(RunningWorker):
    """The other end of a worker."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.broker: list[LagReport] = []

    def take(self, message):
        if isinstance(message, LagReport):
            self.broker.append(message)

    def block(self):
        filled = self.receive_until(lambda message: isinstance(message, BlockReady))
        assert isinstance(filled, BlockReady)
        views = self.ring.views(filled.slot, filled.rows)
        copied = {name: column.copy() for name, column in views.items()}
        return Block(copied, filled.coverage), filled.slot


def learner(client, stream=STREAM, **options):
    return Learner(SCHEMA if stream.labels is None else KEYED, stream, client, **options)


def message(first, rows):
    return pack_rows(SCHEMA, [{"x": [first + i, 0, 0], "y": 1} for i in range(rows)])


def test_blocks_cover_messages_and_gaps():
    partition = FakePartition()
    partition.append(message(0, 1))
    partition.skip(3)
    partition.append(message(1, 1))
    partition.skip()
    with learner(FakeClient({P0: partition})) as end:
        opened = end.receive_until(lambda each: isinstance(each, PartitionsOpened))
        assert opened == PartitionsOpened([P0], [0], [None])
        block, _ = end.block()
    assert block.columns["offset"].tolist() == [0, 4]
    (cover,) = block.coverage
    assert (cover.start, cover.end, cover.removed) == (0, 6, 0)


def test_only_log_starts_of_ten_minutes_ago_are_reported(monkeypatch):
    monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "LAG_SECONDS", 0.0)
    monkeypatch.setattr(lag_reporter, "_LOG_STARTS_SECONDS", 0.0)
    starts, asked = [7, 9, 8, 10], itertools.count()

    class Aging(FakeClient):
        def lag(self, *, log_starts=False):
            if log_starts:
                self.topics[P0].start = starts[min(next(asked), 3)]
            return super().lag(log_starts=log_starts)

    with learner(Aging({P0: FakePartition()})) as end:
        log_starts: list[int] = []
        while len(log_starts) < 4:
            report = end.receive_until(lambda each: isinstance(each, LagReport))
            send(end.connection, Ping())
            assert isinstance(report, LagReport)
            log_starts += [first for _, first in report.log_starts]
        assert log_starts == [7, 8, 8, 10]


def test_log_starts_are_asked_for_once_in_ten_minutes(monkeypatch):
    monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "LAG_SECONDS", 0.0)
    asked: list[bool] = []

    class Noting(FakeClient):
        def lag(self, *, log_starts=False):
            asked.append(log_starts)
            return super().lag(log_starts=log_starts)

    with learner(Noting({P0: FakePartition()})) as end:
        while len(asked) < 5:
            end.receive_until(lambda each: isinstance(each, LagReport))
            send(end.connection, Ping())
    assert asked[:5] == [True, False, False, False, False]


@pytest.mark.slow
def test_a_full_ring_stops_the_reading_until_a_slot_is_released():
    partition = FakePartition()
    with learner(FakeClient({P0: partition}), buffer_bytes=8_000) as end:
        rows = end.ring.rows
        total = end.ring.slots + 3
        for _ in range(total):
            partition.append(message(0, rows))
        slots = [end.block()[1] for _ in range(end.ring.slots)]
        # Reports are sent while the ring is full, blocks are not.
        assert isinstance(end.receive_until(lambda each: isinstance(each, LagReport | BlockReady)), LagReport)
        send(end.connection, Release(slots[2]))
        assert end.block()[1] == slots[2]


def test_released_slots_are_overwritten_while_little_comes_and_others_are_not():
    partition = FakePartition()
    with learner(FakeClient({P0: partition}), buffer_bytes=8_000) as end:
        rows = end.ring.rows
        for number in range(end.ring.slots):
            partition.append(message(1 + number, rows))
        blocks = [end.block() for _ in range(end.ring.slots)]
        kept, *released = (slot for _, slot in blocks)
        for slot in released:
            send(end.connection, Release(slot))

        def held(slot):
            return sum(int(column.view("u1").any()) for column in end.ring.views(slot, rows).values() if column.nbytes)

        wait_until(lambda: not any(map(held, released)))
        assert end.ring.views(kept, rows)["feature.x"].tolist() == blocks[0][0].columns["feature.x"].tolist()


def test_positions_that_the_learner_sends_are_committed():
    partition = FakePartition()
    client = FakeClient({P0: partition})
    with learner(client) as end:
        end.receive_until(lambda each: isinstance(each, PartitionsOpened))
        send(end.connection, Commit([(0, 7)]))
        partition.append(message(0, 1))
        assert end.block()[0].columns["offset"].tolist() == [0]
    assert client.committed == {P0: 7}


def test_a_message_that_is_being_appended_is_not_read_before_it_is_there():
    partition = FakePartition()
    client = FakeClient({P0: partition})
    client.assign({P0: 0})
    partition.append(b"a")
    partition.messages[partition.end] = b"b"  # as when another thread appends it just now
    (first,) = client.poll(timedelta(0), 9)
    assert (first.values, first.end) == ([b"a"], 1)
    partition.append(b"b")
    (second,) = client.poll(timedelta(0), 9)
    assert (second.values, second.end) == ([b"b"], 2)


class Stuck(FakeClient):
    """Never hands out what partition 0 has, as a client does that silently fails to read a batch."""

    def poll(self, timeout, limit):
        return [messages for messages in super().poll(timeout, limit) if messages.partition != P0]


class TestAStall:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.01)
        monkeypatch.setattr(worker_module, "LAG_SECONDS", 0.01)
        monkeypatch.setattr(lag_reporter, "_BUSY_SHARE", 1.0)
        monkeypatch.setattr(stalls, "STALLED_SECONDS", 0.1)

    def test_a_stalled_position_is_reported_as_a_problem(self):
        partition, other = FakePartition(), FakePartition()
        partition.append(message(0, 1))
        with learner(Stuck({P0: partition, P1: other})) as end:
            while not end.broker or not end.broker[-1].problem:
                received = end.receive_until(lambda each: isinstance(each, LagReport | BlockReady))
                if isinstance(received, BlockReady):  # else the ring becomes full, and nothing is read
                    send(end.connection, Release(received.slot))
                    continue
                send(end.connection, Ping())  # it reports only while the learner sends messages
                other.append(message(0, 1))
            assert end.broker[-1].problem.startswith("events[0] is stalled at offset 0, while it ends at 1: the broker")

    @pytest.mark.slow
    def test_waiting_for_the_learner_does_not_count_as_a_stall(self, monkeypatch):
        now, receive = 0.0, IngestWorker._receive

        def receive_slowly(worker, *, wait):
            nonlocal now
            now += 0.05 * wait
            receive(worker, wait=wait)

        monkeypatch.setattr(IngestWorker, "_receive", receive_slowly)
        for module in (lag_reporter, worker_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
        partition = FakePartition()
        with learner(FakeClient({P0: partition}), buffer_bytes=8_000) as end:
            rows = end.ring.rows
            for _ in range(end.ring.slots + 3):
                partition.append(message(0, rows))
            for _ in range(end.ring.slots):
                end.block()
            while now < 1:
                end.receive_until(lambda each: isinstance(each, LagReport))
                send(end.connection, Ping())
        assert [each.problem for each in end.broker] == [None] * len(end.broker)


class Held(FakeClient):
    """Opens only when it may."""

    def __init__(self, topics):
        super().__init__(topics)
        self.may = threading.Event()

    def open(self):
        assert self.may.wait(PATIENCE_SECONDS)


def test_a_partition_that_is_held_is_read_once_it_is_released_and_is_not_stalled(monkeypatch):
    monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.0)
    monkeypatch.setattr(stalls, "STALLED_SECONDS", 0.0)
    topics = {P0: FakePartition(), P1: FakePartition()}
    for partition in topics.values():
        partition.append(message(0, 1))
    client = Held(topics)
    with learner(client) as end:
        send(end.connection, PausePartitions([0]))
        client.may.set()
        for offset in range(3):
            block, slot = end.block()
            assert (block.columns["partition"].tolist(), block.columns["offset"].tolist()) == ([1], [offset])
            send(end.connection, Release(slot))
            topics[P1].append(message(0, 1))
        assert end.block()[0].columns["offset"].tolist() == [3]
        assert not any("[0]" in (report.problem or "") for report in end.broker)
        send(end.connection, PausePartitions([]))
        block, _ = end.block()
        assert (block.columns["partition"].tolist(), block.columns["offset"].tolist()) == ([0], [0])


class TestPassingOver:
    def test_skipped_offsets_are_reported_and_later_events_are_read(self):
        partition = FakePartition()
        for _ in range(500):
            partition.append(message(0, 1))
        partition.skip(2)
        client = Held({P0: partition, P1: FakePartition()})
        with learner(client, positions=[(P0, Position(1)), (P1, Position(0))]) as end:
            send(end.connection, SkipToEnd())
            client.may.set()
            block, _ = end.block()
            assert len(block) == 0
            assert block.coverage == (Coverage(0, 1, 502, passed=501),)
            assert isinstance(end.receive_until(lambda each: isinstance(each, SkippedToEnd | BlockReady)), SkippedToEnd)
            partition.append(message(7, 1))
            block, _ = end.block()
            assert block.columns["offset"].tolist() == [502]
            assert [(cover.start, cover.end, cover.passed) for cover in block.coverage] == [(502, 503, 0)]

    def test_labels_are_read_since_events_that_were_read_wait_for_them(self):
        events, labels = FakePartition(), FakePartition()
        for number in range(3):
            events.append(pack_rows(KEYED, [{"x": [0, 0, 0], "id": number}]))
            labels.append(np.array([(1, number)], [("y", "<i8"), ("id", "<i8")]).tobytes())
        client = Held({P0: events, TopicPartition("labels", 0): labels})
        with learner(client, stream=WITH_LABELS) as end:
            send(end.connection, SkipToEnd())
            client.may.set()
            block, _ = end.block()
            assert block.coverage == (Coverage(0, 0, 3, passed=3),)
            block, _ = end.block()
            assert block.columns["partition"].tolist() == [1, 1, 1]
            assert block.columns["outcome"].tolist() == [Outcome.LABEL] * 3

    def test_at_the_end_of_a_partition_nothing_is_skipped_or_reported(self):
        with learner(FakeClient({P0: FakePartition()})) as end:
            send(end.connection, SkipToEnd())
            assert isinstance(end.receive_until(lambda each: isinstance(each, SkippedToEnd | BlockReady)), SkippedToEnd)

    def test_the_rest_of_a_torn_message_is_read(self):
        partition = FakePartition()
        partition.append(message(0, 3))
        partition.append(message(0, 1))
        client = Held({P0: partition})
        with learner(client, positions=[(P0, Position(0, 1))]) as end:
            send(end.connection, SkipToEnd())
            client.may.set()
            assert isinstance(end.receive_until(lambda each: isinstance(each, SkippedToEnd | BlockReady)), SkippedToEnd)
            block, _ = end.block()
            assert block.columns["row"].tolist() == [1, 2, 0]

    def test_fetched_messages_that_are_in_no_block_yet_are_skipped_too(self, monkeypatch):
        monkeypatch.setattr(worker_module, "_PORTION_BYTES", 1)
        partition = FakePartition()
        for first in range(1000):
            partition.append(message(first, 20))
        with learner(FakeClient({P0: partition})) as end:
            first, slot = end.block()
            send(end.connection, SkipToEnd())
            covered = [*first.coverage]
            while not covered[-1].passed:
                send(end.connection, Release(slot))
                block, slot = end.block()
                covered += block.coverage
            assert covered[-1].end == 1000
            assert covered[-1].passed > 500
            assert all(before.end == after.start for before, after in itertools.pairwise(covered))

    def test_a_broker_that_is_away_is_asked_again(self):
        partition = FakePartition()
        partition.append(message(0, 1))
        client = Held({P0: partition})
        client.away = True
        with learner(client, positions=[(P0, Position(0))]) as end:
            send(end.connection, SkipToEnd())
            client.may.set()
            end.receive_until(lambda each: isinstance(each, LagReport) and each.problem is not None)
            client.away = False
            assert end.block()[0].coverage == (Coverage(0, 0, 1, passed=1),)


def test_a_block_comes_only_after_its_dead_letters_are_acknowledged():
    partition = FakePartition()
    client = FakeClient({P0: partition})
    client.refused_letters = 1
    partition.append(b"torn")
    partition.append(message(0, 1))
    with learner(client) as end:
        block, _ = end.block()
        assert len(block) == 2
        assert [letter.value for letter in client.letters] == [b"torn"]
    assert any(each.problem and "events.dead" in each.problem for each in end.broker)


def test_a_block_reports_the_dead_letters_that_were_not_written(caplog):
    partition = FakePartition()
    client = FakeClient({P0: partition})
    client.dropped_values = {b"torn"}
    for value in (b"torn", b"bad", message(0, 1)):
        partition.append(value)
    with learner(client) as end:
        filled = end.receive_until(lambda each: isinstance(each, BlockReady))
        assert isinstance(filled, BlockReady)
        assert (filled.rows, filled.letters_dropped) == (3, {"refused": 1})
        partition.append(message(0, 1))
        filled = end.receive_until(lambda each: isinstance(each, BlockReady))
        assert isinstance(filled, BlockReady)
        assert filled.letters_dropped == {}
    assert [letter.value for letter in client.letters] == [b"bad"]
    assert "dead letters were not written" in caplog.text


@pytest.mark.slow
def test_a_broker_that_is_away_is_reported_and_waited_for():
    partition = FakePartition()
    client = FakeClient({P0: partition})
    with learner(client) as end:
        end.receive_until(lambda each: isinstance(each, PartitionsOpened))
        client.away = True
        end.receive_until(lambda each: isinstance(each, LagReport) and each.problem is not None)
        partition.append(message(0, 1))
        client.away = False
        assert len(end.block()[0]) == 1
        end.receive_until(lambda each: isinstance(each, LagReport) and each.problem is None)


def test_a_bug_in_decoding_is_reported_and_does_not_stop_the_stream(monkeypatch):
    sound = RowsFormat.decode

    def decode(self, values, headers=()):
        if b"poison" in values:
            raise TypeError("unforeseen")
        return sound(self, values)

    monkeypatch.setattr(RowsFormat, "decode", decode)
    partition = FakePartition()
    partition.append(b"poison")
    partition.append(message(0, 1))
    client = FakeClient({P0: partition})
    with learner(client) as end:
        assert end.block()[0].columns["outcome"].tolist() == [Outcome.DEAD_LETTERED, Outcome.PENDING]
        report = end.receive_until(lambda each: isinstance(each, LagReport) and each.problem is not None)
        assert isinstance(report, LagReport)
        assert report.problem is not None
        assert "TypeError: unforeseen" in report.problem
    assert [letter.value for letter in client.letters] == [b"poison"]


@given(st.lists(st.tuples(st.lists(st.none() | st.integers(0, 9), max_size=8), st.integers(0, 3)), max_size=5))
def test_portions_are_small_and_together_hold_all_fetched_messages(plan):
    fetched = []
    for index, (sizes, removed) in enumerate(plan):
        n, values = len(sizes), [None if size is None else b"x" * size for size in sizes]
        offsets = [2 * i + removed for i in range(n)]
        topic = TopicPartition("events", index)
        faults = {index: f"{offsets[index]}" for index in range(0, n, 3)}
        fetched.append(Messages(topic, offsets, [0] * n, [b"k"] * n, values, [[]] * n, 100, removed, faults))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "_PORTION_BYTES", 10)
        portions = list(_portions(fetched))
    for portion in portions:
        sizes = [len(value or b"") for part in portion for value in part.values]
        assert sum(sizes[:-1]) < 10
        assert len({part.partition for part in portion}) == len(portion)
    for messages in fetched:
        parts = [part for portion in portions for part in portion if part.partition == messages.partition]
        assert [offset for part in parts for offset in part.offsets] == messages.offsets
        assert [value for part in parts for value in part.values] == messages.values
        faults = {part.offsets[index]: why for part in parts for index, why in part.faults.items()}
        assert faults == {messages.offsets[index]: why for index, why in messages.faults.items()}
        assert [part.removed for part in parts] == [messages.removed] + [0] * (len(parts) - 1)
        assert [part.end for part in parts[:-1]] == [part.offsets[0] for part in parts[1:]]
        assert parts[-1].end == messages.end


def test_known_partitions_keep_their_index_and_new_ones_come_after_them():
    client = FakeClient({P0: FakePartition(), P1: FakePartition()})
    client.topics[P0].append(message(0, 1))
    client.topics[P1].append(message(0, 1))
    with learner(client, positions=[(P1, Position(0))]) as end:
        assert end.receive_until(lambda each: isinstance(each, PartitionsOpened)) == PartitionsOpened(
            [P1, P0], [0, 0], [None, None]
        )
        block, _ = end.block()
        assert sorted(block.columns["partition"].tolist()) == [0, 1]


def test_partitions_of_which_nothing_is_read_are_reported_as_such_and_logged(caplog):
    removed, vanished = TopicPartition("clicks", 0), TopicPartition("events", 1)
    client = FakeClient({P0: FakePartition()})
    client.ids = {"events": "two"}
    positions = [(removed, Position(4)), (P0, Position(7)), (vanished, Position(3))]
    marks = [PartitionFingerprint("of clicks"), PartitionFingerprint("one"), PartitionFingerprint("one")]
    skips = STREAM.model_copy(update={"on_gap": "skip"})
    with caplog.at_level("WARNING"), learner(client, positions=positions, marks=marks, stream=skips) as end:
        opened = end.receive_until(lambda each: isinstance(each, PartitionsOpened))
    assert isinstance(opened, PartitionsOpened)
    assert opened.partitions == [removed, P0, vanished, P0.next_incarnation]
    assert opened.unread == [0, 1, 2]
    assert "clicks is in stream.topics no more: nothing is read after [0]@4" in caplog.text
    assert "events was created again with fewer partitions: there is no [1]@3 any more" in caplog.text


def test_a_log_that_lost_its_end_is_read_on_from_there_under_either_on_gap():
    partition = FakePartition()
    for _ in range(5):
        partition.append(message(0, 1))
    client = FakeClient({P0: partition})
    client.ids = {"events": "one"}
    mark = PartitionFingerprint("one", Fingerprint(6, 1, "of a record that is lost"))
    assert STREAM.on_gap == "fail"
    with learner(client, positions=[(P0, Position(7))], marks=[mark]) as end:
        opened = end.receive_until(lambda each: isinstance(each, PartitionsOpened))
        assert opened == PartitionsOpened([P0, P0.next_incarnation], [7, 5], ["one", "one"], [0])
        partition.append(message(9, 1))
        block, _ = end.block()
        assert block.coverage[0].partition == 1
        assert block.columns["offset"].tolist() == [5]
    # Unread records below the new end are a gap.
    ours, theirs = socket.socketpair()
    with contextlib.closing(Connection(ours.detach())), contextlib.closing(Connection(theirs.detach())) as there:
        ring = SharedRing(BlockLayout(SCHEMA), 1_000_000)
        worker = IngestWorker(STREAM, client, BlockBuilder(SCHEMA, STREAM, HoldOut(fraction=0, seed=0)), ring, there)
        with (
            contextlib.closing(ring),
            pytest.raises(GapError, match=r"events\[0\]@2: the log lost its end and has gro"),
        ):
            worker.run(
                [(P0, Position(2))],
                [PartitionFingerprint("one", Fingerprint(1, 1_700_000_000_001, "of one that is lost"))],
            )


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=30))
def test_blocks_hold_every_event_once_and_cover_all_offsets(plan):
    """Messages of many rows over two partitions with gaps, cut into tiny slots: nothing is lost or comes twice."""
    partitions = {P0: FakePartition(), P1: FakePartition()}
    expected: list[tuple[int, int, int]] = []
    for where, rows, gap in plan:
        target = partitions[(P0, P1)[where]]
        offset = target.append(message(0, rows))
        expected += [(where, offset, row) for row in range(max(rows, 1))]
        target.skip(gap)
    seen: list[tuple[int, int, int]] = []
    position = {0: (0, 0), 1: (0, 0)}
    with learner(FakeClient(partitions), buffer_bytes=7_000) as end:
        while any(position[i][0] < topic.end for i, topic in enumerate(partitions.values())):
            block, slot = end.block()
            for cover in block.coverage:
                assert cover.start == position[cover.partition][0]
                mine = block.columns["partition"] == cover.partition
                rows = list(
                    zip(block.columns["offset"][mine].tolist(), block.columns["row"][mine].tolist(), strict=True)
                )
                assert rows == sorted(rows)
                torn = rows and rows[-1][0] == cover.end
                position[cover.partition] = (cover.end, rows[-1][1] + 1 if torn else 0)
            seen += [
                (int(p), int(o), int(r))
                for p, o, r in zip(*(block.columns[name] for name in ("partition", "offset", "row")), strict=True)
            ]
            send(end.connection, Release(slot))
    assert sorted(seen) == sorted(expected)
    assert len(set(seen)) == len(seen)
