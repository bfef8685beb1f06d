"""Labels that come later than their events: what it costs to wait for them, and what early negatives are worth.

    python -m benchmarks.late_labels [--quick] [--json FILE] [--save] [--only PART ...] [--seeds N] [--data DIR]

    rate          events a second that a learner trains on: with labels in another topic, over labels in the events
    memory        bytes of memory that an event takes that waits, without its payload
    freshness     from the append of a label to a prediction by a version that has learned from it
    early         flights from New York, of which only late ones get a label, when they land: the log loss of the
                  prediction that was made when it was due, with early negatives and their correction, over the smaller
                  one of waiting for the label and of negatives without a correction

The learner of `rate` and `freshness` trains an MLP of a million parameters. `early` runs a backtest, without broker and
learner process.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anabranch.commands.backtest.batches import Numbering
from anabranch.commands.backtest.delayed_labels import POLICIES, DelayedLabels, LabelDelay, Policy
from anabranch.commands.backtest.measure import with_policy
from anabranch.commands.backtest.runs import RunLog, run_pipeline
from anabranch.config.loader import load_config
from anabranch.ingest.events.block import IDENTITY_COLUMNS, Array
from anabranch.ingest.events.identity import mix
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings
from anabranch.learner.extensions.late_labels.join_part import JoinPart, open_join
from anabranch.learner.settings.pipeline import PipelineSettings
from benchmarks.harness import data, late_stream, models
from benchmarks.harness.flights import MIDDLE, SCALE
from benchmarks.harness.interleave import Spread
from benchmarks.harness.memory import give_back, resident
from benchmarks.harness.pipeline import broker
from benchmarks.harness.results import Form, Results, Target, options

WAIT_HOURS = 12.0
"""How long a flight waits for its alarm: 99.9 % of late flights land within it."""
BATCH_SIZE = 32
_KNOWN = "feature.known"
_TEXT = """
name = "flights"
seed = {seed}
[stream]
topics = ["flights"]
[schema.features]
num = {{dtype = "float32", shape = [14]}}
cat = {{dtype = "int64", shape = [3]}}
[schema.label]
name = "late"
classes = 2
[model]
factory = "benchmark_models:tabular"
args = {{middle = {middle}, scale = {scale}, categories = {categories}}}
[learner]
strategy = "none"
batch_size = {batch_size}
optimizer = {{name = "adamw", lr = 1e-3}}
max_grad_norm = inf
device = "cpu"
precision = "fp32"
"""


def flights(folder: Path | None, rows: int | None = None, *, both: bool = False) -> dict[str, Array]:
    """Return the columns of the first `rows` flights, in scheduled order.

    `time` is when the prediction is due, `feature.known` when the label comes: the landing of late flights, 0 for those
    in time, of which nobody reports anything. With `both`, it is the landing of all.
    """
    arrays = {name: array[:rows] for name, array in data.load("nycflights", folder).items()}
    order = np.argsort(arrays["t"], kind="stable")
    label = (arrays["delay"][order] > 15).astype(np.int64)
    landed = arrays["t_label"][order].astype(np.float64)
    return {
        "feature.num": arrays["num"][order],
        "feature.cat": arrays["cat"][order],
        "label": label,
        "labelled": np.ones(len(order), np.bool_),
        "weight": np.ones(len(order), np.float32),
        "time": arrays["t"][order].astype(np.float64),
        _KNOWN: landed if both else np.where(label == 1, landed, 0.0),
    }


def log_loss(columns: Mapping[str, Array], policy: Policy, seed: int) -> float:
    """Return the mean log loss of the predictions that are made when each flight's prediction is due."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "benchmark_models.py").write_bytes(Path(models.__file__).read_bytes())
        spec, log, numbering = with_policy(_spec(path, columns, seed), policy), RunLog(), Numbering()
        labels = DelayedLabels(policy, LabelDelay(_KNOWN, WAIT_HOURS * 3600, "negative"), BATCH_SIZE)

        def blocks(_: HoldOut) -> Iterator[Mapping[str, Array]]:
            return (numbering.add(batch) for batch in _batches(columns))

        run_pipeline(spec, spec.events, blocks, log, lambda _: False, threading.Event(), labels)
    return log.points[-1].overall_loss


def _spec(folder: Path, columns: Mapping[str, Array], seed: int) -> PipelineSettings:
    categories = (columns["feature.cat"].max(axis=0) + 1).tolist()
    text = _TEXT.format(seed=seed, middle=MIDDLE, scale=SCALE, categories=categories, batch_size=BATCH_SIZE)
    (folder / "pipeline.toml").write_text(text)
    spec = load_config(folder / "pipeline.toml", {}).pipeline
    wait = {"topics": ("labels",), "wait": f"{WAIT_HOURS:g}h", "unmatched": "negative"}
    labels = LabelStreamSettings.model_validate(wait)
    return spec.with_changes(stream=spec.stream.model_copy(update={"labels": labels}))


def _batches(columns: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
    for begin in range(0, len(columns["label"]), BATCH_SIZE):
        yield {name: column[begin : begin + BATCH_SIZE] for name, column in columns.items()}


_BATCH = 1000
_BETWEEN_CHECKPOINTS = 10
"""Batches."""
_STRIDE = 1_000_003
"""A prime: multiples of it are all numbers in another order."""
_ROW_BYTES = 128
_ENDLESS = 2**50
_SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}})
)


