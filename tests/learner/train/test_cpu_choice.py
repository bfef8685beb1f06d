"""What makes steps fastest on a CPU is chosen by trials, which change nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typing_extensions import override

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.train.cpu_choice import CpuChoice, choose, fastest, fastest_steps, trial_seconds
from anabranch.learner.train.setup import TrainingSetup

CPU = torch.device("cpu")
TWO, ONE = CpuChoice(2), CpuChoice(1)
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3, 8, 8]}}, "label": {"name": "y", "classes": 2}}
    )
)


@pytest.fixture(autouse=True)
def threads():
    """The number of torch's threads, which is the same after the test."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


class Clock:
    """A clock that trials move on."""

    def __init__(self, seconds):
        self.now, self.seconds, self.trials = 0.0, seconds, []

    def __call__(self):
        return self.now

    def trial(self, choice):
        self.trials.append(choice)
        self.now += self.seconds[choice]


@given(st.dictionaries(st.builds(CpuChoice, st.integers(1, 64), st.booleans()), st.floats(1e-4, 3.0), min_size=1))
def test_trials_take_turns_for_a_second_and_each_choice_has_one(seconds):
    clock, choices = Clock(seconds), list(seconds)
    taken = trial_seconds(choices, clock.trial, clock)
    assert clock.trials == list(itertools.islice(itertools.cycle(choices), len(clock.trials)))
    assert clock.now >= 1.0 or sum(seconds.values()) >= 1.0
    assert clock.now <= max(1.0, sum(seconds.values())) + max(seconds.values())
    assert taken == pytest.approx(seconds)


def test_another_choice_has_to_be_clearly_faster():
    assert fastest({TWO: 1.0, ONE: 0.94}, TWO) == ONE
    assert fastest({TWO: 1.0, ONE: 0.96}, TWO) == TWO
    assert fastest({TWO: 1.0}, TWO) == TWO


@pytest.mark.parametrize("best", [CpuChoice(1, channels_last=True), CpuChoice(1)])
def test_a_model_and_the_generator_are_as_before_but_for_the_memory_format(monkeypatch, caplog, best):
    caplog.set_level("INFO")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    tried = []

    def measured(choices, trial):
        tried.extend(choices)
        for choice in choices:
            trial(choice)
        return {choice: 0.5 if choice == best else 1.0 for choice in choices}

    monkeypatch.setattr("anabranch.learner.train.cpu_choice.trial_seconds", measured)
    assert choose(model, SCHEMA, choose_precision("fp32", CPU), 8) == best
    assert torch.get_num_threads() == best.threads
    assert {choice.channels_last for choice in tried} == {False, True}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert model[0].weight.is_contiguous() is not best.channels_last
    assert f"steps run with {best};" in caplog.text


class Viewing(nn.Module):
    """Views what a convolution returns as a row, which fails with channels last, or always."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

    @override
    def forward(self, x):
        output: torch.Tensor = self.head(self.body(x).view(len(x), *self.shape))
        return output


@pytest.mark.parametrize("shape", [(144,), (7,)], ids=["channels last", "always"])
def test_a_memory_format_with_which_the_model_raises_is_no_choice(threads, caplog, shape):
    caplog.set_level("INFO")
    model = Viewing(shape)
    chosen = choose(model, SCHEMA, choose_precision("fp32", CPU), 8)
    assert not chosen.channels_last
    assert model.body.weight.is_contiguous()
    assert torch.get_num_threads() == chosen.threads
    assert "channels last: RuntimeError: view size is not compatible" in caplog.text or shape == (7,)
    assert shape == (144,) or chosen.threads == threads


@pytest.mark.parametrize("compile_", ["auto", True, False])
def test_the_choice_is_made_with_auto_alone_and_ends_with_the_learner(threads, caplog, compile_):
    caplog.set_level("INFO")
    model, settings = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), LearnerSettings(compile=compile_, batch_size=4)
    precision = choose_precision("fp32", CPU)
    task = Classification()
    strategy = build_strategy(settings.strategy, ModelSettings(factory="model:build"), task)
    setup = TrainingSetup(model, task, strategy, SCHEMA, settings, CPU, precision)
    with fastest_steps(setup):
        assert torch.get_num_threads() <= threads
    assert torch.get_num_threads() == threads
    assert ("learner.compile: steps run with" in caplog.text) is (compile_ == "auto")
