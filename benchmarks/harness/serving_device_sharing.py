"""Device sharing: learner and serving on one core, the load generator and all else on the others.

Serving takes about 20 % of the core. The arms run in turns; a signal suspends the learner in those without it:

    alone     requests while the learner is stopped
    free      the learner without requests
    shared    both

`p99_training_over_alone` is the 99th percentile of `shared` over that of `alone`, `training_kept_over_free` the
learner's steps a second in `shared` over 0.8 times those of `free`. Another learner and server, with
`device_sharing.policy = "exclusive"`, are the comparison without device sharing; their figures end in `_off`.

The producer of the learner's events has a lower priority than the generator, whose waits would otherwise count as the
server's. `yield_p99_seconds` is the time from the wake-up of a process at serving's priority until it has the core,
while the learner trains; `yield_p99_alone_seconds` is the same while the learner is suspended. Figures of the convnet
begin with `convnet_`; the quick form leaves it out.
"""

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from anabranch.learner.device.cpu_priority import shorten_slice
from benchmarks.harness import commands
from benchmarks.harness.cores import split
from benchmarks.harness.event_feed import EventFeed
from benchmarks.harness.interleave import Spread, ratio
from benchmarks.harness.load import Answers, Load
from benchmarks.harness.pipeline import LearnerProcess, Stream, make_topic, messages, packed, pipeline, schema_of
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request

_SHORTEST, _LONGEST = 0.001, 0.005


class SchedulingLatency:
    """A process that sleeps for random times and records how late it wakes; it ends with the context."""

    def __init__(self, cores: set[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, cores), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "SchedulingLatency":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        commands.end(self._ours, self._process)

    def turn(self, seconds: float) -> NDArray[np.float64]:
        """Sleep and wake for `seconds`; return how late each wake-up was, in seconds, float64."""
        self._ours.send(seconds)
        late: NDArray[np.float64] = self._ours.recv()
        return late


def _serve(connection: Connection, cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    shorten_slice()  # as a server does
    generator = np.random.default_rng(0)
    for seconds in commands.received(connection):
        late, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            due = time.perf_counter() + float(generator.uniform(_SHORTEST, _LONGEST))
            time.sleep(max(0.0, due - time.perf_counter()))
            late.append(time.perf_counter() - due)
        connection.send(np.array(late))


_TARGETS = {
    "p99_training_over_alone": Target(1.10),
    "training_kept_over_free": Target(0.95, least=True),
    "yield_p99_seconds": Target(0.005),
}
USED = 0.2
"""The fraction of the core that serving takes."""
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
CONVNET = {"factory": "convnet", "args": {"channels": 16}}
MODELS = {"": (MLP, "an MLP of a million parameters"), "convnet_": (CONVNET, "a small convnet")}
"""By the prefix of their figures."""
TARGETS = {f"{model}{key}": target for model in MODELS for key, target in _TARGETS.items()}
BATCH = 96
_POOL_ROWS, _STORED = 20_000, 10_000
_LOWER = 10
"""Nice level of the producer."""


@dataclass(frozen=True)
class Sizes:
    """Seconds of a turn, seconds of warm-up before it, and the number of rounds, also without device sharing."""

    turn: float
    warm_up: float
    rounds: int
    rounds_off: int


SIZES = Sizes(1.0, 0.2, 1, 1), Sizes(1.5, 0.5, 3, 1), Sizes(10.0, 1.0, 10, 4)
"""Of each form."""
CORE, OTHERS = split()


class Core:
    """A learner and a server on one core, and the requests to it."""

    def __init__(
        self,
        learner: LearnerProcess,
        server: ServingProcess,
        load: Load,
        feed: EventFeed,
        latency: SchedulingLatency,
        sizes: Sizes,
    ) -> None:
        self._learner, self._server, self._load, self._feed, self._sizes = learner, server, load, feed, sizes
        self._latency = latency
        self.rate = 50.0
        self.used: list[float] = []
        """The fraction of the core that serving took in each turn alone."""
        self.trained: dict[str, list[float]] = {"free": [], "shared": []}
        """The fraction that the learner took in each turn: below 1 in `free` it waited for the stream."""

    def calibrate(self) -> None:
        """Find the rate at which serving takes its fraction of the core."""
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
            return self._steps("free", self._sizes.turn)

    def shared(self) -> tuple[Answers, float]:
        """Return the answers while the learner trains, and its steps a second."""
        with self._learning():
            self._load.turn(self.rate, self._sizes.warm_up)
            self._load.begin(self.rate, self._sizes.turn)
            steps = self._steps("shared", self._sizes.turn - self._sizes.warm_up)
            return self._load.end(), steps

    def late(self, *, alone: bool) -> float:
        """Return how late a process gets the core when it wakes, at the 99th percentile, in seconds."""
        with contextlib.nullcontext() if alone else self._learning():
            return float(np.percentile(self._latency.turn(self._sizes.turn), 99))

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

    def _steps(self, arm: str, seconds: float) -> float:
        begin = time.time()
        first = self._learner.wait_for(lambda report: report.time > begin)
        busy, began = self._learner.busy_seconds(), time.perf_counter()
        last = self._learner.wait_for(lambda report: report.time > first.time + seconds)
        self.trained[arm].append((self._learner.busy_seconds() - busy) / (time.perf_counter() - began))
        return (last.steps - first.steps) / (last.time - first.time)


def document(stream: Stream, model: dict[str, Any], policy: str) -> dict[str, Any]:
    """Return the pipeline file."""
    sections = {
        "learner": {"batch_size": BATCH, "max_grad_norm": float("inf")},
        "replay": {"capacity": _STORED},
        "versions": {"publish_every": "1s", "keep": 20},
        "checkpoints": {"every": "30s"},
        "gate": {"holdout_fraction": 0.01},
    }
    serving = {"port": 0, "max_delay": "1ms", "device": "cpu"}
    return pipeline(stream, model, 0, sections) | {"serving": serving, "device_sharing": {"policy": policy}}


@contextlib.contextmanager
def on_one_core(bootstrap: str, sizes: Sizes, policy: str, model: dict[str, Any]) -> Iterator[Core]:
    """A suspended learner with a full store, and a server that is ready, on one core."""
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((_POOL_ROWS, 784), np.float32)}
    described = schema_of(columns, 10)
    payload = list(messages(packed(described, columns, generator.integers(0, 10, _POOL_ROWS))))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="device-sharing-"))).resolve()
        stream = Stream(bootstrap, folder.name, described, 0)
        make_topic(stream)
        feed = stack.enter_context(EventFeed(stream, payload, _POOL_ROWS / len(payload), OTHERS))
        learner = stack.enter_context(LearnerProcess(folder, document(stream, model, policy), CORE))
        feed.watch(learner.state_dir)
        learner.wait_for(lambda report: sum(report.outcomes.values()) > _STORED and report.version is not None)
        learner.spare(OTHERS)
        feed.pause()
        learner.pause()
        _lower_priority({learner.process.pid})
        server = stack.enter_context(ServingProcess(folder, CORE))
        url = f"{server.wait().address}/v2/models/{stream.topic}/infer"
        load = stack.enter_context(Load(url, *binary_request(1, 784), OTHERS))
        latency = stack.enter_context(SchedulingLatency(CORE))
        yield Core(learner, server, load, feed, latency, sizes)


