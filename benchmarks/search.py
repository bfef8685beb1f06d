"""Live search: settings that start 100 times off, and its cost.

    python -m benchmarks.search [--quick] [--json FILE] [--save] [--only PART ...] [--data DIR] [--seeds N]
                                [--rows N] [--jobs N]

One network is trained on each event once, in the order of the stream, by the learner's own trainer and without replay.
The accuracy is prequential: of each event before it is trained on, in percent, over the whole stream. The parts:

    streams   four natural streams: Elec2; flights, whether late and by which airline; MNIST in its original order.
              `given` is a learning rate that a person would write, `best` the best of a grid of fixed ones for each
              seed, in hindsight. `low` and `high` start 100 times below and above the given one, `kept` starts with it,
              and each searches with the defaults. `fixed_low` and `fixed_high` are the same starts without a search
    cost      steps a second with a search over those without, in turns
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.extensions.search.extension import ChallengerSearch
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.features.numbers import LIMIT, Moments
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.search import SearchSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from benchmarks.harness.data import load
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.results import Results, Target, options

STREAMS = ("elec2", "flights", "airlines", "mnist")


@dataclass(frozen=True)
class LabelledStream:
    """Numbers `[N, D]`, float32, and classes `[N]`, int64."""

    x: Array
    y: Array

    @property
    def schema(self) -> Schema:
        """One feature, one label."""
        feature = {"dtype": "float32", "shape": [self.x.shape[1]]}
        label = {"name": "y", "classes": int(self.y.max()) + 1}
        return Schema(SchemaSettings.model_validate({"features": {"x": feature}, "label": label}))


def stream(name: str, data: Path | None, rows: int, batch: int) -> LabelledStream:
    """Return the first events of a stream; tabular numbers are scaled as `scale = "standard"` scales them."""
    if name == "elec2":
        arrays = load("elec", data)
        x, y = arrays["x"], arrays["y"]
    elif name == "mnist":
        arrays = load("mnist", data)
        x, y = arrays["x_train"], arrays["y_train"]
    else:
        arrays = load("nycflights", data)
        x, y = arrays["num"], arrays["delay"] > 15 if name == "flights" else arrays["cat"][:, 0]
    x, y = x[:rows].astype(np.float32), np.unique(y[:rows], return_inverse=True)[1].astype(np.int64)
    return LabelledStream(x / np.float32(255.0) if name == "mnist" else scaled(x, batch), y)


def scaled(x: Array, size: int) -> Array:
    """Return numbers `[N, D]` scaled by the moments of all events before their batch of `size`, as the learner does.

    A number that has been constant so far is 0. By the deviation of its first events, which is that of rounding, the
    first other value would be a million.
    """
    parts, moments = list[Array](), Moments.of(np.zeros((0, x.shape[1])))
    for start in range(0, len(x), size):
        batch, deviation = x[start : start + size].astype(np.float64), moments.deviation
        factor = np.where(deviation > 0, 1 / np.where(deviation > 0, deviation, 1), 0)
        parts.append(((batch - moments.mean) * factor).clip(-LIMIT, LIMIT).astype(np.float32))
        moments = moments.merged(Moments.of(batch))
    return np.concatenate(parts)


PARTS = ("streams", "cost")
TARGETS = {
    "low_near_best_fraction": Target(0.9, least=True),
    "high_near_best_fraction": Target(0.9, least=True),
    "low_gap_to_given_points": Target(0.3),
    "high_gap_to_given_points": Target(0.3),
    "low_gap_to_start_points": Target(0.3),
    "high_gap_to_start_points": Target(0.3),
    "kept_gap_to_given_points": Target(0.3),
    "cost_steps_over_off": Target(0.8, least=True),
}
_NEAR = {"best": 0.5, "given": 0.3, "start": 0.3}
"""Points of accuracy; `start` is the same start without a search."""
CPU = torch.device("cpu")
GIVEN = 1e-3
"""A person's learning rate for Adam: the default."""
GRID = tuple(10.0**power for power in (-5, -4, -3.5, -3, -2.5, -2, -1.5, -1))
OFF = 100.0
BATCH = 16
_FIRST_STEPS = 600
"""Steps in which a search takes what is saved up for its beginning."""
_QUICK_ROWS = 20_000
_MOST_ROWS = 100_000


