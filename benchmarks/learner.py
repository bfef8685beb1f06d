"""Steps a second of the whole learner, over that of a plain PyTorch loop on batches in memory.

    python -m benchmarks.learner [--quick] [--json FILE] [--save] [--only PART ...]

    mlp      an MLP of a million parameters
    large    the MLP with four times as many events a step, which separates the cost of a step from that of an event;
             left out of the quick form
    convnet  two convolutions over images of 28 x 28
    formats  the MLP with events as JSON, for information; left out of the quick form
    tracing  the MLP with 1 % of the steps traced, over the MLP without tracing: one learner, switched between turns
    ranks    new events a second of two ranks on a topic of eight partitions, of which half have nine times as many
             events: over equal partitions, and those over one rank; left out of the quick form
    narrow   new events a second, of 16 float32 and a label, through ingest into a model too small to matter, and those
             of a second of CPU time; left out of the quick form
    lock     how late a thread wakes up in the learner's process, while others publish, score and make checkpoints
    overhead a model too small to matter, on events from memory: CPU time of the loop's thread that a plain loop in the
             same thread does not take, of steps with 64 and with 512 new events; in blocks of 4,096 events, and in
             blocks of one step, as of wide events or of many partitions
    measures the same with two and with ten classes: what measures, baselines and drift of new events take of that CPU
             time; of 16 features, too, since drift is not that of wide vectors

In the first six parts the learner reads a live topic of packed rows, replays one old event for each new one,
publishes every second and checkpoints every 30 seconds. The baseline loop trains the same model with the same
optimizer, on as many new and old rows a step. In `overhead` the plain loop takes its turns within the learner's
process, between two blocks of events.

Both have one thread of torch on the same core, and run in turns. During a turn of the baseline loop a signal stops the
learner and its ingest process, and the producer sends nothing; the baseline loop waits during turns of the learner. The
broker, ingest, the producer and the learner's other threads, which publish and checkpoint, run on the other cores. The
time that the training loop waits for those threads counts. The learner's clocks continue while it is stopped: a version
is due at the start of each turn, and checkpoints are more frequent.

In a third arm the baseline loop runs while an ingest process reads the stream as fast as the learner did, and discards
it. Cores share caches and memory bandwidth; this arm shows that part of the difference.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.learner.status.report import LearnerReport
from benchmarks.harness import narrow as narrow_events
from benchmarks.harness.baseline_loop import BaselineLoop, Loop
from benchmarks.harness.cores import split
from benchmarks.harness.event_feed import EventFeed
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.lock_probe import late_wakeups
from benchmarks.harness.overhead import BLOCK, FEATURES, MEASURING, measure
from benchmarks.harness.pipeline import (
    LearnerProcess,
    Stream,
    broker,
    make_topic,
    messages,
    packed,
    pipeline,
    schema_of,
)
from benchmarks.harness.ranks import rates
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.serving_tracing import MISSING, Ratios, Turn, alternate, collector, has_exporter, switchable

_POLL = timedelta(seconds=0.1)


class StreamReader:
    """A separate ingest process, whose blocks are released at a fixed rate; it ends with the context."""

    def __init__(self, stream: Stream, form: str, feed: EventFeed) -> None:
        settings = StreamSettings.model_validate(
            {
                "bootstrap_servers": stream.bootstrap,
                "topics": [stream.topic],
                "format": form,
                "start": "latest",
                "buffer_bytes": "8MB",  # so that little is read beyond what is released
            }
        )
        schema = SchemaSettings.model_validate(stream.schema)
        self._source = BlockReader(settings.resolved("stream_reader"), schema, HoldOut(fraction=0.01, seed=0))
        self._feed = feed

    def __enter__(self) -> "StreamReader":
        self._source.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @contextlib.contextmanager
    def reading(self, rate: float) -> Iterator[None]:
        """Read `rate` events a second of what the feed sends, until the context ends."""
        done = threading.Event()
        thread = threading.Thread(target=self._read, args=(rate, done))
        self._source.pass_over()
        self._feed.go_on()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._feed.pause()

    def _read(self, rate: float, done: threading.Event) -> None:
        if rate == 0:  # on a machine that does other things the learner may have had no step
            return
        begin, rows = time.perf_counter(), 0
        while not done.wait(max(0.0, begin + rows / rate - time.perf_counter())):
            block = self._source.poll(_POLL)
            if block is not None:
                rows += len(block.columns["row"])
                self._feed.read_by_others(len(block.columns["row"]))
                self._source.release(block)


TARGETS = {
    "mlp_over_baseline": Target(0.95, least=True),
    "convnet_over_baseline": Target(0.95, least=True),
    "uneven_over_even": Target(0.95, least=True),
    "tracing_over_off": Target(0.99, least=True),
    "tracing_busy_over_off": Target(1.01),
    "overhead_64_seconds": Target(100e-6),
    "overhead_512_seconds": Target(150e-6),
    "overhead_64_by_blocks_seconds": Target(100e-6),
    "overhead_512_by_blocks_seconds": Target(150e-6),
    "tiny_64_over_plain": Target(0.9, least=True),
    "tiny_512_over_plain": Target(0.9, least=True),
    "tiny_64_by_blocks_over_plain": Target(0.9, least=True),
    "tiny_512_by_blocks_over_plain": Target(0.9, least=True),
    "measures_small_2_fraction": Target(0.01),
    "measures_small_10_fraction": Target(0.01),
    "narrow_events_per_second": Target(400_000, least=True),
    "wakeup_p99_seconds": Target(1e-3),
    "wakeup_worst_seconds": Target(5e-3),
}
TINY = [FEATURES, 32, 10]
"""Widths of a model too small to matter: what is left of a step is the loop's."""
OPTIMIZER = {"name": "adamw", "lr": 1e-3}
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
CONVNET = {"factory": "convnet", "args": {"channels": 16}}
BATCH, LARGE = 128, 512
"""New events a step: enough for a step of 10 ms or more, and four times as many."""
_POOL_ROWS = 20_000
_TRACED_SECONDS, _TRACED_TURNS = 0.5, 8
"""Of a turn at least, and turns of each kind in a round."""


