"""How far the probabilities that are served are from frequencies, with and without a calibration.

    python -m benchmarks.calibration [--quick] [--json FILE] [--save] [--only STREAM ...] [--data DIR] [--seeds N]

The learner's own step and store train on two natural streams: Elec2, and flights from New York, of which a quarter are
late. A version is made every 256 events; it answers the next 256 before they are trained on. `ece` is the expected
calibration error of these answers over the events from the 20,000th on, to the end of the stream; `log_loss` that of
the same events. Arms: `uniform` and `balanced`, what is replayed of the classes; each without a calibration, and with
`temperature`, `platt` and `isotonic`. `_error` is what chance alone gives: the ECE of labels that are sampled from the
answers themselves, the mean of 20 samples.
"""

import argparse
import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from anabranch.commands.backtest.batches import Numbering, batch_of
from anabranch.commands.backtest.training import BacktestTraining
from anabranch.config.loader import load_config
from anabranch.ingest.events.block import Array
from anabranch.learner.evaluate.calibration import calibrated, learned_rule
from anabranch.learner.evaluate.measures import Outcomes, measure_of, probability_of
from anabranch.learner.evaluate.outcomes import log_probabilities
from anabranch.learner.model.answer_rule import AnswerRule
from anabranch.learner.model.factory import forward
from anabranch.learner.settings.model import TaskSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.train.build import build_training_setup
from benchmarks.harness import data, models
from benchmarks.harness.flights import MIDDLE, SCALE
from benchmarks.harness.interleave import Spread
from benchmarks.harness.results import Results, Target, options

STREAMS = ("elec2", "flights")
SAMPLING = {"uniform": "uniform", "balanced": "class-balanced"}
CALIBRATIONS = ("none", "temperature", "platt", "isotonic")
TARGETS = {f"{stream}_{arm}_isotonic_ece": Target(0.01) for stream in STREAMS for arm in SAMPLING}
_BATCH = 64
_VERSION = 4
"""Steps."""
_TEXT = """
name = "events"
seed = {seed}
[stream]
topics = ["events"]
[schema.features]
{features}
[schema.label]
name = "y"
classes = 2
[model]
factory = "benchmark_models:tabular"
args = {{middle = {middle}, scale = {scale}, categories = {categories}}}
[learner]
strategy = "er"
batch_size = 64
device = "cpu"
precision = "fp32"
[replay]
sampling = "{sampling}"
[task]
calibrate = "isotonic"
"""


def events_of(name: str, folder: Path | None, rows: int | None) -> tuple[dict[str, Array], dict[str, object]]:
    """Return the columns of the first events of a stream, and what fills in `_TEXT`."""
    if name == "elec2":
        arrays = data.load("elec", folder)
        columns, label, first = {"num": arrays["x"]}, arrays["y"], arrays["x"][:1000]
        middle, scale, counts = first.mean(axis=0).tolist(), (first.std(axis=0) + 1e-3).tolist(), []
        features = 'num = {dtype = "float32", shape = [6]}'
    else:
        arrays = data.load("nycflights", folder)
        columns = {"num": arrays["num"], "cat": arrays["cat"]}
        label, middle, scale = arrays["delay"] > 15, MIDDLE, SCALE
        counts = (arrays["cat"].max(axis=0) + 1).tolist()
        features = 'num = {dtype = "float32", shape = [14]}\ncat = {dtype = "int64", shape = [3]}'
    found = {f"feature.{column}": values[:rows] for column, values in columns.items()}
    total = len(found["feature.num"])
    found |= {"label": label[:rows].astype(np.int64), "labelled": np.ones(total, np.bool_)}
    found |= {"weight": np.ones(total, np.float32)}
    return found, {"features": features, "middle": middle, "scale": scale, "categories": counts}


