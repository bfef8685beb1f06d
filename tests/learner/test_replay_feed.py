"""The feed of old events, with and without a store."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Histogram

from anabranch.ingest.events.block import Array
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.loop.replay_feed import NOTHING, ReplayFeed, StoreFeed
from anabranch.learner.model.examples import EARLY, Early
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.stream.batches import Batch
from anabranch.learner.train.step_result import StepResult


def test_a_feed_with_a_store_goes_on_from_the_checkpoint_of_a_strategy_that_replays_nothing():
    part: Any = SimpleNamespace()
    feed = StoreFeed(part, _trainer(part), part, part, step_size=1, timer=part)
    feed.restore(ReplayFeed().state())
    assert feed.state() == {"debt": 0.0}
    ReplayFeed().restore({"debt": 0.5})


def _trainer(strategy: Any) -> Any:
    return SimpleNamespace(strategy=strategy)


class _RecordedStore:
    """Records what is added."""

    def __init__(self):
        self.fields: dict[str, Any] = {"output": (np.dtype(np.float32), (3,))}
        self.listens = False
        self.added: list[dict[str, Array]] = []
        self.removed: list[list[int]] = []

    def add(self, columns, *_):
        self.added.append(columns)

    def remove(self, columns, **_):
        self.removed.append(columns["offset"].tolist())

    def plan_ahead(self, *_):
        pass


def test_only_events_with_their_final_label_are_stored(schema):
    store, trainer = _RecordedStore(), _trainer(SimpleNamespace(kind=SimpleNamespace(keeps_output=True)))
    part: Any = SimpleNamespace()
    feed = StoreFeed(store, trainer, part, part, step_size=1, timer=part)  # type: ignore[arg-type]
    new = {**fake_columns(schema, range(3), label=[0, 0, 1]), EARLY: np.array([0, 1, 2], np.uint8)}
    result = StepResult(True, 0.0, 0.0, 0.0, output_B=torch.arange(9.0).view(3, 3))
    feed.add(0, Batch(new, {}, {}, []), NOTHING, result, [])
    (added,) = store.added
    assert EARLY not in added
    assert (added["offset"].tolist(), added["label"].tolist()) == ([0, 2], [0, 1])
    assert added["output"].tolist() == [[0, 1, 2], [6, 7, 8]], "each with its own output"

    early = {**fake_columns(schema, range(3)), EARLY: np.full(3, Early.NEGATIVE, np.uint8)}
    feed.add(1, Batch(early, {}, {}, []), NOTHING, result, [])
    assert len(store.added) == 1, "a step of early negatives alone adds nothing"
    assert store.removed == []


def test_an_event_that_is_taken_back_replaces_the_stored_negative(schema):
    store, trainer = _RecordedStore(), _trainer(SimpleNamespace(kind=SimpleNamespace(keeps_output=True)))
    part: Any = SimpleNamespace()
    feed = StoreFeed(store, trainer, part, part, step_size=1, timer=part)  # type: ignore[arg-type]
    new = {**fake_columns(schema, [7, 9], label=[1]), EARLY: np.array([0, 3], np.uint8), "waited": np.ones(2, np.bool_)}
    result = StepResult(True, 0.0, 0.0, 0.0, output_B=torch.zeros(2, 3))
    feed.add(0, Batch(new, fake_columns(schema, [8]), {}, []), NOTHING, result, [])
    (added,) = store.added
    assert store.removed == [[9]]
    assert added["offset"].tolist() == [7, 8, 9]
    assert added["waited"].tolist() == [True, False, True]


def test_a_positive_that_is_only_stored_replaces_the_stored_negative(schema):
    store, trainer = _RecordedStore(), _trainer(SimpleNamespace(kind=SimpleNamespace(keeps_output=True)))
    part: Any = SimpleNamespace()
    feed = StoreFeed(store, trainer, part, part, step_size=1, timer=part)  # type: ignore[arg-type]
    stored = {**fake_columns(schema, [7, 9], label=[1]), EARLY: np.array([0, 3], np.uint8)}
    feed.add(0, Batch({}, stored, {}, []), NOTHING, None, [])
    (added,) = store.added
    assert (store.removed, added["offset"].tolist(), EARLY in added) == ([[9]], [7, 9], False)


def test_a_step_for_which_nothing_is_planned_keeps_its_debt_and_is_no_sample_in_the_metrics():
    store: Any = SimpleNamespace(sample=lambda _step, _n: None, planned=lambda _step: 0)
    monitor: Any = SimpleNamespace(measures=False, adjustments=SimpleNamespace(replay_ratio=1.5))
    registry, part = CollectorRegistry(), SimpleNamespace()
    timer = Histogram("sample", "Time of a sample.", registry=registry)
    feed = StoreFeed(store, _trainer(STRATEGIES["er"]()), monitor, part, step_size=1, timer=timer)  # type: ignore[arg-type]
    feed.restore({"debt": 0.5})
    assert feed.sample(0, 1) == NOTHING
    assert feed.state() == {"debt": 0.5}
    assert registry.get_sample_value("sample_count") == 0
