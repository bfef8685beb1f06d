"""The object store of `[storage]`: whether it answers, can be written, and compares before it replaces."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from anabranch.core.errors import SettingsError
from anabranch.core.object_store.bucket import Bucket, BucketAwayError
from anabranch.core.object_store.conditional_writes import UnconditionalWritesError, check_conditional_writes
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from learner.errors import StorageError
from learner.object_storage.head import HeadReader

_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
"""Names of obstore's errors about credentials and rights."""
_LOCAL = ("file", "memory")


def check_storage(context: CheckContext) -> Iterator[Finding]:
    """Read the head, then write, replace, list and delete a separate object."""
    settings = context.config.pipeline.storage
    if settings is None:
        return
    try:
        bucket = settings.quick_bucket
        HeadReader(bucket).poll()
        yield from _check_writes(bucket)
    except SettingsError as exc:
        yield found("storage.head" if isinstance(exc, StorageError) else "storage.unusable", f"{exc}.")
        return
    except BucketAwayError as exc:
        denied = type(exc.__cause__).__name__ in _DENIED
        yield found("storage.denied" if denied else "storage.connect", f"{exc}.")
        return
    named = sorted(name for name in settings.options if "encryption" in name or "sse" in name)
    if named:
        yield ok(f"Encryption of objects by the object store is set by {', '.join(named)}.")
    elif urlsplit(settings.url).scheme not in _LOCAL:
        yield found("storage.encryption", "storage.options names no encryption: that of the bucket's default applies.")


def _check_writes(bucket: Bucket) -> Iterator[Finding]:
    """Try what a learner does, with an object that is deleted again; the start of a learner does the same."""
    try:
        check_conditional_writes(bucket)
    except UnconditionalWritesError as exc:
        yield found("storage.conditional", f"{exc.fault}.")
    else:
        yield ok(f"{bucket.url} answers, can be written, and compares before it replaces.")
