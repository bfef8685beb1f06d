"""Whether an object store compares before it replaces an object: without that, two learners overwrite each other."""

import contextlib
import re
import secrets

from anabranch.core.errors import SettingsError
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError

PREFIX = "doctor"
"""What the paths of objects of the check begin with."""
_NOT_IMPLEMENTED = re.compile(r"\b501\b")


class UnconditionalWritesError(SettingsError):
    """An object store lacks conditional writes."""

    def __init__(self, bucket: Bucket, how: str) -> None:
        self.fault = f"{bucket.url} replaces objects without a comparison: it {how}"
        super().__init__(
            f"{self.fault}; use an object store with conditional writes, or two learners may overwrite each other"
        )


def check_conditional_writes(bucket: Bucket) -> None:
    """Try what the lease of a learner does, with an object that is deleted again.

    Raises:
        UnconditionalWritesError: the store lacks conditional writes.
        BucketAwayError: it cannot be reached or written.
    """
    path, ignored = f"{PREFIX}/{secrets.token_hex(8)}", list[str]()
    try:
        tag = bucket.create(path, b"1")
        with contextlib.suppress(ReplacedError):
            tag = bucket.create(path, b"2")
            ignored.append("If-None-Match")
        newer = bucket.replace(path, b"3", tag)
        with contextlib.suppress(ReplacedError):
            if bucket.replace(path, b"4", tag) and newer != tag:
                ignored.append("If-Match")
        bucket.delete([path])
        with contextlib.suppress(ReplacedError):
            bucket.replace(path, b"5", newer)
            ignored += [] if "If-Match" in ignored else ["If-Match for an object that is not there"]
    except BucketAwayError as exc:
        if not _lacks(exc.__cause__):
            raise
        raise UnconditionalWritesError(bucket, f"answers a conditional write with an error ({exc})") from exc
    except ReplacedError as exc:  # of an object that nobody else has written
        raise UnconditionalWritesError(bucket, f"takes no conditional write ({exc})") from exc
    finally:
        with contextlib.suppress(BucketAwayError):
            bucket.delete([each for each in bucket.sizes(PREFIX) if each.startswith(path)])
    if ignored:
        raise UnconditionalWritesError(bucket, f"ignores {' and '.join(ignored)}")


def _lacks(exc: BaseException | None) -> bool:
    """Return whether an answer to a conditional write means that there is no such thing, now or later.

    Some stores answer 304 in place of 412, by which the writer cannot know what has happened.
    """
    from obstore.exceptions import BaseError, NotModifiedError, NotSupportedError

    if isinstance(exc, NotModifiedError | NotSupportedError):
        return True
    return isinstance(exc, BaseError) and _NOT_IMPLEMENTED.search(str(exc)) is not None
