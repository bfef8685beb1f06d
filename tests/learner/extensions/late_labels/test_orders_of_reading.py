"""Late labels, read in five orders, against an offline join: each event ends the same way, with the same label."""

import itertools
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import HoldOut, LagPolicySettings
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.extensions.late_labels.extension import LateLabels
from anabranch.learner.extensions.late_labels.stream_times import LabelClock
from anabranch.learner.model.device import Precision
from anabranch.learner.model.examples import EARLY, Early
from anabranch.learner.model.task import Classification
from anabranch.learner.stream.batch import Batch, Span
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.stream.ledger import Ledger
from tests.learner.extensions.late_labels.joins import SCHEMA, JoinBench, events, labels, options, problem

WAIT_MS = 100_000
BEGIN_MS = 1_700_000_000_000
STEP = 8
NAMES = TopicPartition("events", 0), TopicPartition("labels", 0)


@dataclass(frozen=True)
class Record:
    key: int
    time_ms: int
    label: int = -1


@dataclass(frozen=True)
class Row:
    """How an event ends: its outcome, its label, and whether a negative was taken back for that label."""

    outcome: str
    label: int
    taken_back: bool = False


def streams(seed, count=150):
    """Return events and labels in the order of their time: most have one in time, others late, too late, or none."""
    random = np.random.default_rng(seed)
    times = BEGIN_MS + np.sort(random.integers(0, 6 * WAIT_MS, count))
    keys = 1 + np.where(random.random(count) < 0.9, np.arange(count), random.integers(0, count, count))
    lags = np.array([0.5, 0.999, -0.7, 1.001, 1.7, 1.999, 2.5, 0.1])[random.integers(0, 8, count)]
    labelled = random.random(count) < 0.85
    found = [
        Record(int(key), int(time + lag * WAIT_MS), int(random.random() < 0.6))
        for key, time, lag in zip(keys[labelled], times[labelled], lags[labelled], strict=True)
    ]
    again = [Record(each.key, each.time_ms + 1000, 1 - each.label) for each in found[::5]]
    others = [Record(9000 + index, BEGIN_MS + index * WAIT_MS, 1) for index in range(6)]
    came = [Record(int(key), int(time)) for key, time in zip(keys, times, strict=True)]
    return came, sorted(found + again + others, key=lambda label: label.time_ms)


def offline_join(came, found, *, take_back):
    """Join in plain Python: the first label of the key that is in time, or else the first late one."""
    rows = []
    for event in came:
        lags = [(label.time_ms - event.time_ms, label.label) for label in found if label.key == event.key]
        in_time = [label for lag, label in lags if -WAIT_MS <= lag <= WAIT_MS]
        late = [label for lag, label in lags if WAIT_MS < lag <= 2 * WAIT_MS]
        if in_time:
            rows.append(Row("TRAINED", in_time[0]))
        else:
            rows.append(Row("TIMED_OUT", int(take_back and late[:1] == [1]), take_back and late[:1] == [1]))
    return rows


