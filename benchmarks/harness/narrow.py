"""A learner on narrow events, from a topic that has all of them: events a second, by the clock and by CPU time."""

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.pipeline import LearnerProcess, Stream, messages, packed, pipeline, schema_of, send

FLOATS, CLASSES, BATCH = 16, 10, 4096
MODEL = {"factory": "mlp", "args": {"widths": [FLOATS, 32, CLASSES]}}
"""Too small to matter, as the events are."""
_POOL_ROWS = 200_000
_WARM, _MEASURED = 0.2, 0.95
"""Parts of the events after which counting begins and ends."""


@dataclass(frozen=True)
class Rates:
    """New events: a second, and a second of CPU time of the loop's thread, of the learner's other threads, and of the
    processes that read."""

    wall: float
    loop: float
    threads: float
    ingest: float


def fill(bootstrap: str, rows: int) -> Stream:
    """Make a topic of at least `rows` events."""
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((min(rows, _POOL_ROWS), FLOATS), np.float32)}
    label = generator.integers(0, CLASSES, len(columns["x"]))
    described = schema_of(columns, CLASSES)
    values = list(messages(packed(described, columns, label)))
    turns = -(-rows // len(label))
    repeated = itertools.islice(itertools.cycle(values), turns * len(values))
    return send(bootstrap, "narrow", described, repeated, turns * len(label))


def rates(stream: Stream, optimizer: Mapping[str, Any], core: set[int] | None, others: set[int] | None) -> Rates:
    """Let a new learner train on the topic, one old event with each new one; its loop has `core` for itself."""
    sections = {
        # The embedded broker ignores the limit of a fetch and returns all messages.
        "stream": {"properties": {"receive.message.max.bytes": 2**30}},
        "learner": {"batch_size": BATCH, "optimizer": optimizer, "max_grad_norm": float("inf")},
        "replay": {"capacity": 100_000},
        "versions": {"publish_every": "1s"},
        "checkpoints": {"every": "30s"},
        "gate": {"holdout_fraction": 0.01},
    }
    with (
        tempfile.TemporaryDirectory(dir=".", prefix="narrow-") as folder,
        LearnerProcess(Path(folder).resolve(), pipeline(stream, MODEL, 0, sections), core) as learner,
    ):
        process = psutil.Process(learner.process.pid)
        learner.wait_for(lambda report: report.steps > 0)
        learner.spare(others, threads=True)
        first = learner.wait_for(lambda report: sum(report.outcomes.values()) > _WARM * stream.rows)
        learner.spare(others, threads=True)  # also threads started since
        before = _cpu_seconds(process)
        last = learner.wait_for(lambda report: sum(report.outcomes.values()) > _MEASURED * stream.rows)
        after = _cpu_seconds(process)
        rows = sum(last.outcomes.values()) - sum(first.outcomes.values())
        loop, threads, ingest = (rows / max(1e-9, end - begin) for begin, end in zip(before, after, strict=True))
        return Rates(rows / (last.time - first.time), loop, threads, ingest)


def _cpu_seconds(process: psutil.Process) -> tuple[float, float, float]:
    """Return the CPU time of the main thread, of the other threads, and of the child processes."""
    own = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    loop = own.pop(process.pid)
    times = [child.cpu_times() for child in process.children(recursive=True)]
    return loop, sum(own.values()), sum(each.user + each.system for each in times)
