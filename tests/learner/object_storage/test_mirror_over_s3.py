"""Uploads to a real S3 server whose requests fail, are slow, or lose their replies: they go on, and heal."""

import threading
from datetime import timedelta

import pytest

from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.extensions.storage import extension as mirror
from anabranch.learner.object_storage.head import HEAD, HeadReader
from tests.learner.object_storage.uploading import PATIENCE, FaultyBucket, UploadBench, damaged, running_threads, torn
from tests.support.s3_proxy import CLOSED, INTERNAL_ERROR, NO_REPLY, SLOW_DOWN, S3Proxy, no_fault, some_of
from tests.support.waiting import wait_until


@pytest.fixture
def proxy(s3):
    with S3Proxy(s3.options["endpoint"]) as proxy:
        yield proxy


@pytest.fixture
def bench(s3, proxy, tmp_path, monkeypatch):
    """A learner behind the proxy, whose back-off is short."""
    monkeypatch.setattr(mirror, "_FIRST", timedelta(milliseconds=10))
    monkeypatch.setattr(mirror, "_LONGEST", timedelta(milliseconds=50))
    return UploadBench(tmp_path, FaultyBucket(s3.url, proxy.options(s3.options)))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(some_of(SLOW_DOWN, 2, of=3), id="SlowDown"),
        pytest.param(some_of(INTERNAL_ERROR, 1, of=2), id="500"),
        pytest.param(some_of(NO_REPLY, 1, of=3, method="PUT"), id="lost replies"),
        pytest.param(some_of(NO_REPLY, 1, of=2, method="POST"), id="lost replies of deletions"),
        pytest.param(some_of(CLOSED, 1, of=2), id="closed connections"),
    ],
)
def test_requests_that_fail_leave_the_newest_state_intact(bench, s3, proxy, fault):
    proxy.fault, number = fault, 0
    with running_threads(bench.mirror):
        while number < 8 or not proxy.answered:  # a slow machine deletes nothing before that
            number += 1
            bench.checkpoint(number, carried=number - 1 if number > 1 else None)
            bench.version(number)
            for thread in bench.mirror.threads:
                thread.finish(Deadline(timedelta(seconds=0.3)))
            CheckpointPruning(bench.checkpoints, 3).prune()
            bench.versions.delete(number - 3)
            assert torn(s3.bucket) == []
        proxy.fault = no_fault
        wait_until(bench.finished)
    reader = HeadReader(s3.bucket)
    reader.poll()
    assert reader.contents is not None
    assert max(reader.contents.checkpoints) == max(reader.contents.versions) == number
    assert len(reader.contents.checkpoints) <= 3
    assert damaged(s3.bucket) == []
    assert all(thread.warning is None for thread in bench.mirror.threads)
    named = {str(number) for number in reader.contents.versions}
    assert {path.split("/")[-2].partition("-")[0] for path in s3.bucket.sizes("versions")} == named


def test_a_reply_that_is_lost_after_the_head_was_replaced_is_no_other_learner(s3, proxy, tmp_path):
    bench = UploadBench(tmp_path, FaultyBucket(s3.url, proxy.options(s3.options), retries=1))
    lost = some_of(NO_REPLY, 1, of=2)
    proxy.fault = lambda method, path: lost(method, path) if method == "PUT" and path.endswith(HEAD) else None
    bench.version(1)
    assert bench.version_uploads.advance()
    assert proxy.answered
    bench.lease.check()
    assert damaged(s3.bucket) == []


def test_a_slow_upload_is_finished_and_then_the_newest_one_follows(bench, s3, proxy):
    may_go_on = threading.Event()

    def slow(method, path):
        if method == "PUT" and "files/" in path:
            assert may_go_on.wait(PATIENCE.total_seconds())

    proxy.fault = slow
    bench.checkpoint(1)
    with running_threads(bench.mirror):
        wait_until(lambda: any("files/" in path for _, path in proxy.requests), "an upload")
        bench.checkpoint(2)
        bench.checkpoint(3)
        CheckpointPruning(bench.checkpoints, 1).prune()
        bench.version(1)
        assert bench.mirror.threads[0].finish(Deadline(PATIENCE))
        assert bench.lease.head.checkpoints == {}, "the version waited for the checkpoint"
        may_go_on.set()
        assert bench.finished()
    assert bench.lease.head.checkpoints == {1: 1, 3: 1}
    assert damaged(s3.bucket) == []
