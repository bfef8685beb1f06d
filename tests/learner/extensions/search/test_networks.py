"""Challengers with their own networks: built, taught, compared, too slow, after a restart, and after faults."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import ModelError
from anabranch.learner.extensions.search.extension import ChallengerSearch
from anabranch.learner.extensions.search.networks import NETWORK_TEACHING, LatencyBound, NetworkSpec, taught
from anabranch.learner.extensions.search.pool import CAUGHT_UP, TEACHING
from anabranch.learner.extensions.search.trainers import ChallengerTrainers
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.pipeline import ServedSettings
from anabranch.learner.settings.search import LR, SearchSettings
from anabranch.learner.state_dir.search_control import write_control
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.strategies.teacher_loss import TeacherLoss
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.learner.extensions.search.test_trainer import pool_of, same, search_of
from tests.learner.learner_bench import CPU, small_model

WIDTH, DEPTH = "model.args.width", "model.args.depth"
WIDER = {"challengers": 1, "share": 0.5, "space": {WIDTH: (1, 17)}}


def mlp(width, depth=1):
    """`depth` hidden layers."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), *hidden, nn.Dropout(0.1), nn.Linear(width, 3))


class Made:
    """What a trainer was made of, for another one."""

    def __init__(self, schema, path):
        self.schema, self.path = schema, path
        self.built: list[Mapping[str, Any]] = []
        self.build: Callable[..., nn.Module] = mlp

    def trainer(self, search, width=1, latency=None, **learner):
        """A plain trainer without `search`."""
        torch.manual_seed(0)
        settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": 0.01}, **learner})
        setup = TrainingSetup(
            mlp(width), Classification(), STRATEGIES["er"](), self.schema, settings, CPU, choose_precision("fp32", CPU)
        )
        if search is None:
            return Trainer(setup)

        def build(args):
            self.built.append(args)
            return self.build(**args)

        spec = NetworkSpec(
            {"width": width, "depth": 1}, build, TeacherLoss(Classification(), *NETWORK_TEACHING), latency
        )
        chosen = SearchSettings.model_validate(search)
        return Trainer(setup, wrappers=[ChallengerSearch(chosen, 0, self.path, setup, STRATEGIES["er"], spec)])


@pytest.fixture
def made(schema, tmp_path):
    return Made(schema, tmp_path)


def batch(trainer, step):
    """32 events whose class is the largest of three numbers."""
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(step)).numpy()
    return trainer.examples({"feature.x": x, "label": x.argmax(axis=1), "weight": x[:, 0] * 0 + 1})


def train(trainer, steps):
    torch.default_generator.manual_seed(steps.start)  # not those of all devices, for which torch formats the stack
    for step in steps:
        assert trainer.step(batch(trainer, step), [batch(trainer, step + 10**6)]).finite


def train_until(trainer, done, most=2500):
    """Return the number of steps."""
    for step in range(most):
        if done():
            return step
        train(trainer, range(step, step + 1))
    raise AssertionError(pool_of(trainer).state())


def networks_of(trainer):
    return search_of(trainer)._trainers


@pytest.mark.slow
def test_a_wider_network_catches_up_and_is_reported_and_the_model_is_as_without_it(made):
    plain, searching = made.trainer(None), made.trainer(WIDER)
    steps = train_until(searching, lambda: search_of(searching).warning)
    train(plain, range(1))
    for step in range(1, steps):
        train(plain, range(step, step + 1))
    assert all(same(each, searching.tensors()[part]) for part, each in plain.tensors().items())
    report = search_of(searching).report
    assert report is not None
    better = next(each for each in report.history if each.outcome == "better")
    assert better.values[WIDTH] > 1
    assert CAUGHT_UP <= better.taught < better.taught + better.steps <= report.steps
    width = f"{better.values[WIDTH]:.0f}"
    assert search_of(searching).warning == (
        f"challenger {better.number} is better than the model, with {WIDTH} = {width}; a learner keeps its network: "
        f"set width = {width} in [model].args of a new pipeline, which the versions of this one can teach"
    )
    assert (searching.found, report.values, report.given) == ({}, {WIDTH: 1.0}, {WIDTH: 1.0})


def test_a_network_has_the_models_tensors_of_the_same_name_and_shape_and_keeps_its_weights(made):
    trainer = made.trainer({"challengers": 1, "space": {DEPTH: (1, 4)}}, width=8)
    train(trainer, range(3))
    before = {name: value.clone() for name, value in trainer.snapshot().items()}
    networks = networks_of(trainer)
    (challenger,) = pool_of(trainer).live
    pool_of(trainer).end(challenger, "no_better")
    challenger.number = 99
    assert networks.begin(challenger) is None
    own = networks[challenger].snapshot()
    taken = {name for name, value in before.items() if name in own and own[name].shape == value.shape}
    assert "0.weight" in taken
    assert taken < own.keys()
    assert all(torch.equal(own[name], before[name]) for name in taken)
    networks.keep([])
    assert not networks.has(challenger)


