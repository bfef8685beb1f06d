"""Strategies: what every one promises, and each against a plain reference of what is special to it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ingest.errors import SettingsError
from ingest.schema import Schema
from learner.config import LearnerSettings, ModelSettings, StrategySettings
from learner.embedding import Embedding
from learner.precision import choose_precision
from learner.strategies import STRATEGIES
from learner.strategies.build import build_strategy
from learner.strategies.der import DarkReplay, DarkReplayPlus
from learner.strategies.er_ace import AsymmetricReplay
from learner.strategy import Examples, Strategy
from learner.task import Classification, Regression, Task
from learner.trainer import Trainer

CPU = torch.device("cpu")
PLAIN = {"optimizer": {"name": "sgd", "lr": 0.1}, "max_grad_norm": math.inf}


def make_trainer(
    schema: Schema, model: nn.Module, strategy: Strategy, task: Task | None = None, **settings: object
) -> Trainer:
    options = LearnerSettings.model_validate({**PLAIN, **settings})
    embedding = Embedding(model, "2") if strategy.embeds else None
    precision = choose_precision(options.precision, CPU)
    return Trainer(model, task or Classification(), strategy, schema, options, CPU, precision, embedding)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 3))


def events(n: int, seed: int, classes: tuple[int, ...] = (0, 1, 2)) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    label_B = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
    x, said = (torch.randn(n, 3, generator=generator) for _ in range(2))
    return Examples({"x": x}, label_B, torch.rand(n, generator=generator) + 0.5, said)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(model.parameters()))])


def stepped(trainer: Trainer, new: Examples, old: list[Examples]) -> Tensor:
    """Return the gradient of a step with plain SGD."""
    before = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    assert trainer.step(new, old).finite
    return (before - nn.utils.parameters_to_vector(trainer.model.parameters()).detach()) / 0.1


def mean(losses: Tensor, examples: Examples) -> Tensor:
    return (losses * examples.weight_B).sum() / examples.weight_B.sum()


def cross_entropy(model: nn.Module, examples: Examples) -> Tensor:
    return functional.cross_entropy(model(examples.features["x"]), examples.label_B, reduction="none")


class TestErAce:
    def test_new_events_are_told_apart_among_the_classes_that_are_new(self, schema: Schema) -> None:
        new, old, plain = events(6, 1, (0, 2)), events(5, 2), small()
        logits = plain(new.features["x"])[:, [0, 2]]
        among = functional.cross_entropy(logits, new.label_B // 2, reduction="none")
        expected = gradient(plain, mean(among, new) + mean(cross_entropy(plain, old), old))
        found = stepped(make_trainer(schema, small(), AsymmetricReplay()), new, [old])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_an_event_without_weight_of_a_class_of_its_own_does_no_harm(self, schema: Schema) -> None:
        new = events(6, 1, (0,))
        new.label_B[0], new.weight_B[0] = 1, 0
        assert make_trainer(schema, small(), AsymmetricReplay()).step(new, [events(4, 2)]).finite


class TestDer:
    def test_old_events_are_held_to_what_was_said_of_them(self, schema: Schema) -> None:
        new, old, plain = events(6, 1), events(5, 2), small()
        assert old.output_B is not None
        away = (plain(old.features["x"]) - old.output_B).square().mean(dim=1)
        expected = gradient(plain, mean(cross_entropy(plain, new), new) + 0.4 * mean(away, old))
        found = stepped(make_trainer(schema, small(), DarkReplay(alpha=0.4)), new, [old])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_der_plus_plus_learns_the_labels_of_other_events(self, schema: Schema) -> None:
        new, first, second, plain = events(6, 1), events(5, 2), events(4, 3), small()
        assert first.output_B is not None
        away = (plain(first.features["x"]) - first.output_B).square().mean(dim=1)
        labels = mean(cross_entropy(plain, second), second)
        expected = gradient(plain, mean(cross_entropy(plain, new), new) + 0.4 * mean(away, first) + 0.7 * labels)
        strategy = DarkReplayPlus(alpha=0.4, beta=0.7)
        assert strategy.draws(5) == (5, 5)
        found = stepped(make_trainer(schema, small(), strategy), new, [first, second])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_events_of_which_nothing_was_said_count_for_nothing(self, schema: Schema) -> None:
        new, old = events(6, 1), events(5, 2)
        assert old.output_B is not None
        old.output_B[2:], old.weight_B[2:] = math.nan, 0  # as of events without a label
        found = stepped(make_trainer(schema, small(), DarkReplay()), new, [old])
        expected = stepped(make_trainer(schema, small(), DarkReplay()), new, [old[:2]])
        assert torch.allclose(found, expected, atol=1e-6)


class TestSettings:
    def test_a_name_alone_is_a_strategy_with_its_defaults(self) -> None:
        assert LearnerSettings.model_validate({"strategy": "der++"}).strategy.name == "der++"
        assert LearnerSettings().strategy.name == "er"

    @pytest.mark.parametrize(
        ("strategy", "message"),
        [
            ({"name": "der++", "gamma": 1}, "der[+][+] has no 'gamma'; it takes alpha, beta"),
            ({"name": "er", "alpha": 1}, "er has no 'alpha'; it takes no arguments"),
            ({"name": "der", "alpha": -1}, "der refuses alpha = -1: it has to be a number of at least 0"),
            ({"name": "der", "alpha": "much"}, "der refuses alpha = 'much': it has to be a number of at least 0"),
        ],
    )
    def test_an_argument_that_does_not_fit_is_named(self, strategy: dict[str, object], message: str) -> None:
        settings = StrategySettings.model_validate(strategy)
        with pytest.raises(SettingsError, match=f"learner.strategy: {message}"):
            build_strategy(settings, ModelSettings(factory="m:build"), Classification())

    @pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.tasks])
    def test_a_strategy_for_classes_refuses_a_regression(self, name: str) -> None:
        model = ModelSettings(factory="m:build", task="regression", embedding="2")
        with pytest.raises(SettingsError, match=r'made for model.task = "classification".* and that is "regression"'):
            build_strategy(StrategySettings(name=name), model, Regression())

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_what_the_settings_say_of_a_strategy_is_so(self, name: str) -> None:
        settings, kind = StrategySettings(name=name), STRATEGIES[name]
        assert (settings.replays, settings.keeps_output, settings.embeds) == (
            kind.replays,
            kind.keeps_output,
            kind.embeds,
        )
