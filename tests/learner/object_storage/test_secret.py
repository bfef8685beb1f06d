"""The secret of a state directory in an object store: another host holds out and keeps the same events."""

from pathlib import Path

import pytest

from anabranch.core.object_store.bucket import Bucket
from anabranch.core.stream_secret import SECRET_FILE, StreamSecret
from learner.errors import StorageError
from learner.object_storage.secret import OBJECT, fetch_secret, upload_secret


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"file://{tmp_path}/bucket", {})


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    return folders


def start(bucket: Bucket, host: Path) -> StreamSecret:
    """Do as a learner does that holds the lease."""
    fetch_secret(bucket, host)
    secret = StreamSecret.open(host)
    upload_secret(bucket, secret)
    return secret


def test_a_fresh_host_has_the_secret_of_the_one_before(bucket: Bucket, hosts: list[Path]) -> None:
    first = start(bucket, hosts[0])
    assert bucket.read(OBJECT) == first.value
    assert start(bucket, hosts[1]).value == first.value
    assert (hosts[1] / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert start(bucket, hosts[0]).value == first.value


def test_a_state_directory_that_gets_an_object_store_keeps_its_secret(bucket: Bucket, hosts: list[Path]) -> None:
    before = StreamSecret.open(hosts[0])
    assert start(bucket, hosts[0]).value == before.value == bucket.read(OBJECT)


def test_two_secrets_are_refused(bucket: Bucket, hosts: list[Path]) -> None:
    start(bucket, hosts[0])
    StreamSecret.open(hosts[1])
    with pytest.raises(StorageError, match=r"secret.key is not the secret that file://.* has: .*move secret.key"):
        start(bucket, hosts[1])


def test_an_object_that_is_no_secret_is_not_taken(bucket: Bucket, hosts: list[Path]) -> None:
    bucket.create(OBJECT, b"short")
    with pytest.raises(StorageError, match="has 5 bytes, and not the 32 of a secret"):
        start(bucket, hosts[0])
    bucket.write(OBJECT, bytes(100))
    with pytest.raises(StorageError, match="100 bytes"):
        start(bucket, hosts[0])
    assert not (hosts[0] / SECRET_FILE).exists()
