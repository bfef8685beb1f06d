"""Features learned on the stream, against what only hindsight has: scales of all values, and a table without an end.

    python -m benchmarks.features [--quick] [--json FILE] [--save] [--only PART ...] [--data DIR] [--seeds N]

One network is trained on each event once, in the order of the stream, by the learner's own trainer and without replay.
The accuracy is prequential: of each event before it is trained on, in percent, over the whole stream. The parts:

    tabular   raw numbers: `hindsight` scales them by the mean and deviation of the whole stream, before it begins;
              `raw` does not scale; `standard`, `robust` and `quantile` learn their scales on the stream. A gap is how
              many points a scale is below hindsight. The streams are flights, in the units of their file, and Elec2,
              whose file has all numbers in 0..1: its columns are multiplied by 1 to 10^5, one after the other
    ids       ids of Zipf distributions, of exponent 1.2 and (`flat`) 1.05, each id with its chance of the label:
              `unbounded` has a row for each id that comes, `learn` a vocabulary that grows in a table of 1 % of the
              possible ids, `hash` as many buckets. `best` is a table of that size which has the most frequent ids
              before the stream begins: what no method without hindsight can beat by much. The long form has a million
              possible ids and a table of 10,000, the quick form a tenth of both: ten million in 100,000 are the same
              in proportion, and need ten times the events
    groups    groups that come and go, of which each differs from the others: `shared` is the network without the
              group's id, `embedding` has the id as a learned vocabulary whose rows of 8 numbers are inputs, `intercept`
              has it as a feature with `intercept`. `first_10` and `first_50` are of the first events of those groups
              that come after a quarter of the stream. The streams: `made` has 100 groups at a time, each of 100 events
              in the mean, whose classes and whose dependence on the numbers differ; `alike` is the same, but groups do
              not differ; `flights` has the number of the flight, which is of one line and plan

Figures of the moments are in the tests: tests/learner/model/features/test_statistics.py.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.features.learned import FeatureLearning
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from benchmarks.harness.data import load
from benchmarks.harness.flights import MIDDLE, SCALE
from benchmarks.harness.interleave import Spread
from benchmarks.harness.results import Results, Target, options

FIRST = ("", "_first_10", "_first_50")
OTHERS = ("shared", "embedding")
TARGETS = {
    "flights_standard_gap": Target(1.0),
    "elec2_standard_gap": Target(1.0),
    **{f"groups_made_over_{other}{part}_points": Target(1.0, least=True) for other in OTHERS for part in FIRST},
    **{f"groups_flights_over_{other}{part}_points": Target(0.0, least=True) for other in OTHERS for part in FIRST},
    "groups_alike_over_shared_points": Target(-0.3, least=True),
    **{f"{name}_learn_gap": Target(0.3) for name in ("ids", "ids_flat")},
    **{f"{name}_learn_below_best": Target(0.3) for name in ("ids", "ids_flat")},
    **{f"{name}_learn_over_hash_points": Target(0.0, least=True) for name in ("ids", "ids_flat")},
}
EXPONENTS = {"ids": 1.2, "ids_flat": 1.05}
CPU = torch.device("cpu")
SCALES = ("standard", "robust", "quantile")
LEARNER = {"flights": {"name": "adam", "lr": 1e-3}, "elec2": {"name": "adam", "lr": 3e-3}}
GROUPS = ("made", "alike", "flights")
_ROW = 8
_LIVE, _LIFE = 100, 100
_TABLE = 16_384
"""Rows for groups."""
_UNITS = 10.0 ** np.arange(6)


class Mlp(nn.Module):
    """Two hidden layers on numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, 2]`."""
        logits: Tensor = self.body(x)
        return logits


class Grouped(nn.Module):
    """Two hidden layers on numbers, and on a row for the group where it is an input."""

    def __init__(self, numbers: int, classes: int, rows: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, _ROW) if rows else None
        inputs = numbers + _ROW * (rows > 0)
        self.body = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, classes)
        if self.rows is not None:
            nn.init.normal_(self.rows.weight, std=0.1)

    def forward(self, x: Tensor, group: Tensor | None = None) -> Tensor:
        """Return logits `[B, C]`."""
        if self.rows is not None:
            x = torch.cat([x, self.rows(group)], dim=1)
        logits: Tensor = self.head(self.body(x))
        return logits


class Table(nn.Module):
    """One number for each class and id."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, 2]`."""
        logits: Tensor = self.table(x)
        return logits


def prequential(
    feature: Mapping[str, Any],
    model: nn.Module,
    columns: Mapping[str, Array],
    optimizer: Mapping[str, Any],
    batch: int,
    more: Mapping[str, Any] | None = None,
    right: Array | None = None,
) -> tuple[float, float]:
    """Train a model on a stream of events once; return the accuracy in percent, and the seconds of a step.

    Args:
        feature: settings of the feature `x`.
        model: of the events.
        columns: of all events.
        optimizer: settings.
        batch: events of a step.
        more: settings of further features, by name.
        right: gets whether each prediction was right.
    """
    classes = max(2, int(columns["label"].max()) + 1)
    label = {"name": "y", "classes": classes}
    schema = Schema(SchemaSettings.model_validate({"features": {"x": feature, **(more or {})}, "label": label}))
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    settings = LearnerSettings.model_validate({"optimizer": optimizer, "precision": "fp32"})
    precision = choose_precision("fp32", CPU)
    trainer = Trainer(TrainingSetup(model, Classification(), STRATEGIES["none"](), schema, settings, CPU, precision))
    total, steps, rows = 0.0, 0, len(columns["label"])
    ones = np.ones(batch, np.float32)
    begin = time.process_time()
    for start in range(0, rows, batch):
        some = {name: column[start : start + batch] for name, column in columns.items()}
        some["weight"] = ones[: len(some["label"])]
        result = trainer.step(trainer.examples(some), columns=some)
        if right is not None:
            assert result.output_B is not None
            right[start : start + batch] = (result.output_B.argmax(dim=1).numpy() == some["label"]).tolist()
        total += result.score
        steps += 1
    return 100 * total / rows, (time.process_time() - begin) / steps


def tabular(name: str, data: Path | None, rows: int | None, seeds: int, results: Results) -> None:
    """Add the figures of one stream of numbers."""
    if name == "flights":
        arrays = load("nycflights", data)
        values, label = arrays["num"], (arrays["delay"] > 15).astype(np.int64)
    else:
        arrays = load("elec", data)
        values, label = (arrays["x"] * _UNITS).astype(np.float32), arrays["y"]
    values, label = values[:rows], label[:rows]
    deviation = values.std(axis=0, dtype=np.float64)
    scaled = ((values - values.mean(axis=0, dtype=np.float64)) / np.where(deviation > 0, deviation, 1)).astype("f4")
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        for arm in ("hindsight", "raw", *SCALES):
            torch.manual_seed(seed)
            feature = {"dtype": "float32", "shape": [values.shape[1]]} | ({"scale": arm} if arm in SCALES else {})
            columns = {
                "feature.x": scaled if arm == "hindsight" else values,
                "label": label,
                "time_ms": np.arange(len(label)),
            }
            accuracy, _ = prequential(feature, Mlp(values.shape[1]), columns, LEARNER[name], 64)
            found.setdefault(arm, []).append(accuracy)
    for arm, accuracies in found.items():
        results.add(f"{name}_{arm}", spread(accuracies), f"{seeds} seeds, {len(label)} events", "%")
    for arm in SCALES:
        gaps = np.subtract(found["hindsight"], found[arm])
        results.add(f"{name}_{arm}_gap", spread(gaps.tolist()), "points below hindsight", "points")


def zipf(ids: int, exponent: float, events: int, seed: int) -> tuple[Array, Array]:
    """Return ids and labels of a stream: each id has its chance."""
    generator = np.random.default_rng(seed)
    weight = np.arange(1, ids + 1, dtype=np.float64) ** -exponent
    rank = np.searchsorted(np.cumsum(weight) / weight.sum(), generator.random(events))
    chance = 1 / (1 + np.exp(-generator.normal(0, 2, ids)))
    label = (generator.random(events) < chance[rank]).astype(np.int64)
    return generator.permutation(ids)[rank].astype(np.int64), label


def best_rows(compact: Array, buckets: Array, rows: int) -> Array:
    """Return the row of each event, int64: the most frequent ids have three quarters of the rows, others share."""
    own = 3 * rows // 4
    counts = np.bincount(compact)
    row = np.full(len(counts), -1)
    row[np.argsort(-counts, kind="stable")[:own]] = np.arange(min(own, len(counts)))
    known = row[compact]
    return np.where(known < 0, own + buckets % (rows - own), known)


def many_ids(name: str, ids: int, events: int, seeds: int, results: Results) -> None:
    """Add the figures of a stream of ids, in tables of 1 % of them."""
    rows, found, seconds, distinct = ids // 100, dict[str, list[float]](), dict[str, float](), 0
    for seed in range(seeds):
        values, label = zipf(ids, EXPONENTS[name], events, seed)
        came, compact = np.unique(values, return_inverse=True)
        distinct = len(came)
        buckets = (values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)) % np.uint64(rows)
        arms: dict[str, tuple[dict[str, Any], int, Array]] = {
            "unbounded": ({"dtype": "int64"}, distinct, compact.astype(np.int64)),
            "learn": ({"dtype": "int64", "encode": {"learn": rows, "min_count": 2}}, rows, values),
            "hash": ({"dtype": "int64"}, rows, buckets.astype(np.int64)),
            "best": ({"dtype": "int64"}, rows, best_rows(compact, buckets.astype(np.int64), rows)),
        }
        for arm, (feature, size, column) in arms.items():
            torch.manual_seed(seed)
            model = Table(size)
            columns = {"feature.x": column, "label": label, "time_ms": np.arange(events)}
            accuracy, seconds[arm] = prequential(feature, model, columns, {"name": "adagrad", "lr": 0.5}, 512)
            found.setdefault(arm, []).append(accuracy)
            if arm == "learn":
                size_bytes = sum(value.nbytes for value in model.state_dict().values())
    remark = f"{events} events of {distinct} of {ids} ids, {rows} rows, {seeds} seeds"
    for arm, accuracies in found.items():
        results.add(f"{name}_{arm}", spread(accuracies), remark, "%")
    gaps = np.subtract(found["unbounded"], found["learn"])
    results.add(f"{name}_learn_gap", spread(gaps.tolist()), "points below a table without an end", "points")
    gaps = np.subtract(found["best"], found["learn"])
    results.add(f"{name}_learn_below_best", spread(gaps.tolist()), "points below hindsight in the same table", "points")
    gains = np.subtract(found["learn"], found["hash"])
    results.add(f"{name}_learn_over_hash_points", spread(gains.tolist()), "points above as many buckets", "points")
    results.add(f"{name}_learn_state_bytes", size_bytes, "of table and vocabulary, however many ids come")
    results.add(f"{name}_learn_step_over_hash", seconds["learn"] / seconds["hash"], "CPU time of a step of 512")


def made_groups(events: int, deviation: float, seed: int) -> tuple[Array, Array, Array]:
    """Return numbers, labels of three classes and groups of a stream in which groups come and go.

    `deviation`: of the groups' intercepts; half of it in all for the groups' dependence on the numbers.
    """
    generator, numbers, classes = np.random.default_rng(seed), 10, 3
    first, second = generator.normal(0, 1, (numbers, 16)), generator.normal(0, 0.7, (16, classes))
    slot, ends = generator.integers(_LIVE, size=events), generator.random(events) < 1 / _LIFE
    live, group = np.arange(_LIVE), np.empty(events, np.int64)
    for index in range(events):
        if ends[index]:
            live[slot[index]] = live.max() + 1
        group[index] = live[slot[index]]
    count = group.max() + 1
    intercept = deviation * generator.normal(0, 1, (count, classes))
    slope = deviation * generator.normal(0, 0.5 / np.sqrt(numbers), (count, numbers, classes))
    x = generator.normal(0, 1, (events, numbers)).astype(np.float32)
    logit = np.tanh(x @ first) @ second + intercept[group] + np.einsum("nd,ndc->nc", x, slope[group])
    label = (logit + generator.gumbel(size=logit.shape)).argmax(axis=1)
    return x, label, generator.permutation(10 * count)[group]


def flight_groups(data: Path | None) -> tuple[Array, Array, Array]:
    """Return the numbers of flights, whether they were late, and which flight of the line's plan it was."""
    arrays = load("flight_plan", data)
    x = ((arrays["num"] - np.array(MIDDLE)) / np.array(SCALE)).astype(np.float32)
    return x, (arrays["delay"] > 15).astype(np.int64), arrays["flight"]


