"""Every storage of checkpoints and versions passes this suite; and all access goes through it."""

import contextlib
import os
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.core.object_store.bucket import Bucket
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.erase_checkpoints import CheckpointRewriter
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.checkpoints.rows_file import ErasedRows
from anabranch.learner.errors import CheckpointError, VersionError
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.state_dir import folders as storage_module
from anabranch.learner.state_dir.folders import MANIFEST, Storage, last_of_hours
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.replay.row_source import TierRows
from tests.memory_storage import MemoryStorage
from tests.support.manifests import manifest_of
from tests.support.s3 import S3Prefix

NOW = 100 * 3600.0


@pytest.mark.parametrize(
    ("hours", "keep", "kept"),
    [
        ([1, 1, 2, 3, 3, 3], 2, {3, 6}),
        ([1, 1, 2, 3, 3, 3], 9, {2, 3, 6}),
        ([1, 2, 3], 0, set()),
        ([], 3, set()),
    ],
)
def test_the_last_of_each_of_the_newest_hours_is_kept(hours, keep, kept):
    assert last_of_hours(dict(enumerate(hours, start=1)), keep, NOW) == kept


def test_hours_of_a_clock_that_was_ahead_do_not_count():
    hours = dict(enumerate([1, 2, 500, 501, 502, 3, 4, 5], start=1))
    assert last_of_hours(hours, 3, 6 * 3600) == {6, 7, 8}
    assert last_of_hours(hours, 9, 6 * 3600) == {1, 2, 6, 7, 8}


def test_a_clock_that_is_far_behind_excludes_none():
    assert last_of_hours(dict(enumerate([10, 11, 12], start=1)), 2, 0.0) == {2, 3}


Maker = Callable[[Path, Callable[[], S3Prefix]], Storage]


def bucket_storage(bucket, kind, path):
    lease = Lease(bucket, timedelta(hours=1), "a")
    lease.acquire(0)
    return BucketStorage(bucket, kind, path / "fetched", lease)


MAKERS: dict[str, Maker] = {
    "local": lambda path, _: Storage(path / "local"),
    "memory": lambda path, _: MemoryStorage(path / "fetched"),
    "checkpoints in a folder": lambda path, _: bucket_storage(Bucket(f"file://{path}/b", {}), "checkpoints", path),
    "versions in a folder": lambda path, _: bucket_storage(Bucket(f"file://{path}/b", {}), "versions", path),
    "checkpoints in memory": lambda path, _: bucket_storage(Bucket(f"memory://{path.name}", {}), "checkpoints", path),
    "versions in memory": lambda path, _: bucket_storage(Bucket(f"memory://{path.name}", {}), "versions", path),
    "checkpoints in s3": lambda path, s3: bucket_storage(s3().bucket, "checkpoints", path),
    "versions in s3": lambda path, s3: bucket_storage(s3().bucket, "versions", path),
}


@pytest.fixture(
    params=[
        pytest.param(make, id=name, marks=[pytest.mark.services] if "s3" in name else [])
        for name, make in MAKERS.items()
    ]
)
def storage(request, tmp_path):
    make: Maker = request.param
    return make(tmp_path, lambda: request.getfixturevalue("s3"))


def publish(storage, number, **files):
    with storage.publish(number, 1) as folder:
        for name, content in files.items():
            folder.write(name, [content])
        folder.write(MANIFEST, [b"{}"])
    return storage.folder(number)


def test_a_new_storage_is_empty(storage):
    assert (storage.numbers(), storage.highest(), storage.folder(1).files()) == ([], 0, {})
    assert storage.folder(1).stamp(MANIFEST) is None
    storage.delete(1)
    storage.clean()


def test_a_folder_exists_once_it_is_published(storage):
    with storage.publish(10, 1) as folder:
        folder.write("rank-0/a", [b"one"])
        folder.write(MANIFEST, [b"{}"])
        assert storage.numbers() == []
        assert storage.folder(10).files() == {}
    assert storage.numbers() == [10]
    assert storage.folder(10).files() == {"rank-0/a": 3, MANIFEST: 2}
    assert storage.folder(10).read("rank-0/a") == storage.folder(10).local("rank-0/a").read_bytes() == b"one"
    publish(storage, 9)
    assert storage.numbers() == [9, 10]
    assert storage.highest() == 10


