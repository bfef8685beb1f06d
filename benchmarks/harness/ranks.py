"""Two ranks on the CPU, with equal partitions and with uneven ones, and one rank."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import row_dtype
from anabranch.ingest.kafka.producer import EventProducer, create_topics
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.status.report import LearnerReport, read_report
from anabranch.runtime.embedded_broker import EmbeddedBroker, free_port
from benchmarks.harness.interleave import interleave

EVEN, UNEVEN = (50,) * 8, (90,) * 4 + (10,) * 4
"""Events of each partition's messages: eight equal partitions, and eight of which half have nine times as many."""
_FLOATS = 784
_SCHEMA = {
    "features": {"x": {"dtype": "float32", "shape": [_FLOATS]}},
    "label": {"name": "y", "classes": 10},
}
_MODEL = f"""
from torch import nn
def build():
    return nn.Sequential(nn.Linear({_FLOATS}, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 10))
"""
_PIPELINE = """
name = "{topic}"
[stream]
bootstrap_servers = "{bootstrap}"
topics = ["{topic}"]
format = "rows"
[schema.features.x]
dtype = "float32"
shape = [784]
[schema.label]
name = "y"
classes = 10
[model]
factory = "ranks_model:build"
[learner]
batch_size = 64
replicas = {ranks}
device = "cpu"
status = "127.0.0.1:{port}"
[replay]
capacity = 20_000
"""
_PATIENCE_SECONDS = 600.0
_POLL_SECONDS = 0.1


def rates(rows: int, rounds: int, bootstrap: str | None = None) -> Mapping[str, Sequence[float]]:
    """Return new events a second, one figure a round: of two ranks with `uneven` and with `even` partitions, and of one
    rank `alone` with even ones.

    Each run starts from the beginning of a topic that already holds `rows` events, so that the stream is not the limit.
    Counting starts with the first report that has steps.
    """
    with contextlib.ExitStack() as stack:
        address = bootstrap or stack.enter_context(EmbeddedBroker()).bootstrap
        topics = {name: f"ranks-{name}-{os.getpid()}" for name in ("uneven", "even")}
        for name, sizes in (("uneven", UNEVEN), ("even", EVEN)):
            _fill(address, topics[name], sizes, rows)
        arms = {name: partial(_rate, address, topic, rows, 2) for name, topic in topics.items()}
        arms["alone"] = partial(_rate, address, topics["even"], rows, 1)
        return interleave(arms, rounds, warm_up=0)


def _fill(bootstrap: str, topic: str, sizes: Sequence[int], rows: int) -> None:
    settings = StreamSettings(bootstrap_servers=bootstrap, topics=(topic,))
    create_topics(settings, {topic: len(sizes), f"{topic}.dead": 1})
    generator = np.random.default_rng(0)
    events = np.zeros(max(sizes), row_dtype(Schema(SchemaSettings.model_validate(_SCHEMA))))
    producer = EventProducer(settings, topic)
    producer.open()
    sent = 0
    while sent < rows:
        for size in sizes:  # the producer takes partitions in turn
            events["x"] = generator.random((len(events), _FLOATS), np.float32)
            events["y"] = generator.integers(0, 10, len(events))
            producer.send(events[:size].tobytes())
            sent += size
    producer.flush()
    producer.close()


def _rate(bootstrap: str, topic: str, rows: int, ranks: int) -> float:
    with tempfile.TemporaryDirectory(dir=".", prefix="ranks-") as name:
        folder = Path(name).resolve()
        (folder / "ranks_model.py").write_text(_MODEL)
        config = folder / "pipeline.toml"
        config.write_text(_PIPELINE.format(topic=topic, bootstrap=bootstrap, ranks=ranks, port=free_port()))
        with _learner(config) as process:
            first = _wait(process, folder, 1)
            last = _wait(process, folder, int(0.95 * rows))
    return (_finished(last) - _finished(first)) / (last.time - first.time)


@contextlib.contextmanager
def _learner(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A learner that ends with the benchmark: it stops when its stdin is closed."""
    with (config.parent / "learner.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch.learner", "-c", str(config), "--supervised"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdin is not None
        process.stdin.close()


def _wait(process: "subprocess.Popen[bytes]", folder: Path, rows: int) -> LearnerReport:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (report := read_report(folder / "var")) is None or _finished(report) < rows:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a learner made no progress: {(folder / 'learner.log').read_text()[-2000:]}")
        time.sleep(_POLL_SECONDS)
    return report


def _finished(report: LearnerReport) -> int:
    return sum(report.outcomes.values())
