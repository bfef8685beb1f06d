"""Live search: settings that start 100 times off, promotions of challengers that are no better, and its cost.

    python -m benchmarks.search [--quick] [--json FILE] [--save] [--only PART ...] [--data DIR] [--seeds N]
                                [--rows N] [--jobs N]

One network is trained on each event once, in the order of the stream, by the learner's own trainer and without replay.
The accuracy is prequential: of each event before it is trained on, in percent, over the whole stream. The parts:

    streams   four natural streams: Elec2; flights, whether late and by which airline; MNIST in its original order.
              `given` is a learning rate that a person would write, `best` the best of a grid of fixed ones for each
              seed, in hindsight. `low` and `high` start 100 times below and above the given one, `kept` starts with it,
              and each searches with the defaults. `fixed_low` and `fixed_high` are the same starts without a search
    same      challengers that are as good as the model, made of random numbers, so that there are many: the test alone.
              Each has to end without a promotion
    networks  challengers with their own networks, on made-up events whose classes another network decides: `equal`
              ones have the size of the model, and `wider` ones more than its two units. How many are reported as better
    river     River's selection among networks, with one learning rate for each power of ten of the same range, on the
              same streams: successive halving with as many updates as a search takes, and a bandit; also CapyMOA's
              halving where that is installed, with Java. Networks take the steps of the learner's trainer. A lead is
              by how much the search is above a halving, started 100 times off
    cost      steps a second with a search over those without, in turns
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.natural_streams import STREAMS, LabelledStream, stream
from benchmarks.harness.results import Results, Target, options
from learner.config import LearnerSettings
from learner.model.device import choose_precision
from learner.model.task import Classification
from learner.search.evidence import Evidence, log_threshold
from learner.search.networks import NETWORK_TEACHING, NetworkSpec
from learner.search.pool import SAVED
from learner.search.trainer import SearchingTrainer
from learner.sections.search import SearchSettings
from learner.strategies.registry import STRATEGIES
from learner.strategies.teacher_loss import TeacherLoss
from learner.training.trainer import Trainer

PARTS = ("streams", "same", "networks", "river", "cost")
TARGETS = {
    "low_near_best_fraction": Target(0.9, least=True),
    "high_near_best_fraction": Target(0.9, least=True),
    "low_gap_to_given_points": Target(0.3),
    "high_gap_to_given_points": Target(0.3),
    "low_gap_to_start_points": Target(0.3),
    "high_gap_to_start_points": Target(0.3),
    "kept_gap_to_given_points": Target(0.3),
    "same_promotions_over_judgements": Target(1e-3),
    **{
        f"{peer}_lead_{arm}_points": Target(0.0, least=True) for peer in ("river", "capymoa") for arm in ("low", "high")
    },
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

    def __init__(self, numbers: int, classes: int, units: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(numbers, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, classes))
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
    networks: NetworkSpec | None = None,
) -> Trainer:
    """Return a trainer with Adam, which searches where `search` is given; `networks` has the model's size, if given."""
    torch.manual_seed(seed)
    schema = events.schema
    units = {} if networks is None else networks.args
    model = Network(events.x.shape[1], schema.label.classes or 1, **units)
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": lr}, "precision": "fp32"})
    arguments: dict[str, Any] = {
        "model": model,
        "task": Classification(),
        "strategy": STRATEGIES["none"](),
        "schema": schema,
        "settings": settings,
        "device": CPU,
        "precision": choose_precision("fp32", CPU),
    }
    if search is None:
        return Trainer(**arguments)
    chosen = SearchSettings.model_validate(search)
    return SearchingTrainer(chosen, seed, folder, STRATEGIES["none"], networks, **arguments)


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


