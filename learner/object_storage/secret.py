"""Keeps the secret of the state directory in the object store: another host holds out and keeps the same events."""

from pathlib import Path

from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.stream_secret import SECRET_BYTES, SECRET_FILE, StreamSecret
from learner.errors import StorageError

OBJECT = "secret"
"""Path of the object."""


def fetch_secret(bucket: Bucket, state_dir: Path) -> None:
    """Let a state directory without a secret have that of the object store, if it has one. The lease must be held.

    Raises:
        BucketAwayError: the object store cannot be reached.
        StorageError: both have a secret, and not the same, or what the object store has is none.
    """
    try:
        there, here = bucket.read(OBJECT, SECRET_BYTES), StreamSecret.read(state_dir)
    except FileNotFoundError:
        return
    except DamagedError as exc:
        raise StorageError(str(exc)) from exc
    if len(there) != SECRET_BYTES:
        raise StorageError(f"{bucket.url}/{OBJECT} has {len(there)} bytes, and not the {SECRET_BYTES} of a secret")
    if here is None:
        StreamSecret(there).write(state_dir)
    elif here.value != there:
        raise StorageError(
            f"{state_dir / SECRET_FILE} is not the secret that {bucket.url} has: they are of two pipelines, or one was "
            f"begun again; use another storage.url or state_dir, or move {SECRET_FILE} and the checkpoints of "
            "state_dir away to go on with what the object store has"
        )


def upload_secret(bucket: Bucket, secret: StreamSecret) -> None:
    """Let the object store have the secret; `fetch_secret` was called before.

    Raises:
        BucketAwayError: the object store cannot be reached.
    """
    try:
        bucket.read(OBJECT, SECRET_BYTES)
    except FileNotFoundError:
        bucket.create(OBJECT, secret.value)
