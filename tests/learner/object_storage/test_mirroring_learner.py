"""A learner as a process that mirrors its state into an S3 server, whose requests fail for a while."""

import shutil

import pytest

from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.object_storage.erasure_upload import ERASURES, stored_erasures
from anabranch.learner.object_storage.head import HeadReader
from anabranch.learner.versions.format import Versions
from anabranch.replay.erasure.erased_events import ByRange
from anabranch.replay.erasure.erasure_log import NAME, ErasureLog
from tests.learner.object_storage.uploading import damaged
from tests.pipelines import LINEAR, adds_up, events, total, write_pipeline
from tests.support.s3 import S3Prefix
from tests.support.s3_proxy import CLOSED, SLOW_DOWN, S3Proxy, no_fault
from tests.support.waiting import TAKES_MINUTES

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
[storage]
"""

pytestmark = [pytest.mark.any_broker, pytest.mark.process]


def lags(report):
    assert report.storage is not None
    return list(report.storage.lag_seconds.values())


def said(report):
    """What is wrong with the uploads: for a short time, or for longer."""
    return [each for each in (*report.warnings, *report.problems) if "has lacked" in each]


@pytest.mark.parametrize(
    ("answer", "seconds", "why"),
    [
        pytest.param(SLOW_DOWN, 0, "SlowDown", id="SlowDown"),
        pytest.param(CLOSED, 60, "error sending request", id="away for 60 s", marks=TAKES_MINUTES),
    ],
)
def test_training_goes_on_while_every_request_fails_and_another_host_goes_on_from_what_was_uploaded(
    answer, seconds, why, kafka, make_topic, produce, start, free_port, s3, tmp_path
):
    topic, status, reader = make_topic(), f"127.0.0.1:{free_port()}", HeadReader(s3.bucket)
    with S3Proxy(s3.options["endpoint"]) as proxy:
        storage = S3Prefix(s3.url, proxy.options(s3.options)).toml
        config = write_pipeline(tmp_path, kafka.bootstrap, topic, REST + storage, model=LINEAR, status=status)
        learner = start(config)
        produce(kafka.bootstrap, topic, events(200))
        learner.wait_for(lambda each: total(each) == 200 and not any(lags(each)))

        proxy.fault = lambda method, path: answer
        produce(kafka.bootstrap, topic, events(200))
        report = learner.wait_for(
            lambda each: (
                total(each) == 400
                and len(said(each)) == 2
                and "has lacked the newest versions for" in said(each)[0]  # not yet where another request failed first
                and max(lags(each)) >= seconds
            )
        )
        assert why in said(report)[0]
        assert bool(report.problems) == (seconds > 0)
        proxy.fault = no_fault
        report = learner.wait_for(lambda each: not any(lags(each)) and not each.warnings and not each.problems)
        assert report.storage is not None
        assert report.storage.failures >= 2
        before = report.checkpoint

        written = ErasureLog(learner.state_dir / NAME)
        partition = partition_name(TopicPartition(topic, 0))
        written.append([ByRange(time=0.0, by="command", partition=partition, first=0, last=9)])
        report = learner.wait_for(lambda each: each.erased_through == 1)
        reader.poll()
        assert reader.contents is not None
        assert min(reader.contents.checkpoints) > (before or 0), "checkpoints with the erased events are still there"

        produce(kafka.bootstrap, topic, events(200))
        learner.wait_for(lambda each: total(each) == 600)
        assert learner.stop() == 0
    reader.poll()
    assert reader.contents is not None
    assert reader.contents.released
    assert max(reader.contents.checkpoints) == Checkpoints(learner.state_dir / "checkpoints", "", 0).numbers()[-1]
    assert max(reader.contents.versions) == Versions(learner.state_dir / "versions").numbers()[-1]
    assert damaged(s3.bucket) == []
    assert s3.bucket.read(ERASURES) == stored_erasures(learner.state_dir)

    shutil.rmtree(learner.state_dir)
    config.write_text(config.read_text().replace(proxy.endpoint, s3.options["endpoint"]))
    other = start(config)
    produce(kafka.bootstrap, topic, events(200))
    report = other.wait_for(lambda each: total(each) == 800)
    assert adds_up(report)
    assert report.erased == 1
    assert other.stop() == 0
