"""A trainer with challengers: the model without a promotion, with one, after a restart, and after faults."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import MemoryShortageError
from anabranch.learner.extensions.search.extension import ChallengerSearch
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.search import LR, SearchSettings
from anabranch.learner.state_dir.origin import VersionOrigin
from anabranch.learner.state_dir.search_control import CONTROL, write_control
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.learner.learner_bench import CPU, small_model
from tests.support.facts import facts_of


@pytest.fixture
def make(schema, tmp_path):
    """Trainers of the same model with dropout, `make(lr, search)`; a plain one without `search`."""

    def trainer(lr, search=None, **learner):
        torch.manual_seed(0)
        settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": lr}, **learner})
        setup = TrainingSetup(
            small_model(), Classification(), STRATEGIES["er"](), schema, settings, CPU, choose_precision("fp32", CPU)
        )
        if search is None:
            return Trainer(setup)
        chosen = SearchSettings.model_validate(search)
        return Trainer(setup, wrappers=[ChallengerSearch(chosen, 0, tmp_path, setup, STRATEGIES["er"])])

    return trainer


def batch(trainer, step):
    """32 events whose class is the largest of three numbers."""
    x = np.random.default_rng(step).normal(size=(32, 3)).astype(np.float32)
    return trainer.examples({"feature.x": x, "label": x.argmax(axis=1), "weight": np.ones(32, np.float32)})


def train(trainer, steps):
    """Return the mean score; dropout is that of the first step's number."""
    torch.default_generator.manual_seed(steps.start)  # not those of all devices, for which torch formats the stack
    return sum(trainer.step(batch(trainer, step), [batch(trainer, step + 10**6)]).score for step in steps) / (
        32 * max(1, len(steps))
    )


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def search_of(trainer):
    (search,) = trainer.wrappers
    assert isinstance(search, ChallengerSearch)
    return search


def pool_of(trainer):
    return search_of(trainer)._pool


def test_without_a_promotion_weights_and_random_numbers_are_those_without_a_search(make):
    plain, searching = make(1e-3), make(1e-3, {"promote": "alert"})
    for trainer in (plain, searching):
        train(trainer, range(12))
        trainer.after = torch.rand(4)  # type: ignore[attr-defined]
    assert pool_of(searching).trained > 12
    for part, tensors in plain.tensors().items():
        assert same(tensors, searching.tensors()[part]), part
    assert torch.equal(plain.after, searching.after)  # type: ignore[attr-defined]
    assert not searching.found


@pytest.mark.slow
def test_a_better_challenger_becomes_the_model(make):
    plain, searching = make(1e-6), make(1e-6, {"promote": "auto"})
    pool, steps = pool_of(searching), 0
    while not pool.outcomes["promoted"]:
        better = {each.number: search_of(searching)._trainers[each] for each in pool.live}
        train(searching, range(steps, steps + 1))
        steps += 1
        assert steps < 300
    winner = next(each for each in pool.history if each.outcome == "promoted")
    assert same(searching.snapshot(), better[winner.number].snapshot())
    assert same(searching.tensors()["optimizer"], better[winner.number].tensors()["optimizer"])
    assert searching.found == winner.values
    assert searching.update.rate() == searching.found[LR]
    train(searching, range(steps, steps + 30))
    assert train(searching, range(1000, 1010)) > train(plain, range(1000, 1010)) + 0.1


@pytest.mark.slow
def test_alert_leaves_the_model_and_says_what_to_do(make):
    trainer = make(1e-6, {"promote": "alert", "challengers": 1})
    step = 0
    while search_of(trainer).warning is None:
        train(trainer, range(step, step + 1))
        step += 1
        assert step < 500
    assert '"anabranch search promote' in search_of(trainer).warning
    said = search_of(trainer).warning
    train(trainer, range(step, step + 1))
    pool_of(trainer).history.clear()  # others have ended since
    assert (search_of(trainer).warning, trainer.found) == (said, {})
    report = search_of(trainer).report
    assert report is not None
    assert [each.outcome for each in report.history] == ["better"]


@pytest.mark.slow
def test_a_restored_search_goes_on_bit_for_bit(make):
    search = {"promote": "auto", "challengers": 3, "space": {LR: [1e-6, 1.0], "learner.max_grad_norm": [0.1, 10.0]}}
    first = make(1e-5, search)
    train(first, range(15))
    assert pool_of(first).live
    second = make(1e-5, search)
    second.restore(
        {part: {name: value.clone() for name, value in tensors.items()} for part, tensors in first.tensors().items()},
        json.loads(json.dumps(first.state())),
    )
    for each in (first, second):
        train(each, range(15, 160))
    assert pool_of(first).outcomes["promoted"]
    assert first.state() == second.state()
    parts, others = first.tensors(), second.tensors()
    assert parts.keys() == others.keys()
    assert all(same(parts[name], others[name]) for name in parts)