def _lower_priority(but: set[int]) -> None:
    """Move all descendants of this process, except `but`, to the other cores and a lower priority.

    The priority of their sessions too, where the kernel schedules by session.
    """
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if child.pid not in but:
                _pin(child.pid, OTHERS)
                child.nice(max(_LOWER, child.nice()))
                if os.getsid(child.pid) == child.pid:
                    Path(f"/proc/{child.pid}/autogroup").write_text(str(_LOWER))


def _pin(process: int, cores: set[int] | None) -> None:
    """Move all threads of a process."""
    for thread in psutil.Process(process).threads() if cores is not None else ():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)


def measure(results: Results, form: Form, bootstrap: str) -> None:
    """Measure the section."""
    _pin(os.getpid(), OTHERS)
    try:
        for key, (model, words) in list(MODELS.items())[: None if form is Form.LONG else 1]:
            results.title(f"device_sharing: learner and serving on one core, {words}, single rows")
            _measure(results, key, model, SIZES[form], bootstrap)
    finally:
        _pin(os.getpid(), (CORE or set()) | (OTHERS or set()) or None)


def _measure(results: Results, key: str, model: dict[str, Any], sizes: Sizes, bootstrap: str) -> None:
    alone, free, shared = [], [], []
    with on_one_core(bootstrap, sizes, "inference-first", model) as core:
        core.calibrate()
        for _ in range(sizes.rounds):
            alone.append(core.alone())
            free.append(core.free())
            shared.append(core.shared())
        late, late_alone = core.late(alone=False), core.late(alone=True)
    p99_alone = [answers.percentile(99) for answers in alone]
    results.add(f"{key}p99_training_over_alone", ratio([answers.percentile(99) for answers, _ in shared], p99_alone))
    results.add(
        f"{key}training_kept_over_free", ratio([steps for _, steps in shared], [(1 - USED) * steps for steps in free])
    )
    micro_batch = 1000 / statistics.median(free)
    results.add(f"{key}yield_p99_seconds", late, f"a micro-batch takes {micro_batch:.0f} ms")
    results.add(f"{key}yield_p99_alone_seconds", late_alone)
    with on_one_core(bootstrap, sizes, "exclusive", model) as other:
        other.rate = core.rate
        off = [other.shared() for _ in range(sizes.rounds_off)]
    results.add(
        f"{key}p99_training_over_alone_off",
        _over([a.percentile(99) for a, _ in off], p99_alone),
        "without device sharing",
    )
    results.add(f"{key}training_kept_over_free_off", _over([s for _, s in off], [(1 - USED) * steps for steps in free]))
    arms = {"alone": alone, "training": [a for a, _ in shared], "training_off": [a for a, _ in off]}
    for name, turns in arms.items():
        for q in (50, 99):
            results.add(f"{key}p{q}_{name}_seconds", Spread.of([answers.percentile(q) for answers in turns]))
    results.add(f"{key}steps_per_second_free", Spread.of(free))
    results.add(f"{key}steps_per_second_shared", Spread.of([steps for _, steps in shared]))
    results.add(f"{key}steps_per_second_shared_off", Spread.of([steps for _, steps in off]))
    results.add(f"{key}core_used_by_serving_alone", Spread.of(core.used), f"at {core.rate:.0f} requests a second")
    for arm, parts in core.trained.items():
        results.add(f"{key}core_used_by_training_{arm}", Spread.of(parts))
    results.add(f"{key}requests_failed", float(sum(answers.failed for turns in arms.values() for answers in turns)))
    behind = max(answers.late_p99 for turns in arms.values() for answers in turns)
    results.add(f"{key}load_late_p99_seconds", behind, "the largest delay of the generator, part of the above")


def _over(above: list[float], below: list[float]) -> float:
    """Return the ratio of the medians of unpaired turns."""
    return statistics.median(above) / statistics.median(below)
