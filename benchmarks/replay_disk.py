"""Steps a second with a store larger than its memory, against a store that memory holds.

    python benchmarks/replay_disk.py [--quick] [--rows N] [--memory N] [--hidden N] [--device cpu]

Four learners train on the same new events, 64 a step and as many replayed ones of 3 KB each, in turns of some dozen
steps, so that all meet the same machine:

    small   a store of `--memory` events, all in memory: the baseline
    large   a store of `--rows` events, all in memory: what the size of the index alone costs
    disk    a store of `--rows` events on disk, `--memory` of them cached in memory
    cold    the same, and the page cache gives up the file before each turn

The figure is the steps a second of each over those of the baseline in the same round, and the time that steps waited
for rows over the time that they took.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ingest.block import TopicPartition
from ingest.config import SchemaSettings
from ingest.fake import fake_columns
from ingest.schema import Schema
from learner.config import LearnerSettings
from learner.precision import choose_precision
from learner.strategy import STRATEGIES
from learner.task import Classification
from learner.trainer import Trainer
from replay.build import build_store
from replay.config import ReplaySettings
from replay.store import Store

BATCH = 64
_OFFERED = 5
"""The stream so far is so many times as long as the large store: one new event in so many is kept."""
PARTITIONS = [TopicPartition("events", 0)]
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [784]}}, "label": {"name": "y", "classes": 10}}
    )
)


class Arm:
    """A learner and its store."""

    def __init__(self, name: str, store: Store, device: torch.device, hidden: int = 512, *, cold: bool = False) -> None:
        self.name, self.store, self._cold = name, store, cold
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 256), nn.ReLU(), nn.Linear(256, 10))
        settings = LearnerSettings()
        precision = choose_precision(settings.precision, device)
        self._trainer = Trainer(
            model.to(device), Classification(), STRATEGIES["er"](), SCHEMA, settings, device, precision
        )
        self._step = 0
        self._offset = 10**9

    def fill(self, rows: int) -> None:
        """Offer so many events: all learners have seen a stream of the same length."""
        for begin in range(0, rows, 1000):
            self.store.add(events(begin, 1000), PARTITIONS)
        self.store.tiers.sync()

    def turn(self, steps: int) -> tuple[float, float]:
        """Train, and return steps a second and the share of the time that was spent waiting for rows."""
        disk = self.store.tiers.disk
        if self._cold and disk is not None:
            self.store.tiers.sync()
            os.posix_fadvise(disk._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.store.plan_ahead(self._step, BATCH)
        waited = self.store.tiers.stats.stall_seconds
        begin = time.perf_counter()
        for _ in range(steps):
            new = events(self._offset, BATCH)
            draw = self.store.draw(self._step, BATCH)
            self._trainer.step(self._trainer.examples(new), self._trainer.rehearsal(draw))
            self._step += 1
            self._offset += BATCH
            self.store.add(new, PARTITIONS)
            self.store.plan_ahead(self._step, BATCH)
        seconds = time.perf_counter() - begin
        return steps / seconds, (self.store.tiers.stats.stall_seconds - waited) / seconds


POOL = np.random.default_rng(0).standard_normal((4096, 784), np.float32)


def events(begin: int, count: int) -> dict[str, np.ndarray]:
    """Return new events whose pixels are taken from a pool, which costs little beside the step."""
    columns = fake_columns(SCHEMA, range(begin, begin + count), label=list(range(10)))
    first = begin % (len(POOL) - count)
    columns["feature.x"] = POOL[first : first + count]
    return columns


def store(capacity: int, memory: int, folder: Path, device: torch.device) -> Store:
    """Return a store of `capacity` events with `memory` of them in memory."""
    row = 784 * 4 + 32
    options: dict[str, object] = {"capacity": capacity, "device_bytes": int(memory * row * 1.2) + 1_000_000}
    if capacity > memory:
        options["disk"] = {"bytes": int(capacity * row * 1.2) + 10_000_000}
    return build_store(ReplaySettings.model_validate(options), SCHEMA, device, 0, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, help="events of the large store")
    parser.add_argument("--memory", type=int, help="events that memory holds")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model: how long a step takes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = options.rows or (40_000 if options.quick else 400_000)
    memory = options.memory or rows // 10
    rounds, steps = (25, 20) if options.quick else (100, 40)
    device = torch.device(options.device)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sizes = {"small": (memory, memory), "large": (rows, rows), "disk": (rows, memory), "cold": (rows, memory)}
        arms = [
            Arm(name, store(*size, Path(folder), device), device, options.hidden, cold=name == "cold")
            for name, size in sizes.items()
        ]
        for arm in arms:
            arm.fill(_OFFERED * rows)
            arm.turn(steps)
        held = ", ".join(f"{arm.name} {arm.store.rows}" for arm in arms)
        print(f"{rounds} rounds of {steps} steps, {BATCH} + {BATCH} events of 3.1 KB; held: {held}")
        figures: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
        gc.disable()
        for turn in range(rounds):
            for place in range(len(arms)):
                arm = arms[(place + turn) % len(arms)]
                figures[arm.name].append(arm.turn(steps))
        for name, found in figures.items():
            ratios = [mine / base for (mine, _), (base, _) in zip(found, figures["small"], strict=True)]
            speed = statistics.median(rate for rate, _ in found)
            wait = statistics.median(share for _, share in found)
            print(
                f"{name:7} {speed:7.1f} steps/s  ratio {statistics.median(ratios):.3f} "
                f"[{min(ratios):.3f} .. {max(ratios):.3f}]  waiting {wait:.4f} of the time"
            )
        for arm in arms:
            arm.store.close()


if __name__ == "__main__":
    main()
