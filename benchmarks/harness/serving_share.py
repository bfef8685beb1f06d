"""The share: learner and serving on one core, the load generator and all else on the others.

Serving takes some 20 % of the core. Turns, in each of which every other arm is stopped by a signal or sends nothing:

    alone     requests while the learner is stopped
    free      the learner without requests
    shared    both

`p99_training_over_alone` is the 99th percentile of `shared` over that of `alone`, `training_kept_over_free` the
learner's steps a second in `shared` over 0.8 times those of `free`.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.feed import Feed
from harness.load import Answers, Load
from harness.pipeline import LearnerProcess, Stream, make_topic, messages, packed, pipeline, schema_of
from harness.server import ServingProcess, binary_request
from harness.table import Table, Target
from harness.turns import Spread, ratio

TARGETS = {
    "p99_training_over_alone": Target(1.10),
    "training_kept_over_free": Target(0.95, least=True),
}
USED = 0.2
"""The part of the core that serving takes."""
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
BATCH = 96
_POOL_ROWS, _STORED = 20_000, 10_000


@dataclass(frozen=True)
class Sizes:
    """How long is measured: a turn's seconds, after so many of warming up, and rounds."""

    turn: float
    warm_up: float
    rounds: int


QUICK, FULL = Sizes(2.0, 0.5, 3), Sizes(10.0, 1.0, 10)


class Core:
    """A learner and a server on one core, and the requests to it."""

    def __init__(self, learner: LearnerProcess, server: ServingProcess, load: Load, feed: Feed, sizes: Sizes) -> None:
        self._learner, self._server, self._load, self._feed, self._sizes = learner, server, load, feed, sizes
        self.rate = 50.0
        self.used: list[float] = []
        """The part of the core that serving took in each turn alone."""

    def calibrate(self) -> None:
        """Find the rate at which serving takes its part of the core."""
        for _ in range(2):
            self.alone()
            self.rate *= USED / self.used.pop()

    def alone(self) -> Answers:
        """Answer requests while the learner is stopped."""
        self._load.turn(self.rate, self._sizes.warm_up)
        busy, begin = self._server.busy_seconds(), time.perf_counter()
        answers = self._load.turn(self.rate, self._sizes.turn)
        self.used.append((self._server.busy_seconds() - busy) / (time.perf_counter() - begin))
        return answers

    def free(self) -> float:
        """Return the learner's steps a second without requests."""
        with self._learning():
            return self._steps(self._sizes.turn)

    def shared(self) -> tuple[Answers, float]:
        """Return the answers while the learner trains, and its steps a second."""
        with self._learning():
            self._load.turn(self.rate, self._sizes.warm_up)
            self._load.begin(self.rate, self._sizes.turn)
            steps = self._steps(self._sizes.turn - self._sizes.warm_up)
            return self._load.end(), steps

    @contextlib.contextmanager
    def _learning(self) -> Iterator[None]:
        self._learner.go_on()
        self._feed.go_on()
        try:
            warm = time.time() + self._sizes.warm_up
            self._learner.wait_for(lambda report: report.time > warm)
            yield
        finally:
            self._feed.pause()
            self._learner.pause()

    def _steps(self, seconds: float) -> float:
        begin = time.time()
        first = self._learner.wait_for(lambda report: report.time > begin)
        last = self._learner.wait_for(lambda report: report.time > first.time + seconds)
        return (last.steps - first.steps) / (last.time - first.time)


def document(stream: Stream, model: dict[str, Any]) -> dict[str, Any]:
    """Return the pipeline file."""
    sections = {
        "learner": {"batch_size": BATCH, "max_grad_norm": float("inf")},
        "replay": {"capacity": _STORED},
        "versions": {"publish_every": "1s", "keep": 20},
        "cuts": {"every": "30s"},
        "gate": {"guard_fraction": 0.01},
    }
    return pipeline(stream, model, 0, sections) | {"serving": {"port": 0, "max_delay": "1ms", "device": "cpu"}}


@contextlib.contextmanager
def on_one_core(bootstrap: str, folder: Path, sizes: Sizes) -> Iterator[Core]:
    """A learner that has filled its store, stopped, and a server that is ready, on one core."""
    core, others = _cores()
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((_POOL_ROWS, 784), np.float32)}
    described = schema_of(columns, 10)
    stream = Stream(bootstrap, f"share-{folder.name}", described, 0)
    make_topic(stream)
    payload = list(messages(packed(described, columns, generator.integers(0, 10, _POOL_ROWS))))
    with contextlib.ExitStack() as stack:
        feed = stack.enter_context(Feed(stream, payload, _POOL_ROWS / len(payload), others))
        learner = stack.enter_context(LearnerProcess(folder, document(stream, MLP), core))
        feed.watch(learner.state_dir)
        learner.wait_for(lambda report: sum(report.outcomes.values()) > _STORED and report.version is not None)
        learner.spare(others)
        feed.pause()
        learner.pause()
        server = stack.enter_context(ServingProcess(folder, core))
        url = f"{server.wait().address}/v2/models/{stream.topic}/infer"
        load = stack.enter_context(Load(url, *binary_request(1, 784), others))
        yield Core(learner, server, load, feed, sizes)


def _cores() -> tuple[set[int] | None, set[int] | None]:
    """Return the core for both, and the others; None where cores cannot be chosen."""
    if not hasattr(os, "sched_setaffinity"):
        return None, None
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def measure(table: Table, quick: bool, bootstrap: str) -> None:
    """Measure the section."""
    sizes = QUICK if quick else FULL
    table.title("share: learner and serving on one core, an MLP of a million parameters, single rows")
    with (
        tempfile.TemporaryDirectory(dir=".", prefix="share-") as folder,
        on_one_core(bootstrap, Path(folder).resolve(), sizes) as core,
    ):
        core.calibrate()
        alone, free, shared = [], [], []
        for _ in range(sizes.rounds):
            alone.append(core.alone())
            free.append(core.free())
            shared.append(core.shared())
    table.say(
        "p99_training_over_alone", ratio([each.percentile(99) for each, _ in shared], [a.percentile(99) for a in alone])
    )
    table.say("training_kept_over_free", ratio([steps for _, steps in shared], [(1 - USED) * steps for steps in free]))
    for name, answers in (("alone", alone), ("training", [each for each, _ in shared])):
        table.say(f"p50_{name}_seconds", Spread.of([each.percentile(50) for each in answers]))
        table.say(f"p99_{name}_seconds", Spread.of([each.percentile(99) for each in answers]))
    table.say("steps_per_second_free", Spread.of(free))
    table.say("steps_per_second_shared", Spread.of([steps for _, steps in shared]))
    table.say("share_used", Spread.of(core.used), f"of the core, at {core.rate:.0f} requests a second")
    table.say("share_failed", float(sum(each.failed for each in [*alone, *(each for each, _ in shared)])))
    table.say("load_late_p99_seconds", max(each.late_p99 for each in alone), "of the generator, part of the above")
