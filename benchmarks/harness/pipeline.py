"""The whole path from Kafka to a published version: rows in a topic, and a learner process that reads them."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import row_dtype
from anabranch.ingest.kafka.producer import EventProducer, create_topics
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import build_on_device, make_task
from anabranch.learner.model.growing.pool import grow
from anabranch.learner.model.trained_set import load_trained
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.status.report import LearnerReport, read_report
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.versions.format import Versions
from anabranch.runtime.embedded_broker import EmbeddedBroker, free_port
from benchmarks.harness import models

_MESSAGE_BYTES = 200_000
_PATIENCE_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_CODE = "benchmark_models"


class BrokenRunError(Exception):
    """A learner ended unexpectedly, or made no progress; the message has the end of its log."""


@dataclass(frozen=True)
class Stream:
    """A topic of one partition that holds `rows` events of the schema, and nothing else."""

    bootstrap: str
    topic: str
    schema: Mapping[str, Any]
    rows: int


@dataclass(frozen=True)
class Outcome:
    """The result of a run through the whole path.

    Attributes:
        report: the learner's report with an outcome for each event.
        model: of the last version, for evaluation.
        steps_per_second: between the first report that has a step and the last, so without the start of the process;
            nan where a single report has all of them.
    """

    report: LearnerReport
    model: nn.Module
    steps_per_second: float


@contextlib.contextmanager
def broker(bootstrap: str | None) -> Iterator[str]:
    """The address of a broker: `bootstrap`, or else an embedded one that stops with the context."""
    if bootstrap is not None:
        yield bootstrap
        return
    with EmbeddedBroker() as embedded:
        yield embedded.bootstrap


def schema_of(columns: Mapping[str, Array], classes: int) -> dict[str, Any]:
    """Return the section `[schema]` for features by name and a label `y`."""
    features = {name: {"dtype": str(array.dtype), "shape": list(array.shape[1:])} for name, array in columns.items()}
    return {"features": features, "label": {"name": "y", "classes": classes}}


def produce(bootstrap: str, name: str, columns: Mapping[str, Array], label: Array, classes: int) -> Stream:
    """Make a topic of one partition and send the events to it in order, as packed rows, many a message.

    Its name begins with `name` and is unique, also on a broker with topics of earlier runs.
    """
    described = schema_of(columns, classes)
    rows = packed(described, columns, label)
    return send(bootstrap, name, described, messages(rows), len(rows))


def send(bootstrap: str, name: str, described: Mapping[str, Any], values: Iterable[bytes], rows: int) -> Stream:
    """Make a topic of one partition and send messages with `rows` events to it in order; its name as of `produce`."""
    stream = Stream(bootstrap, f"{name}-{uuid.uuid4().hex[:8]}", described, rows)
    producer = EventProducer(make_topic(stream), stream.topic)
    producer.open()
    try:
        for value in values:
            producer.send(value)
        producer.flush()
    finally:
        producer.close()
    return stream


def make_topic(stream: Stream) -> StreamSettings:
    """Make the topic, and that of its dead letters, and return how it is reached."""
    settings = StreamSettings(bootstrap_servers=stream.bootstrap, topics=(stream.topic,))
    create_topics(settings, {stream.topic: 1, f"{stream.topic}.dead": 1})
    return settings


def packed(described: Mapping[str, Any], columns: Mapping[str, Array], label: Array) -> np.ndarray[Any, Any]:
    """Return events in the format `rows`."""
    rows = np.zeros(len(label), row_dtype(Schema(SchemaSettings.model_validate(described))))
    for name, column in columns.items():
        rows[name] = column
    rows["y"] = label
    return rows


def messages(rows: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """Yield rows as messages of some 200 kB."""
    count = max(1, _MESSAGE_BYTES // rows.dtype.itemsize)
    for begin in range(0, len(rows), count):
        yield rows[begin : begin + count].tobytes()


class LearnerProcess:
    """`python -m anabranch.learner` (or `program`) on a pipeline file in a folder; killed when the context ends.

    torch has one thread. The learner ends when its stdin does, so that it never outlives the benchmark.
    """

    def __init__(
        self,
        folder: Path,
        document: Mapping[str, Any],
        cores: set[int] | None = None,
        program: Sequence[str] = ("-m", "anabranch.learner"),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(models.__file__, folder / f"{_CODE}.py")
        path = folder / "pipeline.toml"
        path.write_text(toml(document))
        self.state_dir = folder / "var"
        self._log = folder / "learner.log"
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, "-c", str(path), "--supervised"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cores)

    def __enter__(self) -> "LearnerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.Error):
            for child in self._children():
                child.kill()  # it may be suspended
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def report(self) -> LearnerReport | None:
        """Return its newest report, if there is one; raises BrokenRunError when the process is gone."""
        if self.process.poll() is not None:
            raise BrokenRunError(f"a learner ended with {self.process.returncode}; its log ends with: {self.said()}")
        report = read_report(self.state_dir)
        return report if report is not None and self.process.pid in (report.pid, report.launcher) else None

    def wait_for(self, condition: Callable[[LearnerReport], bool]) -> LearnerReport:
        """Return the first report that satisfies a condition."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (report := self.report()) is None or not condition(report):
            if time.monotonic() > deadline:
                raise BrokenRunError(f"a learner is at {report}; its log ends with: {self.said()}")
            time.sleep(_POLL_SECONDS)
        return report

    def stop(self) -> None:
        """Stop it after a last version; raises BrokenRunError if its exit code is not 0."""
        self.process.terminate()
        if self.process.wait(60) != 0:
            raise BrokenRunError(f"a learner ended with {self.process.returncode}; its log ends with: {self.said()}")

    def pause(self) -> None:
        """Suspend it and its children by a signal."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after a pause."""
        self._signal(signal.SIGCONT)

    def busy_seconds(self) -> float:
        """Return its CPU time so far, without its children."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def spare(self, cores: set[int] | None, *, threads: bool = False) -> None:
        """Move its children, which read the stream, to other cores; with `threads` also all threads but the loop's."""
        if cores is None:
            return
        pids = [thread.id for child in self._children() for thread in child.threads()]
        if threads:
            own = psutil.Process(self.process.pid).threads()
            pids += [thread.id for thread in own if thread.id != self.process.pid]
        for pid in pids:
            os.sched_setaffinity(pid, cores)

    def _signal(self, number: int) -> None:
        for process in (psutil.Process(self.process.pid), *self._children()):
            process.send_signal(number)

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def said(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-2000:]


