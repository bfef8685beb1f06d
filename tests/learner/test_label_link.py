"""The link between the steps of the loop and the join of late labels; what the loop does for them without a join."""

import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import HoldOut, LagPolicySettings, SchemaSettings
from anabranch.learner.evaluate.baselines import Baselines
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.extensions.late_labels.extension import LateLabels
from anabranch.learner.extensions.late_labels.join_part import open_join
from anabranch.learner.extensions.late_labels.stream_times import LabelClock
from anabranch.learner.model.device import Precision
from anabranch.learner.model.examples import EARLY, Early
from anabranch.learner.model.task import Classification
from anabranch.learner.stream.batch import Batch, Span
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.stream.ledger import Ledger
from tests.learner.learner_bench import ROWS

EVENTS, LABELS = TopicPartition("events", 0), TopicPartition("labels", 0)
PARTITIONS = [Partition(EVENTS, 0, None), Partition(LABELS, 0, None)]
SETTINGS = LabelStreamSettings.model_validate({"topics": ["labels"], "wait": "1h", "bytes": "1MB"})
KEYED = Schema(
    SchemaSettings.model_validate(
        {
            "features": {"x": {"dtype": "float32", "shape": [3]}},
            "label": {"name": "y", "classes": 3},
            "key": {"name": "id"},
        }
    )
)


class Clock:
    """A clock that changes only when it is set, and by `cost` with each reading."""

    def __init__(self):
        self.now, self.cost = 1000.0, 0.0

    def __call__(self):
        self.now += self.cost
        return self.now


class Bench:
    """A link with its ledger, without a loop."""

    def __init__(self, folder, *, hold_out=0, join_column="key_hash", **settings):
        torch.manual_seed(0)
        self.clock, self.ledger, self.model = Clock(), Ledger(), nn.Linear(3, 3)
        device, precision = torch.device("cpu"), Precision("fp32", None)
        self.baselines = Baselines(KEYED)
        predictor = EventTimePredictor(
            self.model, Classification(), KEYED, device, precision, (3,), baselines=self.baselines
        )
        labels = LabelStreamSettings.model_validate({**SETTINGS.model_dump(), **settings})
        by_group = LabelStreamSettings.model_validate({**SETTINGS.model_dump(), "key": "order"})
        settings_of = {**KEYED.settings.model_dump(), "group": {"name": "order"}}
        grouped = Schema(SchemaSettings.model_validate(settings_of), by_group)
        schema = KEYED if join_column == "key_hash" else grouped
        part = open_join(labels, schema, (predictor.width,), folder, None, first=True)
        self.late = LateLabels(
            *(part, labels, HoldOut(fraction=hold_out, seed=0), predictor, LagPolicy(LagPolicySettings(), 0, self)),
            step_size=4,
            max_delay=timedelta(seconds=1),
            clock=LabelClock(self.clock, self.clock, self.clock),
        )
        self.late.attach(self.ledger)
        for name in (EVENTS, LABELS):
            self.ledger.add_partition(name, 0)

    partitions, ends_time = PARTITIONS, None

    def pass_over(self):
        """Do nothing."""

    def arrive(self, *offsets, partition=0):
        """Let events or labels with these offsets arrive; the keys are the offsets + 1."""
        columns = fake_columns(KEYED, offsets, label=[0, 1, 2])
        columns["partition"][:], columns["time_ms"][:] = partition, 5_000
        columns["key_hash"] = np.array(offsets, np.uint64) + np.uint64(1)
        columns["outcome"][:] = Outcome.LABEL if partition else Outcome.WAITING
        columns["labelled"][:] = bool(partition)
        identity = {name: columns[name] for name in IDENTITY_COLUMNS}
        span = Span(identity, np.zeros(len(offsets), np.bool_), {partition: Position(offsets[-1] + 1)}, {}, {}, {})
        kinds = {"labels": columns} if partition else {"waiting": columns}
        batch = self.late.arrivals.before_round(Batch({}, {}, {}, [span], **kinds), PARTITIONS)
        self.ledger.advance(span)
        self.late.settle(batch)
        self.ledger.count()
        return batch

    def step(self, *, finite=True):
        """Train on decided events, and return their offsets; none if there are too few."""
        batch = self.take()
        if batch is None:
            return []
        assert batch.decided is not None
        offsets = sorted(batch.new["offset"].tolist()) if batch.new else []
        if not finite:
            batch.skip(np.ones(len(batch), np.bool_), SkipReason.NON_FINITE)
        self.late.settle(batch)
        return offsets

    def take(self):
        return self.late._decided(PARTITIONS, 1)

    def time_out(self):
        """Let events that wait time out, and decided ones not wait for a full step."""
        self.late.join.advance(5_000 + 3_600_001)
        self.late._decided(PARTITIONS, 1)
        self.clock.now += 1.0


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path / "labels")
    yield bench
    bench.late.close()


