"""The lag policy: how long events wait, when that is too long, and the outcome that they get then."""

import threading
from collections import Counter
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.events.block import Block, Coverage, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.stream import LagPolicySettings
from anabranch.learner.stream.batches import Batches
from anabranch.learner.stream.lag import Arrivals, LagPolicy
from anabranch.learner.stream.ledger import Ledger

NAME = TopicPartition("events", 0)
ACTIONS = ["train-all", "sample", "store-only", "skip-to-latest"]


class Clock:
    """A clock that changes only when it is set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Stream:
    """One partition, and the times at which it was asked to continue at its end."""

    def __init__(self, clock):
        self.ends_time: float | None = None
        self.reads_history = False
        self.partitions = [Partition(NAME, 0, None)]
        self.asked: list[float] = []
        self.clock = clock

    def pass_over(self):
        self.asked.append(self.clock())


def policy(clock, action="sample", stream=None, *, reads=False, **more):
    options = LagPolicySettings.model_validate({"action": action, "high": "60s", "low": "10s", **more})
    return LagPolicy(options, 7, stream or Stream(clock), clock=clock, wall=clock, reads=reads)


def ledger(*, end, position=0):
    accounts = Ledger()
    accounts.add_partition(NAME, 0)
    accounts.partitions[0].end, accounts.partitions[0].position = end, Position(position)
    return accounts


def measured(policy, clock, *, end, position):
    """Update the policy after the broker has reported its end offset."""
    policy._stream.ends_time = clock.now
    policy.update(ledger(end=end, position=position).partitions, [0])
    return policy.seconds, policy.behind


class TestArrivals:
    def test_arrival_is_interpolated_between_two_end_offsets(self):
        arrivals = Arrivals()
        arrivals.record(100.0, 50)
        arrivals.record(110.0, 60)
        assert arrivals.age(110.0, 60) == 0
        assert arrivals.age(110.0, 59) == 0
        assert arrivals.age(112.0, 54) == pytest.approx(7)
        assert arrivals.age(130.0, 59) == pytest.approx(20)

    def test_events_before_the_first_end_offset_arrive_with_it(self):
        arrivals = Arrivals()
        arrivals.record(100.0, 1_000_000)
        assert arrivals.age(100.0, 3) == 0
        assert arrivals.age(105.0, 3) == 5

    def test_no_event_arrives_while_the_end_offset_stays_the_same(self):
        arrivals = Arrivals()
        for at in range(100, 3700):
            arrivals.record(float(at), 50)
        arrivals.record(3700.0, 60)
        assert arrivals.age(3700.0, 50) < 1

    @settings(max_examples=200)
    @given(st.data())
    def test_ages_are_within_the_end_offsets_around_them_and_memory_is_bounded(self, data):
        arrivals, ends, position = Arrivals(), [(0.0, 0)], 0
        arrivals.record(0.0, 0)
        for seconds, grown, settled in data.draw(
            st.lists(st.tuples(st.floats(0.1, 9), st.integers(0, 30), st.integers(0, 30)), max_size=300)
        ):
            ends.append((ends[-1][0] + seconds, ends[-1][1] + grown))
            arrivals.record(*ends[-1])
            position = min(ends[-1][1], position + settled)
            age = arrivals.age(ends[-1][0], position)
            assert 0 <= age <= ends[-1][0]
            assert (age > 0) <= (position < ends[-1][1])
            assert len(arrivals.marks) <= 66
        ages = [arrivals.age(ends[-1][0], each) for each in range(position, ends[-1][1])]
        assert all(older >= younger - 1e-6 for older, younger in pairwise(ages))


def test_it_is_behind_from_high_on_until_low():
    clock = Clock()
    lagging = policy(clock)
    assert measured(lagging, clock, end=0, position=0) == (0, False)
    clock.now += 1
    assert measured(lagging, clock, end=1000, position=0)[1] is False
    clock.now += 58
    assert measured(lagging, clock, end=59_000, position=0)[1] is False
    clock.now += 2
    assert measured(lagging, clock, end=61_000, position=0) == (pytest.approx(61, abs=0.01), True)
    assert measured(lagging, clock, end=61_000, position=11_000) == (pytest.approx(50, abs=0.01), True)
    assert measured(lagging, clock, end=61_000, position=50_000) == (pytest.approx(11, abs=0.01), True)
    assert measured(lagging, clock, end=61_000, position=52_000) == (pytest.approx(9, abs=0.01), False)
    clock.now += 30
    assert measured(lagging, clock, end=91_000, position=52_000) == (pytest.approx(39, abs=0.01), False)
    clock.now += 30
    assert measured(lagging, clock, end=121_000, position=52_000) == (pytest.approx(69, abs=0.01), True)


def test_the_lag_grows_while_the_broker_reports_nothing():
    clock = Clock()
    stream = Stream(clock)
    lagging = policy(clock, stream=stream)
    stream.ends_time = clock.now
    for _ in range(7):
        lagging.update(ledger(end=10).partitions)
        clock.now += 10
    assert lagging.seconds == 60
    assert lagging.behind


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 4), max_size=3), st.floats(0, 5)), max_size=40))
def test_updating_the_partitions_that_moved_gives_the_same_lag_as_updating_all(plan):
    """At each update the broker may have reported end offsets, and some partitions have moved."""
    clock = Clock()
    stream = Stream(clock)
    some, accounts = policy(clock, stream=stream), Ledger()
    for number in range(5):
        accounts.add_partition(TopicPartition("events", number), 0)
    for reports, moved, seconds in plan:
        clock.now += seconds
        if reports:
            stream.ends_time = clock.now
            for number, account in enumerate(accounts.partitions):
                account.end += 3 * number
        for index in moved:
            account = accounts.partitions[index]
            account.position = Position(min(account.end, account.position.offset + 2))
        some.update(accounts.partitions, moved)
        ages = [
            each.age(clock.now, account.position.offset)
            for each, account in zip(some._arrivals, accounts.partitions, strict=True)
        ]
        assert some.seconds == pytest.approx(max(ages))


def test_a_step_updates_no_more_partitions_than_it_moves():
    class Counted(Ledger):
        accesses = 0

        def __len__(self):
            return len(self.partitions)

        def __iter__(self):
            self.accesses += len(self.partitions)
            return iter(self.partitions)

        def __getitem__(self, index):
            self.accesses += 1
            return self.partitions[index]

    clock = Clock()
    stream = Stream(clock)
    lagging, accounts = policy(clock, stream=stream), Counted()
    for number in range(1000):
        accounts.add_partition(TopicPartition("events", number), 0)
    stream.ends_time = clock.now
    lagging.update(accounts)  # type: ignore[arg-type]
    accounts.accesses = 0
    for index in range(100):
        lagging.update(accounts, [index])  # type: ignore[arg-type]
    assert accounts.accesses == 100


def test_a_restart_continues_the_waiting_time_of_events():
    clock = Clock()
    before = policy(clock)
    measured(before, clock, end=100, position=100)
    kept = before.state()
    clock.now += 3600
    after = policy(clock)
    after.restore(kept)
    # Events that arrived while the learner was down are taken to have arrived evenly.
    assert measured(after, clock, end=3700, position=100) == (pytest.approx(3600, abs=1.1), True)
    assert measured(after, clock, end=3700, position=1900) == (pytest.approx(1800, abs=1.1), True)
    again = policy(clock)
    again.restore(after.state())
    assert measured(again, clock, end=3700, position=1900) == (pytest.approx(1800, abs=1.1), True)


def test_unread_events_of_a_topic_that_was_created_again_wait_no_longer():
    clock = Clock()
    stream = Stream(clock)
    lagging = policy(clock, stream=stream)
    accounts = ledger(end=100, position=40)
    stream.ends_time = clock.now
    lagging.update(accounts.partitions)
    clock.now += 30
    lagging.update(accounts.partitions)
    assert lagging.seconds == 30
    kept = lagging.state()
    accounts.add_partition(TopicPartition("events", 0, 1), 0)
    restarted = policy(clock, stream=stream)
    restarted.restore(kept)
    for each in (lagging, restarted):
        clock.now += 3600
        stream.ends_time = clock.now
        each.update(accounts.partitions)
        assert (each.seconds, each.behind) == (0, False)
        assert each.state()["arrivals"][0] == []


def test_ingest_is_asked_to_continue_at_the_end_once_a_second():
    clock = Clock()
    stream = Stream(clock)
    passing = policy(clock, "skip-to-latest", stream)
    reading = policy(clock, "skip-to-latest", other := Stream(clock), reads=True)
    for _ in range(700):
        measured(passing, clock, end=100, position=0)
        measured(reading, clock, end=100, position=0)
        clock.now += 0.125
    assert passing.behind
    assert reading.behind
    assert other.asked == []
    assert stream.asked == [1060.0 + second for second in range(28)]


def stream(schema, seed, messages):
    """Blocks of messages with one to three events, some held out, some without a label, with gaps between them."""
    generator = np.random.default_rng(seed)
    blocks, offset, reached, expected = [], 0, 0, Counter[str]()
    while offset < messages:
        rows = []
        for _ in range(int(generator.integers(1, 9))):
            rows += [(offset, row) for row in range(int(generator.integers(1, 4)))]
            offset += 1 + int(generator.integers(0, 2))
        columns = fake_columns(schema, [offset for offset, _ in rows])
        columns["row"] = np.array([row for _, row in rows], np.int32)
        columns["outcome"] = generator.choice([Outcome.PENDING, Outcome.HELD_OUT], len(rows), p=[0.8, 0.2]).astype(
            np.uint8
        )
        columns["labelled"] = generator.random(len(rows)) < 0.9
        columns["labelled"] |= columns["outcome"] == Outcome.HELD_OUT
        expected["held_out"] += int((columns["outcome"] == Outcome.HELD_OUT).sum())
        expected["unlabelled"] += int((columns["labelled"] == 0).sum())
        expected["all"] += len(rows)
        blocks.append(Block(columns, (Coverage(0, reached, offset),)))
        reached = offset
    return blocks, expected


class Blocks:
    def __init__(self, blocks):
        self.blocks = list(blocks)

    def poll(self, timeout):
        return self.blocks.pop(0) if self.blocks else None

    def release(self, block):
        for column in block.columns.values():
            column[:] = 0


@pytest.mark.parametrize("action", ACTIONS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 9), switches=st.lists(st.booleans(), min_size=1, max_size=8))
def test_every_event_has_one_outcome_whenever_the_learner_falls_behind_and_catches_up(
    schema, action, seed, size, switches
):
    blocks, expected = stream(schema, seed, 60)
    accounts, clock = ledger(end=0), Clock()
    lagging = policy(clock, action)
    batches = Batches(Blocks(blocks), size, timedelta(0), lagging)
    measured(lagging, clock, end=0, position=0)
    stored_only = number = 0
    while True:
        lagging.behind = switches[number % len(switches)]
        batch = batches.next(threading.Event())
        if batch is None:
            break
        number += 1
        stored_only += len(batch.stored_only["offset"]) if batch.stored_only else 0
        for span in batch.spans:
            accounts.advance(span)
    report = accounts.totals.reports()["events:0"]
    assert report.end - report.start == report.finished + report.passed + report.gaps + report.removed + report.pending
    assert sum(report.outcomes.values()) == expected["all"]
    assert report.outcomes["held_out"] == expected["held_out"]
    assert report.outcomes["stored_only"] == stored_only
    assert report.outcomes["stored_only"] >= expected["unlabelled"]
    assert report.skipped == ({"behind": report.outcomes["skipped"]} if report.outcomes["skipped"] else {})
    if action == "train-all" or not any(switches):
        assert report.outcomes["trained"] == expected["all"] - expected["held_out"] - expected["unlabelled"]
    if action != "store-only":
        assert report.outcomes["stored_only"] == expected["unlabelled"]
    else:
        assert report.outcomes["skipped"] == 0
    if all(switches) and action in ("store-only", "skip-to-latest"):
        assert report.outcomes["trained"] == 0


def test_the_sample_is_a_fraction_and_the_same_however_it_is_read(schema):
    clock = Clock()
    sampling = policy(clock, fraction=0.25)
    measured(sampling, clock, end=10, position=0)
    sampling.behind = True
    columns = fake_columns(schema, range(20_000))
    outcome = sampling.settle(columns)["outcome"]
    trained = outcome == Outcome.PENDING
    assert 0.23 < trained.mean() < 0.27
    assert (outcome[~trained] == Outcome.SKIPPED).all()
    pieces = [{name: each[i : i + 999] for name, each in columns.items()} for i in range(0, 20_000, 999)]
    assert np.array_equal(np.concatenate([sampling.settle(piece)["outcome"] for piece in pieces]), outcome)
    assert (columns["outcome"] == Outcome.PENDING).all()
    # After a restart it is asked before the first update.
    other = policy(clock, fraction=0.25)
    other.restore(sampling.state())
    assert np.array_equal(other.settle(columns)["outcome"], outcome)


def test_skipped_events_have_the_reason_behind(schema):
    clock = Clock()
    skipping = policy(clock, "skip-to-latest")
    skipping.behind = True
    assert (skipping.settle(fake_columns(schema, range(5)))["reason"] == SkipReason.BEHIND).all()
    assert skipping.warning is not None
    assert skipping.warning.startswith("the stream is faster than training")


def test_events_that_are_no_full_batch_are_no_stream_that_is_too_fast():
    clock = Clock()
    lag = LagPolicy(LagPolicySettings(), 7, Stream(clock), only_full=True, clock=clock)
    lag.behind = True
    assert lag.warning is not None
    assert lag.warning.startswith("events wait for 0 s: for a full batch, which learner.deterministic needs")


@pytest.mark.parametrize(
    ("action", "outcome"),
    [("sample", Outcome.SKIPPED), ("skip-to-latest", Outcome.SKIPPED), ("store-only", Outcome.WAITING)],
)
def test_an_event_that_waits_for_its_label_is_skipped_when_it_comes_or_stored_when_that_is_there(
    schema, action, outcome
):
    clock = Clock()
    lagging = policy(clock, action, **({"fraction": 1e-9} if action == "sample" else {}))
    columns = fake_columns(schema, range(2))
    columns["outcome"][:] = [Outcome.WAITING, Outcome.LABEL]
    assert lagging.settle(columns) is columns
    assert not lagging.stores_only
    lagging.behind = True
    assert lagging.settle(columns)["outcome"].tolist() == [outcome, Outcome.LABEL]
    assert lagging.stores_only == (action == "store-only")


def test_the_last_rows_of_files_do_not_wait_when_the_topics_begin():
    """They are read, and in batches that are not trained on yet."""
    clock = Clock()
    lag, accounts = policy(clock), Ledger()
    for at, name in enumerate((TopicPartition("history", 0, 0, 1), NAME)):
        accounts.add_partition(name, 0)
        accounts.partitions[at].end = 1000
    accounts.partitions[1].position = Position(1000)
    for _ in range(3):
        clock.now += 60
        lag._stream.ends_time = clock.now
        lag.update(accounts.partitions, [0])
        assert (lag.seconds, lag.behind) == (0.0, False)


def test_nothing_waits_while_files_are_read_and_what_arrived_meanwhile_waits_from_then_on():
    """Though the topic grows for an hour, `skip-to-latest` skips none of it."""
    clock = Clock()
    stream = Stream(clock)
    skipping = policy(clock, "skip-to-latest", stream)
    stream.reads_history = True
    for _ in range(60):
        clock.now += 60
        assert measured(skipping, clock, end=1000 + int(clock.now), position=0) == (0.0, False)
    stream.reads_history = False
    assert measured(skipping, clock, end=5000, position=0) == (0.0, False)
    clock.now += 59
    assert measured(skipping, clock, end=6000, position=0) == (59.0, False)
    assert stream.asked == []
    clock.now += 1
    assert measured(skipping, clock, end=6000, position=0) == (60.0, True)
    assert stream.asked == [clock.now]


def test_a_topic_that_nobody_reads_any_more_is_no_lag():
    """Its events are not late; an action because of them would be taken against those of other topics."""
    clock = Clock()
    before = policy(clock)
    assert measured(before, clock, end=100, position=40) == (0.0, False)
    clock.now += 61
    assert measured(before, clock, end=100, position=40) == (61.0, True)
    after, accounts = policy(clock), ledger(end=100, position=40)
    after.restore(before.state())
    accounts.partitions[0].update(Partition(NAME, 0, 40, read=False))
    after._stream.ends_time = clock.now
    after.update(accounts.partitions)
    assert (after.seconds, after.behind) == (0.0, False)