def ages(group: Array) -> tuple[Array, Array]:
    """Return how many events of its group came before each event, and when the first one of the group came."""
    _, begin, compact = np.unique(group, return_index=True, return_inverse=True)
    order = np.argsort(compact, kind="stable")
    counts = np.bincount(compact)
    age = np.empty(len(group), np.int64)
    age[order] = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    return age, begin[compact]


def groups(name: str, data: Path | None, rows: int, seeds: int, results: Results) -> None:
    """Add the figures of one stream whose groups come and go."""
    found: dict[str, dict[str, list[float]]] = {"embedding": {}, "shared": {}, "intercept": {}}
    seconds = dict[str, float]()
    for seed in range(seeds):
        deviation = 0.0 if name == "alike" else 1.0
        x, label, group = flight_groups(data) if name == "flights" else made_groups(rows, deviation, seed)
        x, label, group = x[:rows], label[:rows], group[:rows]
        columns = {"feature.x": x, "feature.group": group, "label": label, "time_ms": np.zeros(len(label), np.int64)}
        age, begin = ages(group)
        new = begin > len(label) // 4
        for arm, figures in found.items():
            torch.manual_seed(seed)
            model = Grouped(x.shape[1], int(label.max()) + 1, _TABLE if arm == "embedding" else 0)
            id_feature = {
                "dtype": "int64",
                "encode": {"learn": _TABLE, "min_count": 1},
                "intercept": arm == "intercept",
            }
            right, more = np.zeros(len(label)), {} if arm == "shared" else {"group": id_feature}
            optimizer, feature = {"name": "adam", "lr": 1e-3}, {"dtype": "float32", "shape": [x.shape[1]]}
            overall, seconds[arm] = prequential(feature, model, columns, optimizer, 64, more, right)
            figures.setdefault("", []).append(overall)
            for first in (10, 50):
                figures.setdefault(f"_first_{first}", []).append(100 * right[new & (age < first)].mean())
    remark = f"{len(label)} events of {len(np.unique(group))} groups, {seeds} seeds"
    for arm, figures in found.items():
        for part, values in figures.items():
            results.add(f"groups_{name}_{arm}{part}", spread(values), remark, "%")
    for other in OTHERS:
        for part, values in found["intercept"].items():
            gains = np.subtract(values, found[other][part]).tolist()
            results.add(
                f"groups_{name}_over_{other}{part}_points", spread(gains), "points of intercept above", "points"
            )
    for other in OTHERS:
        ratio = seconds["intercept"] / seconds[other]
        results.add(f"groups_{name}_step_over_{other}", ratio, "CPU time of a step of 64")