@pytest.fixture
def taking_back(tmp_path):
    """A link that takes negatives back."""
    bench = Bench(tmp_path / "labels", unmatched="negative", take_back=True)
    yield bench
    bench.late.close()


def test_decided_events_wait_for_a_full_step_for_max_delay(bench):
    bench.arrive(*range(6))
    bench.arrive(*range(5), partition=1)
    assert bench.step() == [0, 1, 2, 3]
    assert bench.step() == []
    bench.clock.now += 1.0
    assert bench.step() == [4]


def test_a_step_that_is_put_back_leaves_no_trace(bench):
    bench.arrive(*range(4))
    bench.arrive(*range(4), partition=1)
    assert bench.late._decided(PARTITIONS, 1) is not None
    bench.late.put_back()
    assert bench.ledger.partitions[0].waiting == 4
    assert bench.step() == [0, 1, 2, 3]
    assert bench.ledger.partitions[0].waiting == 0


def test_trained_through_ends_before_the_first_event_that_waits_and_the_first_label_of_an_open_step(bench):
    def through():
        return [progress.offset for progress in bench.ledger.trained_through.values()]

    assert through() == [-1, -1]
    bench.arrive(*range(6))
    assert through() == [-1, -1]
    bench.arrive(0, 1, 2, 3, 5, partition=1)
    assert through() == [-1, -1]
    bench.step()
    assert through() == [3, 4]
    bench.clock.now += 1.0
    bench.step()
    bench.clock.now += 1.0
    assert bench.step() == [5]
    assert through() == [3, 5]
    assert [last for _, last in bench.ledger.read.values()] == [5, 5]


def through(bench):
    """Up to which offsets events and labels are learned from."""
    return [progress.offset for progress in bench.ledger.trained_through.values()]


def test_a_label_that_came_before_its_event_is_not_learned_from_before_that_is(bench):
    bench.late._max_delay = 0.0
    bench.arrive(0, 1)
    bench.arrive(0, 1, 2, partition=1)
    assert bench.step() == [0, 1]
    assert through(bench) == [1, 1]
    bench.arrive(2)
    assert through(bench) == [1, 1]
    assert bench.step() == [2]
    assert through(bench) == [2, 2]


def test_a_label_that_no_event_can_match_any_more_is_no_longer_waited_for(bench):
    bench.arrive(7, partition=1)
    assert through(bench) == [-1, 6]
    bench.late.join.advance(5_000 + 3_600_001)
    assert through(bench) == [-1, 7]


def test_an_erasure_of_decided_events_says_nothing_of_the_others(bench):
    bench.arrive(*range(8))
    bench.arrive(*range(4), partition=1)
    bench.arrive(*range(4, 8), partition=1)
    bench.late.erase(lambda columns: columns["offset"] >= 4)
    assert through(bench) == [-1, -1]
    assert bench.step() == [0, 1, 2, 3]
    assert through(bench) == [7, 7]


def test_the_search_for_the_oldest_event_is_rare_where_it_is_slow_and_never_too_high(bench):
    bench.arrive(*range(8))
    bench.arrive(*range(8), partition=1)
    assert bench.ledger.first_open()[0] == 0
    bench.clock.cost = 0.1
    assert bench.late.progress() == 0
    assert bench.step() == [0, 1, 2, 3]
    assert bench.ledger.first_open()[0] == 0
    assert bench.late.progress() == 0
    bench.clock.now += 60.0
    assert bench.late.progress() == 4
    assert bench.ledger.first_open()[0] == 4


def test_the_prediction_is_that_of_the_model_when_the_event_came(bench):
    with torch.no_grad():
        bench.model.weight.zero_()
        bench.model.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    bench.arrive(*range(4))
    with torch.no_grad():
        bench.model.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    bench.arrive(*range(4), partition=1)
    batch = bench.late._decided(PARTITIONS, 1)
    assert batch is not None
    assert batch.new["label"].tolist() == [0, 1, 2, 0]
    scored = bench.late.arrivals.scores_of(batch.decided)
    assert (scored.rows, scored.score) == (4, 2.0)
    assert bench.model.training


def test_what_baselines_guess_follows_from_labels_that_came_before_the_event(bench):
    bench.arrive(*range(4))
    bench.baselines.add(np.array([2, 2, 1]), np.zeros(3, np.uint64))
    bench.arrive(*range(4, 8))
    bench.arrive(*range(8), partition=1)
    expected = {0: [2.0, 2.0], 4: [1.0, 2.0]}  # of the labels 0, 1, 2, 0 and 1, 2, 0, 1; guesses are 0, 0 and 2, 1
    for first in (0, 4):
        batch = bench.late._decided(PARTITIONS, 1)
        assert batch.new["offset"].tolist() == [*range(first, first + 4)]
        assert list(bench.late.arrivals.scores_of(batch.decided).baselines) == expected[first]
        bench.late.settle(batch)
    assert bench.baselines.guess(np.zeros(1, np.uint64)).tolist() == [[2.0, 1.0]], "and all labels are learned"


