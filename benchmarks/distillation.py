"""A small student of a large teacher, where one event in ten has a label, through Kafka.

    python -m benchmarks.distillation [--quick] [--json FILE] [--save] [--only PART ...] [--seeds N] [--data DIR]

    mnist   each image once, an MLP 784-32-10 as the student, an MLP 784-800-800-10 as the teacher: accuracy on the test
            images of the student with labels alone, and with `unlabelled = "distil"`; and the time of one prediction of
            both, on one thread

The teacher is trained on all training images in this process, and is a module in that of the learner. Each figure is
the mean over all seeds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from benchmarks.harness import data, models
from benchmarks.harness.interleave import Spread
from benchmarks.harness.pipeline import broker, pipeline, produce, run_through
from benchmarks.harness.results import Form, Results, Target, options
from ingest.events.block import Array

TARGETS = {
    "mnist_student_gain": Target(4.0, least=True),
    "mnist_student_p50_over_teacher": Target(0.333),
}
STUDENT = {"factory": "pixels_mlp", "args": {"widths": [784, 32, 10]}}
TEACHER_WIDTHS = [784, 800, 800, 10]
LABELLED = 0.1
_PASSES = 4
_CALLS = 300
LEARNER = {"strategy": "none", "optimizer": {"name": "adamw", "lr": 2e-3}, "max_grad_norm": float("inf")}


def trained_teacher(x: Array, y: NDArray[np.int64]) -> nn.Module:
    """Return the teacher after some passes over all images."""
    torch.manual_seed(0)
    model = models.pixels_mlp(TEACHER_WIDTHS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(_PASSES):
        for rows in torch.randperm(len(x)).split(256):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, x: Array, y: NDArray[np.int64]) -> float:
    """Return the accuracy in per cent."""
    with torch.no_grad():
        return 100 * float((model(torch.from_numpy(x)).argmax(dim=1).numpy() == y).mean())


def p50(model: nn.Module, x: Array) -> float:
    """Return the median seconds of a prediction for one event."""
    seconds = []
    with torch.inference_mode():
        for index in range(_CALLS):
            one = torch.from_numpy(x[index : index + 1])
            begin = time.perf_counter()
            model(one)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def mnist(results: Results, bootstrap: str, folder: Path, seeds: range, path: Path | None) -> None:
    """Measure both students of each seed."""
    results.title("mnist: one event in ten has a label, one pass, accuracy in per cent")
    arrays = data.load("mnist", path)
    x, y, x_test, y_test = (arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    teacher = trained_teacher(x, y)
    weights = folder / "teacher.safetensors"
    save_file(teacher.state_dict(), weights)
    results.add("mnist_teacher", accuracy(teacher, x_test, y_test), unit="%")
    found: dict[str, list[float]] = {"labels": [], "distil": []}
    student: nn.Module | None = None
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(x))
        labelled = np.random.default_rng(seed + 1000).random(len(x)) < LABELLED
        alone = order[labelled[order]]
        settings = {
            "factory": "benchmark_models:restored_mlp",
            "args": {"widths": TEACHER_WIDTHS, "path": str(weights)},
        }
        for name, rows, sections in (
            ("labels", alone, {"learner": LEARNER}),
            ("distil", order, {"learner": LEARNER, "model": {"teacher": settings}}),
        ):
            label = np.where(labelled[rows], y[rows], -1)
            stream = produce(bootstrap, f"mnist-{name}-{seed}", {"x": x[rows]}, label, 10)
            document = pipeline(stream, STUDENT, seed, sections)
            document["stream"] |= {"unlabelled": "distil"} if name == "distil" else {}
            student = run_through(stream, folder / f"{name}-{seed}", document).model
            found[name].append(accuracy(student, x_test, y_test))
    for name, values in found.items():
        results.add(f"mnist_student_{name}", Spread(statistics.mean(values), min(values), max(values)), unit="%")
    gains = [distil - labels for distil, labels in zip(found["distil"], found["labels"], strict=True)]
    results.add("mnist_student_gain", Spread(statistics.mean(gains), min(gains), max(gains)), unit="%")
    assert student is not None
    results.add("mnist_student_p50_over_teacher", p50(student, x_test) / p50(teacher, x_test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, ["mnist"], "one seed")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 0 on")
    parser.add_argument("--data", type=Path, metavar="DIR", help="has mnist.npz, instead of what pip fetches")
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="a broker instead of an embedded one")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("distillation", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    seeds = range(chosen.seeds if chosen.form is Form.LONG else 1)
    with tempfile.TemporaryDirectory() as folder, broker(chosen.bootstrap) as bootstrap:
        mnist(results, bootstrap, Path(folder).resolve(), seeds, chosen.data)
    results.write(chosen)


if __name__ == "__main__":
    main()
