"""The guard set: who stays, and what it tells."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ingest.block import TopicPartition
from ingest.fake import fake_columns
from ingest.schema import Schema
from learner.guard import GuardSet, evaluate
from learner.task import Classification

NAMES = [TopicPartition("events", 0)]


class Always(nn.Module):
    """Predicts one class, whatever it sees."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.eye(3)[self.answer].expand(len(x), 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=20), st.integers(4, 50))
def test_the_set_is_bounded_keeps_the_youngest_and_is_fair_to_classes(
    schema: Schema, batches: list[tuple[int, int]], most: int
) -> None:
    guard = GuardSet(schema, most)
    offset = 0
    for count, label in batches:
        guard.add(fake_columns(schema, range(offset, offset + count), label=[label]), NAMES)
        offset += count
        assert len(guard.held) == min(offset, most)
        times = guard.held.columns["time_ms"] // 10
        assert (np.diff(times) > 0).all(), "the order of arrival is lost"
        young = range(offset - min(offset, most // 4), offset)
        assert set(young) <= set(times.tolist())
    # Among the old, no class that had more to give has two fewer than another.
    old = guard.held.columns["label"][: len(guard.held) - most // 4]
    seen = np.bincount(np.concatenate([np.full(count, label) for count, label in batches]), minlength=3)
    kept = np.bincount(old, minlength=3)
    if offset > most:
        assert kept.sum() == most - most // 4
        assert ((seen > 0) <= (np.bincount(guard.held.columns["label"], minlength=3) > 0)).all() or most < 12


def test_scores_tell_new_from_old_and_name_the_worst_class(schema: Schema) -> None:
    guard = GuardSet(schema, 400)
    guard.add(fake_columns(schema, range(300), label=[0]), NAMES)
    guard.add(fake_columns(schema, range(300, 400), label=[1]), NAMES)
    device = torch.device("cpu")
    assert evaluate(Always(0), Classification(), schema, guard.held, device) == {"new": 0.0, "old": 1.0, "worst": 0.0}
    assert evaluate(Always(1), Classification(), schema, guard.held, device) == {"new": 1.0, "old": 0.0, "worst": 0.0}


def test_a_handful_of_events_tells_nothing(schema: Schema) -> None:
    guard = GuardSet(schema, 400)
    assert evaluate(Always(0), Classification(), schema, guard.held, torch.device("cpu")) == {}
    guard.add(fake_columns(schema, range(3)), NAMES)
    assert evaluate(Always(0), Classification(), schema, guard.held, torch.device("cpu")) == {}
