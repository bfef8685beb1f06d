"""Steps a second with a store larger than its memory, against a store that memory holds.

    python -m benchmarks.replay_disk [--quick] [--json FILE] [--save] [--only PART ...] [--rows N]
                                     [--memory N] [--hidden N] [--device cpu]

Four learners train on the same new events, 64 a step and as many replayed ones of 3 KB each, in turns of some dozen
steps, so that the load of the machine affects all of them alike:

    small   a store of `--memory` events, all in memory: the baseline
    large   a store of `--rows` events, all in memory: the cost of the size of the index alone
    disk    a store of `--rows` events on disk, `--memory` of them cached in memory
    cold    the same, with an empty page cache before each turn

The figure is the steps a second of each over those of the baseline in the same round. `stall_fraction` is the time
that steps waited for rows over the time that they took.
"""

import argparse
import contextlib
import gc
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import examples_of
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.store import Store
from anabranch.testing.stores import add_now, plan_ahead
from benchmarks.harness.events import PARTITIONS, Events
from benchmarks.harness.interleave import Spread, ratio
from benchmarks.harness.results import Results, options
from benchmarks.harness.stores import drop_page_cache, fill, open_store

BATCH = 64
ARMS = ("large", "disk", "cold")
"""Those that are compared with `small`."""
EVENTS = Events(784)
_STREAM_FACTOR = 5
"""The length of the stream so far, in capacities of the large store: one new event in this many is kept."""


class Arm:
    """A learner and its store."""

    def __init__(self, name: str, store: Store, device: torch.device, hidden: int, cold: Path | None) -> None:
        self.name, self.store, self._cold = name, store, cold
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 256), nn.ReLU(), nn.Linear(256, 10))
        settings = LearnerSettings()
        precision = choose_precision(settings.precision, device)
        self._trainer = Trainer(
            TrainingSetup(
                model.to(device), Classification(), STRATEGIES["er"](), EVENTS.schema, settings, device, precision
            )
        )
        self._step = 0
        self._next = 10**9

    def turn(self, steps: int) -> tuple[float, float]:
        """Train, and return steps a second and the fraction of the time spent waiting for rows."""
        if self._cold is not None:
            self.store.tiers.sync()
            drop_page_cache(self._cold)
        plan_ahead(self.store, self._step, BATCH)
        waited = self.store.tiers.stats.stall_seconds
        begin = time.perf_counter()
        for _ in range(steps):
            new = EVENTS.columns(self._next, BATCH)
            sample = self.store.planner.sample(self._step, BATCH)
            self._trainer.step(self._trainer.examples(new), examples_of(sample, (len(sample),)))
            self._step += 1
            self._next += BATCH
            add_now(self.store, new, PARTITIONS)
            plan_ahead(self.store, self._step, BATCH)
        seconds = time.perf_counter() - begin
        return steps / seconds, (self.store.tiers.stats.stall_seconds - waited) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, ARMS)
    parser.add_argument("--rows", type=int, help="events of the large store")
    parser.add_argument("--memory", type=int, help="events that memory holds")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model: how long a step takes")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    rows = chosen.rows or (4_000, 40_000, 400_000)[chosen.form]
    memory = chosen.memory or rows // 10
    rounds, steps = ((1, 2), (25, 20), (100, 40))[chosen.form]
    device = torch.device(chosen.device)
    torch.set_num_threads(1)
    results = Results("replay_disk", {})
    with contextlib.ExitStack() as stack:
        arms = []
        for name in ["small", *(chosen.only or ARMS)]:
            capacity = memory if name == "small" else rows
            folder = None
            if name in ("disk", "cold"):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
            hot = memory / rows if folder else 1.0
            store = stack.enter_context(open_store(EVENTS, capacity, hot=hot, folder=folder, device=device))
            arms.append(Arm(name, store, device, chosen.hidden, folder if name == "cold" else None))
            fill(store, EVENTS, _STREAM_FACTOR * rows)
            arms[-1].turn(steps)
        held = ", ".join(f"{arm.name} {len(arm.store)}" for arm in arms)
        results.title(f"{rounds} rounds of {steps} steps, {BATCH} + {BATCH} events of 3 KB; held: {held}")
        figures: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
        gc.disable()
        for _ in range(rounds):
            arms.append(arms.pop(0))
            for arm in arms:
                figures[arm.name].append(arm.turn(steps))
    rates = {name: [rate for rate, _ in arm_turns] for name, arm_turns in figures.items()}
    for name, arm_turns in figures.items():
        results.add(f"steps_per_second_{name}", Spread.of(rates[name]))
        if name != "small":
            results.add(f"steps_over_small_{name}", ratio(rates[name], rates["small"]))
        results.add(f"stall_fraction_{name}", Spread.of([share for _, share in arm_turns]), "of the time")
    results.write(chosen)


if __name__ == "__main__":
    main()
