"""A plan against a run, on five pipelines.

    python -m benchmarks.capacity [--quick] [--json FILE] [--save] [--only PART ...] [--bootstrap HOST:PORT]

    disk     a small MLP, replay from a disk tier
    memory   events of 16 kB as packed rows, replay from 4,000 of them in memory
    none     the same without replay, with the strategy `none`
    large    an MLP of a million parameters, packed rows
    wide     events of 8 kB as JSON, with few parameters

Each pipeline runs with a quarter of its store, half of the planned rate, and a backlog for some seconds:
`anabranch plan` takes its constants of that. Then it runs as it was planned: a producer sends events at the planned
rate to a broker; then the learner is given a backlog. Figures are the plan's over the run's:

    memory      of the host: the highest of learner, ingest process and serving, and the ring, also while it is behind
    disk        bytes a day, from one checkpoint to a later one, as Linux counts what the processes write
    freshness   the mean of the plan, and the median of the last minute of the run, as serving counts it
    saturation  new events a second while the learner is behind

`_off_ratio` is that ratio or its inverse, whichever is larger. The broker has the same cores as the pipeline, in both
runs. Nothing is sent while there is a backlog.
"""

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.commands.plan.constants import Constants, Load
from anabranch.commands.plan.disk import DiskWrites
from anabranch.commands.plan.estimate import make_plan
from anabranch.commands.plan.run_constants import measured_constants
from anabranch.commands.plan.speed import RATE
from anabranch.commands.plan.store_size import PlannedStore
from anabranch.config.loader import Config, load_config
from anabranch.ingest.kafka.producer import EventProducer
from anabranch.learner.status.report import LearnerReport
from anabranch.serving.reporting.report import read_report as read_serving
from benchmarks.harness.pipeline import LearnerProcess, Stream, broker, make_topic, packed, pipeline
from benchmarks.harness.process_usage import PeakMemory, children_of, written_bytes
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.server import ServingProcess


class PacedStream:
    """Makes a topic, and sends messages at a rate in a thread while the context lasts."""

    def __init__(self, stream: Stream, messages: list[bytes], rate: float) -> None:
        self._producer = EventProducer(make_topic(stream), stream.topic)
        self._messages, self._rate = messages, rate
        self.sent = 0
        """Messages so far."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "PacedStream":
        self._producer.open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush()
        self._producer.close()

    def send(self, count: int) -> None:
        """Send so many messages, outside the context."""
        self._producer.open()
        for message in itertools.islice(itertools.cycle(self._messages), count):
            self._producer.send(message)
        self.sent += count
        self._producer.flush()
        self._producer.close()

    def _send(self) -> None:
        begin = time.perf_counter()
        for number, message in enumerate(itertools.cycle(self._messages)):
            if self._stop.wait(max(0.0, begin + number / self._rate - time.perf_counter())):
                return
            self._producer.send(message)
            self.sent += 1


_BACKLOG = 4.0
"""Events that wait for the learner, by those that it is thought to learn while it is measured: it may be faster."""
_TRIAL_SECONDS = 12.0
_BATCH = 16
_BACKLOG_BYTES = 3e9
_EMBEDDED_BYTES = 8e8
"""Most bytes that wait, in another broker and in the embedded one, which answers each fetch with all of them and
takes a core meanwhile. Where events are large, the learner is measured for less long."""
_SMOKE_BYTES = 2e7
_MESSAGES = 1_000
_QUARTER = 1.25
KINDS = ("memory", "disk", "freshness", "saturation")


@dataclass(frozen=True)
class Setting:
    """A pipeline, and the load that it is planned for."""

    features: int
    widths: tuple[int, ...]
    rate: float
    sections: Mapping[str, Any]
    event_bytes: int | None = None
    """Of an event as JSON; None: packed rows."""
    before: int = 0
    """Events that come at the rate before the disk is measured, so that the store is full."""


@dataclass(frozen=True)
class Sizes:
    """Checkpoints that a run is measured over, seconds of saturation, and the most events before it is measured."""

    checkpoints: int
    flood: float
    before: int


SIZES = Sizes(1, 1.0, 200), Sizes(3, 6.0, 10_000), Sizes(10, 20.0, 10_000)
"""Of each form."""
_SMALL = (64, 256, 10)
PARTS = {
    "disk": Setting(
        64, _SMALL, 100.0, {"replay": {"capacity": 5_000, "device_bytes": 300_000, "disk": {"bytes": "40MB"}}}, 700
    ),
    "memory": Setting(
        4096,
        (4096, 256, 10),
        100.0,
        {"stream": {"format": "rows"}, "replay": {"capacity": 4_000, "device_bytes": 100_000_000}},
        before=5_000,
    ),
    "none": Setting(64, _SMALL, 100.0, {"learner": {"strategy": "none"}}, 1_500),
    "large": Setting(
        784,
        (784, 900, 320, 10),
        100.0,
        {"stream": {"format": "rows"}, "replay": {"capacity": 5_000}, "learner": {"batch_size": 32}},
    ),
    "wide": Setting(784, (784, 16, 10), 100.0, {"replay": {"capacity": 3_000}}, 8_000),
}
TARGETS = {f"{part}_{kind}_off_ratio": Target(_QUARTER) for part in PARTS for kind in KINDS}


@dataclass
class Run:
    """What a run measured."""

    config: Config
    constants: Constants
    """As `anabranch plan` reads them at its end; what depends on the rate, before the backlog."""
    memory: float
    disk: float
    """Bytes a second."""
    freshness: float
    saturation: float
    begin: int
    end: int
    """Events that had come at both ends of the time in which the disk was measured."""


def document(setting: Setting, stream: Stream) -> dict[str, Any]:
    """Return the pipeline file: what is on by default, with frequent checkpoints and a ring that is soon full."""
    learner = {"batch_size": _BATCH, "max_delay": "50ms"} | setting.sections.get("learner", {})
    sections = {
        # The embedded broker answers a fetch with all that it has.
        "stream": {"format": "json", "buffer_bytes": "8MB", "properties": {"receive.message.max.bytes": 2**30}}
        | setting.sections.get("stream", {}),
        "learner": learner,
        "replay": setting.sections.get("replay", {}),
        "versions": {"publish_every": "1s", "keep": 20},
        "checkpoints": {"every": "4s"},
        "gate": {"holdout_fraction": 0.01, "max_drop_new": 1e9, "max_drop_old": 1e9},
    }
    model = {"factory": "mlp", "args": {"widths": list(setting.widths)}}
    serving = {"port": 0, "device": "cpu"}
    # Without a lower priority for training, so that what else the machine does counts for all processes alike.
    return pipeline(stream, model, 0, sections) | {"serving": serving, "device_sharing": {"policy": "exclusive"}}


def measure(
    part: str, sizes: Sizes, bootstrap: str, most_bytes: float, folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Plan a pipeline from a smaller run of it, and run it, on up to `most_bytes` that wait; return values by kind."""
    setting = PARTS[part]
    trial = run_pipeline(f"{part}-trial", smaller(setting), bootstrap, sizes, most_bytes, folder / "trial")
    run = run_pipeline(part, setting, bootstrap, sizes, most_bytes, folder / "run", trial.constants.saturation_rate)
    return planned(run.config, Load(rate=setting.rate), trial.constants, run), {
        "memory": run.memory,
        "disk": run.disk,
        "freshness": run.freshness,
        "saturation": run.saturation,
    }


