"""Batches and the ledger together: every event is settled once, and offsets add up, however blocks are divided."""

import json
import threading
from collections import Counter, deque
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from anabranch.ingest.backfill.files import FileMark
from anabranch.ingest.events.block import Block, Coverage, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, Position
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.metrics import IngestMetrics
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.stream.batch import Batch, Decided, Span
from anabranch.learner.stream.batches import Batches
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.stream.trained_through import PartitionProgress

NAMES = [TopicPartition("events", 0), TopicPartition("events", 1)]


class Queue:
    """A source of prepared blocks."""

    def __init__(self, blocks):
        self.blocks = deque(blocks)
        self.out: list[Block] = []
        self.released: list[Block] = []

    def poll(self, timeout):
        if not self.blocks:
            return None
        self.out.append(self.blocks.popleft())
        return self.out[-1]

    def release(self, block):
        self.released.append(block)
        for column in block.columns.values():
            column[:] = 0  # a column that is read after its release has the data of another block


def block(schema, rows, coverage):
    """Rows of (partition, offset, row, outcome)."""
    columns = fake_columns(schema, [offset for _, offset, _, _ in rows])
    columns["partition"] = np.array([partition for partition, *_ in rows], np.int32)
    columns["row"] = np.array([row for _, _, row, _ in rows], np.int32)
    columns["outcome"] = np.array([outcome for *_, outcome in rows], np.uint8)
    return Block(columns, tuple(coverage))


def ledger():
    accounts = Ledger()
    for name in NAMES:
        accounts.add_partition(name, 0)
    return accounts


def drain(queue, batch_size):
    batches = Batches(queue, batch_size, timedelta(0))
    found = []
    while (batch := batches.next(threading.Event())) is not None:
        found.append(batch)
    return found


def adds_up(accounts):
    return all(
        report.end - report.start == report.finished + report.passed + report.gaps + report.removed + report.pending
        for report in accounts.totals.reports().values()
    )


SETTLED = [Outcome.PENDING, Outcome.PENDING, Outcome.PENDING, Outcome.HELD_OUT, Outcome.DEAD_LETTERED, Outcome.SKIPPED]


@settings(max_examples=150)
@given(st.data())
def test_every_event_has_one_outcome_and_offsets_add_up_however_the_stream_is_cut(schema, data):
    """Messages of one or many rows over two partitions, with gaps, in blocks and batches of any size."""
    stream: list[tuple[int, int, int, Outcome]] = []
    ends = [0, 0]
    gaps = [0, 0]
    for partition, rows, gap in data.draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.integers(0, 2)), max_size=25)
    ):
        stream += [(partition, ends[partition], row, data.draw(st.sampled_from(SETTLED))) for row in range(rows)]
        ends[partition] += 1 + gap
        gaps[partition] += gap
    blocks, reached, begin = [], [0, 0], 0
    while begin < len(stream):
        end = min(len(stream), begin + data.draw(st.integers(1, 9)))
        coverage = []
        for partition in (0, 1):
            mine = [row for row in stream[begin:end] if row[0] == partition]
            later = [row for row in stream[end:] if row[0] == partition]
            if mine:
                upto = later[0][1] if later else ends[partition]
                coverage.append(Coverage(partition, reached[partition], upto))
                reached[partition] = upto
        blocks.append(block(schema, stream[begin:end], coverage))
        begin = end
    queue, accounts = Queue(blocks), ledger()
    trained: list[int] = []
    settled = 0
    for batch in drain(queue, batch_size := data.draw(st.integers(1, 7))):
        assert len(batch) <= batch_size
        for span in batch.spans:
            accounts.advance(span)
            settled += len(span.trained)
        trained += batch.new["offset"].tolist() if batch.new else []
        assert not data.draw(st.booleans()) or adds_up(accounts)
        # The position is the first event without an outcome: exactly the events before it are settled.
        for partition, account in enumerate(accounts.partitions):
            position = (account.position.offset, account.position.row)
            mine = [row for row in stream[:settled] if row[0] == partition]
            assert all(row[1:3] < position for row in mine)
            assert all(row[1:3] >= position for row in stream[settled:] if row[0] == partition)
    expected = Counter(outcome for *_, outcome in stream)
    assert accounts.totals.outcomes == {
        "trained": expected[Outcome.PENDING],
        "stored_only": 0,
        "held_out": expected[Outcome.HELD_OUT],
        "dead_lettered": expected[Outcome.DEAD_LETTERED],
        "skipped": expected[Outcome.SKIPPED],
    }
    assert trained == [offset for _, offset, _, outcome in stream if outcome is Outcome.PENDING]
    assert [account.position for account in accounts.partitions] == [Position(end) for end in ends]
    assert [account.gaps for account in accounts.partitions] == gaps
    assert len(queue.released) == len(queue.out)