def answers(columns: Mapping[str, Array], spec: PipelineSettings, first: int) -> dict[str, Array]:
    """Return the log-odds by which versions answer the events from `first` on, by calibration, float64 `[N]`."""
    found: dict[str, list[Array]] = {name: [] for name in CALIBRATIONS}
    rules: dict[str, AnswerRule | None] = dict.fromkeys(CALIBRATIONS)
    with contextlib.ExitStack() as stack:
        setup, numbering, seen = build_training_setup(spec, torch.device("cpu")), Numbering(), 0
        training = BacktestTraining(spec, setup, "events", stack)
        for batches in _versions(columns):
            model = copy.deepcopy(training.trainer.model).eval()
            parts = training.monitor.outcomes.recent or ()
            for batch in batches:
                if seen >= first:
                    features = {name[8:]: torch.from_numpy(c) for name, c in batch.items() if name[:8] == "feature."}
                    with torch.inference_mode():
                        log_BC = forward(model, features).log_softmax(dim=1).numpy()
                    for name in CALIBRATIONS:
                        if rules[name] is None or batch is batches[0]:
                            rules[name] = learned_rule(
                                TaskSettings.model_validate({"calibrate": name}), *log_probabilities(parts), rules[name]
                            )
                        rule = rules[name]
                        assert rule is not None
                        log_of = calibrated(rule.calibration, log_BC)
                        found[name].append(log_of[:, 1] - log_of[:, 0])
                training.take(batch_of(numbering.add(batch), held_out={}))
                seen += len(batch["label"])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _versions(columns: Mapping[str, Array]) -> Iterator[list[dict[str, Array]]]:
    rows = len(columns["label"])
    for begin in range(0, rows, _BATCH * _VERSION):
        starts = range(begin, min(rows, begin + _BATCH * _VERSION), _BATCH)
        yield [{name: column[start : start + _BATCH] for name, column in columns.items()} for start in starts]


def of_stream(name: str, chosen: argparse.Namespace, rows: int | None, first: int, results: Results) -> None:
    """Add the figures of one stream."""
    columns, filled = events_of(name, chosen.data, rows)
    label = columns["label"][first // (_BATCH * _VERSION) * _BATCH * _VERSION :]
    values: dict[str, list[float]] = {}
    for arm, sampling in SAMPLING.items():
        for seed in range(chosen.seeds or 1):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                (path / "benchmark_models.py").write_bytes(Path(models.__file__).read_bytes())
                (path / "pipeline.toml").write_text(_TEXT.format(seed=seed, sampling=sampling, **filled))
                spec = load_config(path / "pipeline.toml", {}).pipeline
                odds = answers(columns, spec, first)
            generator = np.random.default_rng(seed)
            for calibration, odds_N in odds.items():
                key = f"{name}_{arm}_{calibration}"
                outcomes = Outcomes("two-classes", odds_N[:, None], label[-len(odds_N) :])
                for measure in ("ece", "log_loss"):
                    value = measure_of(measure, "two-classes").value(outcomes)
                    values.setdefault(f"{key}_{measure}", []).append(value)
                chance = probability_of(odds_N)
                sampled = [
                    measure_of("ece", "two-classes").value(
                        Outcomes("two-classes", odds_N[:, None], (generator.random(len(chance)) < chance).astype(int))
                    )
                    for _ in range(20)
                ]
                values.setdefault(f"{key}_ece_error", []).append(float(np.mean(sampled)))
    for key, each in values.items():
        results.add(key, Spread(float(np.mean(each)), min(each), max(each)), f"{len(each)} seeds, {len(label)} events")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, STREAMS)
    parser.add_argument("--data", type=Path, help="folder of elec.npz and nycflights.npz; fetched by pip without it")
    parser.add_argument("--seeds", type=int, help="by default 1")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("anabranch").setLevel(logging.ERROR)  # flights have numbers that are far from all others
    results = Results("calibration", TARGETS)
    rows, first = ((1536, 512), (60_000, 19_968), (None, 19_968))[chosen.form]
    for name in chosen.only or STREAMS:
        results.title(f"{name}: what versions answer from event {first:,} on")
        of_stream(name, chosen, rows, first, results)
    results.write(chosen)


if __name__ == "__main__":
    main()
