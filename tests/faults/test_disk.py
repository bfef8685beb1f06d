"""A full disk: the last good checkpoints stay, the problem is reported, and training continues."""

import contextlib
import os
import resource
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest

from anabranch.learner.checkpoints.format import Checkpoints
from tests.faults.pipeline import Pipeline, Supervised, make_topic, send
from tests.pipelines import adds_up, encoded, events, total
from tests.support.waiting import PATIENCE_SECONDS

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
[checkpoints]
every = "200ms"
"""
SMALL = 200_000
"""Size limit of a file in bytes: enough for reports and manifests, not for weights."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process can be set on Linux alone")
def test_training_continues_while_checkpoints_cannot_be_written_and_a_crash_repeats_what_no_checkpoint_has(
    kafka, tmp_path
):
    topic = make_topic(kafka.bootstrap, "disk")
    pipeline = Pipeline(tmp_path, kafka.bootstrap, topic, CODE, TEXT)
    sent = 0

    def learn():
        nonlocal sent
        messages = encoded(events(100))
        send(kafka.bootstrap, topic, messages)
        sent += len(messages)

    with Supervised(pipeline) as learner:
        learn()
        covered = learner.wait_for(
            lambda report: total(report) == sent and (report.checkpoint or 0) > 1, "a checkpoint"
        ).checkpoint
        pid = learner.pid()
        _, hard = psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE)
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
        learn()
        too_large = f"could not be written to {pipeline.state_dir}/checkpoints: File too large"
        learner.wait_for(
            lambda report: (
                total(report) == sent
                and len(report.problems) > 1
                and any(too_large in problem for problem in report.problems)
            ),
            "a problem of the disk",
        )
        good = Checkpoints(pipeline.state_dir / "checkpoints", "", 0).numbers()
        assert max(good) >= covered
        assert learner.kill() == pid
        report = learner.wait_for(lambda report: total(report) == sent and not report.problems, "health", no_more=pid)
        assert "going on from checkpoint" in learner.log_tail(20_000)
        learner.wait_for(lambda report: (report.checkpoint or 0) > max(good), "a new checkpoint")
    assert adds_up(report)
    assert report.outcomes["trained"] + report.outcomes["held_out"] == sent
    assert report.replay_rows == {"device": report.outcomes["trained"]}


def health(pipeline):
    """Return the learner's answer on /healthz."""
    try:
        with urllib.request.urlopen(f"http://{pipeline.status}/healthz", timeout=PATIENCE_SECONDS) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as exc:
        return exc.read().decode()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MB; without the permission to mount one the test is skipped."""
    folder = tmp_path / "var"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is mounted on Linux alone")
def test_training_continues_while_the_disk_is_completely_full(kafka, tmp_path, small_disk):
    """Not even a report can be written; the disk tier allocated its slots at the start."""
    topic = make_topic(kafka.bootstrap, "full")
    text = TEXT.replace("[checkpoints]", "keep = 2\nkeep_hourly = 0\n[checkpoints]")
    text += '[replay]\ncapacity = 1000\ndevice_bytes = 0\ndisk = {bytes = "2MB"}\n'
    pipeline = Pipeline(tmp_path, kafka.bootstrap, topic, CODE, text)
    messages = encoded(events(200))
    with Supervised(pipeline) as learner:
        send(kafka.bootstrap, topic, messages)
        before = learner.wait_for(
            lambda report: total(report) == len(messages) and (report.checkpoint or 0) > 1, "a checkpoint"
        )
        pid, filling = learner.pid(), small_disk / "filling"
        with filling.open("wb") as file:

            def full():
                """Fill the rest of the disk, also what a failed checkpoint freed; return whether it was full."""
                left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
                with contextlib.suppress(OSError):  # others write to it too
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), left)
                return not left

            learner.until(full, "a full disk")
            steps = learner.until(pipeline.steps, "its steps")
            send(kafka.bootstrap, topic, messages)
            learner.until(lambda: full() and (pipeline.steps() or 0) > steps, "a step on a full disk")
            learner.until(
                lambda: full() and "var cannot be written to: No space" in health(pipeline), "a missing report"
            )
            learner.until(
                lambda: "could not be written to" in learner.log_tail(20_000), "a failed checkpoint or version"
            )
        filling.unlink()
        report = learner.wait_for(lambda report: total(report) == 2 * len(messages) and not report.problems, "health")
        learner.wait_for(lambda report: (report.checkpoint or 0) > before.checkpoint, "a new checkpoint")
        assert learner.pid() == pid
    assert adds_up(report)
    assert report.replay_rows["disk"] == report.outcomes["trained"]
    assert report.replay_lost == 0
