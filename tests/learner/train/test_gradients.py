"""Gradients and buffers of a step, against torch's functions."""

import math

import pytest
import torch
from torch import nn

from anabranch.learner.strategies.base import differentiate
from anabranch.learner.train.optimizer_step import Gradients
from anabranch.learner.train.step_snapshot import Snapshots


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