def test_erased_events_end_as_skipped(bench):
    bench.arrive(*range(4))
    assert bench.late.erase(lambda columns: columns["offset"] == 2) == 1
    account = bench.ledger.partitions[0]
    assert (account.waiting, account.waited[Outcome.SKIPPED]) == (3, 1)
    bench.arrive(*range(4), partition=1)
    assert bench.step() == []
    bench.clock.now += 1.0
    assert bench.step() == [0, 1, 3]


def make_room(late):
    if not late.join.ready:
        late.join.make_room(2 * late._most_late)


@pytest.mark.slow
def test_a_full_join_lets_its_oldest_events_time_out_where_nothing_else_makes_room(bench, monkeypatch):
    monkeypatch.setattr("anabranch.learner.extensions.late_labels.payload_file._MEMORY_BYTES", 0)
    late, offset, most_late = bench.late, 0, bench.late.arrivals.most_late(1)
    assert most_late == late.join.payload.slots // 32  # not of the room, which is less after a restart
    while not late._full:
        bench.arrive(*range(offset, offset + most_late))
        bench.arrive(*range(offset, offset + most_late, 3), partition=1)
        offset += most_late
        while late.join.ready:
            bench.clock.now += 1.0
            bench.step()
    assert late.join.events.waiting < late.join.payload.slots * 3 // 4
    make_room(late)
    timed_out = late.join.counts.early_timeouts
    assert 0 < late.join.ready == timed_out < late.join.events.waiting
    assert late.problem is not None
    make_room(late)
    assert late.join.counts.early_timeouts == timed_out
    while late.join.ready:
        bench.step()
    assert not late._full


