"""The flights from New York with the labels that a stream of alarms has: only late flights have one, when they land."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from anabranch.commands.backtesting.delayed_labels import DelayedRun, LabelDelay, Policy
from anabranch.commands.backtesting.training import BacktestTraining, Numbering
from anabranch.config.loader import load_config
from benchmarks.harness import data, models
from benchmarks.harness.flights import MIDDLE, SCALE
from ingest.events.block import Array
from learner.__main__ import deployment_of
from learner.build import LearnerSpec

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
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (path / "benchmark_models.py").write_bytes(Path(models.__file__).read_bytes())
        training = BacktestTraining(_spec(path, columns, seed), torch.device("cpu"), "flights", stack)
        run, numbering = DelayedRun(training, "none", policy, _delay()), Numbering()
        for batch in _batches(columns):
            run.add(numbering.add(batch), {})
    return run.score.points[-1].overall_loss


def _delay() -> LabelDelay:
    return LabelDelay(_KNOWN, WAIT_HOURS * 3600, "negative")


def _spec(folder: Path, columns: Mapping[str, Array], seed: int) -> LearnerSpec:
    categories = (columns["feature.cat"].max(axis=0) + 1).tolist()
    text = _TEXT.format(seed=seed, middle=MIDDLE, scale=SCALE, categories=categories, batch_size=BATCH_SIZE)
    (folder / "pipeline.toml").write_text(text)
    return deployment_of(load_config(folder / "pipeline.toml", {}))


def _batches(columns: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
    for begin in range(0, len(columns["label"]), BATCH_SIZE):
        yield {name: column[begin : begin + BATCH_SIZE] for name, column in columns.items()}