class Network(nn.Module):
    """Two hidden layers."""

    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, C]`."""
        logits: Tensor = self.body(x)
        return logits


def trainer_of(
    events: LabelledStream,
    lr: float,
    search: Mapping[str, Any] | None,
    seed: int,
    folder: Path,
) -> Trainer:
    """Return a trainer with Adam, which searches where `search` is given."""
    torch.manual_seed(seed)
    schema = events.schema
    model = Network(events.x.shape[1], schema.label.classes or 1)
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": lr}, "precision": "fp32"})
    setup = TrainingSetup(
        model, Classification(), STRATEGIES["none"](), schema, settings, CPU, choose_precision("fp32", CPU)
    )
    if search is None:
        return Trainer(setup)
    chosen = SearchSettings.model_validate(search)
    return Trainer(setup, wrappers=[ChallengerSearch(chosen, seed, folder, setup, STRATEGIES["none"])])


def run(
    events: LabelledStream, lr: float, seed: int, folder: Path, search: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """Train on a stream once; return the accuracy in percent, and the learning rate at the end."""
    trainer, rows = trainer_of(events, lr, search, seed, folder), len(events.y)
    right = advance(trainer, events, range(0, rows, BATCH))
    return 100 * right / rows, trainer.found.get("learner.optimizer.lr", lr)


def advance(trainer: Trainer, events: LabelledStream, starts: range) -> float:
    """Train on the batches that begin at these events; return how many events were right."""
    right, ones = 0.0, np.ones(BATCH, np.float32)
    for start in starts:
        some = slice(start, start + BATCH)
        columns = {"feature.x": events.x[some], "label": events.y[some]}
        columns["weight"] = ones[: len(columns["label"])]
        right += trainer.step(trainer.examples(columns)).score
    return right


def streams(data: Path | None, rows: int, seeds: int, jobs: int, results: Results) -> None:
    """Add the figures of all streams."""
    within: dict[tuple[str, str], list[float]] = {}
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        runs = {name: [executor.submit(of_a_seed, name, data, rows, seed) for seed in range(seeds)] for name in STREAMS}
        for name, futures in runs.items():
            results.title(f"{name}: the learning rate starts {OFF:g} times off")
            figures = [future.result() for future in futures]
            for arm in figures[0]:
                values = [each[arm] for each in figures]
                rate = arm.endswith("rate")
                unit = "learning rate at the end" if rate else f"{len(stream_of(name, data, rows).y)} events"
                shown = ", ".join(f"{value:.2g}" if rate else f"{value:.2f}" for value in values)
                results.add(f"{name}_{arm}", spread(values), f"{unit}; by seed {shown}", "" if rate else "%")
            for arm, others in {
                "low": {"best": "best", "given": "given", "start": "fixed_low"},
                "high": {"best": "best", "given": "given", "start": "fixed_high"},
                "kept": {"best": "best", "given": "given"},
            }.items():
                for other, fixed in others.items():
                    gaps = within.setdefault((arm, other), [])
                    gaps += [each[fixed] - each[arm] for each in figures]
    results.title("all streams and seeds")
    for (arm, other), gaps in within.items():
        close = sum(gap <= _NEAR[other] for gap in gaps)
        remark = f"{close} of {len(gaps)} are within {_NEAR[other]:g} points"
        results.add(f"{arm}_gap_to_{other}_points", Spread(max(gaps), min(gaps), max(gaps)), "the largest", "points")
        results.add(f"{arm}_near_{other}_fraction", close / len(gaps), remark)


def of_a_seed(name: str, data: Path | None, rows: int, seed: int) -> dict[str, float]:
    """Return the accuracy of each arm on a stream, and the learning rates at the end of those that search."""
    events = stream_of(name, data, rows)
    with tempfile.TemporaryDirectory() as folder:
        fixed = {lr: run(events, lr, seed, Path(folder))[0] for lr in GRID}
        arms = {"given": fixed[nearest(GIVEN)], "best": max(fixed.values())}
        arms |= {"fixed_low": fixed[nearest(GIVEN / OFF)], "fixed_high": fixed[nearest(GIVEN * OFF)]}
        for arm, lr in (("low", GIVEN / OFF), ("high", GIVEN * OFF), ("kept", GIVEN)):
            arms[arm], arms[f"{arm}_rate"] = run(events, lr, seed, Path(folder), {"promote": "auto"})
    return arms


def nearest(lr: float) -> float:
    """Return the learning rate of the grid that is nearest to another one."""
    return min(GRID, key=lambda each: abs(each - lr))


@cache
def stream_of(name: str, data: Path | None, rows: int) -> LabelledStream:
    """Return a stream in batches of this benchmark."""
    return stream(name, data, rows, BATCH)


def cost(steps: int, rounds: int, folder: Path, results: Results) -> None:
    """Add steps a second with a search over those without."""
    generator, rows = np.random.default_rng(0), (_FIRST_STEPS + steps) * BATCH
    events = LabelledStream(generator.normal(size=(rows, 14)).astype(np.float32), generator.integers(0, 2, rows))

    def rate(search: Mapping[str, Any] | None) -> float:
        trainer, first = trainer_of(events, GIVEN, search, 0, folder), _FIRST_STEPS * BATCH
        advance(trainer, events, range(0, first, BATCH))
        begin = time.process_time()
        advance(trainer, events, range(first, len(events.y), BATCH))
        return steps / (time.process_time() - begin)

    arms: dict[str, Callable[[], float]] = {"off": partial(rate, None), "on": partial(rate, {})}
    figures = interleave(arms, rounds)
    remark = f"{steps} steps of CPU time each, {rounds} rounds, after the leases with which it begins"
    results.add("cost_steps_over_off", ratio(figures["on"], figures["off"]), remark)


def spread(values: list[float]) -> Spread:
    """Return the mean of the seeds, with the least and the most."""
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--data", type=Path, help="folder of the streams' files; fetched by pip without it")
    parser.add_argument("--seeds", type=int, help="by default 5, and 1 in the quick form")
    parser.add_argument("--rows", type=int, help="use so many events of each stream")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the part of the streams")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results, parts = Results("search", TARGETS), chosen.only or PARTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = chosen.rows or (640, _QUICK_ROWS, _MOST_ROWS)[chosen.form]
        seeds = chosen.seeds or (1, 1, 5)[chosen.form]
        if "streams" in parts:
            streams(chosen.data, rows, seeds, chosen.jobs, results)
        if "cost" in parts:
            results.title("the cost of a search with the default share")
            cost((20, 2000, 10_000)[chosen.form], (1, 3, 3)[chosen.form], folder, results)
    results.write(chosen)


if __name__ == "__main__":
    main()