def test_an_error_leaves_no_folder_and_its_number_can_be_used_again(storage):
    with contextlib.suppress(ZeroDivisionError), storage.publish(1, 1) as folder:
        folder.write(MANIFEST, [b"{}"])
        raise ZeroDivisionError
    assert (storage.numbers(), storage.highest()) == ([], 1 if isinstance(storage, BucketStorage) else 0)
    publish(storage, 1)
    assert storage.numbers() == [1]


def test_a_number_can_be_published_only_once(storage):
    publish(storage, 1, a=b"first")
    with pytest.raises(OSError, match="1"):
        publish(storage, 1, a=b"second")
    assert storage.folder(1).read("a") == b"first"


def test_writers_of_two_generations_do_not_interfere(storage):
    with storage.publish(1, 1) as stale, storage.publish(2, 2) as folder:
        stale.write("a", [b"stale"])
        folder.write("a", [b"new"])
        for each in (stale, folder):
            each.write(MANIFEST, [b"{}"])
    assert [storage.folder(number).read("a") for number in (1, 2)] == [b"stale", b"new"]


def test_a_link_is_unchanged_when_its_source_is_deleted_or_replaced(storage):
    source = publish(storage, 1, a=b"shared")
    with storage.publish(2, 1) as folder:
        folder.link("rank-0/a", source, "a")
        folder.write(MANIFEST, [b"{}"])
    source.replace("a", b"changed")
    assert storage.folder(2).read("rank-0/a") == b"shared"
    storage.delete(1)
    assert storage.numbers() == [2]
    assert storage.folder(2).read("rank-0/a") == b"shared"
    with pytest.raises(FileNotFoundError):
        storage.folder(2).link("b", storage.folder(1), "a")


def test_the_stamp_of_a_file_changes_when_it_is_replaced(storage):
    folder = publish(storage, 1, a=b"old")
    before = folder.stamp("a")
    assert before == folder.stamp("a") is not None
    folder.replace("a", b"new")
    assert folder.read("a") == b"new"
    assert folder.stamp("a") not in (before, None)


def test_a_missing_file_is_an_error_to_read_and_to_replace_but_not_to_remove(storage):
    folder = publish(storage, 1)
    folder.remove("a")
    with pytest.raises(FileNotFoundError):
        folder.read("a")
    storage.delete(1)
    with pytest.raises(FileNotFoundError):
        storage.folder(1).replace(MANIFEST, b"{}")
    assert storage.numbers() == []


def test_a_folder_without_a_manifest_does_not_exist_and_is_cleaned(storage):
    publish(storage, 1)
    publish(storage, 2, a=b"half").remove(MANIFEST)
    assert (storage.numbers(), storage.highest()) == ([1], 2)
    storage.clean()
    assert (storage.numbers(), storage.highest()) == ([1], 2 if isinstance(storage, BucketStorage) else 1)


def test_a_checkpoint_and_its_links_are_read_back(storage, tmp_path):
    def events(begin):
        return {"index": torch.arange(begin, begin + 9)}

    def read(slots, _):
        return torch.from_numpy(slots)[:, None].view(torch.uint8), slots != 3

    every, rows = np.arange(9), TierRows(8, np.arange(9), np.zeros(9, np.uint64), read)
    checkpoints = Checkpoints(tmp_path / "nowhere", "digest", 3, storage)
    first = {"model": {"w": torch.ones(9)}, "segment-1": events(0)}
    checkpoints.write(1, Checkpoint(10, first, {"steps": 10}, rows={"rows-1": rows}), 1.0)
    carried = {"segment-1": 1, "rows-1": 1}
    checkpoints.write(2, Checkpoint(20, {"model": {"w": torch.zeros(9)}}, {"steps": 20}, carried), 2.0)
    CheckpointPruning(checkpoints, 1).prune()
    found = checkpoints.newest()
    assert found is not None
    assert (found[0], found[1].step, found[1].state) == (2, 20, {"steps": 20})
    assert found[1].tensors["segment-1"]["index"].tolist() == list(range(9))
    found_rows, valid = found[1].rows["rows-1"].read(every)
    assert found_rows.view(torch.int64).reshape(-1).tolist() == [0, 1, 2, 0, 4, 5, 6, 7, 8]
    assert valid.tolist() == (every != 3).tolist()
    manifest = checkpoints.manifest(2)
    erased = ErasedRows(checkpoints.rows(2, "rows-1"), every == 5)
    CheckpointRewriter(checkpoints).replace(manifest, {"segment-1": events(100)}, {"rows-1": erased})
    left, valid = checkpoints.rows(2, "rows-1").read(every)
    assert left.view(torch.int64).reshape(-1).tolist() == [0, 1, 2, 0, 4, 0, 6, 7, 8]
    assert valid.tolist() == ((every != 3) & (every != 5)).tolist()
    tensors, state = checkpoints.open(checkpoints.manifest(2))
    assert state == {"steps": 20}
    assert tensors["segment-1"]["index"].tolist() == list(range(100, 109))
    assert set(storage.folder(2).files()) == {*checkpoints.manifest(2).files, MANIFEST}
    storage.folder(2).replace("rank-0/model.safetensors", b"torn")
    with pytest.raises(CheckpointError, match="does not have its digest"):
        checkpoints.part(2, "model")
    with pytest.raises(
        CheckpointError,
        match=r"there are checkpoints in .* \(2\), and none can be used: checkpoint 2: .* digest; restore one",
    ):
        checkpoints.newest()
    assert not (tmp_path / "nowhere").exists()