@pytest.mark.slow
def test_a_checkpoint_of_a_learner_has_the_search(make_bench):
    learner = {"optimizer": {"name": "adam", "lr": 1e-5}, "deterministic": True}
    options = {"search": {"promote": "auto"}, "learner": learner}
    whole = make_bench(60, **options)
    whole.run()
    begun = make_bench(25, **options)
    begun.run()
    begun.finish()
    begun.close()
    resumed = make_bench(60, **options)
    resumed.resume()
    resumed.run()
    assert whole.trainer.state() == resumed.trainer.state()
    for part, tensors in whole.trainer.tensors().items():
        assert same(tensors, resumed.trainer.tensors()[part]), part


def test_a_version_says_what_was_found_by_then(make_bench):
    bench = make_bench(4, search={}, learner={"optimizer": {"name": "adam", "lr": 1e-5}})
    bench.publisher._writer._origin = VersionOrigin(
        seed=0, settings={}, code={}, packages={}, device="cpu", resumed_from=None
    )
    bench.run()
    pool_of(bench.trainer).take({LR: 0.01})
    bench.finish()
    origin = bench.versions.manifest(max(bench.versions.numbers())).origin
    assert origin is not None
    assert origin.found == {LR: 0.01}


def test_a_checkpoint_without_a_search_begins_one_and_the_other_way_round(make):
    plain, searching = make(1e-3), make(1e-3, {})
    for trainer in (plain, searching):
        train(trainer, range(3))
    for source, target in ((plain, make(1e-3, {})), (searching, make(1e-3))):
        target.restore(source.tensors(), json.loads(json.dumps(source.state())))
        assert same(source.snapshot(), target.snapshot())
        train(target, range(3, 6))