def river(data: Path | None, rows: int, seeds: int, folder: Path, results: Results) -> None:
    """Add the accuracy of River's and CapyMOA's selectors of models, and how far the search is above their halving.

    Left out where River is not installed, as with the extra `bench` alone.
    """
    if find_spec("river") is None:
        results.remark("river: left out, since river is missing")
        return
    from benchmarks.harness.river_selection import RATES, Member, epsilon_greedy, right, successive_halving

    if not (with_capymoa := find_spec("capymoa") is not None):
        results.remark("capymoa: left out, since capymoa is missing")
    leads: dict[str, list[float]] = {}
    for name in STREAMS:
        results.title(f"{name}: River's selection")
        events = stream(name, data, rows, BATCH)
        found: dict[str, list[float]] = {}
        for seed in range(seeds):

            def members(events: LabelledStream = events, seed: int = seed) -> list[Member]:
                return [Member(trainer_of(events, lr, None, seed, folder), BATCH) for lr in RATES]

            arms = {
                "river_halving": successive_halving(members(), len(events.y), SAVED * BATCH),
                "river_bandit": epsilon_greedy(members(), seed, BATCH),
            }
            if with_capymoa:
                from benchmarks.harness.capymoa_selection import Halving

                arms["capymoa_halving"] = Halving(members(), int(events.y.max()) + 1, len(events.y), SAVED * BATCH)
            for arm, selector in arms.items():
                found.setdefault(arm, []).append(100 * right(selector, events.x, events.y) / len(events.y))
            for arm, lr in (("low", GIVEN / OFF), ("high", GIVEN * OFF)):
                accuracy, _ = run(events, lr, seed, folder, {"promote": "auto"})
                for halving in (each for each in arms if each.endswith("_halving")):
                    lead = f"{halving.removesuffix('_halving')}_lead_{arm}_points"
                    leads.setdefault(lead, []).append(accuracy - found[halving][-1])
        for arm, values in found.items():
            results.add(f"{name}_{arm}", spread(values), f"{seeds} seeds, {len(events.y)} events", "%")
    results.title("all streams and seeds: above successive halving")
    for key, values in leads.items():
        ahead = sum(value >= 0 for value in values)
        results.add(key, spread(values), f"the mean; {ahead} of {len(values)} are ahead", "points")


def same(judgements: int, steps: int, results: Results) -> None:
    """Add how many challengers that are as good as the model are promoted: the test alone, without a model.

    Each judgement is the first of its model, which has the largest part of the error rate. With `persistent` luck one
    of the two is better for 16 steps, before the other may be: the mean given earlier steps is not 0 then, so that the
    bound does not hold.
    """
    for key, lasts in (("same_promotions_over_judgements", 1), ("same_persistent_over_judgements", 16)):
        generator, promoted = np.random.default_rng(0), 0
        for _ in range(judgements):
            level = np.repeat(generator.uniform(0.5, 0.95, steps // 16), 16)
            luck = np.repeat(generator.choice((-0.05, 0.0, 0.05), steps // lasts), lasts)
            own, its = (generator.binomial(BATCH, np.clip(level + sign * luck, 0, 1)) for sign in (-1, 1))
            evidence, threshold = Evidence(), log_threshold(1)
            for difference in ((its - own) / BATCH).tolist():
                evidence.add(difference)
                if evidence.log_wealth >= threshold:
                    promoted += 1
                    break
        results.add(key, promoted / judgements, f"{promoted} of {judgements}, each read {steps} times")


def networks(seeds: int, steps: int, folder: Path, results: Results) -> None:
    """Add how many networks are reported that have the size of the model, and that are wider than a too narrow one."""
    search = {"challengers": 2, "share": 0.5, "space": {"model.args.units": (2, 34)}}
    for arm, units in (("equal", 16), ("wider", 2)):
        outcomes, first = Counter[str](), list[float]()
        for seed in range(seeds):
            events = of_a_network(steps * BATCH, seed)

            def build(args: Mapping[str, Any], arm: str = arm, units: int = units) -> nn.Module:
                return Network(10, 4, units if arm == "equal" else args["units"])

            spec = NetworkSpec({"units": units}, build, TeacherLoss(Classification(), *NETWORK_TEACHING))
            trainer = trainer_of(events, 1e-2, search, seed, folder, spec)
            advance(trainer, events, range(0, len(events.y), BATCH))
            report = trainer.search_report
            assert report is not None
            outcomes.update(report.outcomes)
            better = [each.step for each in report.history if each.outcome == "better"]
            first += better[:1]
        judged = sum(outcomes.values())
        remark = f"{outcomes['better']} of {judged} that ended, in {seeds} streams of {steps} steps"
        results.add(f"networks_{arm}_reported", outcomes["better"] / max(1, judged), remark)
        if first:
            remark = f"in the {len(first)} of {seeds} streams with any"
            results.add(f"networks_{arm}_first_step", spread(first), remark, "steps")


def of_a_network(rows: int, seed: int) -> LabelledStream:
    """Return events of ten numbers whose class of four is the largest output of a network with random weights."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 10)).astype(np.float32)
    hidden = np.tanh(x @ generator.normal(size=(10, 24)))
    return LabelledStream(x, (hidden @ generator.normal(size=(24, 4))).argmax(axis=1))


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
        if "same" in parts:
            results.title("challengers that are as good as the model")
            same((10, 200, 2000)[chosen.form], 512, results)
        if "networks" in parts:
            results.title("challengers with their own networks")
            networks((1, 4, 20)[chosen.form], (100, 3000, 3000)[chosen.form], folder, results)
        if "river" in parts:
            river(chosen.data, rows, seeds, folder, results)
        if "cost" in parts:
            results.title("the cost of a search with the default share")
            cost((20, 2000, 10_000)[chosen.form], (1, 3, 3)[chosen.form], folder, results)
    results.write(chosen)


if __name__ == "__main__":
    main()
