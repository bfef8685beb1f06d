"""How often versions fail by measures: equal ones by chance, and ones that rank worse at the same accuracy.

    python -m benchmarks.verdicts [--quick] [--json FILE] [--save] [--only PART ...]

    equal    verdicts on versions that rank as well as the served one, each with new held-out events
    worse    rows of versions whose ROC AUC is 0.02 lower, until monitoring withdraws those that are served

Each round holds out 2,000 events with 40 positives, judges one version, and monitors what serves, by the gate itself.
All versions answer *no* to every event: their accuracy is the same. A version's log-odds are those of the risk behind
the labels, with its own noise. A row is held back from the round on after which the good version before it serves
until the end. `gate.max_hold` is over at once, so that the best version served lately is the served one.
"""

import argparse
import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.versions.format import Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from benchmarks.harness.interleave import Spread
from benchmarks.harness.results import Form, Results, Target, options

EVENTS, POSITIVES = 2000, 40
"""Held-out events of a round, and those of class 1."""
SEPARATION, NOISE = 1.5, 0.45
"""Distance of the means of both classes, in standard deviations, and the noise that lowers the ROC AUC by 0.02."""
ROUNDS = 15
"""The time that is said: 600 positives."""
_NOISES = 8
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [1 + _NOISES]}}, "label": {"name": "y", "classes": 2}}
    )
)
TARGETS = {"equal_failed": Target(0.01), "worse_held_back": Target(0.95, least=True)}


class Row:
    """A gate, and versions that are judged by it one after the other."""

    def __init__(self, folder: Path, seed: int, measure: str) -> None:
        settings = GateSettings.model_validate({"measures": {measure: 0.01}, "max_hold": "1ms"})
        reference = reference_to(ModelSettings(factory="m:build"))
        scorer = Scorer(
            nn.Linear(1 + _NOISES, 2), Classification(), SCHEMA, torch.device("cpu"), measures=settings.measures
        )
        self.gate = QualityGate(Versions(folder), settings, scorer, reference)
        self._random, self._holdout = np.random.default_rng(seed), HoldoutSet(SCHEMA, settings.holdout_rows, seed)
        self._number, self._events = 0, 0
        self.serves = 0
        """The version that serves."""

    def judge(self, noise: float) -> str:
        """Hold out new events, judge the next version, and monitor; return its verdict."""
        label = np.zeros(EVENTS, np.int64)
        label[self._random.permutation(EVENTS)[:POSITIVES]] = 1
        columns = fake_columns(SCHEMA, range(self._events, self._events + EVENTS))
        x = self._random.normal(size=(EVENTS, 1 + _NOISES))
        x[:, 0] += SEPARATION * label
        columns["feature.x"], columns["label"] = x.astype(np.float32), label
        self._holdout.add(columns, [TopicPartition("payments", 0)])
        self._events, self._number = self._events + EVENTS, self._number + 1
        weights, rows = self._weights(noise), self._holdout.held
        found = self.gate.scorer.score_and_find(weights, rows.columns)
        verdict = self.gate.judge(found, rows)
        self.gate.record_published(self._number, weights, found, rows, verdict)
        if verdict.verdict != "fail":
            self.serves = self._number
        before = self.gate.withdrawn
        self.gate.monitor(rows)
        if self.gate.withdrawn > before and self.gate.by_measures.last_good is not None:
            self.serves = self.gate.by_measures.last_good.number
        return verdict.verdict

    def _weights(self, noise: float) -> dict[str, Tensor]:
        """Return the weights of a version whose odds are calibrated but for a prior by which no event is positive."""
        scale = SEPARATION / (1 + noise**2)
        odds = torch.zeros(1 + _NOISES)
        odds[0], odds[1 + self._number % _NOISES] = scale, scale * noise
        return {"weight": torch.stack([torch.zeros_like(odds), odds]), "bias": torch.tensor([0.0, -20.0])}


def equal(results: Results, rows: int, measure: str) -> None:
    """Measure how many of the verdicts on equal versions fail, by the gate or by monitoring."""
    results.title(f"equal: versions with the same {measure}, {rows * ROUNDS} verdicts")
    failed, withdrawn = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rows):
            row = Row(Path(folder), seed, measure)
            failed += [row.judge(NOISE) for _ in range(1 + ROUNDS)].count("fail")
            withdrawn += row.gate.withdrawn
    results.add("equal_failed", Spread.of([(failed + withdrawn) / (rows * ROUNDS)]), f"{withdrawn} by monitoring")


def worse(results: Results, rows: int, measure: str) -> None:
    """Measure how many rows of worse versions are withdrawn, after how many positives, and how many come back."""
    results.title(f"worse: {measure} of versions whose ROC AUC is 0.02 lower, {rows} rows")
    found, withdrawn = list[int](), 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rows):
            row = Row(Path(folder), seed, measure)
            row.judge(0.0)
            good, served = row.serves, list[bool]()
            for _ in range(2 * ROUNDS):
                row.judge(NOISE)
                served.append(row.serves != good)
            found.append(max((number for number, bad in enumerate(served, 1) if bad), default=0) + 1)
            withdrawn += row.gate.withdrawn
    within = sum(each <= ROUNDS for each in found) / rows
    results.add("worse_held_back", Spread.of([within]), f"within {ROUNDS * POSITIVES} held-out positives")
    results.add("worse_positives", Spread.of([POSITIVES * float(np.median(found))]), "the median row")
    results.add("worse_withdrawn", Spread.of([withdrawn / rows]), "times that monitoring withdrew a row")


PARTS = {"equal": equal, "worse": worse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--measure", default="roc_auc", help="by which versions are judged")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = Results("verdicts", TARGETS)
    rows = {Form.SMOKE: 2, Form.QUICK: 20, Form.LONG: 84}[chosen.form]
    for part in chosen.only or PARTS:
        PARTS[part](results, rows, chosen.measure)
    results.write(chosen)


if __name__ == "__main__":
    main()
