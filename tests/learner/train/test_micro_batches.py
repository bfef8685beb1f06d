"""Micro-batches: nothing is left out, and the gradient is that of the whole step."""

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import micro_batches
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")


def numbered(n):
    return Examples({"x": torch.arange(float(n))}, torch.arange(n), torch.ones(n))


@given(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=2), st.none() | st.integers(2, 30))
def test_every_event_is_in_one_part_in_order_and_none_is_alone(n, sampled, most):
    parts = micro_batches(numbered(n), [numbered(each) for each in sampled], most)
    assert torch.cat([new.label_B for new, _ in parts]).tolist() == list(range(n))
    for sample, each in enumerate(sampled):
        if len(parts) == 1 or each:
            index = sample if len(parts) == 1 else sum(1 for before in sampled[:sample] if before)
            assert torch.cat([old[index].label_B for _, old in parts]).tolist() == list(range(each))
    sizes = [len(new) + sum(map(len, old)) for new, old in parts]
    assert len(sizes) == 1 or min(sizes) > 1
    assert len(sizes) == 1 or all(abs(a - b) <= 1 + len(sampled) for a, b in pairwise(sizes))
    if most is not None and most >= 4 * (1 + len(sampled)):
        assert max(sizes) <= most


def often(name):
    """Make a strategy that consolidates after each step, if it does so at all."""
    return small_strategy(name, **({"every": 1} if "every" in inspect.signature(STRATEGIES[name]).parameters else {}))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("most", [2, 5, 7])
def test_the_gradient_of_micro_batches_is_that_of_the_large_batch(schema, strategy, most):
    weights = []
    for micro in (None, most):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        kind = extended(often(strategy), model, schema)
        settings = LearnerSettings.model_validate(
            {"optimizer": {"name": "sgd", "lr": 0.1}, "micro_batch_size": micro, "max_grad_norm": float("inf")}
        )
        trainer = Trainer(
            TrainingSetup(
                model,
                Classification(),
                kind,
                schema,
                settings,
                CPU,
                choose_precision("fp32", CPU),
                Embedding(model, "1") if kind.kind.embeds else None,
            )
        )
        model.double()
        batches = []
        for begin, n in ((0, 11), (50, 9)):
            columns = fake_columns(schema, range(begin, begin + n), label=[0, 1, 2])
            columns["weight"][::3] = 2.5
            found = trainer.examples(columns)
            output_B = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
            features = {"x": found.features["x"].double()}
            batches.append(Examples(features, found.label_B, found.weight_B.double(), output_B))
        new, old = batches
        samples = len(trainer.strategy.samples(len(old)))
        for _ in range(3):
            assert trainer.step(new, [old[first::samples] for first in range(samples)]).finite
        weights.append(torch.cat([each.reshape(-1) for each in trainer.snapshot().values()]))
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-6)
