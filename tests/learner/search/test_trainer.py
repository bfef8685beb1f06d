"""A trainer with challengers: the model without a promotion, with one, after a restart, and after faults."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from learner.compatibility import conflicts, facts
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.model.device import choose_precision
from learner.model.faulty_events import RaisingEventsError
from learner.model.task import Classification
from learner.search.trainer import SearchingTrainer
from learner.sections.search import LR, SearchSettings
from learner.state_dir.origin import VersionOrigin
from learner.state_dir.search.control import CONTROL, write_control
from learner.strategies.examples import Examples
from learner.strategies.registry import STRATEGIES
from learner.training.trainer import Trainer
from replay.config import ReplaySettings
from tests.learner.learner_bench import CPU, LearnerBench, small_model

Make = Callable[..., Trainer]


@pytest.fixture
def make(schema: Schema, tmp_path: Path) -> Make:
    """Trainers of the same model with dropout, `make(lr, search)`; a plain one without `search`."""

    def trainer(lr: float, search: Mapping[str, Any] | None = None, **learner: Any) -> Trainer:
        torch.manual_seed(0)
        settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": lr}, **learner})
        arguments: dict[str, Any] = {
            "model": small_model(),
            "task": Classification(),
            "strategy": STRATEGIES["er"](),
            "schema": schema,
            "settings": settings,
            "device": CPU,
            "precision": choose_precision("fp32", CPU),
        }
        if search is None:
            return Trainer(**arguments)
        return SearchingTrainer(SearchSettings.model_validate(search), 0, tmp_path, STRATEGIES["er"], **arguments)

    return trainer


def batch(trainer: Trainer, step: int) -> Examples:
    """32 events whose class is the largest of three numbers."""
    x = np.random.default_rng(step).normal(size=(32, 3)).astype(np.float32)
    return trainer.examples({"feature.x": x, "label": x.argmax(axis=1), "weight": np.ones(32, np.float32)})


def train(trainer: Trainer, steps: range) -> float:
    """Return the mean score; dropout is that of the first step's number."""
    torch.default_generator.manual_seed(steps.start)  # not those of all devices, for which torch formats the stack
    return sum(trainer.step(batch(trainer, step), [batch(trainer, step + 10**6)]).score for step in steps) / (
        32 * max(1, len(steps))
    )


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def pool_of(trainer: Trainer) -> Any:
    assert isinstance(trainer, SearchingTrainer)
    return trainer._pool


def test_without_a_promotion_weights_and_random_numbers_are_those_without_a_search(make: Make) -> None:
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
def test_a_better_challenger_becomes_the_model(make: Make) -> None:
    plain, searching = make(1e-6), make(1e-6, {"promote": "auto"})
    pool, steps = pool_of(searching), 0
    while not pool.outcomes["promoted"]:
        better = {each.number: searching._trainers[each.slot] for each in pool.live}  # type: ignore[attr-defined]
        train(searching, range(steps, steps + 1))
        steps += 1
        assert steps < 300
    winner = next(each for each in pool.history if each.outcome == "promoted")
    assert same(searching.snapshot(), better[winner.number].snapshot())
    assert same(searching.optimizer_state(), better[winner.number].optimizer_state())
    assert searching.found == winner.values
    assert searching.update.rate() == searching.found[LR]
    train(searching, range(steps, steps + 30))
    assert train(searching, range(1000, 1010)) > train(plain, range(1000, 1010)) + 0.1


@pytest.mark.slow
def test_alert_leaves_the_model_and_says_what_to_do(make: Make) -> None:
    trainer = make(1e-6, {"promote": "alert", "challengers": 1})
    step = 0
    while trainer.warning is None:
        train(trainer, range(step, step + 1))
        step += 1
        assert step < 500
    assert '"anabranch search promote' in trainer.warning
    said = trainer.warning
    train(trainer, range(step, step + 1))
    pool_of(trainer).history.clear()  # others have ended since
    assert (trainer.warning, trainer.found) == (said, {})
    report = trainer.search_report
    assert report is not None
    assert [each.outcome for each in report.history] == ["better"]


@pytest.mark.slow
def test_a_restored_search_goes_on_bit_for_bit(make: Make) -> None:
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
def test_a_checkpoint_of_a_learner_has_the_search(make_bench: Callable[..., LearnerBench]) -> None:
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


def test_a_version_says_what_was_found_by_then(make_bench: Callable[..., LearnerBench]) -> None:
    bench = make_bench(4, search={}, learner={"optimizer": {"name": "adam", "lr": 1e-5}})
    bench.publisher._origin = VersionOrigin(seed=0, settings={}, code={}, packages={}, device="cpu", resumed_from=None)
    bench.run()
    pool_of(bench.trainer).take({LR: 0.01})
    bench.finish()
    origin = bench.versions.manifest(max(bench.versions.numbers())).origin
    assert origin is not None
    assert origin.found == {LR: 0.01}


def test_a_checkpoint_without_a_search_begins_one_and_the_other_way_round(make: Make) -> None:
    plain, searching = make(1e-3), make(1e-3, {})
    for trainer in (plain, searching):
        train(trainer, range(3))
    for source, target in ((plain, make(1e-3, {})), (searching, make(1e-3))):
        target.restore(source.tensors(), json.loads(json.dumps(source.state())))
        assert same(source.snapshot(), target.snapshot())
        train(target, range(3, 6))


