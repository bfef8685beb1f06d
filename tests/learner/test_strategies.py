"""Strategies: what every one promises, and each against a plain reference of what is special to it."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.core.errors import SettingsError
from anabranch.learner.model.examples import Examples, concat
from anabranch.learner.model.task import Classification, MultiLabel, Regression
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.learner.strategies.agem import ProjectedGradient
from anabranch.learner.strategies.base import StepWeights, StrategyContext
from anabranch.learner.strategies.der import DarkReplay, DarkReplayPlus
from anabranch.learner.strategies.er import AsymmetricReplay, ExperienceReplay, NoReplay
from anabranch.learner.strategies.ewc import ElasticWeights
from anabranch.learner.strategies.lwf import Distillation
from anabranch.learner.strategies.mir import InterferedReplay
from anabranch.learner.strategies.ncm import NearestClassMean, StreamingDiscriminant
from anabranch.learner.strategies.registry import STRATEGIES, build_strategy
from anabranch.testing.checks import NotPromisedError, name_of
from anabranch.testing.strategies import CHECKS, Stream, events, make_trainer, on, small
from tests.support.strategies import small_strategy


def gradient(model, loss):
    return torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(model.parameters()))])


def stepped(trainer, new, old):
    """Return the gradient of a step with plain SGD."""
    before = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    assert trainer.step(new, old).finite
    return (before - nn.utils.parameters_to_vector(trainer.model.parameters()).detach()) / 0.1


def mean(losses, examples):
    return (losses * examples.weight_B).sum() / examples.weight_B.sum()


def cross_entropy(model, examples):
    return functional.cross_entropy(model(examples.features["x"]), examples.label_B, reduction="none")


ARGUMENTS: dict[str, dict[str, Any]] = {"experts": {"size": 10.0}, "ewc": {"every": 40}, "lwf": {"every": 40}}
"""The head of an expert is most of a small model; and what happens now and then has to happen in a short test."""


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_a_strategy_keeps_what_all_promise(name, check):
    try:
        check(lambda: STRATEGIES[name](**ARGUMENTS.get(name, {})))
    except NotPromisedError:
        assert STRATEGIES[name].tasks, "only those that are for some tasks promise less"


def test_experts_take_a_lone_event_in_a_model_that_normalizes_batches(schema):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    trainer = make_trainer(schema, model, small_strategy("experts"))
    assert trainer.step(events(1, 1)).finite


def test_mir_trains_on_as_many_of_its_candidates_as_are_replayed(schema):
    trainer = make_trainer(schema, small(), InterferedReplay())
    result = trainer.step(events(6, 1), [events(n, index) for index, n in enumerate(trainer.strategy.samples(6))])
    assert result.replayed == 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_strategy_learns_on_a_gpu_and_goes_on_from_a_checkpoint(schema, name, precision):
    options = {
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "precision": precision,
        "device": torch.device("cuda", 0),
    }
    trainer, other = (make_trainer(schema, small(), small_strategy(name), **options) for _ in range(2))
    assert Stream(trainer).score(150) == 1
    host = {part: {key: value.cpu() for key, value in each.items()} for part, each in trainer.tensors().items()}
    other.restore(host, trainer.state())
    new = on(trainer.device, events(12, 1))
    old = [on(trainer.device, events(n, 2 + index)) for index, n in enumerate(trainer.strategy.samples(12))]
    assert trainer.step(new, old).loss == pytest.approx(other.step(new, old).loss, rel=1e-4)
    for key, value in trainer.snapshot().items():
        assert torch.allclose(value, other.snapshot()[key], atol=1e-4), key


class TestEr:
    def test_replay_that_the_learner_chooses_takes_nothing_from_new_events(self, schema):
        new, old, plain = events(6, 1), events(3, 2), small()
        trainer = make_trainer(schema, small(), ExperienceReplay(), replay_ratio="auto")
        losses = [(cross_entropy(plain, each) * each.weight_B).sum() for each in (new, old)]
        expected = gradient(plain, sum(losses) / new.weight_B.sum())
        assert torch.allclose(stepped(trainer, new, [old]), expected, atol=1e-6)

    def test_a_ratio_of_the_settings_gives_the_mean_of_all_events(self, schema):
        new, old, plain = events(6, 1), events(3, 2), small()
        both = concat([new, old])
        expected = gradient(plain, mean(cross_entropy(plain, both), both))
        trainer = make_trainer(schema, small(), ExperienceReplay(), replay_ratio=0.5)
        assert torch.allclose(stepped(trainer, new, [old]), expected, atol=1e-6)

    @pytest.mark.parametrize("weight", [0.0, 1e-3])
    def test_new_events_with_little_weight_do_not_enlarge_the_step(self, schema, weight):
        """Such as those whose label has not come: old events alone are at most twice their mean."""
        new, old, plain = events(6, 1), events(6, 2), small()
        new = Examples(new.features, new.label_B, new.weight_B * weight)
        trainer = make_trainer(schema, small(), ExperienceReplay(), replay_ratio="auto")
        both = concat([new, old])
        expected = 2 * gradient(plain, mean(cross_entropy(plain, both), both))
        assert torch.allclose(stepped(trainer, new, [old]), expected, atol=1e-6)


class TestErAce:
    def test_the_loss_of_new_events_is_over_the_classes_that_are_new(self, schema):
        new, old, plain = events(6, 1, (0, 2)), events(5, 2), small()
        logits = plain(new.features["x"])[:, [0, 2]]
        among = functional.cross_entropy(logits, new.label_B // 2, reduction="none")
        expected = gradient(plain, mean(among, new) + mean(cross_entropy(plain, old), old))
        found = stepped(make_trainer(schema, small(), AsymmetricReplay()), new, [old])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_an_event_without_weight_of_a_class_of_its_own_does_no_harm(self, schema):
        new = events(6, 1, (0,))
        new.label_B[0], new.weight_B[0] = 1, 0
        assert make_trainer(schema, small(), AsymmetricReplay()).step(new, [events(4, 2)]).finite


class TestDer:
    def test_old_events_are_held_to_what_was_said_of_them(self, schema):
        new, old, plain = events(6, 1), events(5, 2), small()
        assert old.output_B is not None
        away = (plain(old.features["x"]) - old.output_B).square().mean(dim=1)
        expected = gradient(plain, mean(cross_entropy(plain, new), new) + 0.4 * mean(away, old))
        found = stepped(make_trainer(schema, small(), DarkReplay(alpha=0.4)), new, [old])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_der_plus_plus_learns_the_labels_of_other_events(self, schema):
        new, first, second, plain = events(6, 1), events(5, 2), events(4, 3), small()
        assert first.output_B is not None
        away = (plain(first.features["x"]) - first.output_B).square().mean(dim=1)
        labels = mean(cross_entropy(plain, second), second)
        expected = gradient(plain, mean(cross_entropy(plain, new), new) + 0.4 * mean(away, first) + 0.7 * labels)
        strategy = DarkReplayPlus(alpha=0.4, beta=0.7)
        assert strategy.samples(5) == (5, 5)
        found = stepped(make_trainer(schema, small(), strategy), new, [first, second])
        assert torch.allclose(found, expected, atol=1e-6)

    def test_events_of_which_nothing_was_said_count_for_nothing(self, schema):
        new, old = events(6, 1), events(5, 2)
        assert old.output_B is not None
        old.output_B[2:], old.weight_B[2:] = math.nan, 0  # as of events without a label
        found = stepped(make_trainer(schema, small(), DarkReplay()), new, [old])
        expected = stepped(make_trainer(schema, small(), DarkReplay()), new, [old[:2]])
        assert torch.allclose(found, expected, atol=1e-6)


class TestMir:
    def test_those_are_picked_whose_loss_rises_most(self, schema):
        new, old, plain = events(6, 1), events(20, 2), small()
        before = cross_entropy(plain, old).detach()
        down = gradient(plain, mean(cross_entropy(plain, new), new))
        moved = nn.utils.parameters_to_vector(plain.parameters()).detach() - 0.1 * down
        nn.utils.vector_to_parameters(moved, plain.parameters())
        picked = (cross_entropy(plain, old).detach() - before).topk(5).indices.sort().values
        strategy = InterferedReplay(candidates=4)
        assert strategy.samples(5) == (20,)
        result = make_trainer(schema, small(), strategy).step(new, [old])
        assert result.old_R is not None
        assert (~result.old_R.isnan()).nonzero()[:, 0].tolist() == picked.tolist()

    def test_the_step_is_that_of_new_and_picked_events(self, schema):
        new, old, plain = events(6, 1), events(20, 2), small()
        trainer = make_trainer(schema, small(), InterferedReplay(candidates=4))
        result = make_trainer(schema, small(), InterferedReplay(candidates=4)).step(new, [old])
        assert result.old_R is not None
        both = concat([new, old[~result.old_R.isnan()]])
        expected = gradient(plain, mean(cross_entropy(plain, both), both))
        assert torch.allclose(stepped(trainer, new, [old]), expected, atol=1e-6)

    def test_the_virtual_step_is_seen_in_low_precision_too(self, schema):
        """Which keeps copies of the weights: with stale ones no loss would rise, and the first would be picked."""
        new, old = events(40, 1, (0,)), events(20, 2)
        trainer = make_trainer(schema, small(), InterferedReplay(candidates=4), precision="bf16")
        trainer.update.optimizer.param_groups[0]["lr"] = 5.0
        result = trainer.step(new, [old])
        assert result.old_R is not None
        assert (old.label_B[~result.old_R.isnan()] != 0).all()
        assert (old.label_B == 0).any()

    def test_events_without_a_label_are_picked_last(self, schema):
        old = events(20, 2)
        old.weight_B[:16] = 0
        result = make_trainer(schema, small(), InterferedReplay()).step(events(6, 1), [old])
        assert result.old_R is not None
        assert (~result.old_R.isnan()).nonzero()[:, 0].tolist() == [16, 17, 18, 19]


class TestAGem:
    @pytest.mark.parametrize("against", [True, False])
    def test_what_goes_against_old_events_is_taken_away(self, schema, against):
        new, plain = events(6, 1, (0,)), small()
        old = Examples(new.features, torch.full((6,), 1 if against else 0), new.weight_B)
        g, reference = (gradient(plain, mean(cross_entropy(plain, each), each)) for each in (new, old))
        assert (g @ reference < 0) == against
        expected = g - (g @ reference) / (reference @ reference) * reference if against else g
        found = stepped(make_trainer(schema, small(), ProjectedGradient()), new, [old])
        assert torch.allclose(found, expected, atol=1e-6)
        assert not against or abs(float(found @ reference)) < 1e-5

    def test_the_loss_scale_cancels_out(self):
        assert torch.allclose(self.projected(1), self.projected(1024), atol=1e-6)

    def projected(self, scale):
        """Return the gradient of a step by hand, under a loss scale."""
        model, strategy = small(), ProjectedGradient()
        strategy.setup(learner_of(model))
        new, old = events(6, 1, (0,)), events(6, 1, (1,))
        whole = StepWeights(new.weight_B.sum(), [old.weight_B.sum()])
        strategy.reset()
        loss = strategy.loss(lambda features: model(features["x"]), new, [old], whole)
        strategy.backward(loss, lambda total: total * scale)
        for each in model.parameters():
            assert each.grad is not None
            each.grad /= scale
        strategy.transform_gradients(scale)
        return torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])

    def test_an_overflow_of_the_old_events_gradient_is_seen_in_the_new_ones(self):
        """So that the scaler halves its scale."""
        model, strategy = small(), ProjectedGradient()
        strategy.setup(learner_of(model))
        new, old = events(6, 1), events(6, 2)
        old.weight_B[0] = math.inf
        strategy.reset()
        whole = StepWeights(new.weight_B.sum(), [torch.tensor(6.0)])
        strategy.backward(strategy.loss(lambda features: model(features["x"]), new, [old], whole), lambda total: total)
        assert all(not each.grad.isfinite().all() for each in model.parameters())


class TestEwc:
    def test_the_penalty_and_the_fisher_information_are_those_of_the_paper(self, schema):
        strategy, plain = ElasticWeights(strength=3.0, decay=0.5, every=2), small()
        trainer = make_trainer(schema, small(), strategy)
        weights = list(plain.parameters())
        fisher, anchor, squares = torch.tensor(0.0), torch.tensor(0.0), []
        for step in range(6):
            new = events(5, step)
            now = nn.utils.parameters_to_vector(weights).detach()
            penalty = 3.0 * fisher * (now - anchor) if step >= 2 else 0.0
            down = gradient(plain, mean(cross_entropy(plain, new), new)) + penalty
            assert torch.allclose(stepped(trainer, new, []), down, atol=1e-5)
            nn.utils.vector_to_parameters(now - 0.1 * down, weights)
            squares.append(gradient(plain, cross_entropy(plain, new[:1]).sum()).square())
            if step % 2:
                fisher, squares = 0.5 * fisher + torch.stack(squares).mean(dim=0), []
                anchor = nn.utils.parameters_to_vector(weights).detach()

    def test_an_event_whose_squared_gradient_overflows_does_not_spoil_it_for_good(self, schema):
        strategy = ElasticWeights(every=1)
        trainer = make_trainer(schema, nn.Sequential(nn.Linear(3, 3)), strategy)
        new = events(5, 1)
        new.features["x"][0] = 3e20
        new.label_B[0] = trainer.model(new.features["x"])[0].argmin()
        strategy.after_step(new, torch.empty(0))
        assert all(each.isfinite().all() for each in strategy.tensors().values())
        assert trainer.step(events(5, 2)).finite

    def test_a_placeholder_event_has_no_weight(self, schema):
        strategy = ElasticWeights()
        make_trainer(schema, small(), strategy)
        strategy.after_step(replace(events(1, 1), weight_B=torch.zeros(1)), torch.empty(0))
        assert not any(each.any() for each in strategy.tensors().values())

    def test_it_consolidates_when_the_stream_drifts(self, schema):
        strategy = ElasticWeights()
        trainer = make_trainer(schema, small(), strategy)
        trainer.step(events(5, 1))
        assert not any(name.startswith("anchor") for name in strategy.tensors())
        trainer.on_drift()
        assert torch.equal(strategy.tensors()["anchor.0"], trainer.snapshot()["0.weight"])

    @pytest.mark.slow
    def test_it_has_less_forgetting_than_plain_training(self, schema):
        kept = []
        for strategy in (ElasticWeights(strength=100, every=100), NoReplay()):
            trainer = make_trainer(schema, small(), strategy, optimizer={"name": "sgd", "lr": 0.05})
            for step in range(200):
                x = torch.randn(12, 3, generator=torch.Generator().manual_seed(step))
                index = 0 if step < 100 else 1
                trainer.step(Examples({"x": x}, (x[:, index] > 0).long(), torch.ones(12)))
            x = torch.randn(500, 3, generator=torch.Generator().manual_seed(1000))
            kept.append((trainer.model(x).argmax(dim=1) == (x[:, 0] > 0).long()).float().mean().item())
        assert kept[0] > kept[1] + 0.05


class TestLwf:
    def test_outputs_are_held_to_those_of_the_snapshot(self, schema):
        trainer = make_trainer(schema, small(), Distillation(strength=0.5, temperature=3.0, every=2))
        for step in range(2):
            trainer.step(events(5, step))
        teacher, plain = small(), small()
        teacher.load_state_dict(trainer.snapshot())
        trainer.step(events(5, 2))
        plain.load_state_dict(trainer.snapshot())
        new = events(5, 3)
        target = (teacher(new.features["x"]).detach() / 3).softmax(dim=1)
        output = (plain(new.features["x"]) / 3).log_softmax(dim=1)
        losses = cross_entropy(plain, new) - 0.5 * (target * output).sum(dim=1)
        assert torch.allclose(stepped(trainer, new, []), gradient(plain, mean(losses, new)), atol=1e-6)

    def test_the_snapshot_has_its_own_running_statistics(self, schema):
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        trainer = make_trainer(schema, model, Distillation(every=1))
        trainer.step(events(8, 1))
        before = trainer.strategy.tensors()["1.running_mean"]
        learned = {**trainer.strategy.tensors()}
        trainer.strategy._teacher_output(events(8, 2))  # type: ignore[attr-defined]
        assert torch.equal(learned["1.running_mean"], before)
        assert torch.equal(trainer.snapshot()["1.running_mean"], before)
        assert model.training


class TestClassMeans:
    def seen(self, trainer):
        parts = [events(7, step, (0, 2)) for step in range(9)]
        for part in parts:
            trainer.step(part)
        whole = concat(parts)
        return (
            trainer.model[:3](whole.features["x"]).detach().double().numpy(),
            whole.label_B.numpy(),
            (whole.weight_B.double().numpy()),
        )

    def test_slda_is_linear_discriminant_analysis(self, schema):
        trainer = make_trainer(schema, small(), StreamingDiscriminant(shrinkage=0.01))
        z, y, w = self.seen(trainer)
        means = np.array([np.average(z[y == c], axis=0, weights=w[y == c]) for c in (0, 2)])
        centred = z - means[y // 2]
        covariance = (centred * w[:, None]).T @ centred / w.sum()
        inverse = np.linalg.inv(0.99 * covariance + 0.01 * np.eye(8))
        state = trainer.snapshot()
        assert np.allclose(state["3.weight"][[0, 2]].numpy(), means @ inverse, atol=1e-3)
        bias = -0.5 * np.einsum("cd,de,ce->c", means, inverse, means)
        assert np.allclose(state["3.bias"][[0, 2]].numpy(), bias, atol=1e-3)

    def test_a_last_layer_that_is_frozen_is_refused_and_a_frozen_body_is_not(self, schema):
        model = small()
        model[:3].requires_grad_(False)
        self.seen(make_trainer(schema, model, NearestClassMean()))
        model = small()
        model[3].bias.requires_grad_(False)
        with pytest.raises(SettingsError, match="sets the weights of the linear layer 3, and the factory has frozen"):
            make_trainer(schema, model, NearestClassMean())

    def test_ncm_says_the_class_whose_mean_is_nearest(self, schema):
        trainer = make_trainer(schema, small(), NearestClassMean())
        z, y, w = self.seen(trainer)
        means = np.array([np.average(z[y == c], axis=0, weights=w[y == c]) for c in (0, 2)])
        asked = events(50, 99).features["x"]
        z = trainer.model[:3](asked).detach().double().numpy()
        nearest = np.square(z[:, None] - means).sum(axis=2).argmin(axis=1) * 2
        assert trainer.model(asked).argmax(dim=1).tolist() == nearest.tolist()

    @pytest.mark.parametrize("kind", [NearestClassMean, StreamingDiscriminant])
    def test_what_is_added_up_does_not_depend_on_the_number_of_ranks(self, schema, kind):
        """So that a checkpoint may be gone on from with another; here the other rank of two has nothing to add."""
        alone, one_of_two = (make_trainer(schema, small(), kind()) for _ in range(2))

        def average(parts):
            for part in parts:
                part.div_(2)

        strategy = one_of_two.strategy
        strategy.learner = replace(strategy.learner, reduce=average, ranks=2)
        for trainer in (alone, one_of_two):
            trainer.step(events(20, 1))
        found = strategy.tensors()
        assert found
        assert all(torch.equal(found[name], value) for name, value in alone.strategy.tensors().items())

    @pytest.mark.parametrize("kind", [NearestClassMean, StreamingDiscriminant])
    def test_all_but_the_last_layer_stays_as_it_was_built(self, schema, kind):
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        trainer = make_trainer(schema, model, kind())
        trainer.step(events(8, 1))
        changed = [name for name, value in trainer.snapshot().items() if not torch.equal(value, before[name])]
        assert changed == ["3.weight", "3.bias"]

    def test_a_layer_that_does_not_give_the_logits_of_the_embedding_is_refused(self, schema):
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Identity(), nn.ReLU(), nn.Linear(8, 3))
        with pytest.raises(SettingsError, match="not that of the linear layer 4 on the embedding"):
            make_trainer(schema, model, NearestClassMean())
        with pytest.raises(
            SettingsError, match="head = '7' has to be a linear layer with a bias; the model's are 0, 3"
        ):
            make_trainer(schema, small(), NearestClassMean(head="7"))

    @pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.kind.embeds])
    def test_a_model_without_a_named_embedding_is_refused(self, name):
        with pytest.raises(SettingsError, match=f'"{name}" compares embeddings, and model.embedding is ""'):
            build_strategy(StrategySettings(name=name), ModelSettings(factory="m:build"), Classification())


def learner_of(model):
    return StrategyContext(model, Classification(), lambda _: None, lambda: 0.1, lambda each: [each], {})


class TestSettings:
    def test_a_name_alone_is_a_strategy_with_its_defaults(self):
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
    def test_an_argument_that_does_not_fit_is_named(self, strategy, message):
        settings = StrategySettings.model_validate(strategy)
        with pytest.raises(SettingsError, match=f"learner.strategy: {message}"):
            build_strategy(settings, ModelSettings(factory="m:build"), Classification())

    @pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.tasks])
    def test_a_strategy_for_classes_refuses_a_regression(self, name):
        model = ModelSettings(factory="m:build", task="regression", embedding="2")
        with pytest.raises(SettingsError, match=r'made for model.task = "classification".* and that is "regression"'):
            build_strategy(StrategySettings(name=name), model, Regression())

    @pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.tasks])
    def test_a_strategy_for_classes_refuses_several_of_an_event(self, name):
        model = ModelSettings(factory="m:build", task="multilabel", embedding="2")
        with pytest.raises(SettingsError, match=r'made for model.task = "classification".* and that is "multilabel"'):
            build_strategy(StrategySettings(name=name), model, MultiLabel())

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_what_the_settings_say_of_a_strategy_is_so(self, name):
        assert StrategySettings.model_validate({"name": name}).kind is STRATEGIES[name].kind
