"""The object store of `[storage]`: whether it answers, can be written, and compares before it replaces."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from anabranch.core.errors import SettingsError
from anabranch.core.object_store.bucket import BucketAwayError
from anabranch.core.object_store.conditional_writes import UnconditionalWritesError, check_conditional_writes
from anabranch.core.preflight import Finding, info, ok, problem
from anabranch.learner.errors import StorageError
from anabranch.learner.object_storage.head import HeadReader
from anabranch.learner.object_storage.opening import check_state_is_here
from anabranch.learner.settings.storage import StorageSettings

_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
"""Names of obstore's errors about credentials and rights."""
_LOCAL = ("file", "memory")


def check_storage(settings: StorageSettings | None, state_dir: Path) -> Iterator[Finding]:
    """Read the head, then write, replace, list and delete a separate object; without a store, the state is here."""
    if settings is None:
        try:
            check_state_is_here(state_dir)
        except SettingsError as exc:
            what, _, fix = str(exc).partition(": ")
            yield problem("storage.left", f"{what}.", f"{fix[:1].upper()}{fix[1:]}.")
        return
    try:
        bucket = settings.quick_bucket
        HeadReader(bucket).poll()
        check_conditional_writes(bucket)  # as the start of a learner does
    except UnconditionalWritesError as exc:
        fix = "Use an object store with conditional writes: without them two learners may overwrite each other."
        yield problem("storage.conditional", f"{exc.fault}.", fix)
        return
    except StorageError as exc:
        yield problem("storage.head", f"{exc}.", "Use the release that wrote it, or another storage.url.")
        return
    except SettingsError as exc:
        yield problem("storage.unusable", f"{exc}.", "Fix storage.url or storage.options.")
        return
    except BucketAwayError as exc:
        if type(exc.__cause__).__name__ in _DENIED:
            fix = "Fix the credentials, or allow what docs/guides/object-store.md lists below storage.url."
            yield problem("storage.denied", f"{exc}.", fix)
        else:
            fix = "Start it, or fix storage.url and storage.options.endpoint."
            yield problem("storage.connect", f"{exc}.", fix, unreachable=True)
        return
    yield ok(f"{bucket.url} answers, can be written, and compares before it replaces.")
    named = sorted(name for name in settings.options if "encryption" in name or "sse" in name)
    if named:
        yield ok(f"Encryption of objects by the object store is set by {', '.join(named)}.")
    elif urlsplit(settings.url).scheme not in _LOCAL:
        message = "storage.options names no encryption: that of the bucket's default applies."
        fix = "Nothing, when that is intended; else set it, such as storage.options.aws_server_side_encryption."
        yield info("storage.encryption", message, fix)
