"""What cuts and versions cost: a learner with a full cut every 30 s and a version every second, and one with neither.

Both learn from a stream that goes on, with one thread of torch on one and the same core, in turns: while one has its
turn the other is stopped by a signal, with its ingest process and its producer, which have the other cores. A clock
goes on while its learner is stopped, so that a turn begins with a cut and a version that are overdue: a turn shorter
than 30 s has more cuts than it should, and its figure is an upper bound.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from tests.faults.figures import Figures

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: it has files named like our packages

from harness.feed import Feed
from harness.pipeline import LearnerProcess, Stream, make_topic, messages, packed, pipeline, schema_of
from harness.turns import Spread, in_turns, ratio

MODEL = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
BATCH = 96
_STORED = 10_000
_POOL_ROWS = 20_000
_WARM_SECONDS = 1.0
_ARMS = {"with": ("1s", "30s"), "without": ("1h", "1h")}
"""Time between versions and between cuts."""


class Turns:
    """A learner that is stopped but for its turns."""

    def __init__(self, learner: LearnerProcess, feed: Feed, seconds: float) -> None:
        self._learner, self._feed, self._seconds = learner, feed, seconds
        self.busy: list[float] = []
        """The processor's seconds a step of each turn."""

    def turn(self) -> float:
        """Let it learn, and return its steps a second by its own reports."""
        self._learner.go_on()
        self._feed.go_on()
        begin = self._learner.wait_for(lambda _: True).time
        first = self._learner.wait_for(lambda report: report.time > begin + _WARM_SECONDS)
        busy = self._learner.busy_seconds()
        last = self._learner.wait_for(lambda report: report.time > first.time + self._seconds)
        self.busy.append((self._learner.busy_seconds() - busy) / (last.steps - first.steps))
        self._feed.pause()
        self._learner.pause()
        return (last.steps - first.steps) / (last.time - first.time)


@contextmanager
def learner(
    folder: Path, bootstrap: str, arm: str, seconds: float, cores: set[int], others: set[int]
) -> Iterator[Turns]:
    """A learner that has filled its store and is stopped."""
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((_POOL_ROWS, 784), np.float32)}
    described = schema_of(columns, 10)
    stream = Stream(bootstrap, f"cost-{arm}", described, 0)
    make_topic(stream)
    payload = list(messages(packed(described, columns, generator.integers(0, 10, _POOL_ROWS))))
    publish_every, cut_every = _ARMS[arm]
    sections = {
        "learner": {"batch_size": BATCH, "max_grad_norm": float("inf")},
        "replay": {"capacity": _STORED},
        "versions": {"publish_every": publish_every},
        "cuts": {"every": cut_every},
    }
    with (
        Feed(stream, payload, _POOL_ROWS / len(payload), others) as feed,
        LearnerProcess(folder / arm, pipeline(stream, MODEL, 0, sections), cores) as process,
    ):
        feed.watch(process.state_dir)
        process.wait_for(lambda report: sum(report.outcomes.values()) > _STORED)
        process.spare(others)
        feed.pause()
        process.pause()
        yield Turns(process, feed, seconds)


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Say which share of its steps a learner loses."""
    seconds, rounds = (8.0, 3) if quick else (30.0, max(3, round(minutes)))
    figures.title(
        "cost", f"steps of {BATCH} events with cuts and versions and without, {rounds} turns of {seconds:.0f} s"
    )
    first, *rest = sorted(os.sched_getaffinity(0))
    cores, others = {first}, set(rest) or {first}
    os.sched_setaffinity(0, others)
    try:
        with ExitStack() as stack:
            arms = {arm: stack.enter_context(learner(folder, bootstrap, arm, seconds, cores, others)) for arm in _ARMS}
            rates = in_turns({arm: each.turn for arm, each in arms.items()}, rounds, warm_up=0)
    finally:
        os.sched_setaffinity(0, {first, *rest})
    kept = ratio(rates["with"], rates["without"])
    figures.say("cut_cost_fraction", 1 - kept.middle, _spread(kept))
    busy = ratio(arms["without"].busy, arms["with"].busy)
    figures.say("cut_cost_fraction_busy", 1 - busy.middle, f"by the processor's time; {_spread(busy)}")


def _spread(kept: Spread) -> str:
    return f"[{1 - kept.most:.3f} .. {1 - kept.least:.3f}]"