@dataclass(frozen=True)
class Sizes:
    """Seconds of a turn, seconds of warm-up before it, rounds; events of the store; events and rounds of `ranks`;
    events of a turn, and rounds, of `overhead`; events and rounds of `narrow`; seconds and rounds of `lock`."""

    turn: float
    warm_up: float
    rounds: int
    stored: int = 10_000
    ranks: tuple[int, int] = (60_000, 7)
    overhead: tuple[int, int] = (65_536, 12)
    narrow: tuple[int, int] = (8_000_000, 5)
    lock: tuple[float, int] = (12.0, 1)


SIZES = (
    Sizes(0.6, 0.1, 1, 1_000, (1_600, 1), (8_192, 1), (200_000, 1), (1.0, 1)),
    Sizes(1.5, 0.5, 3),
    Sizes(8.0, 2.0, 8, lock=(60.0, 3)),
)
"""Of each form."""
CORE, OTHERS = split()


class Live:
    """A learner on a continuous stream, stopped between turns."""

    def __init__(
        self, learner: LearnerProcess, feed: EventFeed, reader: StreamReader, sizes: Sizes, batch: int
    ) -> None:
        self._learner, self._feed, self._reader, self._sizes, self._batch = learner, feed, reader, sizes, batch
        self.busy = 0.0
        """CPU seconds per step of the last turn."""
        self._rate = 0.0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Let it train in the block, which begins after the warm-up."""
        self._learner.spare(OTHERS, threads=True)  # also threads started since, such as that of the first checkpoint
        self._learner.go_on()
        self._feed.go_on()
        warm = time.time() + self._sizes.warm_up
        self._learner.wait_for(lambda report: report.time > warm)
        yield
        self._feed.pause()
        self._learner.pause()

    def steps(self, seconds: float) -> Turn:
        """Return what it does while it trains, from its next report on."""
        now = time.time()
        first, busy = self._learner.wait_for(lambda report: report.time > now), self._learner.busy_seconds()
        end = first.time + seconds
        last = self._learner.wait_for(lambda report: report.time > end)
        return Turn(last.steps - first.steps, last.time - first.time, self._learner.busy_seconds() - busy)

    def turn(self) -> float:
        """Let it train, and return the steps a second from its reports, without the warm-up."""
        with self.training():
            turn = self.steps(self._sizes.turn)
        self.busy = turn.busy / max(1, turn.done)
        self._rate = turn.done / turn.seconds
        return self._rate

    def alternate_tracing(self, rounds: int, turns: int, *, switch: bool = True) -> Ratios:
        """Compare steps with tracing and without, where it was started with `switchable`."""
        with self.training():
            return alternate(
                self._learner.process.pid, lambda: self.steps(_TRACED_SECONDS), rounds, turns=turns, switch=switch
            )

    def report(self) -> LearnerReport:
        """Return its newest report."""
        return self._learner.wait_for(lambda report: report.steps > 0)

    def with_reader(self, turn: Callable[[], float]) -> float:
        """Measure another arm while an ingest process alone reads the stream as fast as in the last turn."""
        with self._reader.reading(self._rate * self._batch):
            time.sleep(self._sizes.warm_up)
            return turn()


def document(
    stream: Stream, model: dict[str, Any], form: str, batch: int, stored: int, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the pipeline file: everything that is on by default, with the default checkpoints, and `more` sections."""
    sections = {
        # The embedded broker ignores the limit of a fetch and returns all messages: here more than 100 MB.
        "stream": {"format": form, "properties": {"receive.message.max.bytes": 2**30}},
        "learner": {"batch_size": batch, "optimizer": OPTIMIZER, "max_grad_norm": float("inf")},
        "replay": {"capacity": stored},
        "versions": {"publish_every": "1s", "keep": 20},
        "checkpoints": {"every": "30s"},
        "gate": {"holdout_fraction": 0.01},
        **(more or {}),
    }
    return pipeline(stream, model, 0, sections)


