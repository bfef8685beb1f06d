"""Catastrophic forgetting in one pass over a stream from Kafka, and the cost of replay where nothing recurs.

    python -m benchmarks.forgetting [--quick] [--json FILE] [--save] [--only PART ...] [--seeds N] [--jobs N]
                                    [--data DIR]

    split_mnist   class-incremental Split-MNIST: five tasks of two digits after one another, each image once, a single
                  head, MLP 784-100-100-10; the mean accuracy of the five tasks on the test images at the end
    best          the same with our best settings for each size of the store, and a model that predicts with the
                  average of its weights and in training shifts images at random by up to a pixel
    experts       the same stream, with the strategies whose model grows, and no stored event; also what an expert has
                  of the model's parameters, and whether frozen ones stay as they are
    auto          one config with `replay_ratio = "auto"` on Split-MNIST and on two streams with natural drift, Elec2
                  and the flights from New York: accuracy on the newest events before they are trained on, over the
                  whole stream, less that without replay; also that of the no-change baseline
    strangers     the same ratio on five natural streams on which no rule was made, with batches of 32 and plain SGD; a
                  fixed ratio of 1 for comparison
    compression   ER on Split-MNIST with two ranks on the CPU: what compressed gradients and rarer exchanges change in
                  accuracy, in points, and the bytes that a rank sends over those of full gradients; the quick form has
                  the ways with a target; the model predicts with the average of its weights, since the last ones
                  alone differ by two points between equal runs
    memory        ER with 300 events on seven short streams, each uneven in another way: policies of the store against
                  a uniform reservoir, in points; the quick form compares the one with a target

Events go into a topic of one partition as packed rows, in order. A learner process reads them, and the last version
that it published is evaluated. Each figure is the mean over all seeds; the file has the value of each seed.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.ingest.events.block import Array
from anabranch.learner.model.growing.pool import POOL, parts_in, pool_of
from anabranch.learner.versions.format import Versions
from benchmarks.harness import data
from benchmarks.harness.flights import MIDDLE, SCALE
from benchmarks.harness.interleave import Spread
from benchmarks.harness.memory_streams import EVENTS, IMAGES, MemoryStream, natural, prequential
from benchmarks.harness.pipeline import BrokenRunError, Outcome, Stream, broker, pipeline, produce, run_through
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.strangers import SOURCES, stranger


def frozen_parts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the frozen experts, each with one row an expert."""
    layers = {name: value for name, value in weights.items() if name.startswith(f"{POOL}.layers.")}
    stacked = {name: value for name, value in layers.items() if ".open_" not in name}
    return {**stacked, f"{POOL}.shift": weights[f"{POOL}.shift"]}


def changed_numbers(state_dir: Path) -> tuple[int, int]:
    """Return how many numbers of experts differ in the last version from any version since they were frozen, and how
    many versions had a frozen expert."""
    versions = Versions(state_dir / "versions")
    every = [versions.weights(versions.manifest(number)) for number in versions.numbers()]
    last, changed, compared = frozen_parts(every[-1]), 0, 0
    for weights in every[:-1]:
        compared += parts_in(weights) > 1
        for name, value in frozen_parts(weights).items():
            changed += int((value != last[name][: len(value)]).sum())
    return changed, compared


def part_sizes(model: nn.Module) -> tuple[float, float]:
    """Return the parameters of an expert, and these with its class means in the router, as fractions of the model
    without experts."""
    pool = pool_of(model)
    assert pool is not None
    base = sum(each.numel() for name, each in model.named_parameters() if not name.startswith(POOL))
    own = sum(each.numel() for name, each in pool.named_parameters() if "open_" in name)
    of_router = sum(each.numel() for each in pool.router.parameters())
    largest = int(torch.bincount(pool.router.owner).max())
    return own / base, (own + of_router * largest / len(pool.router.owner)) / base


Sections = Mapping[str, Mapping[str, Any]]

