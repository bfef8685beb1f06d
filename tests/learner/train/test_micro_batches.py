"""Micro-batches leave nothing out; gradients and buffers of a step, against torch's functions."""

import inspect
import math
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
from anabranch.learner.strategies.base import differentiate
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import micro_batches
from anabranch.learner.train.optimizer_step import Gradients
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_snapshot import Snapshots
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


@pytest.mark.parametrize("most", [0.1, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("poison", [None, math.inf, math.nan])
def test_gradients_are_clipped_as_torch_does_it_bit_for_bit(most, poison):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(1))]
    torchs = [nn.Parameter(each.detach().clone()) for each in ours]
    for mine, other in zip(ours[:2], torchs[:2], strict=True):  # the third has none
        mine.grad = torch.randn_like(mine)
        if poison is not None:
            mine.grad.view(-1)[2] = poison
        other.grad = mine.grad.clone()
    with torch.no_grad():
        norm = Gradients(ours, most).clip()
    torchs_norm = nn.utils.clip_grad_norm_(torchs, most).nan_to_num()
    if math.isinf(most):
        assert bool(norm.isfinite()) == (poison is None), "where nothing is clipped, that is all it shows"
    else:
        assert torch.equal(norm.nan_to_num(), torchs_norm)
    if poison is None:
        for mine, other in zip(ours[:2], torchs[:2], strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad)


def test_a_weight_that_is_a_term_of_the_loss_changes_no_later_gradient():
    term, weight = nn.Parameter(torch.tensor([5.0])), nn.Parameter(torch.tensor(3.0))
    for _ in range(2):
        differentiate(term.squeeze(0) + weight * weight)
    assert term.grad is not None
    term.grad *= 100  # as what clips it
    weight.grad = None
    differentiate(weight * weight)
    assert weight.grad == 6.0


def test_without_a_gradient_the_norm_is_zero():
    gradients = Gradients([nn.Parameter(torch.ones(2))], 1.0)
    gradients.clear()
    assert gradients.clip().item() == 0


class Rebinding(nn.Module):
    """Keeps what it saw as a buffer, which is the caller's own tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("none", None)

    def forward(self, x):
        self.seen = x
        return x


def test_buffers_are_restored_and_a_tensor_that_was_bound_to_them_is_unchanged():
    model = nn.Sequential(Rebinding(), nn.BatchNorm1d(3))
    snapshot = Snapshots(model, torch.device("cpu")).of_step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.tensor([[1.0, 2, math.inf], [4, 5, 6]])
    kept = x.clone()
    model(x)
    assert bool(snapshot.lost_finite())
    assert (magnitude := snapshot.magnitude()) is not None
    assert not magnitude.isfinite()
    snapshot.restore_buffers()
    assert not bool(snapshot.lost_finite())
    assert (magnitude := snapshot.magnitude()) is not None
    assert magnitude.isfinite()
    assert torch.equal(x, kept)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
