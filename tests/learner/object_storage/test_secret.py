"""The secret of a state directory in an object store: another host holds out and keeps the same events."""

import pytest

from anabranch.core.object_store.bucket import Bucket
from anabranch.core.stream_secret import SECRET_FILE, StreamSecret
from anabranch.learner.errors import StorageError
from anabranch.learner.object_storage.opening import SECRET, fetch_secret, upload_secret


@pytest.fixture
def bucket(tmp_path):
    return Bucket(f"file://{tmp_path}/bucket", {})


@pytest.fixture
def hosts(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    return folders


def start(bucket, host):
    """Do as a learner does that holds the lease."""
    fetch_secret(bucket, host)
    secret = StreamSecret.open(host)
    upload_secret(bucket, secret)
    return secret


def test_a_fresh_host_has_the_secret_of_the_one_before(bucket, hosts):
    first = start(bucket, hosts[0])
    assert bucket.read(SECRET) == first.value
    assert start(bucket, hosts[1]).value == first.value
    assert (hosts[1] / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert start(bucket, hosts[0]).value == first.value


def test_a_state_directory_that_gets_an_object_store_keeps_its_secret(bucket, hosts):
    before = StreamSecret.open(hosts[0])
    assert start(bucket, hosts[0]).value == before.value == bucket.read(SECRET)


def test_two_secrets_are_refused(bucket, hosts):
    start(bucket, hosts[0])
    StreamSecret.open(hosts[1])
    with pytest.raises(StorageError, match=r"secret.key is not the secret that file://.* has: .*move secret.key"):
        start(bucket, hosts[1])


def test_an_object_that_is_no_secret_is_not_taken(bucket, hosts):
    bucket.create(SECRET, b"short")
    with pytest.raises(StorageError, match="has 5 bytes, and not the 32 of a secret"):
        start(bucket, hosts[0])
    bucket.write(SECRET, bytes(100))
    with pytest.raises(StorageError, match="100 bytes"):
        start(bucket, hosts[0])
    assert not (hosts[0] / SECRET_FILE).exists()