class Learner:
    """The join at the side of a loop, with readers of two topics that are arrays, and restarts from checkpoints."""

    def __init__(self, folder, streams, *, early, take_back, size=2**20):
        torch.manual_seed(0)
        self.streams, self.early = streams, early
        self.settings = LabelStreamSettings.model_validate(
            {"topics": ["labels"], "wait": f"{WAIT_MS}ms", "bytes": "1MB", "unmatched": "negative"}
            | {"early": "negative-then-correct" if early else "none", "take_back": take_back}
        )
        wait = timedelta(milliseconds=WAIT_MS)
        self.bench = JoinBench(folder, options(wait=wait, take_back=take_back, bytes=size))
        self.device = torch.device("cpu")
        self.predictor = EventTimePredictor(
            *(nn.Linear(3, 3), Classification(), SCHEMA, self.device, Precision("fp32", None), (3,))
        )
        self.monotonic, self.wall = 0.0, BEGIN_MS / 1000
        self.ledger = Ledger()
        for name in NAMES:
            self.ledger.add_partition(name, 0)
        self.learned: list[tuple[int, str, int]] = []
        self.rounds = 0
        """All that was learned or ended: offset, what, label."""
        self.most_kept = 0
        self.late = self.link()
        self.saved: tuple[Any, ...] = ()
        self.checkpoint()

    partitions, ends_time = (), None

    def pass_over(self):
        """Do nothing."""

    def link(self):
        late = LateLabels(
            *(self.bench.part, self.settings, HoldOut(fraction=0, seed=0), self.predictor),
            LagPolicy(LagPolicySettings(), 0, self),
            step_size=STEP,
            max_delay=timedelta(0),
            clock=LabelClock(lambda: self.monotonic, lambda: self.wall, lambda: 0.0),
        )
        late.attach(self.ledger)
        return late

    def checkpoint(self):
        self.bench.ledger = self.ledger.state()
        self.bench.checkpoint()
        self.saved = self.ledger.state(), self.late.state(), list(self.learned)

    def kill(self):
        """Go back to the last checkpoint, as a restart does."""
        ledger, late, self.learned = self.saved[0], self.saved[1], list(self.saved[2])
        self.ledger = Ledger()
        self.ledger.restore(ledger)
        self.bench.restart()
        self.late = self.link()
        self.late.restore(late)

    def position(self, topic):
        return self.ledger.partitions[topic].position.offset

    def read(self, topic, most=STEP):
        """Read the next records of a topic, unless it is held; return whether there were any."""
        begin = self.position(topic)
        records = self.streams[topic][begin : begin + most]
        if not records or topic in self.late.ahead:
            return False
        offsets = range(begin, begin + len(records))
        keys, times = [record.key for record in records], [record.time_ms for record in records]
        columns = {"waiting": events(offsets, keys, times)}
        if topic:
            columns = {"labels": labels(keys, [record.label for record in records], times, begin)}
        identity = {
            name: next(iter(columns.values())).get(name, np.zeros(len(offsets), dtype))
            for name, dtype in IDENTITY_COLUMNS.items()
        }
        identity["outcome"] = np.full(len(offsets), Outcome.LABEL if topic else Outcome.WAITING, np.uint8)
        positions = {topic: Position(begin + len(offsets))}
        span = Span(identity, np.zeros(len(offsets), np.bool_), positions, {}, {}, {})
        self.finish(self.late.arrivals.before_round(Batch({}, {}, {}, [span], **columns), []))
        return True

    def step(self):
        """Take a round of one to three steps on decided events, if there are any."""
        self.rounds += 1
        batch = self.late._decided([], 1 + self.rounds % 3)
        if batch is not None:
            self.finish(self.late.arrivals.before_round(batch, []))
        return batch is not None

    def finish(self, batch):
        if batch.new:
            early = batch.new.get(EARLY, np.zeros(len(batch), np.uint8))
            names = [Early(value).name for value in early.tolist()]
            rows = zip(batch.new["offset"].tolist(), names, batch.new["label"].tolist(), strict=True)
            self.learned += list(rows)
        for span in batch.spans:
            self.ledger.advance(span)
        if batch.decided is not None:
            decided = batch.decided
            ended = zip(decided.span.columns["offset"], decided.ends, decided.label, decided.ended, strict=True)
            self.learned += [(int(at), Outcome(int(how)).name, int(label)) for at, how, label, ends in ended if ends]
        self.late.settle(batch)
        self.ledger.count()

    def advance(self, ends=None):
        """Let the join time events out, where the topics have these ends."""
        self.monotonic += 0.1
        ends = ends or (len(self.streams[0]), len(self.streams[1]))
        partitions = [Partition(name, 0, end) for name, end in zip(NAMES, ends, strict=True)]
        self.late._advance(partitions, self.monotonic)
        self.most_kept = max(self.most_kept, len(self.late.join.labels))

    def run_out(self):
        """Read what is left, at a time when no label can come any more, and let all events end."""
        self.wall = BEGIN_MS / 1000 + 100 * WAIT_MS / 1000
        done = 0
        while done < 3:
            self.advance()
            progress = [self.read(0), self.read(1), self.step()]
            done = 0 if any(progress) else done + 1

    def rows(self):
        """Return how each event has ended; all that was learned of it has to add up to that."""
        rows = []
        for offset in range(len(self.streams[0])):
            own = [(what, label) for at, what, label in self.learned if at == offset]
            counts = Counter(what for what, _ in own)
            assert counts["TRAINED"] + counts["TIMED_OUT"] == 1, own
            (outcome, label), *_ = [each for each in own if each[0] in ("TRAINED", "TIMED_OUT")]
            plain = [label for what, label in own if what == "PLAIN"]
            corrected, taken_back = counts["CORRECTED"], counts["TAKEN_BACK"]
            # A negative is learned once, and a positive once, after all negatives were undone.
            negatives = plain.count(0) + counts["NEGATIVE"]
            positives = plain.count(1) + corrected + taken_back
            final = 1 if taken_back else label
            assert (positives, negatives - corrected - taken_back) == ((1, 0) if final == 1 else (0, 1)), own
            rows.append(Row(outcome, final, bool(taken_back)))
        return rows


