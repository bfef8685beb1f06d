"""The link between the steps of the loop and the join of late labels, on a join without a loop."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingest.config import HoldOut, LagPolicySettings, SchemaSettings
from ingest.events.block import IDENTITY_COLUMNS, Outcome
from ingest.events.partition import TopicPartition
from ingest.events.position import Position
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from ingest.label_stream_settings import LabelStreamSettings
from ingest.reader.cursors import Partition
from learner.evaluation.event_time import EventTimePredictor
from learner.labels.label_join import JoinOptions
from learner.labels.opening import open_join
from learner.late_labels import LateLabels
from learner.loop_parts.batch_source import BatchSource
from learner.model.device import Precision
from learner.model.task import Classification
from learner.strategies.early_negatives import EARLY, Early
from learner.stream.batch import Batch, Span
from learner.stream.label_times import LabelClock
from learner.stream.lag import LagPolicy
from learner.stream.ledger import Ledger

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

    def __init__(self) -> None:
        self.now, self.cost = 1000.0, 0.0

    def __call__(self) -> float:
        self.now += self.cost
        return self.now


class Bench:
    """A link with its ledger, without a loop."""

    def __init__(self, folder: Path, *, hold_out: float = 0, join_column: str = "key_hash", **settings: object) -> None:
        torch.manual_seed(0)
        self.clock, self.ledger, self.model = Clock(), Ledger(), nn.Linear(3, 3)
        device, precision = torch.device("cpu"), Precision("fp32", None)
        predictor = EventTimePredictor(self.model, Classification(), KEYED, device, precision, (3,))
        labels = LabelStreamSettings.model_validate({**SETTINGS.model_dump(), **settings})
        options = JoinOptions(labels.wait, int(labels.bytes), take_back=labels.take_back)
        join = open_join(options, KEYED, (3,), folder, None, first=True)
        self.late = LateLabels(
            *(join, labels, HoldOut(fraction=hold_out, seed=0), predictor, LagPolicy(LagPolicySettings(), 0, self)),
            join_column=join_column,
            step_size=4,
            max_delay=timedelta(seconds=1),
            clock=LabelClock(self.clock, self.clock, self.clock),
        )
        self.late.attach(self.ledger)
        for name in (EVENTS, LABELS):
            self.ledger.add_partition(name, 0)

    partitions, ends_time = PARTITIONS, None

    def pass_over(self) -> None:
        """Do nothing."""

    def arrive(self, *offsets: int, partition: int = 0) -> Batch:
        """Let events or labels with these offsets arrive; the keys are the offsets + 1."""
        columns = fake_columns(KEYED, offsets, label=[0, 1, 2])
        columns["partition"][:], columns["time_ms"][:] = partition, 5_000
        columns["key_hash"] = np.array(offsets, np.uint64) + np.uint64(1)
        columns["outcome"][:] = Outcome.LABEL if partition else Outcome.WAITING
        columns["labelled"][:] = bool(partition)
        identity = {name: columns[name] for name in IDENTITY_COLUMNS}
        span = Span(identity, np.zeros(len(offsets), np.bool_), {partition: Position(offsets[-1] + 1)}, {}, {}, {})
        kinds = {"labels": columns} if partition else {"waiting": columns}
        batch = self.late.begin(Batch({}, {}, {}, [span], **kinds), PARTITIONS)
        self.ledger.advance(span, Outcome.TRAINED)
        self.late.settle(batch, finite=True)
        self.ledger.count()
        return batch

    def step(self, *, finite: bool = True) -> list[int]:
        """Train on decided events, and return their offsets; none if there are too few."""
        batch = self.take()
        if batch is None:
            return []
        assert batch.decided is not None
        self.late.settle(batch, finite=finite)
        return sorted(batch.new["offset"].tolist()) if batch.new else []

    def take(self) -> Batch | None:
        return self.late.take(PARTITIONS)

    def time_out(self) -> None:
        """Let events that wait time out, and decided ones not wait for a full step."""
        self.late.join.advance(5_000 + 3_600_001)
        self.late.take(PARTITIONS)
        self.clock.now += 1.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "labels")
    yield bench
    bench.late.join.close()


@pytest.fixture
def taking_back(tmp_path: Path) -> Iterator[Bench]:
    """A link that takes negatives back."""
    bench = Bench(tmp_path / "labels", unmatched="negative", take_back=True)
    yield bench
    bench.late.join.close()


def test_decided_events_wait_for_a_full_step_for_max_delay(bench: Bench) -> None:
    bench.arrive(*range(6))
    bench.arrive(*range(5), partition=1)
    assert bench.step() == [0, 1, 2, 3]
    assert bench.step() == []
    bench.clock.now += 1.0
    assert bench.step() == [4]


def test_a_step_that_is_put_back_leaves_no_trace(bench: Bench) -> None:
    bench.arrive(*range(4))
    bench.arrive(*range(4), partition=1)
    assert bench.late.take(PARTITIONS) is not None
    bench.late.put_back()
    assert bench.ledger.partitions[0].waiting == 4
    assert bench.step() == [0, 1, 2, 3]
    assert bench.ledger.partitions[0].waiting == 0


def test_trained_through_ends_before_the_first_event_that_waits_and_the_first_label_of_an_open_step(
    bench: Bench,
) -> None:
    def through() -> list[int]:
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
    assert list(bench.ledger.seen_through.values()) == [5, 5]


def through(bench: Bench) -> list[int]:
    """Up to which offsets events and labels are learned from."""
    return [progress.offset for progress in bench.ledger.trained_through.values()]


def test_a_label_that_came_before_its_event_is_not_learned_from_before_that_is(bench: Bench) -> None:
    bench.late._max_delay = 0.0
    bench.arrive(0, 1)
    bench.arrive(0, 1, 2, partition=1)
    assert bench.step() == [0, 1]
    assert through(bench) == [1, 1]
    bench.arrive(2)
    assert through(bench) == [1, 1]
    assert bench.step() == [2]
    assert through(bench) == [2, 2]


def test_a_label_that_no_event_can_match_any_more_is_no_longer_waited_for(bench: Bench) -> None:
    bench.arrive(7, partition=1)
    assert through(bench) == [-1, 6]
    bench.late.join.advance(5_000 + 3_600_001)
    assert through(bench) == [-1, 7]


def test_an_erasure_of_decided_events_says_nothing_of_the_others(bench: Bench) -> None:
    bench.arrive(*range(8))
    bench.arrive(*range(4), partition=1)
    bench.arrive(*range(4, 8), partition=1)
    bench.late.erase(lambda columns: columns["offset"] >= 4)
    assert through(bench) == [-1, -1]
    assert bench.step() == [0, 1, 2, 3]
    assert through(bench) == [7, 7]


def test_the_search_for_the_oldest_event_is_rare_where_it_is_slow_and_never_too_high(bench: Bench) -> None:
    bench.arrive(*range(8))
    bench.arrive(*range(8), partition=1)
    assert bench.late.first_open()[0] == 0
    bench.clock.cost = 0.1
    assert bench.late.search_if_due() == 0
    assert bench.step() == [0, 1, 2, 3]
    assert bench.late.first_open()[0] == 0
    assert bench.late.search_if_due() == 0
    bench.clock.now += 60.0
    assert bench.late.search_if_due() == 4
    assert bench.late.first_open()[0] == 4


def test_the_prediction_is_that_of_the_model_when_the_event_came(bench: Bench) -> None:
    with torch.no_grad():
        bench.model.weight.zero_()
        bench.model.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    bench.arrive(*range(4))
    with torch.no_grad():
        bench.model.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    bench.arrive(*range(4), partition=1)
    batch = bench.late.take(PARTITIONS)
    assert batch is not None
    assert batch.new["label"].tolist() == [0, 1, 2, 0]
    scored = bench.late._scores_of(batch.decided)
    assert (scored.rows, scored.score) == (4, 2.0)
    assert bench.model.training


def test_erased_events_end_as_skipped(bench: Bench) -> None:
    bench.arrive(*range(4))
    assert bench.late.erase(lambda columns: columns["offset"] == 2) == 1
    account = bench.ledger.partitions[0]
    assert (account.waiting, account.waited[Outcome.SKIPPED]) == (3, 1)
    bench.arrive(*range(4), partition=1)
    assert bench.step() == []
    bench.clock.now += 1.0
    assert bench.step() == [0, 1, 3]


@pytest.mark.slow
def test_a_full_join_lets_its_oldest_events_time_out_where_nothing_else_makes_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.labels.payload_file._MEMORY_BYTES", 0)
    late, offset = bench.late, 0
    assert late.most_rows == late.join.slots // 32  # not of the room, which is less after a restart
    while not late.full:
        bench.arrive(*range(offset, offset + late.most_rows))
        bench.arrive(*range(offset, offset + late.most_rows, 3), partition=1)
        offset += late.most_rows
        while late.join.ready:
            bench.clock.now += 1.0
            bench.step()
    assert late.join.waiting < late.join.slots * 3 // 4
    late.make_room()
    timed_out = late.join.counts.early_timeouts
    assert 0 < late.join.ready == timed_out < late.join.waiting
    assert late.join.problem is not None
    late.make_room()
    assert late.join.counts.early_timeouts == timed_out
    while late.join.ready:
        bench.step()
    assert not late.full


def test_a_loop_that_does_not_read_since_the_join_is_full_makes_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.labels.payload_file._MEMORY_BYTES", 0)
    source: Any = BatchSource.__new__(BatchSource)
    reader = SimpleNamespace(partitions=[], ends_time=None, hold=lambda partitions: None)
    source._parts = SimpleNamespace(late=bench.late, source=reader)
    stop, join = threading.Event(), bench.late.join
    bench.arrive(*range(join.slots * 7 // 8))
    monkeypatch.setattr(LateLabels, "most_rows", join.slots // 8)
    assert source._decided_or_next(stop) is None
    batch = source._decided_or_next(stop)
    assert batch is not None
    assert batch.decided is not None
    assert join.counts.early_timeouts == join.slots // 4


def test_a_damaged_event_that_is_taken_back_does_not_end_a_second_time(taking_back: Bench, tmp_path: Path) -> None:
    bench, path = taking_back, tmp_path / "labels" / taking_back.late.join.file.name
    features = bench.arrive(*range(2)).waiting["feature.x"]
    bench.time_out()
    assert bench.step() == [0, 1]
    content = path.read_bytes()
    path.write_bytes(content.replace(features[0].tobytes(), bytes(12)))
    bench.arrive(*range(2), partition=1)
    bench.late.take(PARTITIONS)
    bench.clock.now += 1.0
    assert bench.step() == [1]
    account = bench.ledger.partitions[0]
    assert (bench.late.join.counts.damaged, account.waiting, account.waited[Outcome.SKIPPED]) == (1, 0, 0)


def test_an_erasure_goes_on_where_the_counts_of_waiting_events_do_not_fit(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.arrive(*range(4))
    bench.ledger.partitions[0].waited[Outcome.SKIPPED] += 1
    assert bench.late.erase(lambda columns: columns["offset"] < 0) == 0
    assert "fewer events have waited for labels than do now" in caplog.text


def test_a_second_key_of_events_is_stored_only_where_labels_have_another(tmp_path: Path) -> None:
    for column in ("key_hash", "group_hash"):
        bench = Bench(tmp_path / column, join_column=column)
        bench.arrive(*range(4))
        assert bench.late.join._table.own_keys == (column != "key_hash")
        bench.late.join.close()


@pytest.mark.parametrize("used", ["trained on", "skipped", "stored", "held out"])
def test_only_events_that_were_used_as_negatives_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
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
    bench.late.join.close()


def test_a_negative_that_was_only_stored_is_replaced_in_the_store_when_its_label_comes(
    taking_back: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    taking_back.late.settle(batch, finite=True)
    assert len(taking_back.late.join._table) == 0


def test_while_events_are_stored_only_none_is_trained_on_before_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    bench.late.join.close()


@pytest.mark.parametrize("early", [True, False])
def test_a_correction_whose_step_is_not_finite_is_in_another_step_once_more(tmp_path: Path, early: bool) -> None:
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
    assert (bench.late.join.ready, bench.late.join.waiting, bench.late._repeated) == (0, 0, set())
    bench.late.join.close()


def test_the_join_is_kept_small_before_there_is_a_stream_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(bench.late.join, "tidy", lambda: calls.append(None))
    bench.late.advance(PARTITIONS, None)
    assert len(calls) == 1