def spread(values: Sequence[float]) -> Spread:
    """Return the mean of the seeds, with the least and the most."""
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)))


PARTS = ("tabular", "ids", "groups")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--data", type=Path, help="folder of elec.npz and nycflights.npz; fetched by pip without it")
    parser.add_argument("--seeds", type=int, help="by default 3, and 1 in the quick form")
    parser.add_argument("--rows", type=int, help="use so many events of each stream")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results, seeds = Results("features", TARGETS), chosen.seeds or (1, 1, 3)[chosen.form]
    parts = chosen.only or PARTS
    if "tabular" in parts:
        for name in ("elec2", "flights"):
            results.title(f"{name}: raw numbers")
            tabular(name, chosen.data, chosen.rows or (1_000, 60_000, None)[chosen.form], seeds, results)
    if "ids" in parts:
        ids, events = ((1_000, 2_000), (100_000, 400_000), (1_000_000, 4_000_000))[chosen.form]
        for name, exponent in EXPONENTS.items():
            results.title(f"{name}: more than there are rows, Zipf {exponent:g}")
            many_ids(name, ids if chosen.rows is None else 10_000, chosen.rows or events, seeds, results)
    for name in GROUPS if "groups" in parts else ():
        results.title(f"{name}: groups that come and go")
        most = (4_000, 60_000, 400_000 if name == "flights" else 60_000)[chosen.form]
        groups(name, chosen.data, chosen.rows or most, seeds, results)
    results.write(chosen)


if __name__ == "__main__":
    main()
