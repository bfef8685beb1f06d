"""Bases in an object store: uploaded before what names them, once, and kept while named."""

import hashlib
import shutil

import pytest

from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import BucketAwayError
from anabranch.learner.object_storage.bases import fetch_base
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.fetching import fetch_versions
from anabranch.learner.object_storage.head import base_path
from anabranch.learner.state_dir.bases import Bases, bases_in
from anabranch.learner.versions.format import Versions
from tests.learner.object_storage.uploading import FaultyBucket, UploadBench


@pytest.fixture
def start(tmp_path):
    """Starts a learner of a state directory: `start("host")`; all of them have the same object store."""
    return lambda name="host": UploadBench(tmp_path, FaultyBucket(f"file://{tmp_path}/bucket"), name)


@pytest.fixture
def bench(start):
    return start()


def advance(bench):
    assert bench.version_uploads.advance()
    assert bench.checkpoint_uploads.advance()


def objects(bench):
    return set(bench.bucket.sizes("bases"))


def head_of(bench):
    return bench.lease.head


def test_a_base_is_uploaded_once_and_before_the_first_folder_that_names_it(bench):
    base = bench.use_base(b"frozen")
    bench.version(1)
    bench.checkpoint(1)
    advance(bench)
    bench.version(2)
    advance(bench)

    written = [path for path in bench.bucket.paths if not path.startswith("head")]
    assert written[0] == base_path(base, 1)
    assert sum(path.startswith("bases/") for path in written) == 1
    assert head_of(bench).bases == {base: 1}


def test_a_pipeline_without_a_base_makes_no_request_for_one(bench, monkeypatch):
    asked: list[str] = []
    sizes = bench.bucket.sizes
    monkeypatch.setattr(bench.bucket, "sizes", lambda prefix: asked.append(prefix) or sizes(prefix))
    bench.version(1)
    bench.checkpoint(1)
    advance(bench)

    assert "bases" not in asked


def test_a_base_is_deleted_after_the_last_folder_that_names_it_and_not_before(bench):
    old = bench.use_base(b"old")
    bench.version(1)
    bench.checkpoint(1)
    advance(bench)
    new = bench.use_base(b"new")
    bench.version(2)
    bench.checkpoint(2)
    advance(bench)
    assert head_of(bench).bases.keys() == {old, new}

    bench.versions.delete(1)
    advance(bench)
    assert objects(bench) == {base_path(old, 1), base_path(new, 1)}, "checkpoint 1 names it"

    for number in (3, 4):
        bench.checkpoint(number)
        advance(bench)
    assert head_of(bench).bases == {new: 1}
    assert objects(bench) == {base_path(new, 1)}


def test_a_base_stays_while_a_folder_on_it_is_being_written(bench):
    old, new = bench.use_base(b"old"), bench.use_base(b"new")
    with bench.bases.holding(old):
        with bench.bases.holding(new):
            bench.bases.prune()
        assert head_of(bench).bases.keys() == {old, new}


def test_a_base_of_checkpoints_that_were_set_aside_stays(bench):
    old = bench.use_base(b"old")
    bench.checkpoint(1)
    assert bench.checkpoint_uploads.advance()
    bench.checkpoint_uploads._target.set_aside(1)
    new = bench.use_base(b"new")
    with bench.bases.holding(new):
        bench.bases.prune()

    assert head_of(bench).bases.keys() == {old, new}


def test_an_upload_that_fails_is_done_again_and_leaves_nothing(bench, start):
    """A base that was written, and never listed, is that of a learner that was killed between the two."""
    base = bench.use_base(b"frozen")
    bench.bucket.write(base_path("a" * 64, 1), b"killed")
    bench.version(1)
    bench.bucket.away = True
    with pytest.raises(BucketAwayError):
        bench.version_uploads.advance()
    bench.bucket.away = False

    assert bench.version_uploads.advance()

    assert objects(bench) == {base_path(base, 1)}


def test_a_version_whose_base_is_damaged_here_is_not_uploaded(bench):
    base = bench.use_base(b"frozen")
    bases_in(bench.state_dir).file(base).write_bytes(b"damaged")
    bench.version(1)

    assert not bench.version_uploads.advance()
    assert head_of(bench).versions == head_of(bench).bases == {}


def test_a_fresh_host_fetches_the_base_of_the_newest_version(bench, tmp_path, caplog):
    base = bench.use_base(b"frozen")
    bench.version(1)
    advance(bench)
    source = BucketStorage(bench.bucket, "versions", tmp_path / "fetched")
    fetch_versions(source, Versions(tmp_path / "b" / "versions"))
    assert bases_in(tmp_path / "b").checked(base).read_bytes() == b"frozen"
    assert source.local_base(base).read_bytes() == b"frozen"

    bench.bucket.write(base_path(base, 1), b"damaged")
    fetch_versions(BucketStorage(bench.bucket, "versions", tmp_path / "fetched"), Versions(tmp_path / "c" / "versions"))
    assert "version 1 in" in caplog.text
    assert "is damaged, and not fetched" in caplog.text
    assert Versions(tmp_path / "c" / "versions").numbers() == []
    assert not bases_in(tmp_path / "c").digests()


def test_a_base_that_the_object_store_lacks_is_one_sentence(bench, tmp_path):
    bases, sha256 = Bases(tmp_path / "bases"), hashlib.sha256(b"frozen").hexdigest()
    with pytest.raises(DamagedError, match=f"/bucket has no base '{sha256}'"):
        fetch_base(bench.bucket, {}, sha256, bases)
    with pytest.raises(DamagedError, match=f"/bucket/bases/{sha256}-1 cannot be used"):
        fetch_base(bench.bucket, {sha256: 1}, sha256, bases)
    assert not bases.path.exists() or not list(bases.path.iterdir())


def test_a_learner_on_another_host_lists_the_bases_that_it_inherits(bench, start):
    base = bench.use_base(b"frozen")
    bench.version(1)
    advance(bench)
    shutil.rmtree(bench.state_dir)
    bench.lease.update(lambda head: head)
    del bench
    other = start("other")
    new = other.use_base(b"new")
    other.version(2)
    advance(other)

    assert head_of(other).bases == {base: 1, new: other.generation}, "version 1 is there"