@contextlib.contextmanager
def live(
    bootstrap: str,
    model: dict[str, Any],
    form: str,
    sizes: Sizes,
    folder: Path,
    batch: int,
    more: Mapping[str, Any] | None = None,
    program: Sequence[str] = ("-m", "anabranch.learner"),
) -> Iterator[Live]:
    """A learner with a full store, stopped; `more`: sections of its config; `program`: how Python starts it."""
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((_POOL_ROWS, 784), np.float32)}
    label = generator.integers(0, 10, _POOL_ROWS)
    described = schema_of(columns, 10)
    stream = Stream(bootstrap, f"live-{folder.name}", described, 0)
    make_topic(stream)
    rows = packed(described, columns, label)
    payload = list(messages(rows)) if form == "rows" else _json(columns["x"], label)
    rows_a_message = _POOL_ROWS / len(payload) if form == "rows" else 1.0
    with (
        EventFeed(stream, payload, rows_a_message, OTHERS) as feed,
        LearnerProcess(folder, document(stream, model, form, batch, sizes.stored, more), CORE, program) as learner,
    ):
        feed.watch(learner.state_dir)
        learner.wait_for(lambda report: sum(report.outcomes.values()) > sizes.stored)
        learner.spare(OTHERS, threads=True)
        feed.pause()
        learner.pause()
        with StreamReader(stream, form, feed) as reader:
            yield Live(learner, feed, reader, sizes, batch)


def _json(x: np.ndarray[Any, Any], label: np.ndarray[Any, Any]) -> list[bytes]:
    """Return some events as JSON, one a message, with four decimal places."""
    few = zip(x[:2000].round(4).tolist(), label.tolist(), strict=False)
    return [json.dumps({"x": [round(value, 4) for value in row], "y": each}).encode() for row, each in few]


