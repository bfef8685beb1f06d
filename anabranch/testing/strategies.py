"""What every strategy promises. The subject of a check is a function that makes a new one.

Models of the checks have three features and three classes; a strategy that embeds gets the third module's output.
"""

import json
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Examples, concat
from anabranch.learner.model.task import TASKS, Classification, Task
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.base import Strategy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.checks import Check, NotPromisedError, expect

CPU = torch.device("cpu")
PLAIN = {"optimizer": {"name": "sgd", "lr": 0.1}, "max_grad_norm": math.inf}
ADAM = {"name": "adamw", "lr": 1e-2}
Make = Callable[[], Strategy]


def schema_of(label: dict[str, object]) -> Schema:
    """Return a schema of three numbers and a label."""
    features = {"x": {"dtype": "float32", "shape": [3]}}
    return Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", **label}}))


CLASSES = schema_of({"classes": 3})


def make_trainer(
    schema: Schema,
    model: nn.Module,
    strategy: Strategy,
    task: Task | None = None,
    device: torch.device = CPU,
    **settings: object,
) -> Trainer:
    """Return a trainer of plain SGD, unless `settings` of `[learner]` say otherwise."""
    options = LearnerSettings.model_validate({**PLAIN, **settings})
    embedding = Embedding(model, "2") if strategy.kind.embeds else None
    precision = choose_precision(options.precision, device)
    extended(strategy, model, schema, device)
    arguments = (model.to(device), task or Classification(), strategy, schema, options, device, precision)
    return Trainer(TrainingSetup(*arguments, embedding))


def extended(
    strategy: Strategy, model: nn.Module, schema: Schema, device: torch.device = CPU, embedding: str = "0"
) -> Strategy:
    """Let a strategy add to a model what it trains, as building a learner does; return the strategy."""
    converted = strategy.convert(model.to(device), ModelContext(device, schema, embedding))
    expect(converted is model, "convert returned another model: change the modules of the one that it gets")
    return strategy


def small(seed: int = 0) -> nn.Sequential:
    """Return a model of three features and classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 3))


def events(n: int, seed: int, classes: Sequence[int] = (0, 1, 2)) -> Examples:
    """Return n random events, with outputs that were kept with them."""
    generator = torch.Generator().manual_seed(seed)
    label_B = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
    x, said = (torch.randn(n, 3, generator=generator) for _ in range(2))
    return Examples({"x": x}, label_B, torch.rand(n, generator=generator) + 0.5, said)


def sampled_for(trainer: Trainer, n: int) -> list[Examples]:
    """Return old events for a step that replays n."""
    return [events(size, index) for index, size in enumerate(trainer.strategy.samples(n))]


class Stream:
    """Three well separated classes in turn, with all that was learned of them to rehearse."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.learned: list[Examples] = []

    def score(self, steps: int, rows: int = 12) -> float:
        """Learn, and return the share of the last events that was predicted."""
        found = 0.0
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            label_B = torch.arange(rows) % 3
            x = torch.eye(3)[label_B] + 0.1 * torch.randn(rows, 3, generator=generator)
            new = on(self.trainer.device, Examples({"x": x}, label_B, torch.ones(rows)))
            result = self.trainer.step(new, self._sampled(rows, generator))
            expect(result.finite, f"step {step} is not finite")
            self.learned.append(Examples(new.features, new.label_B, new.weight_B, result.output_B))
            found = result.score / rows
        return found

    def _sampled(self, rows: int, generator: torch.Generator) -> list[Examples]:
        samples = self.trainer.strategy.samples(rows) if self.learned else ()
        chosen = [torch.randint(len(self.learned), (n,), generator=generator).tolist() for n in samples]
        return [stacked([self.learned[index][index % rows : index % rows + 1] for index in each]) for each in chosen]


