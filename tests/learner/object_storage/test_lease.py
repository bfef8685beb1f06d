import shutil
import threading
from datetime import timedelta

import msgspec
import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError
from anabranch.learner.errors import SecondLearnerError, StorageError
from anabranch.learner.object_storage.head import HEAD, HeadReader
from anabranch.learner.object_storage.lease import Lease, PrefixOwner
from anabranch.learner.object_storage.opening import HOLDER, check_state_is_here, holder_of, record_mode
from tests.support.waiting import PATIENCE_SECONDS, wait_until

LEASE = timedelta(seconds=0.3)


@pytest.fixture
def bucket(tmp_path):
    return Bucket(f"memory://{tmp_path.name}/prefix", {})


def add_version(lease, number):
    lease.update(
        lambda head: msgspec.structs.replace(head, versions={**head.versions, number: head.generation}),
    )


def renewed_often(lease):
    """Let a lease be renewed far more often than it has to be: a slow machine does not miss its time."""
    lease._every = 0.02
    return lease


def test_the_generation_grows_with_each_holder(bucket):
    first = Lease(bucket, LEASE, "a")
    assert first.acquire(known=4) == 5
    assert Lease(bucket, LEASE, "a").acquire(known=0) == 6  # of the same state directory: that one has ended
    assert Lease(bucket, LEASE, "a").acquire(known=9) == 10


def test_a_released_lease_is_taken_at_once(bucket):
    with Lease(bucket, timedelta(hours=1), "a") as lease:
        lease.acquire(0)
    assert Lease(bucket, timedelta(hours=1), "b").acquire(0) == 2


@pytest.mark.slow
def test_a_lease_that_is_renewed_is_not_taken(bucket):
    held = renewed_often(Lease(bucket, timedelta(hours=1), "a"))
    held.acquire(0)
    with held, pytest.raises(SecondLearnerError, match="another learner is at work in memory://"):
        Lease(bucket, timedelta(hours=1), "b").acquire(0)
    held.check()


@pytest.mark.slow
def test_a_silent_learner_is_fenced_off_and_publishes_nothing(bucket):
    silent = Lease(bucket, LEASE, "a")
    silent.acquire(0)
    add_version(silent, 1)
    other = Lease(bucket, LEASE, "b")
    assert other.acquire(0) == 2
    with pytest.raises(SecondLearnerError, match=r"has taken memory://.* since this one, of generation 1"):
        add_version(silent, 2)
    with pytest.raises(SecondLearnerError):
        silent.check()
    add_version(other, 2)
    reader = HeadReader(bucket)
    assert reader.poll()
    assert reader.contents is not None
    assert reader.contents.versions == {1: 1, 2: 2}
    assert not reader.poll()


def test_the_wait_for_a_silent_learner_ends_with_stop(bucket):
    Lease(bucket, LEASE, "a").acquire(0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(SecondLearnerError, match="stopped while"):
        Lease(bucket, timedelta(hours=1), "b").acquire(0, stop)


def test_a_write_whose_reply_was_lost_is_no_other_learner(bucket, monkeypatch):
    lease = Lease(bucket, LEASE, "a")
    lease.acquire(0)
    replace = bucket.replace

    def lost(path, content, tag):
        replace(path, content, tag)
        raise BucketAwayError("no reply")

    monkeypatch.setattr(bucket, "replace", lost)
    with pytest.raises(BucketAwayError):
        add_version(lease, 1)
    monkeypatch.setattr(bucket, "replace", replace)
    add_version(lease, 2)
    assert lease.head.versions == {1: 1, 2: 1}


def test_of_two_processes_with_one_id_the_first_is_fenced_off(bucket):
    first = Lease(bucket, LEASE, "a")
    first.acquire(4)
    first.update(lambda head: msgspec.structs.replace(head, generation=6))
    second = Lease(bucket, LEASE, "a")
    assert second.acquire(0) == 7
    with pytest.raises(SecondLearnerError):
        add_version(first, 1)
    second.update(lambda head: msgspec.structs.replace(head, generation=8))
    add_version(second, 1)
    assert second.head.versions == {1: 8}


@pytest.mark.slow
def test_of_two_learners_that_wait_one_takes_the_lease(bucket, monkeypatch):
    first = Lease(bucket, LEASE, "a")
    first.acquire(0)
    outcomes, polls, read = list[str](), list[str](), bucket.read_changed

    def poll(path, tag, max_bytes=None):
        polls.append(threading.current_thread().name)
        return read(path, tag, max_bytes)

    monkeypatch.setattr(bucket, "read_changed", poll)

    def take(holder):
        lease = renewed_often(Lease(bucket, timedelta(hours=1), holder))
        try:
            lease.acquire(0)
        except SecondLearnerError:
            outcomes.append("refused")
            return
        with lease:
            outcomes.append("taken")
            done.wait(PATIENCE_SECONDS)

    done = threading.Event()
    threads = [threading.Thread(target=take, args=(holder,), name=holder, daemon=True) for holder in "bc"]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(polls.count(each) >= 2 for each in "bc"), "both waits")
        first.update(lambda head: msgspec.structs.replace(head, released=True))
        wait_until(lambda: len(outcomes) == 2, "both outcomes")
    finally:
        done.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused", "taken"]


