"""The trained set: decided once, from what requires a gradient."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anabranch.learner.errors import ModelError
from anabranch.learner.model.trained_set import (
    base_names,
    base_state,
    check_views,
    copy_sharing_base,
    decide_trained_set,
    load_trained,
    trained_state,
    with_base,
    without_base,
)
from tests.support.trained_set import split_state


class Tied(nn.Module):
    """Has a frozen weight under two names, a buffer that is saved, and one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)


class Quantized(nn.Linear):
    """Adds an entry to the state dict, as quantized weights do, and refuses to load it."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(1)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return torch.tensor(self.steps)

    def set_extra_state(self, state):
        self.steps = int(state)


def frozen(module):
    return module.requires_grad_(False)


def test_a_module_without_a_frozen_parameter_has_no_base():
    module = nn.Sequential(Quantized(2, 2), nn.BatchNorm1d(2))

    assert base_names(module) == frozenset()
    assert trained_state(module).keys() == module.state_dict().keys()


def test_buffers_are_trained_and_frozen_parameters_are_the_base():
    module = nn.Sequential(frozen(nn.BatchNorm1d(2)), nn.Linear(2, 1))

    assert split_state(module) == (
        ["0.running_mean", "0.running_var", "0.num_batches_tracked", "1.weight", "1.bias"],
        ["0.weight", "0.bias"],
    )


def test_what_quantized_weights_add_to_the_state_dict_is_the_base():
    module = nn.Sequential(frozen(Quantized(2, 2)), nn.Linear(2, 1))

    assert split_state(module) == (["1.weight", "1.bias"], ["0.weight", "0.bias", "0.weight.absmax"])


def test_what_a_module_saves_itself_is_trained():
    extra = WithExtraState(2, 2)
    extra.steps = 3
    module = nn.Sequential(frozen(extra), nn.Linear(2, 1))
    saved = {name: value.clone() for name, value in trained_state(module).items()}
    extra.steps = 4

    load_trained(module, saved)

    assert extra.steps == 3


def test_a_tied_frozen_weight_is_in_the_base_once():
    module = Tied()
    module.first.weight.requires_grad_(False)

    assert list(base_state(module)) == ["first.weight"]
    assert list(trained_state(module)) == ["mean", "first.bias", "second.bias"]


def test_a_decision_stays_when_gradients_are_switched_off_later():
    module = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 1))
    decide_trained_set(module)

    served = frozen(copy.deepcopy(module))
    decide_trained_set(served)

    assert split_state(served) == (["1.weight", "1.bias"], ["0.weight", "0.bias"])


def test_a_layer_that_a_module_gains_later_is_trained():
    module = nn.Sequential(frozen(nn.Linear(2, 2)))
    decide_trained_set(module)
    module.append(frozen(nn.Linear(2, 1)))

    assert list(trained_state(module)) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"1.weight": None}, "missing 1.weight, unexpected none"),
        ({"0.weight": torch.zeros(2, 2)}, "tensors for frozen weights: 0.weight"),
        ({"2.weight": torch.zeros(2, 2)}, "missing none, unexpected 2.weight"),
        ({"1.weight": torch.zeros(5, 5)}, "size mismatch for 1.weight"),
    ],
)
def test_other_tensors_than_the_trained_ones_are_refused_and_the_base_is_unchanged(change, sentence):
    module = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 1))
    before = {name: value.clone() for name, value in base_state(module).items()}
    tensors = {name: value for name, value in (trained_state(module) | change).items() if value is not None}

    with pytest.raises(RuntimeError, match=sentence):
        load_trained(module, tensors)

    assert all(torch.equal(value, before[name]) for name, value in base_state(module).items())


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_the_trained_set_restores_what_training_changes_and_nothing_else(layers):
    module = nn.Sequential()
    for normalizes, freezes_weight, freezes_bias in layers:
        layer = nn.BatchNorm1d(2) if normalizes else nn.Linear(2, 2)
        layer.weight.requires_grad_(not freezes_weight)
        layer.bias.requires_grad_(not freezes_bias)
        module.append(layer)
    decide_trained_set(module)
    trained, base = split_state(module)
    saved = {name: value.clone() for name, value in trained_state(module).items()}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for value in (*(each for each in module.parameters() if each.requires_grad), *module.buffers()):
            value += 1

    load_trained(module, saved)

    assert sorted([*trained, *base]) == sorted(module.state_dict())
    assert set(base) == {name for name, value in module.named_parameters() if not value.requires_grad}
    assert set(base_state(module)) == set(base)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_copy_shares_the_base_and_nothing_else():
    module = nn.Sequential(frozen(nn.BatchNorm1d(2)), nn.Linear(2, 1))

    other = copy_sharing_base(module)

    shared = {name for name, value in other.state_dict().items() if value.data_ptr() == address(module, name)}
    assert shared == {"0.weight", "0.bias"}


def test_a_module_whose_base_was_released_gives_copies_with_another_one():
    module = nn.Sequential(frozen(nn.Conv2d(2, 2, 1)), Tied()).to(memory_format=torch.channels_last)
    module[1].first.weight.requires_grad_(False)
    decide_trained_set(module)
    tensors = {name: torch.rand_like(value) for name, value in base_state(module).items()}
    stride = module[0].weight.stride()

    empty = without_base(module)
    other = with_base(empty, tensors, torch.device("cpu"))

    assert all(value.is_meta for value in base_state(empty).values())
    assert all(torch.equal(value, tensors[name]) for name, value in base_state(other).items())
    assert other[1].first.weight is other[1].second.weight
    assert other[0].weight.stride() == stride
    assert not other[0].weight.requires_grad


class Listed(nn.Module):
    """Reads its frozen weights from a list, as recurrent layers of torch do."""

    def __init__(self):
        super().__init__()
        self.recurrent = frozen(nn.GRU(2, 2))
        self.first, self.head = frozen(nn.Linear(2, 2)), nn.Linear(2, 1)
        self.listed = [self.first.weight]

    def forward(self, x):
        return self.head(self.recurrent(x @ self.listed[0])[0])


def test_what_refers_to_a_frozen_weight_refers_to_that_of_another_base_too():
    module, x = Listed(), torch.rand(3, 1, 2)
    tensors = {name: torch.rand_like(value) for name, value in base_state(module).items()}

    other = with_base(without_base(module), tensors, torch.device("cpu"))

    module.load_state_dict(tensors, strict=False)
    assert torch.equal(other(x), module(x))
    assert other.listed[0] is other.first.weight


@pytest.mark.parametrize("attribute", ["one", "several"])
def test_a_view_of_a_frozen_weight_that_would_stay_behind_is_refused(attribute):
    module = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 1))
    view = module[0].weight.detach()[0]
    setattr(module, attribute, view if attribute == "one" else [view])
    decide_trained_set(module)

    with pytest.raises(ModelError, match=r"is a view of the frozen weight 0\.weight, which serving would"):
        check_views(module)


def test_a_module_that_trains_as_a_whole_is_not_copied():
    module = nn.Linear(2, 2)
    assert without_base(module) is module


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"0.bias": None}, "missing 0.bias, unexpected none"),
        ({"2.bias": torch.zeros(1)}, "missing none, unexpected 2.bias"),
        ({"0.bias": torch.zeros(2**20)}, r"0.bias has the shape \[1048576\] and torch.float32"),
        ({"0.bias": torch.zeros(2, dtype=torch.float64)}, "and torch.float64"),
        ({"0.weight.absmax": torch.zeros(1)}, "0.weight.absmax of the frozen weights is not the model's"),
    ],
)
def test_a_base_of_another_model_is_refused(change, sentence):
    module = nn.Sequential(frozen(Quantized(2, 2)), nn.Linear(2, 1))
    tensors = {name: value for name, value in (base_state(module) | change).items() if value is not None}

    with pytest.raises(RuntimeError, match=sentence):
        with_base(module, tensors, torch.device("cpu"))


def address(module, name):
    return module.state_dict()[name].data_ptr()