def smaller(setting: Setting) -> Setting:
    """Return a quarter of the store at half of the rate."""
    replay = dict(setting.sections.get("replay", {}))
    for name in ("capacity", "device_bytes"):
        if name in replay:
            replay[name] //= 4
    sections = {**setting.sections, "replay": replay}
    return replace(setting, rate=setting.rate / 2, sections=sections, before=setting.before // 4)


def synthetic(setting: Setting, described: Mapping[str, Any]) -> list[bytes]:
    """Return messages of one random event each: JSON with spaces up to its size, or packed rows."""
    random = np.random.default_rng(1)
    x = random.standard_normal((_MESSAGES, setting.features), np.float32)
    y = random.integers(10, size=_MESSAGES)
    if setting.event_bytes is None:
        return [row.tobytes() for row in packed(described, {"x": x}, y)]
    events = [{"x": each.round(4).tolist(), "y": int(label)} for each, label in zip(x, y, strict=True)]
    return [json.dumps(each).encode().ljust(setting.event_bytes) for each in events]


def planned(config: Config, load: Load, constants: Constants, run: Run) -> dict[str, float]:
    """Return the plan's values: disk writes of the events that the run had at that time."""
    plan, store = make_plan(config, load, constants), None
    if constants.row_bytes is not None:
        store = PlannedStore.of(config.pipeline, constants.row_bytes)
    window = DiskWrites(config.pipeline, constants, load, store)
    disk = window.between("run", run.begin / load.rate, run.end / load.rate).value("total")
    values = {
        "memory": plan.sections["memory"].value("total"),
        "disk": None if disk is None else disk / 86_400,
        "freshness": plan.sections["freshness"].value("mean"),
        "saturation": plan.sections["saturation"].value(RATE),
    }
    return {kind: value for kind, value in values.items() if value is not None}


def run_pipeline(
    name: str,
    setting: Setting,
    bootstrap: str,
    sizes: Sizes,
    most_bytes: float,
    folder: Path,
    expected: float | None = None,
) -> Run:
    """Run learner and serving at the rate, and then on a backlog; `expected`: the events a second that it may learn."""
    described = {
        "features": {"x": {"dtype": "float32", "shape": [setting.features]}},
        "label": {"name": "y", "classes": 10},
    }
    stream = Stream(bootstrap, f"capacity-{name}-{os.urandom(3).hex()}", described, 0)
    messages = synthetic(setting, described)
    with contextlib.ExitStack() as stack:
        paced = PacedStream(stream, messages, setting.rate)
        learner = stack.enter_context(LearnerProcess(folder, document(setting, stream)))
        server = stack.enter_context(ServingProcess(folder))
        config = load_config(folder / "pipeline.toml", {})
        learner.wait_for(lambda _: True)  # events that come before it does would wait for it
        with paced:
            learner.wait_for(lambda report: report.version is not None)
            server.wait()
            peak = PeakMemory(learner.process.pid, server.process.pid)
            _wait(learner, peak, lambda report: sum(report.outcomes.values()) >= min(setting.before, sizes.before))
            first = _next_checkpoint(learner, peak)
            pids = [learner.process.pid, *children_of(learner.process.pid), server.process.pid]
            wrote, last = sum(map(written_bytes, pids)), first
            for _ in range(sizes.checkpoints):
                last = _next_checkpoint(learner, peak)
            wrote = sum(map(written_bytes, pids)) - wrote
            steady = measured_constants(config)
        served = read_serving(learner.state_dir)
        learner.pause()
        rate, seconds = expected or _BATCH / (steady.step_seconds or 1.0), sizes.flood if expected else _TRIAL_SECONDS
        backlog = min(_BACKLOG * rate * seconds, most_bytes / len(messages[0]))
        paced.send(int(backlog))
        learner.go_on()
        saturation = _saturate(learner, peak, min(seconds, backlog / _BACKLOG / rate), paced.sent)
        constants = measured_constants(config)
    for each in ("step_seconds", "delivery_seconds", "delivery_p99_seconds"):
        setattr(constants, each, getattr(steady, each))
    freshness = 0.0 if served is None or served.freshness_p50_seconds is None else served.freshness_p50_seconds
    written = wrote / (last.time - first.time)
    begin, end = (sum(each.outcomes.values()) for each in (first, last))
    return Run(config, constants, peak.total, written, freshness, saturation, begin, end)


def _next_checkpoint(learner: LearnerProcess, peak: PeakMemory) -> LearnerReport:
    """Return the first report after the next checkpoint."""
    number = learner.wait_for(lambda _: True).checkpoint
    return _wait(learner, peak, lambda report: report.checkpoint != number)


def _saturate(learner: LearnerProcess, peak: PeakMemory, seconds: float, sent: int) -> float:
    """Return the events a second while some wait, after it has begun with them; 0 without two such reports.

    It may be done with all that were `sent` from one report to the next.
    """

    def done(report: LearnerReport) -> bool:
        return sum(report.outcomes.values()) >= sent

    idle = _wait(learner, peak, lambda report: _waiting(report) > 0 or done(report))  # the first fetch takes seconds
    begun = _wait(learner, peak, lambda report: report.outcomes["trained"] > idle.outcomes["trained"] or done(report))
    reports = [_wait(learner, peak, lambda report: report.time > begun.time + seconds / 3)]
    while reports[-1].time <= reports[0].time + seconds and _waiting(reports[-1]):
        reports.append(_wait(learner, peak, lambda report: report.time > reports[-1].time))
    first, last = reports[0], next((each for each in reversed(reports) if _waiting(each)), reports[0])
    passed = last.time - first.time
    return (last.outcomes["trained"] - first.outcomes["trained"]) / passed if passed else 0.0


def _waiting(report: LearnerReport) -> int:
    return sum(partition.pending for partition in report.partitions.values())


def _wait(learner: LearnerProcess, peak: PeakMemory, condition: Any) -> LearnerReport:
    def sampled(report: LearnerReport) -> bool:
        peak.sample()
        return bool(condition(report))

    return learner.wait_for(sampled)


def compare(results: Results, part: str, sizes: Sizes, bootstrap: str, most_bytes: float, root: Path) -> None:
    """Add the ratios of a part."""
    folder = root / part
    folder.mkdir()
    plan, run = measure(part, sizes, bootstrap, most_bytes, folder)
    for kind in KINDS:
        if kind not in plan or not run[kind]:
            results.remark(f"{kind}: the plan has {plan.get(kind)}, and the run {run[kind]}")
            continue
        ratio = plan[kind] / run[kind]
        shown = f"the plan says {plan[kind]:,.4g}, the run {run[kind]:,.4g}"
        results.add(f"{part}_{kind}_off_ratio", max(ratio, 1 / ratio), shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="a broker instead of an embedded one")
    chosen = parser.parse_args()
    sizes = SIZES[chosen.form]
    results = Results("capacity", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="capacity-"))).resolve()
        bootstrap = stack.enter_context(broker(chosen.bootstrap))
        most_bytes = _BACKLOG_BYTES if chosen.bootstrap else _EMBEDDED_BYTES
        if chosen.form is Form.SMOKE:
            most_bytes = _SMOKE_BYTES
        for part in chosen.only or PARTS:
            results.title(f"{part}: {PARTS[part].rate:,.0f} events a second")
            results.fact(f"load_before_{part}", os.getloadavg()[0])
            compare(results, part, sizes, bootstrap, most_bytes, root)
    results.write(chosen)


if __name__ == "__main__":
    main()