def test_removed_and_passed_offsets_are_not_counted_as_gaps(schema):
    rows = [(0, 12, 0, Outcome.PENDING)]
    accounts = ledger()
    for batch in drain(Queue([block(schema, rows, [Coverage(0, 10, 14, removed=7, passed=3)])]), 4):
        for span in batch.spans:
            accounts.advance(span)
    report = accounts.totals.reports()["events:0"]
    assert (report.removed, report.passed, report.gaps, report.finished) == (7, 3, 3, 1)
    assert report.trained_through == 13
    assert adds_up(accounts)


def test_a_backlog_without_events_to_train_on_is_split_into_batches(schema):
    blocks = [block(schema, [(0, n, 0, Outcome.SKIPPED)], [Coverage(0, n, n + 1)]) for n in range(500)]
    batches = drain(Queue(blocks), 8)
    assert len(batches) > 10
    assert sum(len(batch.spans) for batch in batches) == 500


def test_a_skipped_batch_is_counted_with_its_reason(schema):
    rows = [(0, offset, 0, Outcome.PENDING) for offset in range(3)]
    accounts = ledger()
    for batch in drain(Queue([block(schema, rows, [Coverage(0, 0, 3)])]), 8):
        batch.skip(np.ones(len(batch), np.bool_), SkipReason.NON_FINITE)
        for span in batch.spans:
            accounts.advance(span)
    assert accounts.totals.outcomes["skipped"] == 3
    assert accounts.totals.skipped == {"non_finite": 3}


def test_events_without_a_label_are_stored_only(schema):
    made = block(schema, [(0, offset, 0, Outcome.PENDING) for offset in range(4)], [Coverage(0, 0, 4)])
    made.columns["labelled"][1:3] = False
    accounts = ledger()
    (batch,) = drain(Queue([made]), 8)
    assert batch.new["offset"].tolist() == [0, 3]
    assert batch.stored_only["offset"].tolist() == [1, 2]
    for span in batch.spans:
        accounts.advance(span)
    assert accounts.totals.outcomes["trained"] == accounts.totals.outcomes["stored_only"] == 2


def test_decreasing_offsets_are_a_bug_that_is_detected_at_once(schema):
    accounts = ledger()
    rows = [(0, offset, 0, Outcome.PENDING) for offset in range(2)]
    first, second = (
        span for batch in drain(Queue([block(schema, rows, [Coverage(0, 0, 2)])]), 1) for span in batch.spans
    )
    accounts.advance(second)
    with pytest.raises(AssertionError):
        accounts.advance(first)


def test_a_row_among_removed_offsets_is_a_bug_that_is_detected_at_once(schema):
    accounts = ledger()
    rows = [(0, 3, 0, Outcome.PENDING)]
    (batch,) = drain(Queue([block(schema, rows, [Coverage(0, 0, 9, removed=5)])]), 1)
    with pytest.raises(AssertionError):
        accounts.advance(batch.spans[0])


@pytest.mark.parametrize("counted_between", [False, True])
def test_settling_a_span_twice_is_a_bug_that_is_detected(schema, counted_between):
    accounts = ledger()
    (batch,) = drain(Queue([block(schema, [(0, 0, 0, Outcome.PENDING)], [Coverage(0, 0, 1)])]), 1)
    accounts.advance(batch.spans[0])
    if counted_between:
        accounts.count()
    accounts.advance(batch.spans[0])
    with pytest.raises(AssertionError):
        accounts.count()