def on(device: torch.device, examples: Examples) -> Examples:
    """Return events on a device."""
    said = None if examples.output_B is None else examples.output_B.to(device)
    features = {name: value.to(device) for name, value in examples.features.items()}
    return Examples(features, examples.label_B.to(device), examples.weight_B.to(device), said)


def stacked(parts: list[Examples]) -> Examples:
    """Return all events of some parts, with their outputs."""
    said = [part.output_B for part in parts if part.output_B is not None]
    whole = concat(parts)
    return Examples(whole.features, whole.label_B, whole.weight_B, torch.cat(said))


def _for(make: Make, task: str) -> Strategy:
    strategy = make()
    if strategy.tasks and not any(issubclass(TASKS[task], TASKS[each]) for each in strategy.tasks):
        raise NotPromisedError(f"it is for {', '.join(sorted(strategy.tasks))} alone")
    return strategy


def _learns(make: Make, precision: str) -> None:
    trainer = make_trainer(CLASSES, small(), _for(make, "classification"), optimizer=ADAM, precision=precision)
    score = Stream(trainer).score(150)
    expect(score == 1, f"it predicts {score:.0%} of the events after 150 steps, not all")


def learns_a_separable_stream(make: Make) -> None:
    """150 steps of three classes that a line separates."""
    _learns(make, "fp32")


def learns_a_separable_stream_in_bf16(make: Make) -> None:
    """The same under autocast."""
    _learns(make, "bf16")


def takes_a_lone_event_with_old_ones_and_without(make: Make) -> None:
    """Old events may be none, or one, and so may new ones; a model may normalize batches."""
    for precision in ("fp32", "bf16"):
        strategy = _for(make, "classification")
        norm = nn.Identity() if strategy.kind.grows else nn.BatchNorm1d(8)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), norm, nn.ReLU(), nn.Linear(8, 3))
        trainer = make_trainer(CLASSES, model, strategy, precision=precision)
        old = sampled_for(trainer, 1)
        for given in ([], old, [events(1, 4) for _ in old]):
            sizes = [len(each) for each in given]
            expect(
                trainer.step(events(1, 1), given).finite, f"a step of 1 new event and {sizes} old ones is not finite"
            )


def repeats_a_step_that_is_not_finite(make: Make) -> None:
    """A step with an infinite feature changes nothing, and later steps are finite."""
    trainer = make_trainer(CLASSES, small(), _for(make, "classification"))
    old = sampled_for(trainer, 6)
    expect(trainer.step(events(6, 1), old).finite, "the first step is not finite")
    before = trainer.tensors()
    bad = events(6, 2)
    bad.features["x"][1] = math.inf
    expect(not trainer.step(bad, old).finite, "a step with an infinite feature counts as finite")
    for part, tensors in trainer.tensors().items():
        for key, value in tensors.items():
            kept = torch.equal(value, before[part][key])
            expect(kept, f"a step that is not finite has changed {part} {key}: reset() has to undo it")
    expect(trainer.step(events(6, 3), old).finite, "the step after one that is not finite is not finite either")


def replays_what_its_samples_bring(make: Make) -> None:
    """`kind.replays` says whether there are samples, and the losses of the old events are returned."""
    trainer = make_trainer(CLASSES, small(), _for(make, "classification"))
    old = sampled_for(trainer, 6)
    brought, replays = sum(map(len, old)), trainer.strategy.kind.replays
    expect(bool(old) == replays, f"kind.replays is {replays}, and samples(6) has {len(old)} samples")
    result = trainer.step(events(6, 1), old)
    selects = type(trainer.strategy).select is not Strategy.select
    fits = 0 < result.replayed <= brought if old and selects else result.replayed == brought
    expect(fits, f"a step with {brought} old events counts {result.replayed}")
    if old:
        expect(result.old_R is not None, "the losses of old events are missing from MicroBatchLoss.old")
        found = 0 if result.old_R is None else int((~result.old_R.isnan()).sum())
        expect(found == result.replayed, f"{found} of {result.replayed} old events have a loss")


