"""A mixture of experts computes what its definition says, and its biases balance the load."""

import pytest
import torch
from torch import nn

from anabranch.learner.model.mixture import MixtureOfExperts


def make(k, balance=1e-3, experts=4):
    torch.manual_seed(0)
    return MixtureOfExperts(3, [nn.Linear(3, 5) for _ in range(experts)], k=k, balance=balance).double()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_each_vector_gets_the_sum_of_its_best_experts(k):
    layer, x_ND = make(k).eval(), torch.randn(9, 3, dtype=torch.float64)
    for x_D, found in zip(x_ND, layer(x_ND), strict=True):
        rating = layer.router(x_D).softmax(0)
        best = rating.topk(k).indices
        gate = rating[best] / (rating[best].sum() if k > 1 else 1)
        expected = sum(g * layer.experts[int(e)](x_D) for g, e in zip(gate, best, strict=True))
        assert torch.allclose(found, expected)


def test_leading_dimensions_stay_and_no_vectors_are_allowed():
    layer = make(2)
    assert layer(torch.randn(2, 7, 3, dtype=torch.float64)).shape == (2, 7, 5)
    assert layer(torch.randn(0, 3, dtype=torch.float64)).shape == (0, 5)


def test_an_expert_without_vectors_has_a_zero_gradient():
    layer = make(1)
    layer(torch.randn(1, 3, dtype=torch.float64)).sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())
    assert sum(bool(expert.weight.grad.any()) for expert in layer.experts) == 1


def test_biases_balance_the_load_in_training_alone():
    layer, x_ND = make(1, balance=2e-3), torch.randn(256, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight[0] *= 4

    def load():
        chosen = (layer.router(x_ND).softmax(1) + layer.bias_E).argmax(1)
        return float(torch.bincount(chosen, minlength=4).max()) / len(x_ND)

    before = load()
    layer.eval()(x_ND)
    assert not layer.bias_E.any()
    for _ in range(400):
        layer.train()(x_ND)
    assert load() < 0.3
    assert before > 0.4


def test_a_number_of_chosen_experts_that_there_are_not_is_refused():
    with pytest.raises(ValueError, match="k = 5 of 4 experts; take a number from 1 to that of the experts"):
        make(5)