def test_only_events_with_a_time_that_are_trained_on_for_the_first_time_are_new(schema):
    rows = [(0, offset, 0, Outcome.PENDING) for offset in range(6)] + [(1, 3, 0, Outcome.PENDING)]
    rows += [(0, 6, 0, Outcome.HELD_OUT)]
    made = block(schema, rows, [Coverage(0, 0, 7), Coverage(1, 0, 4)])
    made.columns["labelled"][4] = False
    made.columns["time_ms"][:] = [100, 101, 102, 103, 104, -1, 106, 107]
    accounts = Ledger({"events:0": PartitionProgress(1), "events:1": PartitionProgress(9, incarnation=1)})
    for name in NAMES:
        accounts.add_partition(name, 0)
    for batch in drain(Queue([made]), 2):
        for span in batch.spans:
            accounts.advance(span)
    assert accounts.take_newly_trained().quantiles(9).tolist() == [102, 103, 106]
    assert accounts.take_newly_trained().rows == 0


def test_the_events_of_a_skipped_batch_are_not_newly_trained(schema):
    accounts = ledger()
    for batch in drain(Queue([block(schema, [(0, 5, 0, Outcome.PENDING)], [Coverage(0, 5, 6)])]), 8):
        batch.skip(np.ones(len(batch), np.bool_), SkipReason.NON_FINITE)
        for span in batch.spans:
            accounts.advance(span)
    assert accounts.take_newly_trained().rows == 0


def test_pending_is_the_number_of_offsets_beyond_the_position(schema):
    accounts = ledger()
    accounts.partitions[1].end = 40
    assert accounts.totals.reports()["events:1"].pending == 40
    assert accounts.trained_through["events:1"].offset == -1


def test_nothing_is_pending_of_a_partition_that_nobody_reads_until_it_is_read_again(schema):
    accounts = ledger()
    account = accounts.partitions[1]
    account.update(Partition(NAMES[1], 0, 40, "id"))
    account.position = account.counted = Position(0)
    again = Ledger()
    again.restore(accounts.state())
    account = again.partitions[1]
    account.update(Partition(NAMES[1], 0, 0, read=False))
    report = again.totals.reports()["events:1"]
    assert (report.pending, report.end, report.removed) == (0, 0, 0)
    assert adds_up(again)
    assert account.mark.topic_id == "id"
    account.update(Partition(NAMES[1], 0, 45, "id"))
    assert again.totals.reports()["events:1"].pending == 45


def test_unread_events_of_a_topic_that_was_created_again_are_removed(schema):
    accounts = ledger()
    accounts.partitions[0].update(Partition(NAMES[0], 0, 9, "first"))
    for batch in drain(Queue([block(schema, [(0, 0, 0, Outcome.PENDING)], [Coverage(0, 0, 2)])]), 4):
        accounts.add_partition(NAMES[0].next_incarnation, 0)
        for span in batch.spans:
            accounts.advance(span)  # what was under way is settled where it is from
    accounts.partitions[2].update(Partition(NAMES[0].next_incarnation, 0, 5, "second"))
    again = Ledger()
    again.restore(accounts.state())
    for each in (accounts, again):
        reports = each.totals.reports()
        assert adds_up(each)
        assert (reports["events#0:0"].removed, reports["events#0:0"].pending) == (7, 0)
        assert (reports["events:0"].incarnation, reports["events:0"].pending) == (1, 5)
        assert each.trained_through["events:0"].incarnation == 1
        assert [mark.topic_id for mark in each.marks.values()] == ["first", None, "second"]