def run_through(stream: Stream, folder: Path, document: Mapping[str, Any]) -> Outcome:
    """Train a learner on a whole stream, and return its last version.

    Raises:
        BrokenRunError: the learner failed, or an event was neither trained nor held out.
    """
    with LearnerProcess(folder, document) as learner:
        first = learner.wait_for(lambda report: report.steps > 0)
        report = learner.wait_for(lambda report: sum(report.outcomes.values()) >= stream.rows)
        learner.stop()
    last = read_report(learner.state_dir)
    if last is None or last.outcomes["trained"] + last.outcomes["held_out"] != stream.rows:
        raise BrokenRunError(f"not all of {stream.rows} events were trained: {last and last.outcomes}")
    seconds = report.time - first.time
    rate = (report.steps - first.steps) / seconds if seconds > 0 else math.nan
    return Outcome(last, published(learner.state_dir, document, folder), rate)


def pipeline(stream: Stream, model: Mapping[str, Any], seed: int, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline file that reads the stream: no event is held out, and it publishes and checkpoints rarely.

    `sections` override these settings.
    """
    document: dict[str, Any] = {
        "name": stream.topic,
        "seed": seed,
        "stream": {"bootstrap_servers": stream.bootstrap, "topics": [stream.topic], "format": "rows"},
        "schema": stream.schema,
        "model": {**model, "factory": f"{_CODE}:{model['factory']}"},
        "learner": {"device": "cpu", "precision": "fp32", "max_delay": "10s", "status": f"127.0.0.1:{free_port()}"},
        "replay": {},
        "versions": {"publish_every": "1h", "keep": 2},
        "checkpoints": {"every": "1h"},
        "gate": {"holdout_fraction": 0.0},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return document


def toml(document: Mapping[str, Any]) -> str:
    """Write a document as TOML: its mappings as inline tables, which may nest."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in document.items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML
    return json.dumps(value)


def published(state_dir: Path, document: Mapping[str, Any], folder: Path) -> nn.Module:
    """Return the model of the last version of a pipeline, in evaluation mode."""
    versions = Versions(state_dir / "versions")
    manifest = versions.manifest(max(versions.numbers()))
    weights, module = versions.weights(manifest), extended_model(document, folder)
    grow(module, weights)
    load_trained(module, weights)
    if manifest.base is not None:
        module.load_state_dict(bases_in(state_dir).tensors(manifest.base), strict=False)
    return module.eval()


def extended_model(document: Mapping[str, Any], folder: Path) -> nn.Module:
    """Build the model of a pipeline file on the CPU, with what its strategy adds to it."""
    settings = ModelSettings.model_validate(document["model"])
    strategy = LearnerSettings.model_validate(document.get("learner", {})).strategy
    module = build_on_device(settings, folder, torch.device("cpu"))
    schema = Schema(SchemaSettings.model_validate(document["schema"]))
    context = ModelContext(torch.device("cpu"), schema, settings.embedding)
    return build_strategy(strategy, settings, make_task(settings.task, folder)).convert(module, context)
