"""A disk that takes no more: the last good cuts stay, it is said, and training goes on."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from learner.cut import Cuts
from tests.faults.pipeline import Pipeline, Supervised, adds_up, make_topic, send, total

CODE = "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(3, 60_000), nn.Linear(60_000, 3))\n"
TEXT = """
{stream}
[schema.features.x]
dtype = "float32"
shape = [3]
[schema.label]
name = "y"
classes = 3
[model]
factory = "faulty_model:build"
{learner}
batch_size = 16
device = "cpu"
[versions]
publish_every = "200ms"
[cuts]
every = "200ms"
"""
SMALL = 200_000
"""Bytes that a file may have: reports and manifests do, weights do not."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process can be set on Linux alone")
def test_training_goes_on_while_no_cut_can_be_written_and_a_crash_then_costs_what_no_cut_has(
    kafka: Any, tmp_path: Path
) -> None:
    topic = make_topic(kafka.bootstrap, "disk")
    pipeline = Pipeline(tmp_path, kafka.bootstrap, topic, CODE, TEXT)
    sent = 0

    def learn() -> None:
        nonlocal sent
        messages = [json.dumps({"x": [float(i % 3 == k) for k in range(3)], "y": i % 3}).encode() for i in range(100)]
        send(kafka.bootstrap, topic, messages)
        sent += len(messages)

    with Supervised(pipeline) as learner:
        learn()
        covered = learner.wait_for(lambda report: total(report) == sent and report.cut is not None, "a cut").cut
        pid = learner.pid()
        _, hard = psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE)
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
        learn()
        report = learner.wait_for(lambda report: total(report) == sent and len(report.ill) > 1, "a word on the disk")
        assert any(f"could not be written to {pipeline.state_dir}/cuts: File too large" in each for each in report.ill)
        good = Cuts(pipeline.state_dir / "cuts", "", 0).numbers()
        assert max(good) >= covered
        assert learner.kill() == pid
        report = learner.wait_for(lambda report: total(report) == sent and not report.ill, "health", no_more=pid)
        assert "going on from cut" in learner.said(20_000)
        learner.wait_for(lambda report: (report.cut or 0) > max(good), "a new cut")
    assert adds_up(report)
    assert report.outcomes["trained"] + report.outcomes["held_out"] == sent
    assert report.replay_rows == {"device": report.outcomes["trained"]}