def goes_on_from_a_checkpoint_bit_for_bit(make: Make) -> None:
    """`tensors` and `state` are all that a restart needs; the state is JSON."""
    trainer, other = (make_trainer(CLASSES, small(), _for(make, "classification"), optimizer=ADAM) for _ in range(2))
    Stream(trainer).score(30)
    trainer.strategy.gather()
    tensors = {part: {key: value.clone() for key, value in each.items()} for part, each in trainer.tensors().items()}
    generators = trainer.generators()
    other.restore(tensors, json.loads(json.dumps(trainer.state())))
    losses = []
    for each in (trainer, other):
        each.restore_generators(*generators)
        losses.append([each.step(events(12, seed), sampled_for(each, 12)).loss for seed in (1, 2)])
    expect(losses[0] == losses[1], f"two steps have the losses {losses[0]}, and {losses[1]} after a restart")
    for name, value in trainer.snapshot().items():
        expect(torch.equal(value, other.snapshot()[name]), f"{name} differs after a restart and two steps")


def _score(
    make: Make, name: str, schema: Schema, model: nn.Module, label: Callable[[Tensor], Tensor], lr: float, steps: int
) -> tuple[float, Strategy]:
    strategy = make()
    if strategy.tasks:
        raise NotPromisedError(f"it is for {', '.join(sorted(strategy.tasks))} alone")
    trainer = make_trainer(schema, model, strategy, TASKS[name](), optimizer={"name": "sgd", "lr": lr})
    learned: list[Examples] = []
    score = 0.0
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        new = Examples({"x": x}, label(x), torch.ones(8))
        old = [stacked([learned[-1]] * (n // 8)) for n in strategy.samples(8)] if learned else []
        result = trainer.step(new, old)
        learned.append(Examples(new.features, new.label_B, new.weight_B, result.output_B))
        score = result.score / 8
    return score, strategy


def learns_a_regression(make: Make) -> None:
    """One number, unless it is made for classes; old outputs that it holds on to make it slower."""
    torch.manual_seed(0)
    slope = torch.tensor([1.0, -2.0, 0.5])
    schema, model = schema_of({"dtype": "float32"}), nn.Linear(3, 1)
    score, strategy = _score(make, "regression", schema, model, lambda x: x @ slope + 1, 0.05, 200)
    expect(-score < (0.5 if strategy.kind.keeps_output else 0.1), f"its error is {-score:.3f} after 200 steps")


def learns_several_classes_of_an_event(make: Make) -> None:
    """The same for labels of several classes."""
    torch.manual_seed(0)
    schema, bounds = schema_of({"classes": 3, "multi": True}), torch.tensor([0.0, 0.5, 1.0])
    score, strategy = _score(make, "multilabel", schema, nn.Linear(3, 3), lambda x: x > bounds, 1.0, 200)
    expect(score > (0.6 if strategy.kind.keeps_output else 0.8), f"its score is {score:.3f} after 200 steps")


def learns_a_class_at_each_position(make: Make) -> None:
    """The same for labels of one class at each position; nobody labels those in between."""
    torch.manual_seed(0)
    schema, model = schema_of({"classes": 2, "length": 3}), nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (3, 2)))
    label = lambda x: torch.where(x.abs() > 0.2, (x > 0).long(), -100)  # noqa: E731
    score, strategy = _score(make, "token-classification", schema, model, label, 1.0, 100)
    expect(score > (0.6 if strategy.kind.keeps_output else 0.85), f"its score is {score:.3f} after 100 steps")


CHECKS: Sequence[Check] = (
    takes_a_lone_event_with_old_ones_and_without,
    repeats_a_step_that_is_not_finite,
    replays_what_its_samples_bring,
    goes_on_from_a_checkpoint_bit_for_bit,
    learns_a_separable_stream,
    learns_a_separable_stream_in_bf16,
    learns_a_regression,
    learns_several_classes_of_an_event,
    learns_a_class_at_each_position,
)