def test_a_challenger_that_is_not_finite_ends(make):
    search = {"challengers": 2, "space": {LR: [1e-3, 1e30]}}
    learner = {"max_grad_norm": math.inf, "optimizer": {"name": "sgd", "lr": 1e-3}}
    plain, trainer = make(1e-3, **learner), make(1e-3, search, **learner)
    for each in (plain, trainer):
        train(each, range(40))
    assert pool_of(trainer).outcomes["not_finite"] >= 1
    assert same(plain.snapshot(), trainer.snapshot())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RaisingEventsError([0], "bad"), "raised"),
        (ValueError("weights that are no number"), "raised"),
        (MemoryShortageError("too little", undone=True), "no_memory"),
        (SettingsError("no room for the optimizer's state"), "no_memory"),
    ],
)
def test_a_challenger_that_fails_ends_and_the_model_goes_on(make, monkeypatch, error, outcome):
    trainer = make(1e-3, {"challengers": 1})
    train(trainer, range(1))

    def fail(*_arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(search_of(trainer)._trainers._copies[0], "step_without_features", fail)
        train(trainer, range(1, 2))
    assert pool_of(trainer).outcomes == {outcome: 1}
    plain = make(1e-3)
    for step in range(2):
        train(plain, range(step, step + 1))
    assert same(plain.snapshot(), trainer.snapshot())


def test_a_promotion_for_which_there_is_no_memory_ends_the_challenger(make, monkeypatch):
    trainer, plain = make(1e-3, {"challengers": 1, "promote": "auto"}), make(1e-3)
    train(trainer, range(1))

    def fail(*_arguments):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(pool_of(trainer), "observe", lambda *_: True)
    monkeypatch.setattr("anabranch.learner.extensions.search.trainers.copy_trainer", fail)
    train(trainer, range(1, 2))
    assert pool_of(trainer).outcomes["no_memory"]
    for step in range(2):
        train(plain, range(step, step + 1))
    assert same(plain.snapshot(), trainer.snapshot())


def test_all_that_are_better_at_once_are_reported(make, monkeypatch):
    trainer = make(1e-3, {"challengers": 2})
    monkeypatch.setattr(pool_of(trainer), "observe", lambda *_: True)
    train(trainer, range(1))
    assert pool_of(trainer).outcomes == {"better": 2}
    assert not pool_of(trainer).live


def test_no_lease_begins_while_the_learner_is_behind(make):
    trainer, behind = make(1e-3, {}), [True, False]
    search_of(trainer).is_behind = lambda: behind[0]
    train(trainer, range(2))
    assert not pool_of(trainer).challengers
    behind.pop(0)
    train(trainer, range(2, 3))
    assert pool_of(trainer).live


def test_events_on_which_the_model_raises_are_named_as_without_a_search(make):
    trainer = make(1e-3, {"challengers": 1})
    spoiled = batch(trainer, 0)
    spoiled.label_B[3] = 7  # of three classes
    with pytest.raises(RaisingEventsError) as raised:
        trainer.step(spoiled)
    assert list(raised.value.indices) == [3]
    assert not pool_of(trainer).outcomes
    pool = pool_of(trainer)
    begun = pool.step, [each.number for each in pool.live]
    train(trainer, range(1))
    assert (pool.step, [each.number for each in pool.live]) == begun, "the step is the same, without that event"
    train(trainer, range(1, 2))
    assert pool.step == begun[0] + 1


def test_a_step_of_the_model_that_is_not_finite_teaches_no_challenger(make):
    trainer = make(1e-3, {"challengers": 1})
    train(trainer, range(2))
    before = search_of(trainer)._trainers._copies[0].snapshot()
    spoiled = batch(trainer, 2)
    spoiled.features["x"][0] = math.nan
    assert not trainer.step(spoiled).finite
    assert same(before, search_of(trainer)._trainers._copies[0].snapshot())


class TestControl:
    """What a person writes into `search.json`."""

    @pytest.fixture
    def trainer(self, make, monkeypatch):
        monkeypatch.setattr("anabranch.learner.state_dir.search_control._EVERY_SECONDS", 0.0)
        trainer = make(1e-3, {})
        train(trainer, range(2))
        return trainer

    def test_a_pin_ends_all_challengers_and_unpin_begins_again(self, trainer, tmp_path):
        write_control(tmp_path, pinned=True)
        train(trainer, range(2, 10))
        report = search_of(trainer).report
        assert report is not None
        assert (report.pinned, report.challengers, report.outcomes) == (True, [], {"stopped": 4})
        write_control(tmp_path, pinned=False)
        train(trainer, range(10, 12))
        assert pool_of(trainer).live

    def test_settings_are_taken_once(self, trainer, make, tmp_path):
        write_control(tmp_path, values={LR: 0.02}, pinned=True)
        train(trainer, range(2, 5))
        assert trainer.found == {LR: 0.02}
        assert trainer.update.rate() == 0.02
        resumed = make(1e-3, {})
        resumed.restore(trainer.tensors(), json.loads(json.dumps(trainer.state())))
        pool_of(resumed).take({LR: 0.01})
        train(resumed, range(5, 7))
        assert resumed.found == {LR: 0.01}

    def test_a_damaged_file_is_reported_and_the_model_goes_on(self, trainer, tmp_path):
        (tmp_path / CONTROL).write_text("{")
        train(trainer, range(2, 4))
        assert search_of(trainer).warning is not None
        assert "delete it, and repeat the command" in search_of(trainer).warning
        (tmp_path / CONTROL).unlink()
        write_control(tmp_path, pinned=True)
        train(trainer, range(4, 6))
        assert search_of(trainer).warning is None
        assert pool_of(trainer).pinned

    def test_a_command_counts_that_is_repeated_after_the_file_was_deleted(self, trainer, tmp_path):
        for step, rate in enumerate((0.02, 0.03), 2):
            write_control(tmp_path, values={LR: rate})
            train(trainer, range(step, step + 1))
            assert trainer.found == {LR: rate}
            (tmp_path / CONTROL).unlink()


@pytest.mark.parametrize(
    "learner",
    [
        {"comm_hook": "fp16"},
        {"sharding": "zero1"},
        {"sync_every": 2},
        {"compile": True},
        {"graphs": True},
        {"strategy": "ewc"},
    ],
    ids=lambda learner: next(iter(learner)),
)
def test_what_does_not_go_with_a_search_is_refused(learner):
    settings = LearnerSettings.model_validate(learner)
    said = [sentence for _, sentence in conflicts(facts_of(learner=settings, search={}))]
    assert any("take [search] out" in sentence for sentence in said)
    assert not list(conflicts(facts_of(search={})))


def test_module_is_copied_whole(make):
    trainer = make(1e-3, {"challengers": 2})
    copies: list[nn.Module] = [each.model for each in search_of(trainer)._trainers]
    assert len({id(weight) for model in (trainer.model, *copies) for weight in model.parameters()}) == 3 * len(
        list(trainer.model.parameters())
    )
