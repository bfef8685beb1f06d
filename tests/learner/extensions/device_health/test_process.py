"""A learner as a process whose device warns, and then falls off the bus."""

import pytest

from tests.pipelines import encoded, events
from tests.support.nvml import UUID, WELL
from tests.support.waiting import PATIENCE_SECONDS

CONFIG = """
[checkpoints]
every = "1h"
[device]
enabled = "on"
every = "100ms"
"""
MODEL = """
import ctypes
ctypes.CDLL("{library}")
from torch import nn
from anabranch.learner.device.nvml import Nvml
from anabranch.learner.extensions.device_health import extension
extension._open = lambda devices: [Nvml().open("{uuid}")]  # torch has no CUDA device here
def build():
    return nn.Linear(3, 3)
"""


def script_of(path, at_start=""):
    path.write_text(f"{UUID}\n{WELL} {at_start}\n")
    return path


def test_a_learner_checkpoints_at_a_warning_ends_at_a_fault_and_goes_on_from_there(
    kafka, make_topic, produce, write_pipeline, start, fake_library, tmp_path
):
    topic, script = make_topic(), script_of(tmp_path / "script")
    config = write_pipeline(kafka.bootstrap, topic, CONFIG, MODEL.format(library=fake_library, uuid=UUID))
    produce(kafka.bootstrap, topic, encoded(events(300)))
    learner = start(config, FAKE_NVML_SCRIPT=str(script))
    # A query that takes two seconds, as on a busy machine, is a warning too, for a while.
    trained = learner.wait_for(
        lambda report: report.steps and report.device and report.device.devices and not report.warnings
    )
    assert trained.problems == []
    assert f'anabranch_device_temperature_celsius{{sensor="gpu",uuid="{UUID}"}} 62.0' in learner.get("/metrics")

    with script.open("a") as file:
        file.write("corrected=100\n")
    warned = learner.wait_for(lambda report: (report.checkpoint or 0) > (trained.checkpoint or 0))
    assert learner.wait_for(lambda report: report.warnings).problems == []
    assert "memory errors that ECC corrected" in learner.get("/healthz")

    with script.open("a") as file:
        file.write("xid=79 error=15\n")
    assert learner.process.wait(PATIENCE_SECONDS) == 1
    log = learner.log.read_text()
    assert "the device has fallen off the bus" in log
    assert "the learner ends, to go on from the newest checkpoint" in log
    assert "Traceback" not in log

    gone = start(config, FAKE_NVML_SCRIPT=str(script_of(script, "error=15")))
    assert gone.process.wait(PATIENCE_SECONDS) == 1, "the supervisor tries again"

    script_of(script)
    again = start(config, FAKE_NVML_SCRIPT=str(script)).wait_for(lambda report: report.device)
    assert again.checkpoint == warned.checkpoint
    assert again.steps >= trained.steps


@pytest.mark.slow
def test_ranks_start_again_from_the_checkpoint_when_a_device_has_failed(
    kafka, make_topic, produce, write_pipeline, start, fake_library, tmp_path
):
    topic, script = make_topic(), script_of(tmp_path / "script")
    model = MODEL.format(library=fake_library, uuid=UUID)
    config = write_pipeline(kafka.bootstrap, topic, f'replicas = 2\ndevice = "cpu"\n{CONFIG}', model)
    produce(kafka.bootstrap, topic, encoded(events(300)))
    learner = start(config, FAKE_NVML_SCRIPT=str(script))
    trained = learner.wait_for(lambda report: report.steps and report.device and report.device.devices)
    with script.open("a") as file:
        file.write("corrected=100\n")
    warned = learner.wait_for(lambda report: (report.checkpoint or 0) > (trained.checkpoint or 0))
    with script.open("a") as file:
        file.write("xid=48 uncorrected=1\n")
    learner.until(lambda: "the learner ends, to go on from the newest checkpoint" in learner.log.read_text())
    script_of(script)
    again = learner.wait_for(lambda report: bool(report.device), no_more=trained.pid)
    assert again.checkpoint == warned.checkpoint
    assert again.steps >= trained.steps
    assert again.problems == []
