"""A stream that is faster than training, learned by a real learner that is killed in the midst of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.config import SchemaSettings
from ingest.rows import pack_rows
from ingest.schema import Schema
from learner.report import LearnerReport, read_report

CONFIG = """
name = "test"
[stream]
bootstrap_servers = "{bootstrap}"
topics = ["{topic}"]
format = "rows"
buffer_bytes = 1_000_000
[stream.lag_policy]
action = "{action}"
high = "1s"
low = "500ms"
[schema.features.x]
dtype = "float32"
shape = [512]
[schema.label]
name = "y"
classes = 3
[model]
factory = "slow_model:build"
[learner]
batch_size = 16
replay_ratio = 0
status = "127.0.0.1:0"
[versions]
publish_every = "1h"
[cuts]
every = "300ms"
[gate]
guard_fraction = 0.1
"""
SLOW = """
import time
from torch import nn
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x)
def build():
    return Slow(512, 3)
"""
MESSAGES, ROWS = 300, 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started = []

    def begin() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "learner", "-c", str(tmp_path / "pipeline.toml")]
        with (tmp_path / "learner.log").open("ab") as said:
            started.append(subprocess.Popen(command, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for(
    process: subprocess.Popen[bytes], folder: Path, condition: Callable[[LearnerReport], bool]
) -> LearnerReport:
    deadline = time.monotonic() + 60
    while True:
        report = read_report(folder / "var")
        if report is not None and report.pid == process.pid and condition(report):
            return report
        assert process.poll() is None, (folder / "learner.log").read_text()
        assert time.monotonic() < deadline, f"{report}\n{(folder / 'learner.log').read_text()}"
        threading.Event().wait(0.02)


def total(report: LearnerReport, term: str) -> int:
    return sum(getattr(partition, term) for partition in report.partitions.values())


def left_out(report: LearnerReport) -> int:
    return report.outcomes["stored_only"] + report.outcomes["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["sample", "store-only", "skip-to-latest"])
def test_a_stream_that_is_too_fast_is_accounted_for_exactly_though_the_learner_is_killed(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    tmp_path: Path,
    start: Callable[[], subprocess.Popen[bytes]],
    action: str,
) -> None:
    topic = make_topic(partitions=2)
    text = CONFIG.format(bootstrap=kafka.bootstrap, topic=topic, action=action)
    (tmp_path / "pipeline.toml").write_text(text)
    (tmp_path / "slow_model.py").write_text(SLOW)
    learner = start()
    wait_for(learner, tmp_path, lambda report: bool(report.partitions))
    rows = [{"x": [float(i % 3 == k) for k in range(512)], "y": i % 3} for i in range(ROWS)]
    features = {"x": {"dtype": "float32", "shape": [512]}}
    schema = SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}})
    messages = [pack_rows(Schema(schema), rows)] * (MESSAGES // 2)
    for partition in range(2):
        produce(kafka.bootstrap, topic, messages, partition=partition)
    wait_for(learner, tmp_path, lambda each: total(each, "passed") + left_out(each) > 0)
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    learner = start()
    report = wait_for(
        learner,
        tmp_path,
        lambda each: total(each, "end") == MESSAGES and not total(each, "pending") and not each.behind,
    )
    terms = {term: total(report, term) for term in ("start", "finished", "passed", "gaps", "removed")}
    assert terms["start"] == terms["gaps"] == terms["removed"] == 0
    assert terms["finished"] + terms["passed"] == MESSAGES
    assert sum(report.outcomes.values()) == terms["finished"] * ROWS
    assert report.skipped == ({"behind": report.outcomes["skipped"]} if report.outcomes["skipped"] else {})
    assert (terms["passed"] > 0) == (action == "skip-to-latest")
    assert (report.outcomes["stored_only"] > 0) == (action == "store-only")
    assert action != "sample" or report.outcomes["skipped"] > 0
    assert 0.07 < report.outcomes["held_out"] / (terms["finished"] * ROWS) < 0.13
    assert report.replay_rows["device"] == report.outcomes["trained"] + report.outcomes["stored_only"]
    # Having caught up it trains on all again.
    for partition in range(2):
        produce(kafka.bootstrap, topic, messages[:2], partition=partition)
    after = wait_for(learner, tmp_path, lambda each: total(each, "end") == MESSAGES + 4 and not total(each, "pending"))
    kept = {kind: after.outcomes[kind] - report.outcomes[kind] for kind in ("trained", "held_out")}
    assert kept["trained"] + kept["held_out"] == 4 * ROWS