def test_a_built_network_depends_on_its_number_and_no_generator_moves(made):
    first = []
    for _ in range(2):
        trainer = made.trainer(WIDER)
        torch.manual_seed(5)
        torch.rand(len(first))
        state = torch.get_rng_state()
        (challenger,) = pool_of(trainer).begin()
        assert networks_of(trainer).begin(challenger) is None
        assert torch.equal(state, torch.get_rng_state())
        first.append(networks_of(trainer)[challenger].snapshot())
    assert same(*first)


def test_the_models_outputs_teach_and_leave_it_as_it_was(made):
    trainer = made.trainer(WIDER, width=4)
    events, state = batch(trainer, 0), {name: value.clone() for name, value in trainer.snapshot().items()}
    given = taught(events, trainer.model, trainer.runner)
    assert trainer.model.training
    with torch.no_grad():
        expected = trainer.model.eval()(events.features["x"])
    trainer.model.train()
    assert given.teacher_B is not None
    assert torch.equal(given.teacher_B, expected)
    assert given.labelled_B is not None
    assert given.labelled_B.all()
    assert given.taught_B is events.weight_B
    assert same(state, trainer.snapshot())


@pytest.mark.slow
def test_it_has_a_teacher_until_the_last_steps_before_it_is_compared(made, monkeypatch):
    trainer, steps = made.trainer(WIDER), []
    whole = ChallengerTrainers._taught

    def counted(self, *events):
        steps.append(pool_of(trainer).step)
        return whole(self, *events)

    monkeypatch.setattr(ChallengerTrainers, "_taught", counted)
    train_until(trainer, lambda: pool_of(trainer).history)
    (ended,) = pool_of(trainer).history
    assert steps[0] == 1
    assert len(steps) == ended.taught - CAUGHT_UP * (ended.taught // TEACHING)


@pytest.mark.slow
def test_a_restored_search_goes_on_bit_for_bit(made):
    """Also with a network that waits for its next lease."""
    search = {**WIDER, "challengers": 2, "space": {WIDTH: (1, 17), LR: (1e-4, 0.1)}, "share": 0.4}
    first = made.trainer(search)
    train_until(first, lambda: len(pool_of(first).live) == 2 and pool_of(first).step > 5)
    waits = next(each for each in pool_of(first).live if each.network)
    pool_of(first)._wait(waits)
    second = made.trainer(search)
    second.restore(
        {part: {name: value.clone() for name, value in tensors.items()} for part, tensors in first.tensors().items()},
        json.loads(json.dumps(first.state())),
    )
    assert networks_of(second).has(waits)
    for each in (first, second):
        train(each, range(100, 140))
    assert any(each.network and each.slot is not None for each in pool_of(first).live)
    assert first.state() == second.state()
    parts, others = first.tensors(), second.tensors()
    assert parts.keys() == others.keys()
    assert all(same(parts[name], others[name]) for name in parts)


@pytest.mark.slow
def test_a_learner_resumes_its_networks_from_a_checkpoint(make_bench):
    """What came after the checkpoint is lost, as after a kill, and comes again."""

    def build(args):
        return nn.Sequential(small_model(), nn.ReLU(), mlp(args["width"]))

    options = {
        "search": {**WIDER, "space": {WIDTH: (4, 36)}},
        "networks": NetworkSpec({"width": 4}, build, TeacherLoss(Classification(), *NETWORK_TEACHING)),
        "learner": {"optimizer": {"name": "adam", "lr": 1e-3}, "deterministic": True},
    }
    whole = make_bench(40, **options)
    whole.run()
    begun = make_bench(25, **options)
    begun.run()
    begun.finish()
    train(begun.trainer, range(3))
    begun.close()
    resumed = make_bench(40, **options)
    resumed.resume()
    resumed.run()
    (challenger,) = pool_of(whole.trainer).challengers
    assert challenger.taught
    assert whole.trainer.state() == resumed.trainer.state()
    for part, tensors in whole.trainer.tensors().items():
        assert same(tensors, resumed.trainer.tensors()[part]), part


def test_a_network_that_cannot_be_built_again_ends_and_the_model_goes_on(made):
    first = made.trainer(WIDER)
    train(first, range(3))
    tensors, state = first.tensors(), json.loads(json.dumps(first.state()))
    for build in (lambda **args: mlp(args["width"] + 1), _refuses):
        made.build = build
        second = made.trainer(WIDER)
        second.restore(tensors, state)
        assert pool_of(second).outcomes == {"raised": 1}
        assert not pool_of(second).live
        assert same(first.snapshot(), second.snapshot())


def test_a_checkpoint_of_other_arguments_ends_the_challengers(made):
    first = made.trainer(WIDER)
    train(first, range(3))
    for search in ({**WIDER, "space": {LR: (1e-4, 0.1)}}, {**WIDER, "space": {DEPTH: (1, 4)}}):
        second = made.trainer(search)
        second.restore(first.tensors(), json.loads(json.dumps(first.state())))
        assert pool_of(second).outcomes == {"stopped": 1}
        train(second, range(3, 5))


def _refuses(**args):
    raise ModelError(f"no network of {args}")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ModelError("it does not fit"), "raised"),
        (SettingsError("the optimizer refuses it"), "raised"),
        (RuntimeError("CUDA out of memory"), "no_memory"),
        (MemoryError(), "no_memory"),
    ],
)
def test_a_network_that_cannot_be_built_ends_and_others_are_not_tried_at_once(made, error, outcome):
    def fails(**_args):
        raise error

    plain, trainer = made.trainer(None), made.trainer(WIDER)
    made.build = fails
    for each in (plain, trainer):
        train(each, range(40))
    assert pool_of(trainer).outcomes == {outcome: len(made.built)}
    assert len(made.built) <= 3
    assert same(plain.snapshot(), trainer.snapshot())