def waiting_bytes(events: int, folder: Path) -> float:
    """Return the bytes of memory that each of `events` events takes that wait, after half as many waited before them.

    Meanwhile half as many others come and get labels in random order. `folder` gets the file with the payload.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as child:
        return child.submit(_measure, events, folder).result()


def _measure(events: int, folder: Path) -> float:
    size = max(1_000_000, 4 * events * _ROW_BYTES)
    settings = LabelStreamSettings.model_validate({"topics": ("labels",), "wait": "365d", "bytes": size})
    part = open_join(settings, _SCHEMA, (2,), folder, None, first=True)
    join = part.join
    first = _fill(part, events // 2, 1)
    give_back()
    before, begun = resident(), join.events.waiting
    _fill(part, events, first)
    give_back()
    growth = (resident() - before) / (join.events.waiting - begun)
    join.payload.tier.close()
    return growth


def _fill(part: JoinPart, events: int, first: int) -> int:
    """Let `events` wait with the next offsets from `first` on, then half as many more, each with a label for one of the
    first ones; return the next offset."""
    join = part.join
    keys = np.arange(first, first + events) * _STRIDE % events + first
    for begin in range(0, events * 3 // 2, _BATCH):
        join.add_events(_events(first + begin), None)
        if begin >= events:
            join.add_labels(_labels(keys[begin - events : begin - events + _BATCH], first))
            join.take(_BATCH)
            join.settle()
        join.advance(0, events_ms=_ENDLESS)
        if begin // _BATCH % _BETWEEN_CHECKPOINTS == 0:
            number = (first + begin) // _BATCH + 1
            part.capture(number)
            part.end(number, written=True)
    return first + begin + _BATCH


def _key(offsets: np.ndarray) -> np.ndarray:
    return mix(offsets.astype(np.uint64))


def _events(first: int) -> dict[str, Array]:
    columns: dict[str, Array] = {name: np.zeros(_BATCH, dtype) for name, dtype in IDENTITY_COLUMNS.items()}
    columns |= {name: np.zeros((_BATCH, *shape), dtype) for name, (dtype, shape) in _SCHEMA.payload().items()}
    columns["offset"] = columns["time_ms"] = np.arange(first, first + _BATCH)
    columns["key_hash"] = _key(columns["offset"])
    return columns


def _labels(offsets: np.ndarray, time_ms: int) -> dict[str, Array]:
    return {
        "key_hash": _key(offsets),
        "label": np.ones(_BATCH, np.int64),
        "labelled": np.ones(_BATCH, np.bool_),
        "time_ms": np.full(_BATCH, time_ms),
        "partition": np.zeros(_BATCH, np.int32),
        "offset": np.zeros(_BATCH, np.int64),
    }


TARGETS = {
    "late_over_plain": Target(0.9, least=True),
    "waiting_bytes": Target(64),
    "label_freshness_p99_seconds": Target(1.0),
    "early_log_loss_ratio": Target(0.9999),
}
_ROWS = (2_000, 60_000, None)
"""Of the flights, in each form: the second are two months."""


@dataclass(frozen=True)
class Setup:
    """What all parts of one start have in common."""

    results: Results
    bootstrap: str
    seeds: range
    data: Path | None
    form: Form


def rate(setup: Setup) -> None:
    """Measure the rate with late labels."""
    late_stream.rate(setup.results, form=setup.form)


def memory(setup: Setup) -> None:
    """Measure the memory of events that wait."""
    events = (2_000, 200_000, 2_000_000)[setup.form]
    setup.results.title(f"memory: {events:,} events that wait")
    with tempfile.TemporaryDirectory() as folder:
        setup.results.add("waiting_bytes", waiting_bytes(events, Path(folder)), unit="bytes per event")


def freshness(setup: Setup) -> None:
    """Measure from a label to a prediction."""
    late_stream.freshness(setup.results, setup.bootstrap, form=setup.form)


def early(setup: Setup) -> None:
    """Compare the log loss of the three policies on the same flights, by seed."""
    results, rows = setup.results, _ROWS[setup.form]
    results.title(f"flights: late ones get a label when they land, others none within {WAIT_HOURS:g} h")
    for both in (False, True):
        columns = flights(setup.data, rows, both=both)
        losses: dict[str, list[float]] = {}
        for policy in POLICIES:
            losses[policy] = [log_loss(columns, policy, seed) for seed in setup.seeds]
            name = f"{policy.replace('-', '_')}_log_loss" + ("_both_labels" if both else "")
            for seed, value in zip(setup.seeds, losses[policy], strict=True):
                results.fact(f"{name}_seed_{seed}", value)
            mean = Spread(statistics.mean(losses[policy]), min(losses[policy]), max(losses[policy]))
            results.add(name, mean, "flights in time get a label as well" if both else "", "nats")
        ratios = [
            corrected / min(waiting, negative)
            for corrected, waiting, negative in zip(
                losses["negative-then-correct"], losses["wait"], losses["negative"], strict=True
            )
        ]
        worst = Spread(max(ratios), min(ratios), max(ratios))
        key = "early_log_loss_both_labels_ratio" if both else "early_log_loss_ratio"
        results.add(key, worst, "over the better of the other two, of the worst seed")


PARTS: dict[str, Callable[[Setup], None]] = {"rate": rate, "memory": memory, "freshness": freshness, "early": early}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 0 on")
    parser.add_argument("--data", type=Path, metavar="DIR", help="has nycflights.npz, instead of what pip fetches")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("late_labels", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    with broker(None) as bootstrap:
        setup = Setup(results, bootstrap, range(chosen.seeds), chosen.data, chosen.form)
        for part in chosen.only or PARTS:
            PARTS[part](setup)
            results.write(chosen)


if __name__ == "__main__":
    main()
