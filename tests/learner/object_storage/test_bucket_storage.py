"""What a crash, a lost reply or a second learner leaves in an object store: whole folders, and nothing that is needed
is deleted."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import pytest
import torch

from anabranch.core.object_store.bucket import Bucket, BucketAwayError
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.erase_checkpoints import CheckpointRewriter, Eraser
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.errors import SecondLearnerError
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.head import Kind, generation_of
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.replay.erasure.erased_events import ErasedEvents
from tests.support.manifests import manifest_of

T = TypeVar("T")
HOUR = timedelta(hours=1)
KINDS: tuple[Kind, ...] = ("checkpoints", "versions")


class KilledError(BaseException):
    """The process has ended: nothing that follows in it runs."""


class FaultyBucket(Bucket):
    """Fails at the `n`-th change of an object, before or after it has happened."""

    def __init__(self, url):
        super().__init__(url, {})
        self.countdown: int | None = None
        self.after = False
        self.error: type[BaseException] = BucketAwayError
        self.dead = False
        self.failures = 1
        """How many changes fail in a row."""
        self.is_late = False
        """Whether deletions fail, and are executed by `deliver`."""
        self.late: list[Callable[[], object]] = []

    def write(self, path, content):
        self._changing(lambda: super(FaultyBucket, self).write(path, content))

    def create(self, path, content):
        return self._changing(lambda: super(FaultyBucket, self).create(path, content))

    def replace(self, path, content, tag):
        return self._changing(lambda: super(FaultyBucket, self).replace(path, content, tag))

    def delete(self, paths):
        some = list(paths)
        if self.is_late:
            self.late.append(lambda: super(FaultyBucket, self).delete(some))
            raise BucketAwayError("no reply")
        self._changing(lambda: super(FaultyBucket, self).delete(some))

    def deliver(self):
        """Execute the deletions whose replies were lost."""
        self.is_late = False
        while self.late:
            self.late.pop()()

    def _changing(self, change):
        if self.dead:
            raise KilledError
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.failures -= 1
                self.countdown = 0 if self.failures > 0 else None
                self.dead = self.error is KilledError
                if self.after:
                    change()
                raise self.error("no reply")
        return change()


@pytest.fixture
def make_bucket(tmp_path):
    """Returns an empty bucket."""
    numbers = iter(range(1_000_000))
    return lambda: FaultyBucket(f"memory://{tmp_path.name}/{next(numbers)}")


def taken(bucket, holder="a"):
    lease = Lease(bucket, HOUR, holder)
    lease.acquire(0)
    return lease


def checkpoints_in(bucket, tmp_path, lease):
    generation = lease.generation if lease is not None else 0
    return Checkpoints(
        tmp_path / "nowhere", "digest", generation, BucketStorage(bucket, "checkpoints", tmp_path / "fetched", lease)
    )


def checkpoint(step, carried, *segments):
    tensors = {"model": {"w": torch.full((9,), float(step))}}
    tensors |= {f"segment-{number}": {"index": torch.arange(number, number + 9)} for number in segments}
    return Checkpoint(step, tensors, {"steps": step}, carried)


def version(number, generation):
    return manifest_of(number, generation=generation, time=1.0, schema="digest", task="regression")


def paths(bucket):
    return {path for kind in (*KINDS, "files") for path in bucket.sizes(kind)}


def named_paths(bucket, tmp_path):
    """Return the paths of all objects that the head reaches."""
    named = set[str]()
    for kind in KINDS:
        storage = BucketStorage(bucket, kind, tmp_path / "fetched")
        for number in storage.numbers():
            folder = f"{kind}/{number}-{storage.table.generations()[number]}"
            named |= {f"{folder}/{MANIFEST}"} | ({f"{folder}/objects.json"} if kind == "checkpoints" else set())
            named |= {file.path for file in storage.table.files_of(number).values()}
    return named


def work(bucket, tmp_path, lease):
    """Write, share, rewrite and delete checkpoints and versions, through new storages."""
    work_with(*storages(bucket, tmp_path, lease))


def storages(bucket, tmp_path, lease):
    versions = Versions(tmp_path / "nowhere", BucketStorage(bucket, "versions", tmp_path / "fetched", lease))
    return checkpoints_in(bucket, tmp_path, lease), versions


def work_with(checkpoints, versions):
    """Write, share, rewrite and delete checkpoints and versions, as one learner."""
    first = checkpoints.highest() + 1
    checkpoints.write(first, checkpoint(first, {}, first), 1.0)
    checkpoints.write(first + 1, checkpoint(first + 1, {f"segment-{first}": first}, first + 1), 2.0)
    number = versions.highest() + 1
    versions.write({"w": torch.ones(9)}, version(number, 1), Verdict("inconclusive"))
    versions.write_verdict(number, Verdict("pass"))
    CheckpointPruning(checkpoints, 1).prune()
    CheckpointRewriter(checkpoints).replace(
        checkpoints.manifest(first + 1), {f"segment-{first}": {"index": torch.zeros(3, dtype=torch.int64)}}
    )
    versions.write({"w": torch.zeros(9)}, version(number + 1, 1), Verdict("pass"))
    versions.delete(number)


def assert_intact(bucket, tmp_path):
    """Check that a reader finds each listed checkpoint and version with the digests of its manifest."""
    checkpoints = checkpoints_in(bucket, tmp_path, None)
    for number in checkpoints.numbers():
        manifest = checkpoints.manifest(number)
        for name in manifest.files:
            checkpoints.read(manifest, name)
    storage = BucketStorage(bucket, "versions", tmp_path / "fetched")
    versions = Versions(tmp_path / "nowhere", storage)
    for number in versions.numbers():
        versions.contents(versions.manifest(number))
        assert versions.verdict(number) is not None


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_request_leaves_whole_folders_and_the_next_learner_cleans_up(make_bucket, tmp_path, after):
    for kill_at in range(1000):
        bucket = make_bucket()
        first = taken(bucket)
        work(bucket, tmp_path, first)
        bucket.countdown, bucket.after, bucket.error = kill_at, after, KilledError
        try:
            work(bucket, tmp_path, first)
            break
        except KilledError:
            bucket.dead = False
        assert_intact(bucket, tmp_path)
        lease = taken(bucket)
        newest = checkpoints_in(bucket, tmp_path, lease).newest()
        assert newest is not None
        for kind in KINDS:
            storage = BucketStorage(bucket, kind, tmp_path / "fetched", lease)
            storage.clean()
            before = storage.highest()
            assert before == max(storage.numbers())
        assert paths(bucket) == named_paths(bucket, tmp_path), kill_at
        work(bucket, tmp_path, lease)
        assert_intact(bucket, tmp_path)
        assert paths(bucket) == named_paths(bucket, tmp_path), kill_at
    assert kill_at > 20


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_checkpoint_of_an_earlier_learner_is_rewritten_into_a_new_folder(make_bucket, tmp_path, after):
    def rewrite(lease):
        checkpoints = checkpoints_in(bucket, tmp_path, lease)
        parts = {"segment-1": {"index": torch.zeros(3, dtype=torch.int64)}}
        rewriter = CheckpointRewriter(checkpoints)
        for number in checkpoints.numbers():
            rewriter.sweep(checkpoints.manifest(number))
            rewriter.replace(checkpoints.manifest(number), parts)

    for kill_at in range(1000):
        bucket = make_bucket()
        checkpoints = checkpoints_in(bucket, tmp_path, taken(bucket))
        checkpoints.write(1, checkpoint(1, {}, 1), 1.0)
        checkpoints.write(2, checkpoint(2, {"segment-1": 1}), 2.0)
        lease = taken(bucket)
        bucket.countdown, bucket.after, bucket.error = kill_at, after, KilledError
        try:
            rewrite(lease)
            break
        except KilledError:
            bucket.dead = False
        assert_intact(bucket, tmp_path)
        rewrite(taken(bucket))
        assert_intact(bucket, tmp_path)
    bucket.countdown = None
    again = checkpoints_in(bucket, tmp_path, taken(bucket))
    again.storage.clean()
    assert paths(bucket) == named_paths(bucket, tmp_path)
    assert [again.part(number, "segment-1")["index"].tolist() for number in again.numbers()] == [[0, 0, 0]] * 2
    assert [again.manifest(number).generation for number in again.numbers()] == [1, 1], "their age stays"
    assert kill_at > 8


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_erasure_whose_requests_fail_leaves_no_erased_event_once_it_is_repeated(make_bucket, tmp_path, after):
    for fail_at in range(1000):
        bucket = make_bucket()
        checkpoints = checkpoints_in(bucket, tmp_path, taken(bucket))
        checkpoints.write(1, checkpoint(1, {}, 1), 1.0)
        checkpoints.write(2, checkpoint(2, {"segment-1": 1}), 2.0)
        before = {checkpoints.folder(1).files()["rank-0/segment-1.safetensors"]}
        old = {path for path, size in bucket.sizes("files").items() if size in before}
        bucket.countdown, bucket.after = fail_at, after
        failed = 0
        for _ in range(2):
            try:
                checkpoints.storage.delete_set_aside()
                rewriter = CheckpointRewriter(checkpoints)
                for number in checkpoints.numbers():
                    rewriter.sweep(checkpoints.manifest(number))
                    if checkpoints.part(number, "segment-1")["index"].any():
                        parts = {"segment-1": {"index": torch.zeros(3, dtype=torch.int64)}}
                        rewriter.replace(checkpoints.manifest(number), parts)
                break
            except BucketAwayError:
                failed += 1
        assert not old & bucket.sizes("files").keys(), fail_at
        assert paths(bucket) == named_paths(bucket, tmp_path), fail_at
        assert_intact(bucket, tmp_path)
        if not failed:
            break
    assert fail_at > 8


def test_copies_for_an_erasure_are_removed_after_it(make_bucket, tmp_path):
    bucket = make_bucket()
    checkpoints = checkpoints_in(bucket, tmp_path, taken(bucket))
    one = checkpoint(1, {}, 1)
    checkpoints.write(1, Checkpoint(1, one.tensors, {"erased": 0, "ledger": []}), 1.0)
    fetched = tmp_path / "fetched"
    checkpoints.open(checkpoints.manifest(1))
    assert list(fetched.iterdir())
    Eraser(checkpoints, ErasedEvents()).run()
    assert not fetched.exists() or not list(fetched.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("failures", [1, 4])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_requests_that_fail_or_whose_replies_are_lost_hurt_nothing(make_bucket, tmp_path, after, failures):
    """The same storages go on, as in a learner, with what they have not deleted yet."""
    for fail_at in range(0, 1000, failures):
        bucket = make_bucket()
        lease = taken(bucket)
        checkpoints, versions = storages(bucket, tmp_path, lease)
        work_with(checkpoints, versions)
        bucket.countdown, bucket.after, bucket.failures = fail_at, after, failures
        for _ in range(failures):
            try:
                work_with(checkpoints, versions)
            except BucketAwayError:
                assert_intact(bucket, tmp_path)
        if bucket.countdown is not None:
            break
        bucket.failures = 0
        for _ in range(2):
            work_with(checkpoints, versions)
            assert_intact(bucket, tmp_path)
        checkpoints.storage.clean()
        versions.storage.clean()
        assert_intact(bucket, tmp_path)
        assert paths(bucket) == named_paths(bucket, tmp_path), fail_at
    assert fail_at > 20


def test_deletions_that_are_executed_late_hit_nothing_that_was_written_since(make_bucket, tmp_path):
    """Each publication of a number is tried twice with the same contents; the first one fails at its `n`-th request."""
    for fail_at in range(1000):
        bucket = make_bucket()
        checkpoints = checkpoints_in(bucket, tmp_path, taken(bucket))
        checkpoints.write(1, checkpoint(1, {}, 1), 1.0)
        bucket.is_late, bucket.countdown = True, fail_at
        try:
            checkpoints.write(2, checkpoint(2, {}, 7), 1.0)
            break
        except BucketAwayError:
            bucket.countdown = None
        with contextlib.suppress(FileExistsError):
            checkpoints.write(2, checkpoint(2, {}, 7), 1.0)
        bucket.deliver()
        assert checkpoints.numbers() == [1, 2]
        assert_intact(bucket, tmp_path)
    bucket.deliver()
    assert fail_at >= 5


def test_a_deletion_that_is_executed_late_does_not_hit_equal_contents_of_a_later_checkpoint(make_bucket, tmp_path):
    bucket = make_bucket()
    checkpoints = checkpoints_in(bucket, tmp_path, taken(bucket))
    for number, segments in ((1, (9,)), (2, ()), (3, ())):
        checkpoints.write(number, checkpoint(number, {}, *segments), 1.0)
    bucket.is_late = True
    with pytest.raises(BucketAwayError):
        CheckpointPruning(checkpoints, 2).prune()
    checkpoints.write(4, checkpoint(4, {}, 9), 1.0)
    bucket.deliver()
    CheckpointPruning(checkpoints, 2).prune()
    assert checkpoints.numbers() == [3, 4]
    assert_intact(bucket, tmp_path)
    assert paths(bucket) == named_paths(bucket, tmp_path)


def test_a_publication_whose_late_write_of_the_head_arrives_is_not_torn(make_bucket, tmp_path):
    """The reply is lost, the same contents are published under the next number, and that fails too."""
    bucket = make_bucket()
    lease = taken(bucket)
    checkpoints = checkpoints_in(bucket, tmp_path, lease)
    requests = []

    def late(path, content, tag):
        requests.append(lambda: Bucket.replace(bucket, path, content, tag))
        raise BucketAwayError("no reply")

    bucket.replace = late  # type: ignore[method-assign]
    with pytest.raises(BucketAwayError):
        checkpoints.write(1, checkpoint(1, {}, 1), 1.0)
    bucket.countdown, bucket.error = 4, BucketAwayError
    with pytest.raises(BucketAwayError):
        checkpoints.write(2, checkpoint(1, {}, 1), 1.0)
    requests[0]()  # arrives now
    del bucket.replace  # type: ignore[method-assign]
    assert checkpoints_in(bucket, tmp_path, None).numbers() == [1]
    assert_intact(bucket, tmp_path)
    checkpoints.write(3, checkpoint(3, {}, 1), 1.0)
    assert checkpoints.numbers() == [1, 3]
    assert_intact(bucket, tmp_path)


def test_a_learner_that_was_fenced_off_changes_nothing(make_bucket, tmp_path):
    bucket = make_bucket()
    silent = taken(bucket)
    work(bucket, tmp_path, silent)
    old, versions = checkpoints_in(bucket, tmp_path, silent), BucketStorage(bucket, "versions", tmp_path, silent)
    (number,) = old.numbers()
    publication = BucketStorage(bucket, "checkpoints", tmp_path / "fetched", silent).publish(number + 1, 1)
    unfinished = publication.__enter__()
    unfinished.write("rank-0/a", [b"half"])
    successor = taken(bucket)  # of the same state directory: at once
    work(bucket, tmp_path, successor)
    before = paths(bucket)
    for change in (lambda: old.delete(number), lambda: old.storage.set_aside(number), versions.clean):
        with pytest.raises(SecondLearnerError):
            change()
    unfinished.write(MANIFEST, [b"{}"])
    with pytest.raises(SecondLearnerError, match="has taken memory://"):
        publication.__exit__(None, None, None)
    for kind in KINDS:
        BucketStorage(bucket, kind, tmp_path / "fetched", successor).clean()
    assert paths(bucket) == named_paths(bucket, tmp_path)
    assert {path for path in before if "-2" in path} <= paths(bucket)
    assert_intact(bucket, tmp_path)


def test_files_that_checkpoints_share_are_stored_once_and_outlive_the_first(make_bucket, tmp_path):
    bucket = make_bucket()
    lease = taken(bucket)
    checkpoints = checkpoints_in(bucket, tmp_path, lease)
    checkpoints.write(1, checkpoint(1, {}, 1, 2), 1.0)
    checkpoints.write(2, checkpoint(2, {"segment-1": 1}, 2), 2.0)  # one by reference, the other one as it is the same
    shared = {file.path for file in BucketStorage(bucket, "checkpoints", tmp_path, lease).table.files_of(1).values()}
    assert len(bucket.sizes("files")) == 2 + 2 * 2  # segments, and model and state of each
    CheckpointPruning(checkpoints, 1).prune()
    assert len(bucket.sizes("files")) == 2 + 2
    assert len(shared & bucket.sizes("files").keys()) == 2
    successor = taken(bucket)
    after = checkpoints_in(bucket, tmp_path, successor)
    after.write(3, checkpoint(3, {"segment-1": 2, "segment-2": 2}), 3.0)
    CheckpointPruning(after, 1).prune()
    assert_intact(bucket, tmp_path)
    assert {generation_of(path) for path in bucket.sizes("files")} == {lease.generation, successor.generation}


def test_nothing_is_deleted_while_the_files_of_one_checkpoint_are_unknown(make_bucket, tmp_path):
    bucket = make_bucket()
    work(bucket, tmp_path, taken(bucket))
    checkpoints = checkpoints_in(bucket, tmp_path, taken(bucket))
    (number,) = checkpoints.numbers()
    checkpoints.write(number + 1, checkpoint(7, {}, 9), 1.0)
    bucket.write(f"checkpoints/{number}-1/objects.json", b"torn")
    before = bucket.sizes("files").keys()
    after = checkpoints_in(bucket, tmp_path, taken(bucket))
    after.storage.clean()
    after.delete(number + 1)
    assert bucket.sizes("files").keys() == before
    assert after.newest is not None


def test_a_checkpoint_that_is_set_aside_does_not_exist_and_keeps_its_files_until_the_next_erasure(
    make_bucket, tmp_path
):
    bucket = make_bucket()
    lease = taken(bucket)
    checkpoints = checkpoints_in(bucket, tmp_path, lease)
    checkpoints.write(1, checkpoint(1, {}, 1), 1.0)
    checkpoints.write(2, checkpoint(2, {"segment-1": 1}, 2), 2.0)
    checkpoints.storage.set_aside(2)
    before = paths(bucket)
    again = checkpoints_in(bucket, tmp_path, taken(bucket))
    again.storage.clean()
    assert paths(bucket) == before
    assert (again.numbers(), again.highest()) == ([1], 2)
    again.storage.delete_set_aside()
    assert again.numbers() == [1]
    assert paths(bucket) == named_paths(bucket, tmp_path)
    with pytest.raises(FileNotFoundError):
        again.storage.set_aside(2)


def test_what_exists_is_known_without_a_request(make_bucket, tmp_path, monkeypatch):
    bucket = make_bucket()
    lease = taken(bucket)
    checkpoints = checkpoints_in(bucket, tmp_path, lease)
    checkpoints.write(1, checkpoint(1, {}, 1), 1.0)

    def refused(*_):
        raise AssertionError("a request")

    for name in ("read_tagged", "sizes", "read_changed"):
        monkeypatch.setattr(bucket, name, refused)
    assert (checkpoints.numbers(), checkpoints.highest(), checkpoints.generation()) == ([1], 1, 1)
    checkpoints.write(2, checkpoint(2, {"segment-1": 1}), 1.0)
    CheckpointPruning(checkpoints, 1).prune()
    assert checkpoints.latest() is not None


def test_a_file_that_is_uploaded_is_sent_once(make_bucket, tmp_path):
    bucket = make_bucket()
    storage = BucketStorage(bucket, "checkpoints", tmp_path / "fetched", taken(bucket))
    (tmp_path / "file").write_bytes(b"rows")
    for number, sent in ((1, 4), (2, 0)):
        with storage.publish(number, 0) as folder, (tmp_path / "file").open("rb") as file:
            assert folder.upload("rank-0/rows", file, "ab" * 32) == sent
            folder.write(MANIFEST, [b"{}"])
    assert storage.folder(2).local("rank-0/rows").read_bytes() == b"rows"
    storage.drop_copies()
    assert storage.folder(2).local("rank-0/rows").read_bytes() == b"rows"
