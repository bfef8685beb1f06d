"""A small pipeline with three numbers and three classes, and its processes, for tests of whole processes."""

import json
import os
import re
import signal
import subprocess
import tomllib
import urllib.request
from typing import TypeVar

from anabranch.learner.status.report import read_report
from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS, slowness, wait_until

T = TypeVar("T")

CONFIG = """
name = "test"
[stream]
bootstrap_servers = "{bootstrap}"
topics = ["{topic}"]
{stream}
[schema.features.x]
dtype = "float32"
shape = [{width}]
[schema.label]
name = "y"
classes = 3
[model]
factory = "tiny_model:build"
[learner]
status = "{status}"
"""
LINEAR = "from torch import nn\ndef build():\n    return nn.Linear(3, 3)\n"
NARROW = """
import torch
from torch import nn

class Narrow(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 6:  # three new and three old ones are never split
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)

def build():
    return Narrow(3, 3)
"""
"""Runs out of memory with more than six events at once."""


def write_pipeline(folder, bootstrap, topic, rest, *, model, status, stream="", width=3):
    """Write `pipeline.toml` and the module of its model, and return the path of the former.

    `rest` follows the first line of `[learner]`, and `stream` the first lines of `[stream]`; `width` is the number of
    values of an event.
    """
    path = folder / "pipeline.toml"
    path.write_text(CONFIG.format(bootstrap=bootstrap, topic=topic, stream=stream, width=width, status=status) + rest)
    (folder / "tiny_model.py").write_text(model)
    return path


class Part:
    """`learner` or `serving` as a process of a pipeline; it ends with the tests, also if they are killed."""

    def __init__(self, name, config, **environment):
        self.state_dir = config.parent / "var"
        self.log = config.parent / f"{name}.log"
        with self.log.open("ab") as output:
            self.process = forkserver.start(
                ["-m", name, "-c", str(config), "--supervised"],
                stdin=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    def until(self, poll, patience=PATIENCE_SECONDS):
        """Return the first true value of `poll`; fail if the process ends first, or after `patience` seconds of an idle
        machine."""

        def polled():
            value = poll()
            assert value or self.process.poll() is None, self.log.read_text()
            return value

        return wait_until(polled, self.log.read_text, patience, every=0.02)

    def kill(self):
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def stop(self, patience=30):
        """SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience * slowness())

    def close(self):
        """Kill it, and close its stdin."""
        self.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Learner(Part):
    """A learner, of one process or of ranks, and its reports."""

    def __init__(self, config, **environment):
        super().__init__("learner", config, **environment)
        self.status = tomllib.loads(config.read_text())["learner"]["status"]

    @property
    def report(self):
        """Its newest report; not that of an earlier process."""
        report = read_report(self.state_dir)
        return report if report is not None and self.process.pid in (report.pid, report.launcher) else None

    def wait_for(self, condition, patience=PATIENCE_SECONDS, no_more=0):
        """Return the first report that satisfies a condition, not of the rank of pid `no_more`."""

        def poll():
            report = self.report
            return report if report is not None and report.pid != no_more and condition(report) else None

        try:
            return self.until(poll, patience)
        except AssertionError as exc:
            exc.add_note(str(self.report))
            raise

    def get(self, path):
        """Return the answer of its status address."""
        with urllib.request.urlopen(f"http://{self.status}{path}", timeout=PATIENCE_SECONDS) as reply:
            return str(reply.read().decode())

    def metric(self, name):
        """Return a metric without labels."""
        match = re.search(rf"^anabranch_{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert match, name
        return float(match[1])


def events(count):
    """Return events that a linear model can learn."""
    return [{"x": [float(i % 3 == k) for k in range(3)], "y": i % 3} for i in range(count)]


def encoded(values):
    """Return them as messages of JSON."""
    return [json.dumps(value).encode() for value in values]


def total(report):
    """Return the number of events with an outcome."""
    return sum(report.outcomes.values())


def adds_up(report):
    """Return whether the offsets of every partition add up, and each finished event has one outcome."""
    offsets = all(
        part.end - part.start == part.finished + part.passed + part.gaps + part.removed + part.pending
        for part in report.partitions.values()
    )
    return offsets and sum(report.skipped.values()) == report.outcomes.get("skipped", 0)