def test_an_error_of_another_kind_is_raised(made):
    def fails(**_args):
        raise RuntimeError("a fault of this program")

    made.build = fails
    with pytest.raises(RuntimeError, match="a fault of this program"):
        train(made.trainer(WIDER), range(1))


def test_a_model_with_frozen_weights_is_refused(made, monkeypatch):
    whole = mlp

    def frozen(width):
        module = whole(width)
        module[0].requires_grad_(False)  # type: ignore[index]
        return module

    monkeypatch.setattr(f"{__name__}.mlp", frozen)
    with pytest.raises(ModelError, match="the model has frozen weights, which a checkpoint would not have"):
        made.trainer(WIDER)


def test_a_command_for_the_network_changes_nothing(made, monkeypatch, tmp_path):
    monkeypatch.setattr("anabranch.learner.state_dir.search_control._EVERY_SECONDS", 0.0)
    trainer = made.trainer({**WIDER, "space": {WIDTH: (1, 17), LR: (1e-4, 0.1)}})
    train(trainer, range(2))
    write_control(tmp_path, values={LR: 0.02, WIDTH: 9.0}, pinned=True)
    train(trainer, range(2, 4))
    assert pool_of(trainer).values == {WIDTH: 1.0, LR: 0.02}
    assert trainer.found == {LR: 0.02}
    assert not networks_of(trainer)._built  # none is kept without a challenger


class Clock:
    """Seconds that pass by the modules that run: each pass of one takes its time."""

    def __init__(self, *modules):
        self.now = 0.0
        for module, seconds in modules:
            module.register_forward_pre_hook(lambda _module, _input, seconds=seconds: self._pass(seconds))

    def _pass(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("model_ms", "network_ms", "slow"),
    [(1, 17, False), (1, 19, True), (30, 32, False), (30, 34, True), (30, 5, False)],
)
def test_a_network_is_too_slow_by_the_bound_and_by_the_model(schema, model_ms, network_ms, slow):
    model, network, yields = mlp(1), mlp(8), list[None]()
    clock = Clock((model, model_ms / 1e3), (network, network_ms / 1e3))
    bound = LatencyBound(ServedSettings(), schema, clock)
    sentence = bound.exceeded(model, network, CPU, lambda: yields.append(None))
    assert (sentence is not None) == slow
    assert yields
    assert network.training
    if sentence is not None:
        assert sentence.startswith(f"a pass of 1 rows takes {network_ms} ms, and the model's {model_ms} ms")


def test_a_network_that_is_slow_with_the_largest_batch_alone_is_too_slow(schema):
    model, network = mlp(1), mlp(8)
    clock = Clock((model, 0.001))
    network.register_forward_pre_hook(lambda _module, given: clock._pass(len(given[0]) / 1e3))
    bound = LatencyBound(ServedSettings(), schema, clock)
    sentence = bound.exceeded(model, network, CPU, bool)
    assert sentence is not None
    assert sentence.startswith("a pass of 64 rows takes 64 ms")


def test_a_network_that_has_no_memory_for_the_largest_batch_ends(made, schema):
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(8)

        def forward(self, x):
            if len(x) > 64:
                raise RuntimeError("CUDA out of memory")
            output: Tensor = self.body(x)
            return output

    made.build = lambda **_args: Large()
    bound = LatencyBound(ServedSettings(max_batch=65, slo=timedelta(hours=1)), schema, float)
    trainer = made.trainer(WIDER, latency=bound)
    train(trainer, range(1))
    assert pool_of(trainer).outcomes == {"no_memory": 1}
    assert not list(networks_of(trainer))


def test_too_slow_networks_end_before_they_are_taught(made, schema):
    ticks: Iterator[int] = iter(range(10**9))
    bound = LatencyBound(
        ServedSettings(max_batch=8, max_delay=timedelta(milliseconds=20)), schema, lambda: 2.0 ** next(ticks)
    )  # each pass takes longer
    plain, trainer = made.trainer(None), made.trainer(WIDER, latency=bound)
    for each in (plain, trainer):
        train(each, range(20))
    report = search_of(trainer).report
    assert report is not None
    outcomes = {each.outcome for each in report.history}
    assert outcomes <= {"too_slow"}
    assert all(each.taught == 0 for each in report.history)
    assert same(plain.snapshot(), trainer.snapshot())