def test_the_last_record_of_a_block_is_kept_once_all_of_the_block_is_settled(schema):
    last = Fingerprint(3, 30, "abc")
    rows = [(0, offset, 0, Outcome.PENDING) for offset in range(4)]
    accounts = ledger()
    batches = drain(Queue([block(schema, rows, [Coverage(0, 0, 4, last=last)])]), 2)
    assert len(batches) == 2
    for batch, known in zip(batches, (None, last), strict=True):
        for span in batch.spans:
            accounts.advance(span)
        assert accounts.partitions[0].mark.last == known
    again = Ledger()
    again.restore(json.loads(json.dumps(accounts.state())))
    assert again.partitions[0].mark.last == last


def ended(outcomes, *, partition=0, trained=0):
    """Return events that ended, the first `trained` of which are in the batch of the step."""
    n = len(outcomes)
    mask = np.arange(n) < trained
    columns = {
        "partition": np.full(n, partition, np.int32),
        "outcome": np.where(mask, Outcome.PENDING, outcomes).astype(np.uint8),
        "reason": np.where(np.array(outcomes) == Outcome.SKIPPED, SkipReason.TIMED_OUT, 0).astype(np.uint8),
        "time_ms": np.arange(1, n + 1),
    }
    final, yes = np.array(outcomes, np.uint8), np.ones(n, np.bool_)
    return Decided(Span(columns, mask, {}, {}, {}, {}), final, yes, np.zeros((n, 3), np.float32), final, yes, ~yes)


def test_events_that_waited_end_once_in_an_account_of_their_own(schema):
    accounts = ledger()
    (batch,) = drain(Queue([block(schema, [(0, n, 0, Outcome.WAITING) for n in range(6)], [Coverage(0, 0, 6)])]), 9)
    for span in batch.spans:
        accounts.advance(span)
    accounts.count()
    account = accounts.partitions[0]
    assert (account.waiting, accounts.totals.outcomes["waiting"]) == (6, 6)
    accounts.first_open = lambda: {0: 2}
    assert accounts.trained_through["events:0"].offset == 1
    assert accounts.totals.reports()["events:0"].trained_through == 1
    assert accounts.totals.reports()["events:0"].seen_through == accounts.read["events:0"][1] == 5

    kinds = [Outcome.TRAINED, Outcome.TIMED_OUT, Outcome.HELD_OUT, Outcome.SKIPPED]
    accounts.end(ended(kinds, trained=2))
    assert accounts.end_erased(np.zeros(1, np.int32)) == 1
    assert account.waiting == 1
    report = accounts.totals.reports()["events:0"]
    assert {name: count for name, count in report.waited.items() if count} == {
        "trained": 1,
        "timed_out": 1,
        "held_out": 1,
        "skipped": 2,
    }
    assert report.waited_skipped == {"timed_out": 1, "erased": 1}
    assert accounts.take_newly_trained().rows == 2
    restored = Ledger()
    restored.restore(accounts.state())
    assert restored.totals.reports()["events:0"].waited == report.waited
    assert restored.partitions[0].waiting == 1


def test_waited_events_of_a_step_that_is_not_taken_are_skipped(schema):
    accounts = ledger()
    decided = ended([Outcome.TRAINED, Outcome.STORED_ONLY], trained=1)
    Batch({"offset": np.zeros(1)}, {}, {}, [], decided=decided).skip(np.ones(1, np.bool_), SkipReason.NON_FINITE)
    accounts.end(decided)
    account = accounts.partitions[0]
    assert (account.waited[Outcome.SKIPPED], account.waited[Outcome.STORED_ONLY]) == (1, 1)
    assert account.waited_skipped[SkipReason.NON_FINITE] == 1
    assert accounts.take_newly_trained().rows == 0


