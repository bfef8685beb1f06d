"""Learners as processes, whose state is in an object store."""

import os
import shutil
import signal
import time

import pytest

from anabranch.learner.object_storage.head import HEAD
from anabranch.learner.state_dir.lock import GENERATION
from anabranch.learner.versions.format import Versions
from tests import forkserver
from tests.pipelines import LINEAR, adds_up, events, total, write_pipeline
from tests.support.ports import first_free_port
from tests.support.s3 import S3Prefix
from tests.support.waiting import PATIENCE_SECONDS, TAKES_MINUTES

REST = """
batch_size = 8
[checkpoints]
every = "200ms"
[versions]
publish_every = "100ms"
[gate]
holdout_fraction = 0.1
holdout_rows = 100
[replay]
capacity = 10000
device_bytes = "1MB"
[storage]
lease = "4s"
mode = "only"
"""

pytestmark = [pytest.mark.any_broker, pytest.mark.process]


def pipeline_in(folder, bootstrap, topic, storage):
    """Write a pipeline into its own folder, as another host has it."""
    folder.mkdir()
    status = f"127.0.0.1:{first_free_port()}"
    return write_pipeline(folder, bootstrap, topic, REST + storage, model=LINEAR, status=status)


def test_with_an_empty_disk_a_learner_goes_on_from_the_object_store_and_everything_adds_up(
    kafka, make_topic, produce, start, s3, tmp_path
):
    topic = make_topic()
    config = pipeline_in(tmp_path / "a", kafka.bootstrap, topic, s3.toml)
    disk = {"ANABRANCH__REPLAY__DISK__BYTES": "1MB", "ANABRANCH__REPLAY__DEVICE_BYTES": "10kB"}
    for turn in (1, 2):
        learner = start(config, **disk)
        produce(kafka.bootstrap, topic, events(200))
        report = learner.wait_for(lambda each, n=200 * turn: total(each) == n and each.version is not None)
        assert adds_up(report)
        assert report.replay_rows["disk"] == report.outcomes["trained"], "an event is in the store twice, or lost"
        assert report.replay_lost == 0
        if turn == 1:  # the next one waits for the lease, as on another host
            learner.kill()
        else:
            assert learner.stop() == 0
        assert learner.log.read_text().count("going on from checkpoint") == turn - 1
        assert not Versions(learner.state_dir / "versions").numbers()
        assert not (learner.state_dir / "checkpoints").exists()
        shutil.rmtree(learner.state_dir)


@pytest.mark.parametrize("pause", [0, pytest.param(60, marks=TAKES_MINUTES)])
def test_of_two_learners_on_one_prefix_one_goes_on_also_after_a_pause_of_the_other(
    pause, kafka, make_topic, produce, start, request, tmp_path
):
    """The short pause with a folder for an object store, the long one with an S3 server."""
    prefix = request.getfixturevalue("s3") if pause else S3Prefix(f"file://{tmp_path}/bucket", {})
    topic, url = make_topic(), prefix.url
    configs = [pipeline_in(tmp_path / name, kafka.bootstrap, topic, prefix.toml) for name in "ab"]
    first = start(configs[0])
    produce(kafka.bootstrap, topic, events(100))
    first.wait_for(lambda each: total(each) == 100 and (each.checkpoint or 0) > 1)
    refused = start(configs[1], ANABRANCH__STORAGE__LEASE="1h")  # the first may not run for some seconds
    assert refused.process.wait(PATIENCE_SECONDS) == 2
    assert f"another learner is at work in {url}; stop it first" in refused.log.read_text().splitlines()[-1]
    os.kill(first.process.pid, signal.SIGSTOP)
    paused = time.monotonic()
    second = start(configs[1])
    produce(kafka.bootstrap, topic, events(100))
    second.wait_for(lambda each: total(each) == 200)
    time.sleep(max(0.0, paused + pause - time.monotonic()))
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.process.wait(PATIENCE_SECONDS) == 2
    assert f"another learner has taken {url} since this one" in first.log.read_text().splitlines()[-1]
    produce(kafka.bootstrap, topic, events(100))
    report = second.wait_for(lambda each: total(each) == 300)
    assert adds_up(report)
    assert second.stop() == 0
    assert b'"released":true' in prefix.bucket.read(HEAD)
    assert int((second.state_dir / GENERATION).read_text()) == 2


def test_a_store_that_is_away_at_the_start_ends_with_3_and_one_sentence(free_port, tmp_path):
    options = {
        "aws_access_key_id": "key-of-us",
        "aws_secret_access_key": "the-secret-of-us",
        "aws_region": "us-east-1",
        "endpoint": f"http://127.0.0.1:{free_port()}",
    }
    config = pipeline_in(tmp_path / "a", "127.0.0.1:1", "nothing", S3Prefix("s3://bucket/prefix", options).toml)
    done = forkserver.run(["-m", "anabranch.learner", "-c", str(config)])
    sentence = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 3
    assert "storage.url: s3://bucket/prefix/head.json" in sentence
    assert "of-us" not in done.stderr