TARGETS = {
    "split_mnist_er_200": Target(78.9, least=True),
    "split_mnist_er_500": Target(84.0, least=True),
    "split_mnist_derpp_200": Target(84.4, least=True),
    "split_mnist_derpp_500": Target(90.0, least=True),
    "split_mnist_best_200": Target(90.5, least=True),
    "split_mnist_best_500": Target(94.0, least=True),
    "split_mnist_best_5120": Target(96.0, least=True),
    "split_mnist_experts": Target(80.4, least=True),
    "split_mnist_experts_changed": Target(0, exact=True),
    "split_mnist_experts_size_ratio": Target(0.02),
    "elec2_auto_gain": Target(-0.001, least=True),
    "flights_auto_gain": Target(-0.001, least=True),
    "split_mnist_auto_over_er": Target(0.97, least=True),
    **{f"{name}_auto_gain": Target(-0.001, least=True) for name in SOURCES},
    "compression_topk_change": Target(-0.5, least=True),
    "compression_int8_change": Target(-0.5, least=True),
    "compression_topk_bytes_over_full": Target(0.021),
    "compression_int8_bytes_over_full": Target(0.26),
    "memory_long_tailed_chosen_change": Target(2.0, least=True),
    "memory_label_noise_chosen_change": Target(2.0, least=True),
    **{
        f"memory_{name}_chosen_change": Target(-0.3, least=True)
        for name in ("class_incremental", "bursts", "recurring", "elec2", "flights")
    },
}
PUBLISHED = {
    "split_mnist_none": 19.60,
    "split_mnist_er_200": 80.43,
    "split_mnist_er_500": 86.12,
    "split_mnist_er_5120": 93.40,
    "split_mnist_derpp_200": 85.61,
    "split_mnist_derpp_500": 91.00,
    "split_mnist_derpp_5120": 95.30,
    "split_mnist_best_200": 89.5,
    "split_mnist_best_500": 92.1,
    "split_mnist_best_5120": 95.7,
}
"""Of Buzzega et al. 2020, "Dark experience for general continual learning"; for `best` of CLS-ER, Arani et al. 2022."""
_QUICK_ROWS = 60_000
"""Of a stream with natural drift, in the quick form: all flights take two hours."""
TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
MLP: dict[str, Any] = {"factory": "pixels_mlp", "args": {"widths": [784, 100, 100, 10]}}


def averaged_mlp(parts: int = 9, shift: int = 0) -> dict[str, Any]:
    """Return the same model, which predicts with the average of its weights over the last `1 / parts` of the steps, and
    in training shifts images at random by up to `shift` pixels."""
    return {"factory": "averaged_pixels_mlp", "args": {**MLP["args"], "parts": parts, "shift": shift}}


def settings(strategy: object, lr: float, capacity: int, replay: float, **replay_settings: object) -> Sections:
    """Return the sections of a pipeline file: batches of 10, plain SGD, `replay` old events for each new one."""
    learner = {
        "strategy": strategy,
        "batch_size": 10,
        "replay_ratio": replay,
        "optimizer": {"name": "sgd", "lr": lr},
        "max_grad_norm": float("inf"),
    }
    return {"learner": learner, "replay": {"capacity": capacity, **replay_settings}}


def derpp(alpha: float, beta: float) -> dict[str, object]:
    """Return DER++ with the weights of its two terms."""
    return {"name": "der++", "alpha": alpha, "beta": beta}


