"""Models that cannot be divided into stages, or whose experts cannot be divided, are refused with one sentence."""

import re

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.learner.model.device import Precision
from anabranch.learner.model.mixture import MixtureOfExperts
from anabranch.learner.parallel.split.experts import mixtures
from anabranch.learner.parallel.split.pipeline import Boundary, divide
from anabranch.learner.settings.compatibility import stage_conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings

FULL = Precision("fp32", None)
X = {"x": torch.rand(3, 4)}


class Looped(nn.Module):
    """Runs a list of layers, with something between or around them if `twist` says so."""

    def __init__(self, twist=""):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2)
        self.twist = twist
        if twist == "shares":
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        x = self.first(x * 2 if self.twist == "before" else x)
        for layer in self.layers:
            x = layer(x) + (x if self.twist == "residual" else 0) if self.twist == "residual" else layer(x)
            if self.twist == "in place":
                x.relu_()
        if self.twist == "twice":
            x = self.layers[0](x)
        if self.twist == "pair":
            return self.last(x).unbind(1)[0]
        x = self.last(x)
        return x.exp() if self.twist == "after" else x


def test_a_loop_over_a_list_of_modules_is_a_sequence():
    model = Looped()
    stages = divide(model, ["layers.1", "last"], X, FULL)
    assert stages.units == [[model.first, model.layers[0]], [model.layers[1], model.layers[2]], [model.last]]
    assert stages.outputs == [Boundary((4,), torch.float32)] * 2 + [Boundary((2,), torch.float32)]


def test_activations_between_stages_have_the_precision_of_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    stages = divide(model, ["1"], X, Precision("bf16", torch.bfloat16))
    assert stages.outputs[0].dtype is torch.bfloat16
    assert model.training
    assert not model[1].running_mean.any()


@pytest.mark.parametrize(
    ("twist", "names", "sentence"),
    [
        ("", ["layers.7"], 'model.stages: the model has no module "layers.7", but first, layers.0, layers.1'),
        ("", ["last", "layers.1"], "in the order in which they run"),
        ("", ["first"], "the model's first left out"),
        ("before", ["last"], 'the module "first" takes something else than the module before it returns'),
        ("residual", ["layers.1"], 'the module "layers.1" takes something else'),
        ("in place", ["layers.1"], 'the module "layers.1" takes something else'),
        ("twice", ["layers.1"], "which is not first, layers.0, layers.1, layers.2, last once and in this order"),
        ("after", ["last"], 'the model returns something else than its last module, "last"'),
        ("shares", ["layers.1"], "the stages 0 and 1 share layers.0.weight; begin no stage between"),
    ],
)
def test_what_is_no_sequence_is_refused(twist, names, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        divide(Looped(twist), names, X, FULL)


def test_a_module_that_returns_no_rows_ends_no_stage():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Unflatten(0, (3, 4)))
    with pytest.raises(SettingsError, match=re.escape('the module "1" returns no tensor with one row per event')):
        divide(model, ["1"], X, FULL)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "sentence"),
    [
        ("1f1b", 2, ["1"], None),
        ("interleaved", 2, ["1", "2", "3"], None),
        ("1f1b", 1, ["1", "2"], None),
        ("gpipe", 3, ["1"], "model.stages names 1 modules, so that there are 2 stages, but learner.mesh.pipeline = 3"),
        ("1f1b", 2, [], "need one stage on each rank; name 1"),
        ("interleaved", 2, ["1"], "need two or more stages on each rank; name 3, 5 or so on"),
        ("interleaved", 2, ["1", "2", "3", "4"], "there are 5 stages"),
    ],
)
def test_the_number_of_stages_fits_the_ranks(schedule, ranks, stages, sentence):
    learner = LearnerSettings.model_validate({"mesh": {"pipeline": ranks}, "pipeline_schedule": schedule})
    model = ModelSettings(factory="my_model:build", stages=stages)
    found = [said for _, said in stage_conflicts(model, learner)]
    assert len(found) == (sentence is not None)
    assert all(str(sentence) in said for said in found)


def mixture(experts=4, k=2, balance=1e-3):
    return MixtureOfExperts(4, [nn.Linear(4, 4) for _ in range(experts)], k=k, balance=balance)


def test_mixtures_are_found_in_the_order_in_which_they_run():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = mixture(), mixture()

        def forward(self, x):
            return self.second(self.first(x))

    model = Reversed()
    assert mixtures(model, {"first": "expert", "second": "expert"}, 2, X) == [model.first, model.second]


@pytest.mark.parametrize(
    ("parallel", "experts", "sentence"),
    [
        ({}, 4, "learner.mesh.expert = 2, but model.parallel names no module with experts; write such as"),
        ({"9": "expert"}, 4, 'model.parallel: "9" matches no module; those with experts are 1'),
        (
            {"0": "expert"},
            4,
            'model.parallel."0" = "expert": it is a Linear; name a MixtureOfExperts of anabranch.learner.model',
        ),
        ({"1": "expert"}, 3, "its 3 experts are not divisible by learner.mesh.expert = 2"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(parallel, experts, sentence):
    model = nn.Sequential(nn.Linear(4, 4), mixture(experts), nn.Linear(4, 2))
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        mixtures(model, parallel, 2, X)


def test_experts_that_share_a_parameter_are_refused():
    for other in (1, 3):
        tied = mixture()
        tied.experts[other].weight = tied.experts[0].weight
        with pytest.raises(SettingsError, match=rf"1\.experts\.0\.weight and 1\.experts\.{other}\.weight are one"):
            mixtures(nn.Sequential(nn.Linear(4, 4), tied), {"1": "expert"}, 2, X)
    outside = nn.Sequential(nn.Linear(4, 4), mixture())
    outside[1].experts[2].weight = outside[0].weight
    with pytest.raises(SettingsError, match=r"0\.weight and 1\.experts\.2\.weight are one parameter, and experts are"):
        mixtures(outside, {"1": "expert"}, 2, X)
    within = mixture()
    for expert in range(4):
        layer = nn.Linear(4, 4)
        within.experts[expert] = nn.Sequential(layer, layer)
    assert mixtures(nn.Sequential(within), {"0": "expert"}, 2, X) == [within]


def test_a_mixture_that_runs_twice_is_refused():
    shared = mixture()
    with pytest.raises(SettingsError, match="run as 0, 0; each has to run once a pass"):
        mixtures(nn.Sequential(shared, shared), {"0": "expert"}, 2, X)
