import fcntl
import os

import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError
from tests.support.s3 import S3Prefix


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.services)])
def bucket(request, tmp_path):
    if request.param == "s3":
        prefix: S3Prefix = request.getfixturevalue("s3")
        return prefix.bucket
    return Bucket(f"file://{tmp_path}/prefix" if request.param == "file" else f"memory://{tmp_path.name}/prefix", {})


def test_an_object_is_read_as_it_was_written(bucket, tmp_path):
    bucket.write("a/b", b"one")
    bucket.write("a/c", b"three")
    large = bytes(range(250)) * 80_000
    (tmp_path / "file").write_bytes(large)
    bucket.write("empty", b"")
    bucket.write("d", tmp_path / "file")
    assert bucket.read("a/b") == b"one"
    assert bucket.sizes("a") == {"a/b": 3, "a/c": 5}
    bucket.download("d", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == large
    bucket.download("empty", tmp_path / "nothing")
    assert (tmp_path / "nothing").read_bytes() == b""
    with pytest.raises(DamagedError, match="has 5 bytes, and at most 4 are read"):
        bucket.read("a/c", 4)


def test_a_missing_object_is_a_missing_file(bucket, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        bucket.read("nothing")
    with pytest.raises(FileNotFoundError):
        bucket.read_changed("nothing", None)
    bucket.delete(["nothing"])


def test_an_object_is_created_once(bucket):
    bucket.create("a", b"one")
    bucket.create("a", b"one")  # as after a lost reply
    with pytest.raises(ReplacedError, match="written by another process"):
        bucket.create("a", b"two")
    assert bucket.read("a") == b"one"


def test_an_object_is_replaced_only_by_who_read_it_last(bucket):
    first = bucket.create("a", b"one")
    second = bucket.replace("a", b"two", first)
    with pytest.raises(ReplacedError):
        bucket.replace("a", b"three", first)
    assert bucket.replace("a", b"two", first) == second  # as after a lost reply
    assert bucket.read_tagged("a") == (b"two", second)
    bucket.delete(["a"])
    with pytest.raises(ReplacedError, match="was deleted"):
        bucket.replace("a", b"three", second)


def test_an_object_is_replaced_by_its_version_where_the_store_has_one(monkeypatch, tmp_path):
    """Google Cloud Storage refuses to replace an object by its etag."""
    modes = []

    def put(_store, _path, _content, mode):
        modes.append(mode)
        return {"e_tag": '"etag"', "version": "17"}

    bucket = Bucket(f"memory://{tmp_path.name}", {})
    monkeypatch.setattr("obstore.put", put)
    tag = bucket.create("a", b"one")
    bucket.replace("a", b"two", tag)
    assert modes == ["create", {"e_tag": '"etag"', "version": "17"}]


def test_only_a_changed_object_is_read(bucket):
    tag = bucket.create("a", b"one")
    assert bucket.read_changed("a", tag) is None
    new = bucket.replace("a", b"two", tag)
    assert bucket.read_changed("a", tag) == (b"two", new)


def test_a_store_that_is_away_is_an_os_error_without_secrets():
    bucket = Bucket(
        "s3://bucket/prefix",
        {
            "aws_access_key_id": "the-key",
            "aws_secret_access_key": "the-secret",
            "endpoint": "http://127.0.0.1:1/the-secret",
            "aws_region": "us-east-1",
            "timeout": "1s",
        },
        retries=0,
    )
    with pytest.raises(BucketAwayError, match="s3://bucket/prefix/a: ") as caught:
        bucket.read("a")
    assert "the-secret" not in str(caught.value)


def test_an_answer_on_which_the_client_panics_is_an_os_error(bucket, monkeypatch):
    class PanicException(BaseException):  # as PyO3 has it
        pass

    def panic(*_, **__):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    bucket.write("a", b"one")
    monkeypatch.setattr("obstore.get", panic)
    with pytest.raises(BucketAwayError, match=r"/a: .*called `Option::unwrap\(\)` on a `None` value"):
        bucket.read("a")


@pytest.mark.parametrize("url", ["ftp://host/a", "nothing"])
def test_an_url_of_no_object_store_is_one_sentence(url):
    with pytest.raises(SettingsError, match=r"storage\.url: .* cannot be opened: "):
        Bucket(url, {})


def test_a_bucket_that_does_not_exist_is_one_sentence(monkeypatch):
    def put(*_, **__):
        raise FileNotFoundError("NoSuchBucket")

    bucket = Bucket("s3://nothing/prefix", {"aws_region": "us-east-1"})
    monkeypatch.setattr("obstore.put", put)
    for write in (lambda: bucket.create("a", b""), lambda: bucket.write("a", b"")):
        with pytest.raises(
            BucketAwayError, match=r"^storage\.url: s3://nothing/prefix: is there such a bucket\? NoSuch"
        ):
            write()


def test_a_large_object_is_written_in_less_than_10_000_parts(monkeypatch, tmp_path):
    sizes = []
    monkeypatch.setattr("obstore.put", lambda *_, chunk_size, **__: sizes.append(chunk_size))
    bucket, large = Bucket("s3://bucket/prefix", {"aws_region": "us-east-1"}), tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(200 << 30)
    bucket.write("a", large)
    with large.open("rb") as file:
        bucket.write("a", file)
    bucket.write("a", b"small")
    assert [-(-(200 << 30) // size) <= 10_000 for size in sizes[:2]] == [True, True]
    assert sizes[2] == 5 << 20


def test_many_objects_are_deleted_by_few_requests(monkeypatch):
    requests: list[list[str]] = []
    monkeypatch.setattr("obstore.delete", lambda _, paths: requests.append(paths))
    names = [f"a/{number}" for number in range(2_500)]
    Bucket("s3://bucket/prefix", {"aws_region": "us-east-1"}).delete(names)
    assert [len(request) for request in requests] == [1000, 1000, 500]
    assert [name for request in requests for name in request] == names


def test_a_file_that_a_stopped_process_has_locked_is_away_after_a_while(tmp_path, monkeypatch):
    bucket = Bucket(f"file://{tmp_path}/prefix", {})
    tag = bucket.create("a", b"one")
    monkeypatch.setattr("anabranch.core.object_store.bucket._LOCK_SECONDS", 0.05)
    with (tmp_path / "prefix" / "a.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            BucketAwayError, match=r"a\.lock is locked by another process, which may be stopped: end it"
        ):
            bucket.replace("a", b"two", tag)
    assert bucket.replace("a", b"two", tag)


def test_objects_of_a_folder_are_synced_before_another_one_names_them(tmp_path, monkeypatch):
    synced: list[int] = []
    sync = os.fsync

    def record(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr("os.fsync", record)
    bucket, folder = Bucket(f"file://{tmp_path}/prefix", {}), tmp_path / "prefix"
    bucket.write("files/a", b"one")
    tag = bucket.create("head", b"one")
    bucket.replace("head", b"two", tag)
    for path in (folder / "files" / "a", folder / "files", folder / "head", folder):
        assert path.stat().st_ino in synced
