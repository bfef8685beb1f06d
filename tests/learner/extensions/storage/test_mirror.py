"""What is uploaded behind the learner, when, and what is deleted: over a folder that serves as the object store."""

import hashlib
import json
import shutil
import threading
import time
from datetime import timedelta

import msgspec
import pytest

from anabranch.core.backoff import Backoff
from anabranch.core.object_store.bucket import Bucket, BucketAwayError
from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.errors import SecondLearnerError
from anabranch.learner.extensions.storage import extension as mirror
from anabranch.learner.extensions.storage.extension import UploadThread
from anabranch.learner.object_storage.erasure_upload import ERASURES
from anabranch.learner.object_storage.head import OBJECTS, HeadReader, folder_path
from anabranch.learner.versions.format import VERDICT, Verdict
from anabranch.replay.erasure.erasure_log import NAME, SECRET_FILE, Applied
from tests.learner.object_storage.uploading import PATIENCE, FaultyBucket, UploadBench, damaged, running_threads
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Shortens the back-off."""
    monkeypatch.setattr(mirror, "_FIRST", timedelta(milliseconds=10))
    monkeypatch.setattr(mirror, "_LONGEST", timedelta(milliseconds=50))


@pytest.fixture
def start(tmp_path):
    """Starts a learner of a state directory: `start("host")`; all of them have the same object store."""
    return lambda name="host": UploadBench(tmp_path, FaultyBucket(f"file://{tmp_path}/bucket"), name)


@pytest.fixture
def bench(start):
    return start()


@pytest.fixture
def running(bench):
    with running_threads(bench.mirror):
        yield bench


def test_the_newest_checkpoint_is_uploaded_with_the_files_of_its_manifest(bench):
    bench.checkpoint(1)
    bench.checkpoint(2, carried=1)
    assert bench.checkpoint_uploads.advance()
    assert bench.lease.head.checkpoints == {2: 1}
    assert damaged(bench.bucket) == []


def test_a_file_that_is_there_is_not_uploaded_again(bench):
    bench.checkpoint(1)
    bench.checkpoint_uploads.advance()
    segment = bench.checkpoints.manifest(1).files["rank-0/segment-1.safetensors"]
    sent = bench.checkpoint_uploads.uploaded_bytes
    bench.checkpoint(2, carried=1)
    bench.checkpoint_uploads.advance()
    assert [path for path in bench.bucket.paths if segment in path] == [f"files/{segment}-1-1"]
    assert bench.checkpoint_uploads.uploaded_bytes < 2 * sent


def test_the_newest_ones_stay_and_their_files_with_them(bench):
    for number in range(1, 6):
        bench.checkpoint(number, carried=number - 1 if number > 1 else None)
        bench.checkpoint_uploads.advance()
    assert bench.lease.head.checkpoints == {3: 1, 4: 1, 5: 1}
    named = {digest for number in (3, 4, 5) for digest in bench.checkpoints.manifest(number).files.values()}
    assert damaged(bench.bucket) == []
    assert {path.split("/")[1].split("-")[0] for path in bench.bucket.sizes("files")} == named
    assert len(bench.bucket.sizes("files")) == len(named)
    assert {path.split("/")[1] for path in bench.bucket.sizes("checkpoints")} == {"3-1", "4-1", "5-1"}


def test_versions_in_between_are_skipped_while_the_object_store_is_away(running):
    running.bucket.away = True
    running.version(1)
    thread = running.mirror.threads[0]
    wait_until(lambda: "has lacked the newest versions for " in str(thread.warning), "a warning of versions")
    assert running.mirror.report()["storage"].lag_seconds["versions"] > 0
    assert thread.problem is None
    for number in range(2, 9):
        running.version(number)
    failures = thread.failures
    wait_until(lambda: thread.failures > failures, "the end of a round that may have begun before version 8")
    running.bucket.away = False
    assert running.finished()
    # Under the next generation where an upload of it had begun before the object store came back.
    assert set(running.lease.head.versions) == {8}
    assert running.mirror.report()["storage"].lag_seconds == {"erasures": 0.0, "versions": 0.0, "checkpoints": 0.0}
    assert running.mirror.threads[0].warning is None
    assert running.mirror.report()["storage"].failures > 0


def test_lag_counts_from_the_first_version_that_is_missing(bench, monkeypatch):
    now, written = [time.monotonic()], time.time()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: written)
    bench.version(1)
    bench.version_uploads.advance()
    bench.bucket.away = True
    bench.version(2)
    for _ in range(2):
        with pytest.raises(BucketAwayError):
            bench.version_uploads.advance()
        bench.version(max(bench.versions.numbers()) + 1)
    now[0] += 100
    thread = bench.mirror.threads[0]
    assert bench.version_uploads.lag_seconds == pytest.approx(100)
    thread.step()
    assert thread.problem is not None
    assert "has lacked the newest versions for 100 s" in thread.problem
    assert "SlowDown" in thread.problem
    bench.bucket.away = False
    thread.step()
    assert (thread.problem, thread.warning, bench.version_uploads.lag_seconds) == (None, None, 0.0)


def test_uploads_that_are_too_slow_are_a_problem_without_an_error(bench):
    bench.version_uploads.behind_since = time.monotonic() - 100
    problem = bench.mirror.threads[0].problem
    assert problem is not None
    assert "uploads take longer than that; is the connection, or the object store, too slow?" in problem


def test_an_upload_that_has_begun_is_finished_although_its_checkpoint_is_deleted(bench):
    bench.checkpoint(1)

    def newer(path):
        if path.startswith("files/") and 1 in bench.checkpoints.numbers():
            bench.checkpoint(2)
            bench.checkpoint(3)
            CheckpointPruning(bench.checkpoints, 1).prune()

    bench.bucket.before_write = newer
    assert not bench.checkpoint_uploads.advance()
    assert bench.lease.head.checkpoints == {1: 1}
    assert bench.checkpoint_uploads.behind_since is not None
    assert bench.checkpoint_uploads.advance()
    assert bench.lease.head.checkpoints == {1: 1, 3: 1}
    assert damaged(bench.bucket) == []


def hold_uploads(bucket):
    """Let uploads of files wait; return an event that is set once one is begun, and one that lets them go on."""
    is_begun, may_go_on = threading.Event(), threading.Event()

    def wait(path):
        if path.startswith("files/"):
            is_begun.set()
            assert may_go_on.wait(PATIENCE_SECONDS)

    bucket.before_write = wait
    return is_begun, may_go_on


def test_versions_do_not_wait_for_a_checkpoint(running):
    is_begun, may_go_on = hold_uploads(running.bucket)
    running.checkpoint(1)
    assert is_begun.wait(PATIENCE_SECONDS)
    running.version(1)
    assert running.mirror.threads[0].finish(Deadline(PATIENCE))
    assert running.lease.head.versions == {1: 1}
    assert running.lease.head.checkpoints == {}
    may_go_on.set()
    assert running.finished()
    assert running.lease.head.checkpoints == {1: 1}


def test_a_version_is_deleted_there_when_it_is_deleted_here(bench):
    for number in (1, 2, 3):
        bench.version(number)
        bench.version_uploads.advance()
    bench.versions.delete(1)
    bench.version_uploads.advance()
    assert bench.lease.head.versions == {2: 1, 3: 1}
    assert bench.lease.head.verdicts.keys() == {2, 3}


def test_versions_of_another_host_stay_until_there_are_enough(start, bench):
    for number in (1, 2, 3):
        bench.version(number)
        bench.version_uploads.advance()
    bench.lease.update(lambda head: msgspec.structs.replace(head, released=True))
    other = start("other")
    for number in (4, 5, 6):
        other.version(number)
        other.version_uploads.advance()
    assert other.lease.head.versions == {3: 1, 4: 2, 5: 2, 6: 2}


def test_versions_that_a_server_needs_stay(start, bench):
    for number in (1, 2, 3):
        bench.version(number)
        bench.version_uploads.advance()
    bench.lease.update(lambda head: msgspec.structs.replace(head, released=True))
    other = start("other")
    for needed in (None, {2}):
        other.version_uploads._needed = lambda needed=needed: needed
        for _ in range(3):
            other.version(max(3, *other.versions.numbers(), 3) + 1)
            other.version_uploads.advance()
        assert 2 in other.lease.head.versions
        assert (1 in other.lease.head.versions) is (needed is None)


def test_the_threads_end_with_the_learner(bench):
    earlier = {*threading.enumerate()}  # those of another test may not have ended yet
    with running_threads(bench.mirror):
        threads = [each for each in threading.enumerate() if each.name.startswith("storage-") and each not in earlier]
    for thread in threads:
        thread.join(PATIENCE.total_seconds())
    assert [thread.name for thread in threads] == ["storage-versions", "storage-checkpoints"]
    assert not any(thread.is_alive() for thread in threads)


def test_the_end_waits_for_an_upload_no_longer_than_its_deadline(running, caplog):
    may_go_on = threading.Event()
    running.bucket.before_write = lambda path: may_go_on.wait(PATIENCE_SECONDS) if path.startswith("files/") else None
    running.checkpoint(1)
    running.mirror.finish(Deadline(timedelta(seconds=0.3)))
    assert "lacks the newest checkpoints" in caplog.text
    caplog.clear()
    may_go_on.set()
    running.mirror.finish(Deadline(PATIENCE))
    assert caplog.text == ""
    assert running.lease.head.checkpoints == {1: 1}


def test_a_version_is_four_requests_to_write_and_a_deletion_is_one(bench):
    for number in (1, 2):
        bench.version(number)
        bench.version_uploads.advance()
    bench.bucket.paths.clear()
    bench.versions.delete(1)
    bench.version(3)
    bench.version_uploads.advance()
    assert len(bench.bucket.paths) == 5, "docs/guides/object-store.md says what these cost"


def test_a_verdict_that_changes_is_uploaded(bench):
    for number in (1, 2):
        bench.version(number)
        bench.version_uploads.advance()
    bench.bucket.paths.clear()
    bench.version_uploads.advance()
    assert bench.bucket.paths == []
    bench.versions.write_verdict(1, Verdict("fail", ["worse"]))
    bench.version_uploads.advance()
    there = bench.bucket.read(f"{folder_path('versions', 1, 1)}/{VERDICT}")
    assert json.loads(there)["verdict"] == "fail"
    assert bench.lease.head.verdicts[1] == hashlib.sha256(there).hexdigest()


def test_the_verdict_of_another_learners_version_is_left_alone(start, bench):
    bench.version(1)
    bench.version_uploads.advance()
    bench.lease.update(lambda head: msgspec.structs.replace(head, released=True))
    other = start("other")
    other.generation = 9
    other.version(1, verdict="fail")
    other.version_uploads.advance()
    assert json.loads(other.bucket.read(f"{folder_path('versions', 1, 1)}/{VERDICT}"))["verdict"] == "pass"


def test_what_was_written_without_the_object_store_is_uploaded_at_the_next_start(start, bench):
    bench.checkpoint(1)
    bench.version(1)
    again = start()
    with running_threads(again.mirror):
        assert again.finished()
    assert (again.lease.head.checkpoints, again.lease.head.versions) == ({1: 2}, {1: 2})


def test_the_end_names_what_an_object_store_that_is_away_lacks(running, caplog):
    running.bucket.away = True
    running.checkpoint(1)
    running.mirror.finish(Deadline(timedelta(seconds=0.5)))
    assert f"{running.bucket.url} lacks the newest checkpoints, which the next start with this state_dir" in caplog.text


def test_the_end_tries_again_after_short_pauses_until_its_deadline(bench, monkeypatch):
    monkeypatch.setattr(mirror, "_HURRY_SECONDS", 0.001)
    thread = bench.mirror.threads[1]
    thread._backoff = Backoff(timedelta(hours=1), timedelta(hours=1))
    attempts = 0

    def fail_often(path):
        nonlocal attempts
        if path.startswith("files/") and (attempts := attempts + 1) < 20:
            raise BucketAwayError("not yet")

    bench.bucket.before_write = fail_often
    bench.checkpoint(1)
    with running_threads(bench.mirror):
        assert thread.finish(Deadline(PATIENCE))
    assert bench.lease.head.checkpoints.keys() == {1}
    assert thread.failures >= 19


def test_an_upload_that_outlives_the_lease_changes_nothing(bench, caplog):
    is_begun, may_go_on = hold_uploads(bench.bucket)
    bench.checkpoint(1)
    with bench.lease, running_threads(bench.mirror):
        assert is_begun.wait(PATIENCE_SECONDS)
    may_go_on.set()
    bench.mirror.threads[1].thread.join(PATIENCE.total_seconds())
    reader = HeadReader(bench.bucket)
    reader.poll()
    assert reader.contents is not None
    assert reader.contents.released
    assert reader.contents.checkpoints == {}
    bench.mirror.run_if_due()
    assert caplog.text == ""


def test_a_learner_that_was_fenced_off_ends_its_uploads(start, running):
    start()  # of the same state directory
    running.checkpoint(1)
    assert not running.mirror.threads[1].finish(Deadline(PATIENCE))
    running.mirror.threads[1].raise_bug()
    with pytest.raises(SecondLearnerError):
        running.mirror.run_if_due()


def test_a_bug_in_a_thread_is_raised(running):
    def broken(path):
        raise KeyError(path)

    running.bucket.before_write = broken
    running.checkpoint(1)
    assert not running.mirror.threads[1].finish(Deadline(PATIENCE))
    with pytest.raises(KeyError):
        running.mirror.run_if_due()


def test_the_end_does_not_wait_for_a_thread_that_is_ending(running, monkeypatch):
    """What the thread says last wakes the one that waits, for which it may still be alive then."""
    running.bucket.before_write = lambda path: 1 / 0
    running.checkpoint(1)
    thread = running.mirror.threads[1]
    monkeypatch.setattr(thread.thread._thread, "is_alive", lambda: True)
    deadline = Deadline(timedelta(hours=1))
    assert not thread.finish(deadline)


def test_remains_of_a_failed_upload_are_removed(bench):
    bench.version(1)
    bench.version_uploads.advance()
    bench.bucket.before_write = lambda path: setattr(bench.bucket, "away", path.endswith(VERDICT))
    bench.version(2)
    with pytest.raises(BucketAwayError):
        bench.version_uploads.advance()
    bench.bucket.before_write, bench.bucket.away = str, False
    bench.version(3)
    bench.version_uploads.advance()
    assert {path.split("/")[1] for path in bench.bucket.sizes("versions")} == {"1-1", "3-1"}


@pytest.mark.parametrize("newer", [False, True], ids=["the same", "a newer one"])
@pytest.mark.parametrize("kind", ["checkpoints", "versions"])
def test_an_outage_that_begins_in_an_upload_tears_nothing(tmp_path, kind, newer):
    """Nothing can be deleted meanwhile; afterwards the same folder is uploaded again, or the next one."""

    def write(number):
        if kind == "versions":
            bench.version(number)
            bench.versions.delete(number - 3)
        else:
            newest = max(bench.checkpoints.numbers(), default=None)
            bench.checkpoint(number, carried=newest if number != 4 else None)

    def advance():
        for uploads in (bench.checkpoint_uploads, bench.version_uploads):
            uploads.advance()

    for fail_at in range(100):
        bench = UploadBench(tmp_path, FaultyBucket(f"memory://{tmp_path.name}/{fail_at}"), f"host-{fail_at}")
        for number in (1, 2, 3):
            write(number)
            advance()
        left = iter(range(fail_at))

        def begin(path, left=left, bucket=bench.bucket):
            bucket.away = bucket.away or next(left, None) is None

        bench.bucket.before_write = begin
        write(4)
        failed = 0
        for number in (4, 5) if newer else (4, 4):
            if number not in bench.checkpoints.numbers() + bench.versions.numbers():
                write(number)
            try:
                advance()
            except BucketAwayError:
                failed += 1
        bench.bucket.before_write, bench.bucket.away = str, False
        for number in (6, 7):
            advance()
            assert damaged(bench.bucket) == [], fail_at
            write(number)
        advance()
        advance()
        assert damaged(bench.bucket) == [], fail_at
        assert max(bench.lease.head.folders(kind)) == 7
        if not failed:
            break
    assert fail_at >= 4


def test_a_checkpoint_whose_list_of_files_is_lost_can_be_deleted(bench):
    bench.checkpoint(1)
    bench.checkpoint_uploads.advance()
    bench.bucket.delete([f"{folder_path('checkpoints', 1, 1)}/{OBJECTS}"])
    bench.checkpoint_uploads._target.table._files.clear()  # as after a start
    for number in range(2, 5):
        bench.checkpoint(number)
        bench.checkpoint_uploads.advance()
    assert bench.lease.head.checkpoints.keys() == {2, 3, 4}


class TestErasure:
    def test_the_log_and_its_secret_are_uploaded(self, running):
        running.erase()
        assert running.mirror.threads[0].finish(Deadline(PATIENCE))
        files = [(running.state_dir / name).read_bytes() for name in (SECRET_FILE, NAME)]
        assert running.bucket.read(ERASURES) == b"".join(files)

    def test_it_is_done_once_no_checkpoint_there_has_the_events(self, bench):
        bench.checkpoint(1)
        bench.checkpoint_uploads.advance()
        number = bench.erase()
        bench.mirror.erase_through(number)
        bench.checkpoint_uploads.advance()
        bench.erasures.advance()
        assert bench.lease.head.checkpoints == {1: 1}  # the only one
        assert not bench.mirror.has_erased(number)
        bench.checkpoint(2, erased=number)
        bench.checkpoint_uploads.advance()
        assert bench.lease.head.checkpoints == {2: 1}
        assert bench.mirror.has_erased(number)

    def test_it_is_not_done_before_the_log_is_there(self, bench):
        number = bench.erase()
        bench.checkpoint(1, erased=number)
        bench.checkpoint_uploads.advance()
        bench.mirror.erase_through(number)
        assert not bench.mirror.has_erased(number)
        assert bench.erasures.advance()
        assert bench.mirror.has_erased(number)

    def test_it_is_not_done_while_an_earlier_checkpoint_is_on_its_way(self, bench):
        number, seen = bench.erase(), list[bool]()
        bench.erasures.advance()
        bench.checkpoint(1)
        bench.bucket.before_write = lambda path: seen.append(bench.mirror.has_erased(number))
        bench.checkpoint_uploads.advance()
        assert not any(seen)

    def test_checkpoints_that_were_set_aside_are_deleted(self, bench):
        for number in (1, 2):
            bench.checkpoint(number)
            bench.checkpoint_uploads.advance()
        bench.checkpoint_uploads._target.set_aside(2)
        bench.checkpoints.storage.set_aside(2)
        number = bench.erase()
        bench.erasures.advance()
        bench.checkpoint(3, erased=number)
        assert bench.checkpoint_uploads.advance()
        assert bench.lease.head.set_aside == {2: 1}
        assert not bench.mirror.has_erased(number)
        bench.mirror.erase_through(number)
        bench.checkpoint_uploads.advance()
        assert (bench.lease.head.checkpoints, bench.lease.head.set_aside) == ({3: 1}, {})
        assert bench.mirror.has_erased(number)

    def test_a_restart_deletes_no_checkpoint_that_has_applied_the_erasures(self, start, bench):
        bench.checkpoint(1)
        bench.checkpoint_uploads.advance()
        number = bench.erase()
        bench.log.append(Applied(time=0.0, through=number, store=0, holdout=0))
        bench.checkpoint(2, erased=number)
        bench.checkpoint_uploads.advance()
        again = start()
        again.erasures.advance()
        assert not again.mirror.has_erased(number), "not read yet"
        again.checkpoint(3, erased=number)
        again.checkpoint_uploads.advance()
        assert again.lease.head.checkpoints.keys() == {2, 3}
        assert again.mirror.has_erased(number)

    def test_an_upload_whose_reply_was_lost_counts_as_it_is_there(self, bench):
        """Its checkpoint was replaced locally, without the erased events, before the next attempt."""
        lost = []

        def lose(path, content, tag):
            lost.append(Bucket.replace(bench.bucket, path, content, tag))
            raise BucketAwayError("no reply")

        bench.checkpoint(1)
        bench.bucket.replace = lose  # type: ignore[method-assign]
        with pytest.raises(BucketAwayError):
            bench.checkpoint_uploads.advance()
        del bench.bucket.replace  # type: ignore[method-assign]
        assert lost
        number = bench.erase()
        bench.erasures.advance()
        shutil.rmtree(bench.checkpoints.directory(1))
        bench.checkpoint(1, erased=number)
        bench.mirror.erase_through(number)
        bench.checkpoint_uploads.advance()
        assert not bench.mirror.has_erased(number)

    def test_a_learner_that_was_fenced_off_does_not_replace_a_newer_log(self, start, bench):
        bench.erase()
        bench.erasures.advance()
        later = start()
        later.erase()
        later.erasures.advance()
        newest = later.bucket.read(ERASURES)
        bench.erase()
        bench.erasures._due = 0.0
        with pytest.raises(SecondLearnerError):
            bench.erasures.advance()
        assert later.bucket.read(ERASURES) == newest


def test_a_round_that_fails_in_one_upload_goes_on_with_the_others(bench):
    bench.bucket.before_write = lambda path: setattr(bench.bucket, "away", path == ERASURES)
    bench.erase()
    bench.version(1)
    thread = UploadThread([bench.erasures, bench.version_uploads], "url", timedelta(0))
    thread.step()
    assert bench.lease.head.versions == {1: 1}
    assert thread.failures == 1
    assert "url has lacked the newest erasures" in str(thread.warning)
