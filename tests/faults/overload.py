"""A stream ten times faster than training: the memory of the learner and its children does not grow.

The embedded broker answers a fetch with all messages that it has, and ingest must hold them at once. On it the stream
therefore keeps its newest events alone, as with a short retention: the backlog keeps its size, and events that were
removed unread are counted.
"""

import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from kafka import KafkaAdminClient, TopicPartition

from anabranch.learner.status.report import LearnerReport
from tests.faults.figures import Figures
from tests.faults.pipeline import POLL_SECONDS, Pipeline, Supervised, make_topic, producer
from tests.pipelines import adds_up, total
from tests.support.kafka import START

CODE = """
import time
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep({pause})
        return super().forward(x)

def build():
    return Slow(64, 10)
"""
TEXT = """
{stream}
on_gap = "earliest"
buffer_bytes = "4MB"
[schema.features.x]
dtype = "float32"
shape = [64]
[schema.label]
name = "y"
classes = 10
[model]
factory = "faulty_model:build"
{learner}
batch_size = 64
device = "cpu"
[replay]
capacity = 1000
device_bytes = "1MB"
[versions]
publish_every = "1s"
keep = 2
keep_hourly = 0
[checkpoints]
every = "5s"
[gate]
holdout_rows = 100
"""
TOO_FAST = 10
_AHEAD = 5_000
"""Events that are sent before the speed of training is known."""
KEPT, _BURST = 5_000, 1_000
"""Events that the embedded broker keeps, and those that are sent before the others are removed."""


@dataclass(frozen=True)
class Memory:
    """The cost of overload.

    Attributes:
        growth: memory at the end over that after the first tenth.
        curve: bytes of all processes in each tenth of the samples, the mean.
        sent: events on the stream at the end.
        learned: events with an outcome.
        removed: events that were removed before they were read.
        exact: whether the counts add up.
    """

    growth: float
    curve: tuple[float, ...]
    sent: int
    learned: int
    removed: int
    exact: bool


class Flood(threading.Thread):
    """Sends ten events for each that has an outcome, until `done` is set; the broker keeps about `kept`."""

    def __init__(self, pipeline: Pipeline, kept: int | None) -> None:
        super().__init__()
        self._pipeline, self._kept = pipeline, kept
        self.done = threading.Event()
        self.sent = 0

    def run(self) -> None:
        """Send until it is done."""
        generator = np.random.default_rng(0)
        x = generator.random((500, 64)).round(4).tolist()
        messages = [json.dumps({"x": row, "y": index % 10}).encode() for index, row in enumerate(x)]
        with (
            producer(self._pipeline.bootstrap, self._pipeline.topic) as sender,
            contextlib.closing(KafkaAdminClient(bootstrap_servers=self._pipeline.bootstrap)) as admin,
        ):
            while not self.done.wait(POLL_SECONDS):
                report = self._pipeline.report()
                target = max(_AHEAD, TOO_FAST * total(report) if report is not None else 0)
                for _ in range(min(_BURST, target - self.sent)):
                    sender.send(messages[self.sent % len(messages)])
                    self.sent += 1
                if self._kept is not None and self.sent > self._kept:
                    sender.flush()
                    admin.delete_records({TopicPartition(self._pipeline.topic, 0): self.sent - self._kept})


def flooded(folder: Path, bootstrap: str, seconds: float, pause: float, kept: int | None) -> Memory:
    """Flood a learner, whose steps take at least `pause` seconds, for `seconds`, and measure its memory."""
    pipeline = Pipeline(folder, bootstrap, make_topic(bootstrap, "flood"), CODE.format(pause=pause), TEXT)
    flood = Flood(pipeline, kept)
    with Supervised(pipeline) as learner:
        flood.start()
        try:
            learner.wait_for(lambda report: report.steps_since_start > 0, "a step")
            pid, begin, samples = learner.pid(), time.monotonic(), []
            while time.monotonic() - begin < seconds:
                samples.append(sum(map(_bytes, learner.family())))
                time.sleep(max(0.1, seconds / 500))
            # The buffers may hold all that was read so far: events are found removed with the next fetch.
            report = learner.wait_for(lambda report: kept is None or _removed(report) > 0, "events that were removed")
            if learner.pid() != pid:
                raise AssertionError(f"the learner was started again: {learner.log_tail()}")
        finally:
            flood.done.set()
            flood.join()
    curve = tuple(float(np.mean(tenth)) for tenth in np.array_split(samples, 10))
    return Memory(curve[-1] / curve[1], curve, flood.sent, total(report), _removed(report), adds_up(report))


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `overload`."""
    seconds = 40.0 if quick else minutes * 60
    figures.part("overload", f"ten events are sent for each that is trained, for {seconds:.0f} s")
    memory = flooded(folder, bootstrap, seconds, pause=0.1, kept=None if os.environ.get(START) else KEPT)
    megabytes = " ".join(f"{mean / 1e6:.0f}" for mean in memory.curve)
    figures.add("memory_growth", memory.growth, f"MB of learner and ingest by tenths of the time: {megabytes}")
    unread = f"{memory.sent} events sent, {memory.removed} removed unread"
    figures.add("sent_over_learned", memory.sent / max(1, memory.learned), unread)
    figures.add("overload_adds_up", memory.exact)


def _removed(report: LearnerReport) -> int:
    return sum(part.removed for part in report.partitions.values())


def _bytes(process: psutil.Process) -> int:
    """Return the memory that only this process has and has written, or all of it where the system does not report that.

    Pages of programs and libraries, and those that a fork shares, depend on the other processes of the machine.
    """
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except FileNotFoundError:
        return _resident(process)
    except ProcessLookupError:
        return 0
    kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return 1024 * kilobytes["Private_Dirty"]


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
