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

Figures of the moments are in the tests: tests/learner/model/features/test_moments.py.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness.data import load
from benchmarks.harness.interleave import Spread
from benchmarks.harness.results import Results, Target, options
from ingest.config import SchemaSettings
from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.config import LearnerSettings
from learner.model.device import choose_precision
from learner.model.features.learned import attach_features
from learner.model.task import Classification
from learner.strategies.registry import STRATEGIES
from learner.training.trainer import Trainer

TARGETS = {
    "flights_standard_gap": Target(1.0),
    "elec2_standard_gap": Target(1.0),
    **{f"{name}_learn_gap": Target(0.3) for name in ("ids", "ids_flat")},
    **{f"{name}_learn_below_best": Target(0.3) for name in ("ids", "ids_flat")},
    **{f"{name}_learn_over_hash_points": Target(0.0, least=True) for name in ("ids", "ids_flat")},
}
EXPONENTS = {"ids": 1.2, "ids_flat": 1.05}
CPU = torch.device("cpu")
SCALES = ("standard", "robust", "quantile")
LEARNER = {"flights": {"name": "adam", "lr": 1e-3}, "elec2": {"name": "adam", "lr": 3e-3}}
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
    feature: Mapping[str, Any], model: nn.Module, columns: Mapping[str, Array], optimizer: Mapping[str, Any], batch: int
) -> tuple[float, float]:
    """Train a model on a stream of events once; return the accuracy in percent, and the seconds of a step."""
    schema = Schema(SchemaSettings.model_validate({"features": {"x": feature}, "label": {"name": "y", "classes": 2}}))
    attach_features(model, schema, CPU)
    settings = LearnerSettings.model_validate({"optimizer": optimizer, "precision": "fp32"})
    precision = choose_precision("fp32", CPU)
    trainer = Trainer(model, Classification(), STRATEGIES["none"](), schema, settings, CPU, precision)
    total, steps, rows = 0.0, 0, len(columns["label"])
    ones = np.ones(batch, np.float32)
    begin = time.process_time()
    for start in range(0, rows, batch):
        some = {name: column[start : start + batch] for name, column in columns.items()}
        some["weight"] = ones[: len(some["label"])]
        result = trainer.step(trainer.examples(some))
        if result.finite:
            trainer.learn_features(some)
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


def spread(values: Sequence[float]) -> Spread:
    """Return the mean of the seeds, with the least and the most."""
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)))


PARTS = ("tabular", "ids")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--data", type=Path, help="folder of elec.npz and nycflights.npz; fetched by pip without it")
    parser.add_argument("--seeds", type=int, help="by default 3, and 1 in the quick form")
    parser.add_argument("--rows", type=int, help="use so many events of each stream")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results, seeds = Results("features", TARGETS), chosen.seeds or (1 if chosen.quick else 3)
    parts = chosen.only or PARTS
    if "tabular" in parts:
        for name in ("elec2", "flights"):
            results.title(f"{name}: raw numbers")
            tabular(name, chosen.data, chosen.rows or (60_000 if chosen.quick else None), seeds, results)
    if "ids" in parts:
        ids, events = (100_000, 400_000) if chosen.quick else (1_000_000, 4_000_000)
        for name, exponent in EXPONENTS.items():
            results.title(f"{name}: more than there are rows, Zipf {exponent:g}")
            many_ids(name, ids if chosen.rows is None else 10_000, chosen.rows or events, seeds, results)
    results.write(chosen)


if __name__ == "__main__":
    main()
