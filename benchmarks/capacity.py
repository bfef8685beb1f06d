"""A plan against a run, on five pipelines.

    python -m benchmarks.capacity [--quick] [--json FILE] [--save] [--only PART ...] [--bootstrap HOST:PORT]

    disk     a small MLP, replay from a disk tier
    memory   events of 16 kB as packed rows, replay from 4,000 of them in memory
    none     the same without replay, with the strategy `none`
    large    an MLP of a million parameters, packed rows
    wide     events of 8 kB as JSON, with few parameters

`anabranch plan` calibrates each pipeline. Then the pipeline runs: a producer sends events at the planned rate to a
broker; then the learner is given a backlog. Figures are the plan's over the run's:

    memory      of the host: the highest of learner, ingest process and serving, and the ring, also while it is behind
    disk        bytes a day, from one checkpoint to a later one, as Linux counts what the processes write
    freshness   the mean of the same time, as serving counts it
    saturation  new events a second while the learner is behind

`_off_ratio` is that ratio or its inverse, whichever is larger. The broker has the same cores as the pipeline: the plan
of the saturation has those that it left. Nothing is sent meanwhile.

The shortest form (`--smoke`) takes 40 s of CPU time for a part, since it starts the pipeline twice: no test runs it,
but one runs the calibration.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from anabranch.commands.planning.calibrating.calibration import calibrate
from anabranch.commands.planning.calibrating.metrics import FreshnessSum, read_freshness
from anabranch.commands.planning.calibrating.process_usage import (
    PeakMemory,
    children_of,
    usable_cores,
    written_bytes,
)
from anabranch.commands.planning.calibrating.synthetic_events import synthetic_messages
from anabranch.commands.planning.constants import Constants, Load
from anabranch.commands.planning.disk import DiskWrites
from anabranch.commands.planning.plan import make_plan
from anabranch.commands.planning.speed import RATE
from anabranch.commands.planning.store_size import PlannedStore
from anabranch.config.loader import Config, load_config
from benchmarks.harness.cores import cores_of, listener
from benchmarks.harness.paced_stream import PacedStream
from benchmarks.harness.pipeline import BrokenRunError, LearnerProcess, Stream, broker, pipeline, toml
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.server import ServingProcess
from ingest.events.schema import Schema
from learner.state_dir.report import LearnerReport
from serving.reporting.report import read_report as read_serving

_BACKLOG = 4.0
"""Events that wait for the learner, by those that the plan says it learns while it is measured: it may learn faster."""
_BACKLOG_BYTES = 3e9
_EMBEDDED_BYTES = 8e8
"""Most bytes that wait, in another broker and in the embedded one, which answers each fetch with all of them and
takes a core meanwhile. Where events are large, the learner is measured for less long."""
_QUARTER = 1.25
_POLL_SECONDS = 0.1
_PATIENCE = 300.0
KINDS = ("memory", "disk", "freshness", "saturation")


@dataclass(frozen=True)
class Setting:
    """A pipeline, and the load that it is planned for."""

    features: int
    widths: tuple[int, ...]
    rate: float
    sections: Mapping[str, Any]
    event_bytes: int | None = None
    events_per_message: int = 1
    before: int = 0
    """Events that come at the rate before the disk is measured, so that the store is full."""


@dataclass(frozen=True)
class Sizes:
    """Seconds of a calibration, checkpoints that the run is measured over, and seconds of saturation."""

    calibration: float
    checkpoints: int
    flood: float


SIZES = Sizes(2.0, 1, 1.0), Sizes(12.0, 3, 6.0), Sizes(60.0, 10, 20.0)
"""Of each form."""
_SMALL = (64, 256, 10)
PARTS = {
    "disk": Setting(
        64, _SMALL, 100.0, {"replay": {"capacity": 5_000, "device_bytes": "300kB", "disk": {"bytes": "40MB"}}}, 700
    ),
    "memory": Setting(
        4096,
        (4096, 256, 10),
        100.0,
        {"stream": {"format": "rows"}, "replay": {"capacity": 4_000, "device_bytes": "100MB"}},
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

    memory: float
    disk: float
    """Bytes a second."""
    freshness: float
    saturation: float
    taken: float
    """Cores that the broker had meanwhile."""
    begin: int
    end: int
    """Events that had come at both ends of the time in which the disk was measured."""


def document(setting: Setting, stream: Stream) -> dict[str, Any]:
    """Return the pipeline file: what is on by default, with frequent checkpoints and a ring that is soon full."""
    learner = {"batch_size": 16, "max_delay": "50ms"} | setting.sections.get("learner", {})
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
    """Plan a pipeline and run it, at last on up to `most_bytes` that wait; return both values by kind."""
    setting = PARTS[part]
    described = {
        "features": {"x": {"dtype": "float32", "shape": [setting.features]}},
        "label": {"name": "y", "classes": 10},
    }
    stream = Stream(bootstrap, f"capacity-{part}-{os.urandom(3).hex()}", described, 0)
    written = document(setting, stream)
    config = _config(folder / "plan", written)
    load = Load(rate=setting.rate, event_bytes=setting.event_bytes, events_per_message=setting.events_per_message)
    constants = calibrate(config, load, sizes.calibration, lambda _: None)
    saturation = constants.saturation_rate or load.rate
    most_seconds = most_bytes / (_BACKLOG * saturation * (constants.event_bytes or 1.0))
    sizes = replace(sizes, flood=min(sizes.flood, most_seconds))
    run = run_pipeline(setting, stream, config, written, sizes, folder / "run", _BACKLOG * saturation * sizes.flood)
    return planned(config, load, constants, run), {
        "memory": run.memory,
        "disk": run.disk,
        "freshness": run.freshness,
        "saturation": run.saturation,
    }


def _config(folder: Path, written: Mapping[str, Any]) -> Config:
    from benchmarks.harness import models

    folder.mkdir()
    (folder / "benchmark_models.py").write_bytes(Path(models.__file__).read_bytes())
    path = folder / "pipeline.toml"
    path.write_text(toml(written))
    return load_config(path, {})


def planned(config: Config, load: Load, constants: Constants, run: Run) -> dict[str, float]:
    """Return the plan's values: disk writes of the events that the run had at that time, cores without the broker's."""
    left = usable_cores() - run.taken
    plan, store = make_plan(config, msgspec.structs.replace(load, cores=left), constants), None
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
    setting: Setting,
    stream: Stream,
    config: Config,
    written: Mapping[str, Any],
    sizes: Sizes,
    folder: Path,
    backlog: float,
) -> Run:
    """Run learner and serving at the planned rate, and then on a backlog of so many events."""
    schema = Schema(config.pipeline.events)
    messages = synthetic_messages(schema, config.pipeline.stream, setting.event_bytes, setting.events_per_message, 1)
    with contextlib.ExitStack() as stack:
        paced = PacedStream(stream, messages.values, setting.rate / setting.events_per_message)
        learner = stack.enter_context(LearnerProcess(folder, written))
        server = stack.enter_context(ServingProcess(folder))
        learner.wait_for(lambda _: True)  # events that come before it does would wait for it
        with paced:
            learner.wait_for(lambda report: report.version is not None)
            server.wait()
            peak = PeakMemory(learner.process.pid, server.process.pid)
            _wait(learner, peak, lambda report: sum(report.outcomes.values()) >= setting.before)
            first, fresh = _next_checkpoint(learner, peak), _freshness(learner.state_dir)
            pids = [learner.process.pid, *children_of(learner.process.pid), server.process.pid]
            wrote, last = sum(map(written_bytes, pids)), first
            for _ in range(sizes.checkpoints):
                last = _next_checkpoint(learner, peak)
            wrote = sum(map(written_bytes, pids)) - wrote
            freshness = _freshness(learner.state_dir).mean_since(fresh)
        learner.pause()
        paced.send(int(backlog / setting.events_per_message))
        learner.go_on()
        with cores_of(listener(stream.bootstrap)) as taken:
            rate = _saturate(learner, peak, sizes.flood)
    return Run(
        peak.total, wrote / (last.time - first.time), freshness or 0.0, rate, taken(),
        sum(first.outcomes.values()), sum(last.outcomes.values()),
    )  # fmt: skip


def _freshness(state_dir: Path) -> FreshnessSum:
    served = read_serving(state_dir)
    found = None if served is None else read_freshness(served.address)
    if found is None:
        raise BrokenRunError("serving does not answer")
    return found


def _next_checkpoint(learner: LearnerProcess, peak: PeakMemory) -> LearnerReport:
    """Return the first report after the next checkpoint."""
    number = learner.wait_for(lambda _: True).checkpoint
    return _wait(learner, peak, lambda report: report.checkpoint != number)


def _saturate(learner: LearnerProcess, peak: PeakMemory, seconds: float) -> float:
    """Return the events a second while some wait, after it has begun with them; 0 without two such reports."""
    idle = _wait(learner, peak, lambda report: _waiting(report) > 0)  # the first fetch takes seconds
    begun = _wait(learner, peak, lambda report: report.outcomes["trained"] > idle.outcomes["trained"])
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
        for part in chosen.only or PARTS:
            results.title(f"{part}: {PARTS[part].rate:,.0f} events a second")
            results.fact(f"load_before_{part}", os.getloadavg()[0])
            compare(results, part, sizes, bootstrap, most_bytes, root)
    results.write(chosen)


if __name__ == "__main__":
    main()