def test_a_loop_that_does_not_read_since_the_join_is_full_makes_room(bench, monkeypatch):
    monkeypatch.setattr("anabranch.learner.extensions.late_labels.payload_file._MEMORY_BYTES", 0)
    reader: Any = SimpleNamespace(partitions=[], ends_time=None, hold=lambda partitions: None)
    stop, join = threading.Event(), bench.late.join
    bench.arrive(*range(join.payload.slots * 7 // 8))
    bench.late._most_late = join.payload.slots // 8
    assert bench.late.next(reader, stop, lambda _: Batch({}, {}, {}, []), 1) is None
    batch = bench.late.next(reader, stop, lambda _: None, 1)
    assert batch is not None
    assert batch.decided is not None
    assert join.counts.early_timeouts == join.payload.slots // 4


def test_a_damaged_event_that_is_taken_back_does_not_end_a_second_time(taking_back, tmp_path):
    bench, path = taking_back, tmp_path / "labels" / taking_back.late.join.payload.tier.file.name
    features = bench.arrive(*range(2)).waiting["feature.x"]
    bench.time_out()
    assert bench.step() == [0, 1]
    content = path.read_bytes()
    path.write_bytes(content.replace(features[0].tobytes(), bytes(12)))
    bench.arrive(*range(2), partition=1)
    bench.late._decided(PARTITIONS, 1)
    bench.clock.now += 1.0
    assert bench.step() == [1]
    account = bench.ledger.partitions[0]
    assert (bench.late.join.counts.damaged, account.waiting, account.waited[Outcome.SKIPPED]) == (1, 0, 0)


def test_an_erasure_goes_on_where_the_counts_of_waiting_events_do_not_fit(bench, caplog):
    bench.arrive(*range(4))
    bench.ledger.partitions[0].waited[Outcome.SKIPPED] += 1
    assert bench.late.erase(lambda columns: columns["offset"] < 0) == 0
    assert "fewer events have waited for labels than do now" in caplog.text


def test_a_second_key_of_events_is_stored_only_where_labels_have_another(tmp_path):
    for column in ("key_hash", "group_hash"):
        bench = Bench(tmp_path / column, join_column=column)
        bench.arrive(*range(4))
        events = bench.late.join.events
        assert np.shares_memory(events["key"], events["key_hash"]) == (column == "key_hash")
        bench.late.close()


@pytest.mark.parametrize("used", ["trained on", "skipped", "stored", "held out"])
def test_only_events_that_were_used_as_negatives_are_taken_back(tmp_path, monkeypatch, used):
    hold_out = 1 - 1e-9 if used == "held out" else 0.0
    bench = Bench(tmp_path / "labels", hold_out=hold_out, unmatched="negative", take_back=True)
    monkeypatch.setattr(LagPolicy, "stores_only", used == "stored")
    bench.arrive(*range(2))
    bench.time_out()
    bench.step(finite=used != "skipped")
    bench.arrive(*range(2), partition=1)
    counts, taken_back = bench.late.join.counts, 2 if used != "skipped" else 0
    assert (counts.timed_out, counts.taken_back, bench.late.join.ready) == (2, taken_back, taken_back)
    assert bench.ledger.partitions[0].waiting == 0
    bench.late.close()


def test_a_negative_that_was_only_stored_is_replaced_in_the_store_when_its_label_comes(taking_back, monkeypatch):
    monkeypatch.setattr(LagPolicy, "stores_only", True)
    taking_back.arrive(*range(3))
    taking_back.time_out()
    taking_back.step()
    monkeypatch.setattr(LagPolicy, "stores_only", False)  # it was not trained on, and so there is nothing to undo
    taking_back.arrive(*range(3), partition=1)
    taking_back.take()
    taking_back.clock.now += 1.0
    batch = taking_back.take()
    assert batch is not None
    assert batch.new == {}
    assert (batch.stored_only["offset"].tolist(), batch.stored_only["label"].tolist()) == ([1], [1])
    assert batch.stored_only[EARLY].tolist() == [Early.TAKEN_BACK]
    taking_back.late.settle(batch)
    assert len(taking_back.late.join.events) == 0


def test_while_events_are_stored_only_none_is_trained_on_before_its_label(tmp_path, monkeypatch):
    bench = Bench(tmp_path / "labels", unmatched="negative", early="negative-then-correct")
    assert bench.arrive(0, 1).new[EARLY].tolist() == [Early.NEGATIVE] * 2
    monkeypatch.setattr(LagPolicy, "stores_only", True)
    assert bench.arrive(3, 4).new == {}
    bench.arrive(0, 1, 3, 4, partition=1)
    batch = bench.take()
    assert batch is not None
    assert batch.new["offset"].tolist() == [1], "a negative that was trained on is corrected all the same"
    assert batch.new[EARLY].tolist() == [Early.CORRECTED]
    assert sorted(batch.stored_only["offset"].tolist()) == [0, 3, 4]
    bench.late.close()


@pytest.mark.parametrize("early", [True, False])
def test_a_correction_whose_step_is_not_finite_is_in_another_step_once_more(tmp_path, early):
    settings = {"early": "negative-then-correct"} if early else {"take_back": True}
    bench = Bench(tmp_path / "labels", unmatched="negative", **settings)
    bench.late._max_delay = 0.0
    bench.arrive(*range(5))
    if not early:
        bench.late.join.advance(5_000 + 3_600_001)
        assert bench.step() + bench.step() == [0, 1, 2, 3, 4]
    bench.arrive(*range(5), partition=1)
    waiting = []
    for _ in range(3):
        waiting.append((bench.step(finite=False), bench.ledger.partitions[0].waiting))
    # Events 1 and 4 are the positives. A step has four events: 4 was in none early, and there is nothing to correct.
    assert waiting == ([([1], 2), ([1, 4], 0), ([], 0)] if early else [([1], 0), ([1, 4], 0), ([4], 0)])
    assert bench.step() == []
    assert (bench.late.join.ready, bench.late.join.events.waiting, bench.late._repeated) == (0, 0, set())
    bench.late.close()


def test_the_join_is_kept_small_before_there_is_a_stream_time(bench, monkeypatch):
    calls: list[None] = []
    monkeypatch.setattr(bench.late.join.events, "tidy", lambda: calls.append(None))
    bench.late._advance(PARTITIONS, None)
    assert len(calls) == 1


BLOCKS = 6


def run(bench, monkeypatch, begin):
    monkeypatch.setattr(bench.loop, "_before_round", [lambda batch, _partitions: begin(batch)])
    bench.run()
    bench.close()


def test_events_that_begin_to_wait_are_predicted_once_there_is_memory_again(make_bench, monkeypatch):
    bench, begun = make_bench(BLOCKS), [0]

    def short_once(batch):
        begun[0] += 1
        if begun[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return batch

    run(bench, monkeypatch, short_once)
    assert begun == [BLOCKS + 1]
    assert bench.loop.state.rows_new == BLOCKS * (ROWS - 1)


def test_held_out_events_get_the_label_that_came_later(make_bench, monkeypatch, schema):
    bench = make_bench(BLOCKS)
    late = fake_columns(schema, [5, ROWS + 5], label=[0])
    run(bench, monkeypatch, lambda batch: replace(batch, relabelled=late if bench.loop.state.steps == 2 else {}))
    assert bench.holdout.held.columns["offset"].tolist() == [block * ROWS + 5 for block in range(BLOCKS)]
    assert bench.holdout.held.columns["label"].tolist() == [0, 0, 1, 1, 1, 1]