def test_the_files_of_each_pass_are_one_account_and_versions_name_topics_alone(schema):
    names = [TopicPartition(topic, file, 0, number) for number, topic in ((1, "h"), (2, "h.2")) for file in (0, 1)]
    accounts = Ledger()
    for name in (*names, NAMES[0]):
        accounts.add_partition(name, 0)
    for account, rows in zip(accounts.partitions, (3, 5, 3, 5), strict=False):
        account.update(Partition(account.name, 0, rows, FileMark("a", 1, "tag", rows).encoded()))
    outcomes = [Outcome.PENDING, Outcome.HELD_OUT, Outcome.SKIPPED]
    for file, rows in enumerate((3, 4)):
        part = block(schema, [(file, at, 0, outcomes[at % 3]) for at in range(rows)], [Coverage(file, 0, rows)])
        for batch in drain(Queue([part]), 8):
            for span in batch.spans:
                accounts.advance(span)
        for _ in range(2):  # a file that was read is added once
            first, second, topic = (accounts.totals.reports()[name] for name in ("h", "h.2", "events:0"))
            assert len(accounts.totals.reports()) == 3
            read = (3, 7)[file]
            assert (first.files, first.history, first.end, first.finished, first.pending) == (2, 1, 8, read, 8 - read)
            assert first.outcomes == accounts.totals.outcomes
            assert (first.trained_through, first.seen_through) == (read - 1, read - 1)
            assert (second.files, second.history, second.end, second.pending) == (2, 2, 8, 8)
            assert (topic.files, topic.history) == (0, 0)
    assert {*accounts.trained_through} == {*accounts.read} == {"events:0"}


def file_of(number, rows):
    return Partition(TopicPartition("h", number, 0, 1), 0, rows, FileMark("a", 1, "tag", rows).encoded())


def test_the_files_of_a_checkpoint_are_summed_as_before(schema):
    accounts = Ledger()
    for file in range(3):
        accounts.add_partition(TopicPartition("h", file, 0, 1), 0)
        accounts.partitions[file].update(file_of(file, 4))
        rows = 4 - file
        part = block(schema, [(file, at, 0, Outcome.PENDING) for at in range(rows)], [Coverage(file, 0, rows)])
        for batch in drain(Queue([part]), 8):
            for span in batch.spans:
                accounts.advance(span)
    again = Ledger()
    again.restore(json.loads(json.dumps(accounts.state())))
    assert again.totals.reports() == accounts.totals.reports()
    assert accounts.totals.reports()["h"].outcomes["trained"] == again.totals.outcomes["trained"] == 9


def test_a_file_whose_events_wait_for_labels_is_not_read_yet():
    accounts = Ledger()
    for file in range(2):
        accounts.add_partition(TopicPartition("h", file, 0, 1), 0)
        account = accounts.partitions[file]
        account.update(file_of(file, 10))
        account.position = account.counted = Position(10)
    accounts.partitions[0].outcomes[Outcome.WAITING] = 4
    accounts.first_open = lambda: {0: 6}
    report = accounts.totals.reports()["h"]
    assert (report.waiting, report.trained_through, report.seen_through) == (4, 15, 19)
    accounts.partitions[0].waited[Outcome.TRAINED] = 4
    accounts.first_open = dict
    report = accounts.totals.reports()["h"]
    assert (report.waiting, report.trained_through, report.waited["trained"]) == (0, 19, 4)


def test_outcomes_of_a_checkpoint_are_not_counted_and_each_later_one_is_counted_once(schema):
    def settle(accounts, rows, *coverage):
        (batch,) = drain(Queue([block(schema, rows, list(coverage))]), 100)
        for span in batch.spans:
            accounts.advance(span)

    before = ledger()
    settle(before, [(0, 0, 0, Outcome.PENDING)], Coverage(0, 0, 1))
    registry = CollectorRegistry()
    accounts = Ledger(rows=IngestMetrics(registry).rows)
    accounts.restore(before.state())
    rows = [(0, 1, 0, Outcome.PENDING), (0, 2, 0, Outcome.PENDING), (1, 0, 0, Outcome.HELD_OUT)]
    settle(accounts, rows, Coverage(0, 1, 3), Coverage(1, 0, 1))
    accounts.count()
    accounts.count()
    accounts.add_partition(TopicPartition("events", 2), 0)
    assert accounts.totals.outcomes == {**before.totals.outcomes, "trained": 3, "held_out": 1}
    values = {
        (sample.labels["partition"], sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "anabranch_ingest_rows_total"
    }
    assert values == {("0", "trained"): 2, ("1", "held_out"): 1}
