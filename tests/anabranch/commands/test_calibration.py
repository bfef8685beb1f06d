"""A calibration runs the pipeline as it is, and leaves nothing behind."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from anabranch.commands.planning.run_constants import constants_of_run
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from ingest.events.partition import TopicPartition
from ingest.kafka.synthetic import SyntheticClient

MODEL = "import torch\n\ndef build():\n    return torch.nn.Linear(4, 3)\n"
PIPELINE = """
name = "calibrated"
[stream]
topics = ["events"]
bootstrap_servers = "127.0.0.1:1"
[schema]
features = {x = {dtype = "float32", shape = [4]}}
label = {name = "y", classes = 3}
[model]
factory = "calibrated_model:build"
[learner]
device = "cpu"
[replay]
capacity = 2000
disk = {bytes = "4MB"}
"""


def write_pipeline(folder: Path, model: str) -> None:
    (folder / "calibrated_model.py").write_text(model)
    (folder / "pipeline.toml").write_text(PIPELINE)


def run_plan(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    write_pipeline(folder, MODEL)
    command = [sys.executable, "-P", "-m", "anabranch", "plan", "--rate", "200", "--json", "--exit-code", *options]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_calibration_measures_the_pipeline_without_a_broker_and_removes_its_folder(tmp_path: Path) -> None:
    done = run_plan(tmp_path, "--seconds", "2")
    # A busy machine may saturate below the rate, which breaks a promise.
    assert done.returncode in (0, 4), done.stderr
    plan = json.loads(done.stdout)
    assert (done.returncode == 4) == bool(plan["warnings"])
    constants = plan["constants"]
    assert constants["parameters"] == 15
    assert constants["row_bytes"] > 16
    for name in ("learner_bytes", "ingest_bytes", "serving_bytes", "version_bytes", "ingest_rate", "request_seconds"):
        assert constants[name] > 0, name
    assert set(plan["sections"]) >= {"memory", "tiers", "first day", "later day", "freshness", "saturation"}
    assert {path.name for path in tmp_path.iterdir()} <= {"calibrated_model.py", "pipeline.toml", "__pycache__"}


@pytest.mark.process
def test_without_a_calibration_the_model_alone_is_measured(tmp_path: Path) -> None:
    done = run_plan(tmp_path, "--no-calibrate")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["constants"]["parameters"] == 15
    assert plan["constants"]["saturation_rate"] is None


def test_a_plan_of_a_run_needs_a_run(tmp_path: Path) -> None:
    write_pipeline(tmp_path, MODEL)
    with pytest.raises(SettingsError, match="no learner has run"):
        constants_of_run(load_config(tmp_path / "pipeline.toml", {}))


def test_synthetic_messages_come_in_turn_and_as_fast_as_they_are_read_once_they_may() -> None:
    values, flooded = [b"a", b"bb", b"ccc"], [False]
    client = SyntheticClient("events", values, 0.0, lambda: flooded[0], lambda: 12.5)
    partition = TopicPartition("events", 0)
    client.open()
    client.assign({partition: 7})
    assert client.poll(timedelta(0), 10) == []
    flooded[0] = True
    (messages,) = client.poll(timedelta(0), 8)
    assert list(messages.values) == [b"a", b"bb", b"ccc", b"a", b"bb", b"ccc", b"a", b"bb"]
    assert (list(messages.offsets), messages.end) == ([*range(7, 15)], 15)
    assert set(messages.times_ms) == {12_500}
    (messages,) = client.poll(timedelta(0), 1)
    assert list(messages.values) == [b"ccc"]
    assert client.lag().ends == {partition: 16}
    assert client.first_offsets([partition], "earliest", None) == {partition: 16}