def test_a_version_is_judged_again_and_deleted(storage, tmp_path):
    versions = Versions(tmp_path / "nowhere", storage)
    manifest = manifest_of(1, generation=3, time=1.0, step=10, schema="digest", task="regression")
    versions.write({"w": torch.ones(9)}, manifest, Verdict("inconclusive"))
    assert versions.weights(versions.manifest(1))["w"].tolist() == [1.0] * 9
    assert versions.size_bytes(1) > 36
    before = versions.verdict_stamp(1)
    versions.write_verdict(1, Verdict("pass"))
    assert versions.verdict(1) == Verdict("pass")
    assert versions.verdict_stamp(1) != before
    versions.delete(1)
    assert (versions.numbers(), versions.verdict(1), versions.size_bytes(1)) == ([], None, 0)
    with pytest.raises(VersionError, match="does not exist"):
        versions.manifest(1)
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def synced(monkeypatch):
    """The synced directories, in order: device and inode, and the names in the directory at that time."""
    found: list[tuple[tuple[int, int], list[str]]] = []
    sync = os.fsync

    def record(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            found.append(((status.st_dev, status.st_ino), sorted(os.listdir(descriptor))))  # noqa: PTH208 a descriptor
        sync(descriptor)

    monkeypatch.setattr("os.fsync", record)
    return found


def test_files_are_synced_before_the_folder_is_renamed_and_its_name_after(tmp_path, synced):
    storage = Storage(tmp_path / "local")
    publish(storage, 3, **{"rank-0/a": b"one"})
    folder = tmp_path / "local" / "3"
    inside = [(inode(folder / "rank-0"), ["a"]), (inode(folder), [MANIFEST, "rank-0"])]
    assert synced[0] == (inode(tmp_path), ["local"]), "the parent of all folders"
    assert sorted(synced[1:-1]) == sorted(inside), "both before the rename, with all files"
    assert synced[-1] == (inode(tmp_path / "local"), ["3"]), "after the rename"


def test_a_link_and_a_new_file_are_synced_before_their_manifest(tmp_path, synced):
    storage = Storage(tmp_path)
    publish(storage, 1, **{"rank-0/a": b"one"})
    publish(storage, 2)
    synced.clear()
    folder = storage.folder(2)
    folder.link("rank-0/a", storage.folder(1), "rank-0/a")
    folder.write("rank-0/b", [b"two"])
    folder.replace(MANIFEST, b"{ }")
    names = [names for where, names in synced if where == inode(tmp_path / "2" / "rank-0")]
    assert names == [["a", "b"]]
    last, _ = synced[-1]
    assert last == inode(tmp_path / "2"), "the manifest's name, after it was replaced"
    assert len([where for where, _ in synced if where == last]) == 2, "that of rank-0 too, before it"


def inode(path):
    """Return device and inode."""
    status = path.stat()
    return status.st_dev, status.st_ino


def test_a_file_is_copied_if_the_file_system_has_no_links(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    storage = Storage(tmp_path / "local")
    source = publish(storage, 1, a=b"shared")
    monkeypatch.setattr(storage_module.Path, "hardlink_to", refused)
    with storage.publish(2, 1) as folder:
        folder.link("a", source, "a")
        folder.write(MANIFEST, [b"{}"])
    assert storage.folder(2).read("a") == b"shared"
    assert storage.folder(2).stamp("a") != source.stamp("a")