def over_baseline(
    results: Results, key: str, model: dict[str, Any], form: str, sizes: Sizes, bootstrap: str, batch: int = BATCH
) -> None:
    """Measure the learner and the baseline loop in turns."""
    loop = Loop(model, OPTIMIZER, batch, CORE)
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=f"{key}-") as folder,
        BaselineLoop(loop) as baseline,
        live(bootstrap, model, form, sizes, Path(folder).resolve(), batch) as learner,
    ):
        busy: dict[str, list[float]] = {"baseline": [], "learner": [], "baseline_with_reader": []}

        def turn(arm: str, source: BaselineLoop | Live, call: Callable[[], float]) -> Callable[[], float]:
            def taken() -> float:
                rate = call()
                busy[arm].append(source.busy)
                return rate

            return taken

        alone = functools.partial(baseline.turn, sizes.turn)
        arms = {  # the learner before the last arm, which needs its rate
            "baseline": turn("baseline", baseline, alone),
            "learner": turn("learner", learner, learner.turn),
            "baseline_with_reader": turn("baseline_with_reader", baseline, lambda: learner.with_reader(alone)),
        }
        rates = interleave(arms, sizes.rounds, warm_up=0)
    milliseconds = 1000 / statistics.median(rates["baseline"])
    results.add(
        f"{key}_over_baseline",
        ratio(rates["learner"], rates["baseline"]),
        f"a baseline step takes {milliseconds:.1f} ms",
    )
    results.add(
        f"{key}_over_baseline_with_reader",
        ratio(rates["learner"], rates["baseline_with_reader"]),
        "while others read the stream",
    )
    results.add(
        f"{key}_busy_over_baseline", ratio(busy["baseline"], busy["learner"]), "by the CPU time of both, without waits"
    )
    results.add(f"{key}_busy_over_baseline_with_reader", ratio(busy["baseline_with_reader"], busy["learner"]))
    for arm, found in rates.items():
        results.add(f"{key}_steps_per_second_{arm}", Spread.of(found))