def live(learner):
    """Records are read as they come; nothing is left when the time ends."""
    ends = [0, 0]
    for now_ms in range(BEGIN_MS - WAIT_MS, BEGIN_MS + 9 * WAIT_MS, WAIT_MS // 20):
        learner.wall = now_ms / 1000
        for topic, stream in enumerate(learner.streams):
            ends[topic] = sum(record.time_ms <= now_ms for record in stream)
            while learner.position(topic) < ends[topic]:
                learner.read(topic, min(STEP, ends[topic] - learner.position(topic)))
        while learner.step():
            pass
        learner.advance((ends[0], ends[1]))


def backlog(learner):
    """All records are there, and the topics take turns."""


def labels_first(learner):
    while learner.read(1):
        learner.advance()
        learner.step()


def events_first(learner):
    while learner.read(0):
        learner.advance()
        learner.step()


def kills(learner):
    """The learner is killed between any two steps, and topics are read unevenly."""
    random = np.random.default_rng(1)
    learner.wall = BEGIN_MS / 1000 + 100 * WAIT_MS / 1000
    for turn in itertools.count():
        learner.advance()
        read = [learner.read(int(random.integers(2)), int(random.integers(1, 3 * STEP)))]
        if random.random() < 0.5:
            read.append(learner.step())
        if turn % 7 == 3:
            learner.checkpoint()
        if turn % 16 == 15:
            learner.kill()
        if turn > 200 and not any(read):
            return


ORDERS = {order.__name__: order for order in (live, backlog, labels_first, events_first, kills)}
MODES = {
    "wait": (False, False),
    "early": (True, False),
    "take_back": (False, True),
    "early and take_back": (True, True),
}


@pytest.fixture
def learner(tmp_path, request):
    early, take_back = MODES[request.param]
    learner = Learner(tmp_path, streams(seed=7), early=early, take_back=take_back)
    yield learner
    learner.bench.join.payload.tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("learner", MODES, indirect=True)
@pytest.mark.parametrize("order", ORDERS)
def test_events_end_as_in_an_offline_join_whatever_the_order_of_reading(learner, order):
    ORDERS[order](learner)
    learner.run_out()
    expected = offline_join(*learner.streams, take_back=learner.settings.take_back)
    assert learner.rows() == expected
    counts = Counter(expected)
    assert len(counts) >= (4 if learner.settings.take_back else 3)  # the streams have all kinds
    join = learner.late.join
    assert (join.events.waiting, join.ready, problem(join)) == (0, 0, None)
    assert learner.ledger.first_open() == {}


@pytest.mark.parametrize(("take_back", "slots"), [(False, 76), (True, 130)])
def test_events_that_are_ahead_wait_for_their_labels_where_the_file_is_small(tmp_path, take_back, slots):
    learner = Learner(tmp_path, streams(seed=7), early=False, take_back=take_back, size=4096 + slots * 112)
    learner.wall = BEGIN_MS / 1000 + 100 * WAIT_MS / 1000
    assert learner.late.join.payload.slots == slots < len(learner.streams[0])
    events_first(learner)
    assert 1 in learner.late.ahead or learner.position(0) < len(learner.streams[0])
    learner.run_out()
    assert learner.rows() == offline_join(*learner.streams, take_back=take_back)
    counts = learner.late.join.counts
    assert (counts.early_timeouts, counts.early_removals, problem(learner.late.join)) == (0, 0, None)
    learner.bench.join.payload.tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["wait", "take_back"], indirect=True)
@pytest.mark.parametrize("order", ["backlog", "labels_first", "events_first"])
def test_a_topic_that_is_ahead_waits_for_the_other_where_there_is_little_room(learner, order):
    learner.bench.join.labels.limit = 140
    learner.wall = BEGIN_MS / 1000 + 100 * WAIT_MS / 1000
    ORDERS[order](learner)
    learner.run_out()
    assert learner.rows() == offline_join(*learner.streams, take_back=learner.settings.take_back)
    assert learner.late.join.counts.dropped_labels == 0
    assert len(learner.streams[1]) > 140
