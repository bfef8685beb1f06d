"""A calibration runs the pipeline as it is, and leaves nothing behind."""

import contextlib
import json
import signal
import threading
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from anabranch.commands.planning.calibrating import calibration
from anabranch.commands.planning.constants import Load
from anabranch.commands.planning.run_constants import constants_of_model, constants_of_run
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from ingest.events.partition import TopicPartition
from ingest.kafka.synthetic import SyntheticClient
from tests import forkserver

OWN = {"calibrated_model.py", "pipeline.toml", "__pycache__"}
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
[device_sharing]
policy = "exclusive"
"""


def write_pipeline(folder: Path, model: str) -> Path:
    (folder / "calibrated_model.py").write_text(model)
    path = folder / "pipeline.toml"
    path.write_text(PIPELINE)
    return path


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_calibration_measures_the_pipeline_without_a_broker_and_removes_its_folder(tmp_path: Path) -> None:
    command = ["-P", "-m", "anabranch", "plan", str(write_pipeline(tmp_path, MODEL)), "--rate", "200", "--json"]
    done = forkserver.run([*command, "--exit-code", "--seconds", "2"], timeout=350)
    # A busy machine may saturate below the rate, which breaks a promise.
    assert done.returncode in (0, 4), done.stderr
    plan = json.loads(done.stdout)
    assert (done.returncode == 4) == bool(plan["warnings"])
    constants = plan["constants"]
    assert constants["parameters"] == 15
    assert constants["row_bytes"] > 16
    for name in ("learner_bytes", "ingest_bytes", "serving_bytes", "version_bytes", "ingest_rate", "request_seconds"):
        assert constants[name] > 0, name
    assert all(constants["cpu_seconds_per_event"][part] > 0 for part in ("learner", "ingest"))
    assert constants["cores"] >= 1
    assert set(plan["sections"]) >= {"memory", "tiers", "first day", "later day", "freshness", "saturation"}
    assert {path.name for path in tmp_path.iterdir()} <= OWN


def test_a_calibration_that_is_ended_while_it_measures_ingest_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    monkeypatch.setattr(calibration, "_Processes", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(calibration, "_measure", lambda *_: None)
    monkeypatch.setattr(calibration, "synthetic_source", lambda *_: source)

    def say(sentence: str) -> None:
        if "ingest" in sentence:
            signal.raise_signal(signal.SIGTERM)

    config = load_config(write_pipeline(tmp_path, MODEL), {})
    with pytest.raises(KeyboardInterrupt):
        calibration.calibrate(config, Load(rate=200.0), 2.0, say)
    assert source.closed
    assert {path.name for path in tmp_path.iterdir()} <= OWN


def test_ingest_is_measured_by_one_block_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(None, b"first", None, b"second", b"third")
    monkeypatch.setattr(calibration, "synthetic_source", lambda *_: source)
    config, spec = load_config(write_pipeline(tmp_path, MODEL), {}), Mock()
    assert calibration._ingest_rate(config, spec, 0.0, threading.Event())
    assert source.released == [b"first", b"second"]
    assert source.closed


class Source:
    """The reader of a stream with these blocks."""

    def __init__(self, *blocks: bytes | None) -> None:
        self.blocks, self.released, self.closed = [*blocks], list[bytes](), False

    def open(self) -> None:
        pass

    def poll(self, _within: timedelta) -> bytes | None:
        return self.blocks.pop(0) if self.blocks else None

    def release(self, block: bytes) -> None:
        self.released.append(block)

    def close(self) -> None:
        self.closed = True


@pytest.mark.process
def test_without_a_calibration_the_model_alone_is_measured(tmp_path: Path) -> None:
    constants = constants_of_model(load_config(write_pipeline(tmp_path, MODEL), {}))
    assert constants.parameters == 15
    assert constants.saturation_rate is None


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