def mlp(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the MLP."""
    results.title(f"mlp: a million parameters, {BATCH} new and {BATCH} old events a step, rows")
    over_baseline(results, "mlp", MLP, "rows", sizes, bootstrap)


def large(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the MLP with larger steps."""
    results.title(f"large: the MLP with {LARGE} new and {LARGE} old events a step")
    over_baseline(results, "mlp_large", MLP, "rows", sizes, bootstrap, LARGE)


def convnet(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the convnet."""
    results.title(f"convnet: 16 and 32 channels, {BATCH} new and {BATCH} old events a step, rows")
    over_baseline(results, "convnet", CONVNET, "rows", sizes, bootstrap)


def formats(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the MLP on JSON."""
    results.title("formats: the MLP on events of 784 numbers as JSON")
    over_baseline(results, "mlp_json", MLP, "json", sizes, bootstrap)


def tracing(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the MLP with tracing and without."""
    if not has_exporter():
        results.remark(MISSING)
        return
    results.title("tracing: the MLP, 1 % of the steps traced")
    with contextlib.ExitStack() as stack:
        os.environ |= stack.enter_context(collector())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="tracing-"))).resolve()
        sections = {"tracing": {"sample": 0.01}}
        learner = stack.enter_context(
            live(bootstrap, MLP, "rows", sizes, folder, BATCH, sections, switchable("learner"))
        )
        found = learner.alternate_tracing(sizes.rounds, _TRACED_TURNS)
        alike = learner.alternate_tracing(sizes.rounds, _TRACED_TURNS, switch=False)
    results.add("tracing_over_off", found.rate)
    results.add("tracing_busy_over_off", found.busy, "CPU time of a step")
    results.add("tracing_alike_over_alike", alike.rate, "tracing on in both")
    results.add("tracing_busy_alike_over_alike", alike.busy, "tracing on in both")


def ranks(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure two ranks and one rank, on all cores."""
    results.title("ranks: eight partitions, filled beforehand; two ranks, and one alone")
    with all_cores():
        rows_per_second = rates(*sizes.ranks, bootstrap)
    results.add("uneven_over_even", ratio(rows_per_second["uneven"], rows_per_second["even"]), "new events a second")
    results.add(
        "ranks_two_over_one",
        ratio(rows_per_second["even"], rows_per_second["alone"]),
        "on the cores of all other processes",
    )
    for name, rows in rows_per_second.items():
        results.add(f"ranks_rows_per_second_{name}", Spread.of(rows))


def overhead(results: Results, sizes: Sizes, _bootstrap: str) -> None:
    """Measure a model that is too small to matter."""
    results.title("overhead: 64 to 32 to 10, events from memory; CPU time of the loop's thread")
    events, rounds = sizes.overhead
    for batch in (64, 512):
        for rows, kind in ((BLOCK, f"{batch}"), (batch, f"{batch}_by_blocks")):
            turns = measure(batch, rows, events // batch, rounds, OPTIMIZER, TINY)
            more = [learner - plain for learner, plain in zip(turns.learner, turns.plain, strict=True)]
            blocks = f"{batch} new and {batch} old events a step, blocks of {rows}"
            results.add(f"overhead_{kind}_seconds", Spread.of(more), blocks)
            results.add(f"tiny_{kind}_over_plain", ratio(turns.plain, turns.learner))
            results.add(f"tiny_{kind}_plain_seconds", Spread.of(turns.plain))


def measures(results: Results, sizes: Sizes, _bootstrap: str) -> None:
    """Measure what measures of new events and drift of inputs, of the narrow ones, take of the loop's thread."""
    events, rounds = sizes.overhead
    for name, widths in (("tiny", TINY), ("small", [FEATURES, 256, 128, 10]), ("narrow", [16, 256, 128, 10])):
        for classes in (2, 10):
            results.title(
                f"measures: {widths[:-1]} to {classes}, 64 new and 64 old events a step; CPU time of the loop"
            )
            turns = measure(64, BLOCK, events // 64, rounds, OPTIMIZER, [*widths[:-1], classes], MEASURING)
            results.add(f"measures_{name}_{classes}_fraction", Spread.of(turns.parts))
            results.add(f"measures_{name}_{classes}_step_seconds", Spread.of(turns.learner))


def narrow(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure narrow events, of which a whole topic waits."""
    events, rounds = sizes.narrow
    batch = narrow_events.BATCH
    results.title(f"narrow: {events:,} events of 16 float32, {batch} new and {batch} old ones a step, rows")
    stream = narrow_events.fill(bootstrap, events)
    found = [narrow_events.rates(stream, OPTIMIZER, CORE, OTHERS) for _ in range(rounds)]
    results.add("narrow_events_per_second", Spread.of([each.wall for each in found]))
    for name in ("loop", "threads", "ingest"):
        each_round = Spread.of([getattr(each, name) for each in found])
        results.add(f"narrow_events_per_second_of_{name}", each_round, "of its CPU time")


def lock(results: Results, sizes: Sizes, _bootstrap: str) -> None:
    """Measure how late a thread of the learner's process wakes up."""
    seconds, rounds = sizes.lock
    results.title("lock: the MLP, a version each second, a checkpoint each 5 s; how late a probe's wake-ups are")
    found = [late_wakeups(seconds) for _ in range(rounds)]
    during = [np.concatenate([late for name, late in each.items() if name != "loop"]) for each in found]
    arms = {"wakeup": during}
    for name in ("publish", "score", "checkpoint", "loop"):
        if all(name in each for each in found):
            arms[f"wakeup_{name}"] = [each[name] for each in found]
    for key, late in arms.items():
        remark = "without any of it" if key == "wakeup_loop" else ""
        results.add(f"{key}_p99_seconds", Spread.of([float(np.percentile(each, 99)) for each in late]), remark)
        results.add(f"{key}_worst_seconds", Spread.of([float(each.max()) for each in late]), remark)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Allow all cores to processes that are started in the block."""
    if CORE is None or OTHERS is None:
        yield
        return
    os.sched_setaffinity(0, CORE | OTHERS)
    try:
        yield
    finally:
        os.sched_setaffinity(0, OTHERS)


PARTS: dict[str, Callable[[Results, Sizes, str], None]] = {
    "mlp": mlp,
    "large": large,
    "convnet": convnet,
    "formats": formats,
    "tracing": tracing,
    "ranks": ranks,
    "narrow": narrow,
    "lock": lock,
    "overhead": overhead,
    "measures": measures,
}
_QUICK_PARTS = ["mlp", "convnet", "tracing", "lock", "overhead"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument(
        "--bootstrap",
        metavar="HOST:PORT",
        help="a broker, where topics are left, instead of an embedded one; on this machine, kept off the first core",
    )
    chosen = parser.parse_args()
    results = Results("learner", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    if CORE is None:
        results.remark("cores cannot be chosen here: all processes of the benchmark compete for them")
    else:
        os.sched_setaffinity(0, OTHERS or CORE)
    with broker(chosen.bootstrap) as bootstrap:
        for part in chosen.only or (_QUICK_PARTS if chosen.form is Form.QUICK else PARTS):
            results.fact(f"load_before_{part}", os.getloadavg()[0])
            PARTS[part](results, SIZES[chosen.form], bootstrap)
    results.write(chosen)


if __name__ == "__main__":
    main()