def test_a_head_of_another_release_is_refused(bucket):
    bucket.write(HEAD, b'{"format":99,"generation":1,"holder":"a"}')
    with pytest.raises(StorageError, match="is of format 99, and this release reads 2"):
        Lease(bucket, LEASE, "a").acquire(0)
    bucket.write(HEAD, b"{")
    with pytest.raises(StorageError, match=r"head\.json cannot be read"):
        HeadReader(bucket).poll()


def test_the_prefix_of_another_pipeline_is_refused(bucket):
    with Lease(bucket, LEASE, "a", PrefixOwner("fraud", ["events"])) as lease:
        lease.acquire(0)
    before = bucket.read(HEAD)
    sentence = 'has the state of pipeline "fraud" of the topics events; give "{}" another storage.url'
    for owner in (PrefixOwner("clicks", ["events"]), PrefixOwner("fraud", ["clicks"])):
        with pytest.raises(StorageError, match=sentence.format(owner.name)):
            Lease(bucket, LEASE, "a", owner).acquire(0)
    assert bucket.read(HEAD) == before
    assert Lease(bucket, LEASE, "a", PrefixOwner("fraud", ["events", "more"])).acquire(0) == 2


def test_a_store_that_always_refuses_conditional_writes_is_away(bucket, monkeypatch):
    lease = Lease(bucket, LEASE, "a")
    lease.acquire(0)

    def refused(*_):
        raise ReplacedError("it is another one")

    monkeypatch.setattr("anabranch.learner.object_storage.lease._FIRST_PAUSE", timedelta(milliseconds=1))
    monkeypatch.setattr(bucket, "replace", refused)
    for attempt in (lambda: add_version(lease, 1), lambda: Lease(bucket, LEASE, "a").acquire(0)):
        with pytest.raises(BucketAwayError, match="5 times in a row; does the store support conditional writes"):
            attempt()
    stop = threading.Event()
    stop.set()
    with pytest.raises(SecondLearnerError, match="stopped while"):
        Lease(bucket, LEASE, "a").acquire(0, stop)


def test_a_head_that_is_older_than_the_own_one_does_not_replace_it(bucket, monkeypatch):
    lease = Lease(bucket, LEASE, "a")
    lease.acquire(0)
    old = bucket.read_tagged(HEAD)
    add_version(lease, 1)
    lease._tag = "of another one"
    monkeypatch.setattr(bucket, "read_tagged", lambda *_: old)
    with pytest.raises(BucketAwayError, match="was read as it had been before"):
        add_version(lease, 2)
    monkeypatch.undo()
    add_version(lease, 2)
    assert lease.head.versions == {1: 1, 2: 1}


@pytest.mark.parametrize("error", [StorageError("unreadable"), OSError("no file descriptors")])
def test_the_renewal_goes_on_after_errors_of_the_store(bucket, monkeypatch, error):
    lease = Lease(bucket, timedelta(milliseconds=20), "a")
    lease.acquire(0)
    replace, failed = bucket.replace, threading.Event()

    def fails_once(path, content, tag):
        if not failed.is_set():
            failed.set()
            raise error
        return replace(path, content, tag)

    monkeypatch.setattr(bucket, "replace", fails_once)
    with lease:
        assert failed.wait(PATIENCE_SECONDS)
        before = lease.head.beat
        wait_until(lambda: lease.head.beat > before, "a renewal")
    lease.check()


def test_a_bug_of_the_renewal_ends_the_learner(bucket, monkeypatch):
    lease = Lease(bucket, timedelta(milliseconds=20), "a")
    lease.acquire(0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(bucket, "replace", lambda *_: 1 / 0)
    lease.__enter__()
    assert lease._thread is not None
    lease._thread.join(PATIENCE_SECONDS)
    with pytest.raises(ZeroDivisionError):
        lease.check()


def test_after_the_release_nothing_is_written(bucket):
    lease = Lease(bucket, LEASE, "a")
    lease.acquire(0)
    with lease:
        pass
    with pytest.raises(BucketAwayError, match="was released"):
        add_version(lease, 1)


def test_the_id_of_a_state_directory_stays_and_a_copy_has_another_one(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    assert holder_of(folder) == holder_of(folder)
    shutil.copytree(folder, tmp_path / "b")
    assert holder_of(tmp_path / "b") != holder_of(folder)
    (folder / HOLDER).write_bytes(b"torn")
    assert holder_of(folder) == holder_of(folder)


def test_without_storage_the_state_of_mode_only_is_missed(tmp_path):
    check_state_is_here(tmp_path)
    holder_of(tmp_path)
    check_state_is_here(tmp_path)
    record_mode(tmp_path, "s3://bucket/prefix")
    before = holder_of(tmp_path)
    with pytest.raises(
        SettingsError, match=r'is in s3://bucket/prefix, by storage.mode = "only", and there is no \[storage'
    ):
        check_state_is_here(tmp_path)
    record_mode(tmp_path, None)
    check_state_is_here(tmp_path)
    assert holder_of(tmp_path) == before


@pytest.mark.slow
def test_a_late_write_of_a_learner_that_was_killed_is_no_sign_of_life(bucket, monkeypatch):
    killed = Lease(bucket, LEASE, "a")
    killed.acquire(0)
    read, polls = bucket.read_changed, list[int]()

    def write_late(path, tag, max_bytes=None):
        polls.append(1)
        if len(polls) == 2:
            add_version(killed, 1)
        return read(path, tag, max_bytes)

    monkeypatch.setattr(bucket, "read_changed", write_late)
    taken = Lease(bucket, LEASE, "b")
    assert taken.acquire(0) == 2
    assert taken.head.versions == {1: 1}