SPLIT_MNIST: dict[str, Sections] = {
    "split_mnist_er_200": settings("er", 0.01, 200, 1.0),
    "split_mnist_er_500": settings("er", 0.1, 500, 1.0),
    "split_mnist_derpp_200": settings(derpp(0.2, 1.0), 0.03, 200, 12.8),
    "split_mnist_derpp_500": settings(derpp(1.0, 0.5), 0.03, 500, 1.0),
    "split_mnist_none": settings("none", 0.1, 500, 0.0),
}
BEST: dict[str, tuple[Sections, Mapping[str, Any]]] = {
    "split_mnist_best_200": (settings(derpp(0.5, 0.5), 0.05, 200, 1.0), averaged_mlp(8, shift=1)),
    "split_mnist_best_500": (settings(derpp(0.5, 0.5), 0.1, 500, 1.0), averaged_mlp(8, shift=1)),
    "split_mnist_best_5120": (settings(derpp(0.5, 0.5), 0.15, 5120, 6.4), averaged_mlp(9, shift=1)),
}
"""Sections and model; chosen on training images that were not trained on."""
LARGE_BUFFER: dict[str, Sections] = {
    "split_mnist_er_5120": settings("er", 0.1, 5120, 1.0),
    "split_mnist_derpp_5120": settings(derpp(0.2, 0.5), 0.1, 5120, 6.4),
}
"""Left out of the quick form."""
ROUTED = {**MLP, "embedding": "1.0"}
"""Its embedding is the first layer's output: each further layer of random weights loses some of the image."""
GROWING: dict[str, Sections] = {
    "split_mnist_experts": settings({"name": "experts", "size": 0.018}, 0.1, 500, 0.0),
    "split_mnist_progressive": settings("progressive", 0.1, 500, 0.0),
}
"""The size leaves room for the class means of two classes within 2 % of the model."""
AUTO = settings("er", 0.1, 500, 1.0)
"""The settings of all streams of the part `auto`, except the ratio."""
STRANGERS: Sections = {
    "learner": {**AUTO["learner"], "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.02}},
    "replay": {"capacity": 10_000},
}
"""The settings of all streams of the part `strangers`, except the ratio."""
RATIOS: dict[str, object] = {"none": 0.0, "auto": "auto", "fixed": 1.0}
"""The last one is for information, and left out of the quick form."""
COMPRESSION: dict[str, Mapping[str, object]] = {
    "full": {},
    "int8": {"comm_hook": "int8"},
    "topk": {"comm_hook": "topk"},
    "sync_every_4": {"sync_every": 4},
    "sync_every_16": {"sync_every": 16},
    "sync_every_64": {"sync_every": 64},
    "fp16": {"comm_hook": "fp16"},
    "powersgd": {"comm_hook": "powersgd"},
}
"""Settings of two ranks, by figure; the quick form has the first three."""


@dataclass(frozen=True)
class Drifting:
    """A stream with natural drift: its columns, labels, and the model for it."""

    columns: dict[str, Array]
    label: Array
    model: dict[str, Any]

    def first(self, n: int) -> "Drifting":
        """Return the first n events."""
        return Drifting({name: column[:n] for name, column in self.columns.items()}, self.label[:n], self.model)

    @property
    def no_change(self) -> float:
        """The accuracy of the no-change baseline, which predicts the previous label."""
        return float((self.label[1:] == self.label[:-1]).mean())


def elec2(folder: Path | None) -> Drifting:
    """Electricity prices of New South Wales, up or down; numbers are scaled by the statistics of the first 1,000."""
    arrays = data.load("elec", folder)
    first = arrays["x"][:1000]
    args = {"middle": first.mean(axis=0).tolist(), "scale": (first.std(axis=0) + 1e-3).tolist(), "categories": []}
    return Drifting({"num": arrays["x"]}, arrays["y"], {"factory": "tabular", "args": args})


def flights(folder: Path | None) -> Drifting:
    """Departures from New York: does one arrive more than a quarter of an hour late?"""
    arrays = data.load("nycflights", folder)
    counts = (arrays["cat"].max(axis=0) + 1).tolist()
    args = {"middle": MIDDLE, "scale": SCALE, "categories": counts}
    label = (arrays["delay"] > 15).astype(np.int64)
    return Drifting({"num": arrays["num"], "cat": arrays["cat"]}, label, {"factory": "tabular", "args": args})


NATURAL: dict[str, Callable[[Path | None], Drifting]] = {"elec2": elec2, "flights": flights}
MEMORIES: dict[str, Mapping[str, object]] = {
    "uniform": {},
    "chosen": {"admission": "distinct", "sampling": "agreement", "class_floor": 0.25},
    "class_floor": {"class_floor": 0.25},
    "distinct": {"admission": "distinct"},
    "agreement": {"sampling": "agreement"},
    "class_balanced": {"sampling": "class-balanced"},
    "similar": {"sampling": "similar"},
    "diverse": {"admission": "diverse", "sampling": "diverse"},
}
"""Settings of the store, by figure; the quick form has the first two."""


@dataclass(frozen=True)
class Setup:
    """What all runs of one start have in common."""

    results: Results
    bootstrap: str
    folder: Path
    seeds: range
    pool: ThreadPoolExecutor
    data: Path | None
    form: Form
    values: dict[str, list[float]] = field(default_factory=dict)
    """Of each figure so far, one value a seed."""

    def outcomes(
        self, name: str, streams: Sequence[Stream], model: Mapping[str, Any], sections: Sections
    ) -> list[Outcome]:
        """Train on the stream of each seed, several at once; raises BrokenRunError."""
        jobs = [
            self.pool.submit(
                run_through, stream, self.folder / f"{name}-{seed}", pipeline(stream, model, seed, sections)
            )
            for seed, stream in zip(self.seeds, streams, strict=True)
        ]
        return [job.result() for job in jobs]

    def add(self, key: str, values: Sequence[float], unit: str, remark: str = "") -> None:
        """Print the mean over the seeds with its smallest and largest value, and save the value of each seed."""
        self.values[key] = list(values)
        for seed, value in zip(self.seeds, values, strict=True):
            self.results.fact(f"{key}_seed_{seed}", value)
        spread = f"+- {statistics.stdev(values):.2g} " if len(values) > 1 else ""
        mean = Spread(statistics.mean(values), min(values), max(values))
        self.results.add(key, mean, f"{spread}{remark}".strip(), unit)


def in_task_order(label: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return all images, those of a task after those of the one before, in the order of the seed within it."""
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(np.flatnonzero(np.isin(label, task))) for task in TASKS])


def mean_of_tasks(model: torch.nn.Module, x: Array, label: NDArray[np.int64]) -> float:
    """Return the mean of the five tasks' accuracies in per cent; any of the ten classes may be the answer."""
    with torch.no_grad():
        right = model(torch.from_numpy(x)).argmax(dim=1).numpy() == label
    return 100 * float(np.mean([right[np.isin(label, task)].mean() for task in TASKS]))


class SplitMnist:
    """The images, and one topic a seed."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        arrays = data.load("mnist", setup.data)
        self.test = arrays["x_test"], arrays["y_test"]
        """The test images and their labels."""
        x, y = arrays["x_train"], arrays["y_train"]
        self.streams: list[Stream] = []
        """One a seed."""
        for seed in setup.seeds:
            order = in_task_order(y, seed)
            topic = f"split-mnist-{seed}"
            self.streams.append(produce(setup.bootstrap, topic, {"x": x[order]}, y[order], 10))

    def accuracies(self, name: str, sections: Sections, model: Mapping[str, Any]) -> tuple[list[float], float]:
        """Return each seed's accuracy, and the steps a second of a learner."""
        accuracies, outcomes = self.outcomes(name, sections, model)
        return accuracies, statistics.median(outcome.steps_per_second for outcome in outcomes)

    def outcomes(self, name: str, sections: Sections, model: Mapping[str, Any]) -> tuple[list[float], list[Outcome]]:
        """Return each seed's accuracy and outcome."""
        outcomes = self._setup.outcomes(name, self.streams, model, sections)
        return [mean_of_tasks(outcome.model, *self.test) for outcome in outcomes], outcomes


def split_mnist(setup: Setup) -> None:
    """Measure each strategy."""
    setup.results.title("split_mnist: class-incremental, one pass, mean accuracy of five tasks in per cent")
    chosen = SPLIT_MNIST | (LARGE_BUFFER if setup.form is Form.LONG else {})
    _each(setup, {key: (sections, MLP) for key, sections in chosen.items()})


def best(setup: Setup) -> None:
    """Measure our best settings."""
    setup.results.title("best: the same with the best settings for each size of the store, averaged weights, shifts")
    _each(setup, BEST)


def _each(setup: Setup, runs: Mapping[str, tuple[Sections, Mapping[str, Any]]]) -> None:
    mnist = SplitMnist(setup)
    for key, (sections, model) in runs.items():
        try:
            accuracies, rate = mnist.accuracies(key, sections, model)
        except BrokenRunError as exc:
            setup.results.remark(f"{key}: left out: {exc}")
            continue
        published = f"published {PUBLISHED[key]:.2f}, " if key in PUBLISHED else ""
        setup.add(key, accuracies, "%", f"{published}{rate:.0f} steps/s")


def experts(setup: Setup) -> None:
    """Measure the strategies whose model grows, without a stored event."""
    setup.results.title("experts: Split-MNIST with no event stored; versions every half second")
    mnist = SplitMnist(setup)
    for key, sections in GROWING.items():
        often = {**sections, "versions": {"publish_every": "500ms", "keep": 10_000}}
        try:
            outcomes = setup.outcomes(key, mnist.streams, ROUTED, often)
        except BrokenRunError as exc:
            setup.results.remark(f"{key}: left out: {exc}")
            continue
        setup.add(key, [mean_of_tasks(outcome.model, *mnist.test) for outcome in outcomes], "%", "published ER 80.43")
        setup.add(f"{key}_parts", [float(_parts(outcome.model)) for outcome in outcomes], "count")
        frozen = [changed_numbers(setup.folder / f"{key}-{seed}" / "var") for seed in setup.seeds]
        compared = f"in {sum(count for _, count in frozen)} versions"
        setup.results.add(f"{key}_changed", float(sum(changed for changed, _ in frozen)), compared, "count")
        if key == "split_mnist_experts":
            own, with_means = part_sizes(outcomes[0].model)
            setup.results.add(f"{key}_size_ratio", own)
            setup.results.add(f"{key}_with_means_ratio", with_means)


def _parts(model: torch.nn.Module) -> int:
    pool = pool_of(model)
    assert pool is not None
    return pool.size


def auto(setup: Setup) -> None:
    """Measure one config with `replay_ratio = "auto"` on all streams."""
    setup.results.title('auto: one config, the ratio "auto"')
    mnist, fixed = SplitMnist(setup), "split_mnist_er_500"
    try:
        if fixed not in setup.values:
            setup.add(fixed, mnist.accuracies(fixed, SPLIT_MNIST[fixed], MLP)[0], "%")
        setup.add("split_mnist_auto", mnist.accuracies("split_mnist_auto", _with_ratio("auto"), MLP)[0], "%")
    except BrokenRunError as exc:
        setup.results.remark(f"split_mnist_auto_over_er: left out: {exc}")
    else:
        means = [statistics.mean(setup.values[key]) for key in ("split_mnist_auto", fixed)]
        setup.results.add("split_mnist_auto_over_er", means[0] / means[1])
    for name, load in NATURAL.items():
        stream = load(setup.data)
        _natural(setup, name, stream if setup.form is Form.LONG else stream.first(_QUICK_ROWS))


def strangers(setup: Setup) -> None:
    """Measure the ratio "auto" on streams on which it was not made."""
    setup.results.title('strangers: the ratio "auto" on streams on which it was not made')
    for name, source in SOURCES.items():
        x, y = stranger(name, data.load(source, setup.data))
        numbers = x.shape[1]
        args = {"middle": [0.0] * numbers, "scale": [1.0] * numbers, "categories": [], "classes": int(y.max()) + 1}
        _natural(setup, name, Drifting({"num": x}, y, {"factory": "tabular", "args": args}), STRANGERS)


def compression(setup: Setup) -> None:
    """Measure ways to exchange gradients between two ranks, against full gradients."""
    setup.results.title("compression: two ranks on Split-MNIST, ER with 500 events")
    mnist = SplitMnist(setup)
    full: list[float] = []
    full_bytes = 0.0
    for name in list(COMPRESSION)[: None if setup.form is Form.LONG else 3]:
        learner = {**AUTO["learner"], "batch_size": AUTO["learner"]["batch_size"] // 2, "replicas": 2}
        sections = {**AUTO, "learner": {**learner, **COMPRESSION[name]}}
        try:
            accuracies, outcomes = mnist.outcomes(f"compression-{name}", sections, averaged_mlp())
        except BrokenRunError as exc:
            setup.results.remark(f"compression_{name}: left out: {exc}")
            continue
        sent = statistics.mean((each.report.exchanged_bytes or 0) / each.report.steps for each in outcomes)
        setup.add(f"compression_{name}", accuracies, "%", f"{sent:.0f} bytes a step and rank")
        if name == "full":
            full, full_bytes = accuracies, sent
        elif full:
            changes = [changed - before for changed, before in zip(accuracies, full, strict=True)]
            setup.add(f"compression_{name}_change", changes, "points")
            setup.results.add(f"compression_{name}_bytes_over_full", sent / full_bytes)


def _natural(setup: Setup, name: str, drifting: Drifting, sections: Sections = AUTO) -> None:
    stream = produce(setup.bootstrap, name, drifting.columns, drifting.label, int(drifting.label.max()) + 1)
    setup.results.add(f"{name}_no_change", drifting.no_change, "predicts the previous label", "fraction")
    accuracies: dict[str, list[float]] = {}
    for ratio in list(RATIOS)[: 3 if setup.form is Form.LONG else 2]:
        streams = [stream] * len(setup.seeds)
        try:
            outcomes = setup.outcomes(f"{name}-{ratio}", streams, drifting.model, _with_ratio(ratio, sections))
            accuracies[ratio] = [prequential(outcome) for outcome in outcomes]
        except BrokenRunError as exc:
            setup.results.remark(f"{name}_{ratio}: left out: {exc}")
            continue
        setup.add(f"{name}_{ratio}", accuracies[ratio], "fraction")
    for ratio in [other for other in accuracies if other != "none" and "none" in accuracies]:
        gains = [with_ - without for with_, without in zip(accuracies[ratio], accuracies["none"], strict=True)]
        setup.add(f"{name}_{ratio}_gain", gains, "fraction")


def _with_ratio(name: str, sections: Sections = AUTO) -> Sections:
    learner = {**sections["learner"], "replay_ratio": RATIOS[name]}
    return {**sections, "learner": learner, "gate": {"holdout_fraction": 0.01}}


def memory(setup: Setup) -> None:
    """Measure policies of the store against the uniform ones, on each stream."""
    setup.results.title("memory: policies of the store against reservoir and uniform, ER with 300 events")
    arrays = data.load("mnist", setup.data)
    train, test = (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])
    for name, make in IMAGES.items():
        _compare(setup, name, [make(train, test, seed) for seed in setup.seeds])
    for name, load in NATURAL.items():
        part = load(setup.data).first(EVENTS)
        _compare(setup, name, [natural(part.columns, part.label, part.model)] * len(setup.seeds))


def _compare(setup: Setup, name: str, streams: Sequence[MemoryStream]) -> None:
    topics = [
        produce(setup.bootstrap, f"memory-{name}-{seed}", stream.columns, stream.label, stream.classes)
        for seed, stream in zip(setup.seeds, streams, strict=True)
    ]
    uniform: list[float] = []
    for policy, policies in list(MEMORIES.items())[: None if setup.form is Form.LONG else 2]:
        key = f"memory_{name}_{policy}"
        try:
            outcomes = setup.outcomes(key, topics, streams[0].model, settings("er", 0.1, 300, 1.0, **policies))
            scores = [stream.score(outcome) for stream, outcome in zip(streams, outcomes, strict=True)]
        except BrokenRunError as exc:
            setup.results.remark(f"{key}: left out: {exc}")
            continue
        rate = statistics.median(outcome.steps_per_second for outcome in outcomes)
        setup.add(key, scores, "%", f"{rate:.0f} steps/s")
        if policy == "uniform":
            uniform = scores
        elif uniform:
            changes = [score - before for score, before in zip(scores, uniform, strict=True)]
            setup.add(f"{key}_change", changes, "points")


PARTS: dict[str, Callable[[Setup], None]] = {
    "split_mnist": split_mnist,
    "best": best,
    "experts": experts,
    "auto": auto,
    "strangers": strangers,
    "compression": compression,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS, "all keys and seeds that have a target, within 35 minutes on two cores")
    parser.add_argument("--seeds", type=int, default=5, help="seeds, from 0 on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="learners at once")
    parser.add_argument("--data", type=Path, metavar="DIR", help="has mnist.npz and so on, instead of what pip fetches")
    parser.add_argument(
        "--bootstrap", metavar="HOST:PORT", help="a broker, where topics are left, instead of an embedded one"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("forgetting", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    with (
        tempfile.TemporaryDirectory() as folder,
        broker(chosen.bootstrap) as bootstrap,
        ThreadPoolExecutor(chosen.jobs) as pool,
    ):
        setup = Setup(results, bootstrap, Path(folder).resolve(), range(chosen.seeds), pool, chosen.data, chosen.form)
        for part in chosen.only or PARTS:
            PARTS[part](setup)
            results.write(chosen)


if __name__ == "__main__":
    main()