def test_a_challenger_that_is_not_finite_ends(make: Make) -> None:
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
def test_a_challenger_that_fails_ends_and_the_model_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str
) -> None:
    trainer = make(1e-3, {"challengers": 1})
    train(trainer, range(1))

    def fail(*_arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(trainer._trainers[0], "step_without_features", fail)  # type: ignore[attr-defined]
        train(trainer, range(1, 2))
    assert pool_of(trainer).outcomes == {outcome: 1}
    plain = make(1e-3)
    for step in range(2):
        train(plain, range(step, step + 1))
    assert same(plain.snapshot(), trainer.snapshot())


def test_a_promotion_for_which_there_is_no_memory_ends_the_challenger(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, plain = make(1e-3, {"challengers": 1, "promote": "auto"}), make(1e-3)
    train(trainer, range(1))

    def fail(*_arguments: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(pool_of(trainer), "observe", lambda *_: True)
    monkeypatch.setattr("learner.search.trainer.copy_trainer", fail)
    train(trainer, range(1, 2))
    assert pool_of(trainer).outcomes["no_memory"]
    for step in range(2):
        train(plain, range(step, step + 1))
    assert same(plain.snapshot(), trainer.snapshot())


def test_all_that_are_better_at_once_are_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(1e-3, {"challengers": 2})
    monkeypatch.setattr(pool_of(trainer), "observe", lambda *_: True)
    train(trainer, range(1))
    assert pool_of(trainer).outcomes == {"better": 2}
    assert not pool_of(trainer).live


def test_no_lease_begins_while_the_learner_is_behind(make: Make) -> None:
    trainer, behind = make(1e-3, {}), [True, False]
    trainer.set_is_behind(lambda: behind[0])
    train(trainer, range(2))
    assert not pool_of(trainer).challengers
    behind.pop(0)
    train(trainer, range(2, 3))
    assert pool_of(trainer).live


def test_events_on_which_the_model_raises_are_named_as_without_a_search(make: Make) -> None:
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


def test_a_step_of_the_model_that_is_not_finite_teaches_no_challenger(make: Make) -> None:
    trainer = make(1e-3, {"challengers": 1})
    train(trainer, range(2))
    before = trainer._trainers[0].snapshot()  # type: ignore[attr-defined]
    spoiled = batch(trainer, 2)
    spoiled.features["x"][0] = math.nan
    assert not trainer.step(spoiled).finite
    assert same(before, trainer._trainers[0].snapshot())  # type: ignore[attr-defined]


class TestControl:
    """What a person writes into `search.json`."""

    @pytest.fixture
    def trainer(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> Trainer:
        monkeypatch.setattr("learner.state_dir.search.control._EVERY_SECONDS", 0.0)
        trainer = make(1e-3, {})
        train(trainer, range(2))
        return trainer

    def test_a_pin_ends_all_challengers_and_unpin_begins_again(self, trainer: Trainer, tmp_path: Path) -> None:
        write_control(tmp_path, pinned=True)
        train(trainer, range(2, 10))
        report = trainer.search_report
        assert report is not None
        assert (report.pinned, report.challengers, report.outcomes) == (True, [], {"stopped": 4})
        write_control(tmp_path, pinned=False)
        train(trainer, range(10, 12))
        assert pool_of(trainer).live

    def test_settings_are_taken_once(self, trainer: Trainer, make: Make, tmp_path: Path) -> None:
        write_control(tmp_path, values={LR: 0.02}, pinned=True)
        train(trainer, range(2, 5))
        assert trainer.found == {LR: 0.02}
        assert trainer.update.rate() == 0.02
        resumed = make(1e-3, {})
        resumed.restore(trainer.tensors(), json.loads(json.dumps(trainer.state())))
        pool_of(resumed).take({LR: 0.01})
        train(resumed, range(5, 7))
        assert resumed.found == {LR: 0.01}

    def test_a_damaged_file_is_reported_and_the_model_goes_on(self, trainer: Trainer, tmp_path: Path) -> None:
        (tmp_path / CONTROL).write_text("{")
        train(trainer, range(2, 4))
        assert trainer.warning is not None
        assert "delete it, and repeat the command" in trainer.warning
        (tmp_path / CONTROL).unlink()
        write_control(tmp_path, pinned=True)
        train(trainer, range(4, 6))
        assert trainer.warning is None
        assert pool_of(trainer).pinned

    def test_a_command_counts_that_is_repeated_after_the_file_was_deleted(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        for step, rate in enumerate((0.02, 0.03), 2):
            write_control(tmp_path, values={LR: rate})
            train(trainer, range(step, step + 1))
            assert trainer.found == {LR: rate}
            (tmp_path / CONTROL).unlink()


@pytest.mark.parametrize(
    "learner",
    [{"replicas": 2}, {"sharding": "zero1"}, {"compile": True}, {"graphs": True}, {"strategy": "ewc"}],
    ids=lambda learner: next(iter(learner)),
)
def test_what_does_not_go_with_a_search_is_refused(learner: dict[str, Any]) -> None:
    settings = LearnerSettings.model_validate(learner)
    said = [sentence for _, sentence in conflicts(facts(settings, ReplaySettings(), searches=True))]
    assert any("take [search] out" in sentence for sentence in said)
    assert not list(conflicts(facts(LearnerSettings(), ReplaySettings(), searches=True)))


def test_module_is_copied_whole(make: Make) -> None:
    trainer = make(1e-3, {"challengers": 2})
    copies: list[nn.Module] = [each.model for each in trainer._trainers]  # type: ignore[attr-defined]
    assert len({id(weight) for model in (trainer.model, *copies) for weight in model.parameters()}) == 3 * len(
        list(trainer.model.parameters())
    )
