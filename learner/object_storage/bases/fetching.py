"""Fetches a base of an object store into a state directory."""

from collections.abc import Mapping

from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import Bucket
from learner.object_storage.head import base_path
from learner.state_dir.bases import Bases


def fetch_base(bucket: Bucket, listed: Mapping[str, int], sha256: str, bases: Bases) -> None:
    """Fetch a base unless it is in the state directory and intact.

    Args:
        bucket: the object store.
        listed: the bases in its head, with the generation that wrote each.
        sha256: of the base.
        bases: of the state directory.

    Raises:
        DamagedError: the object store does not have it, or it is damaged there.
        BucketAwayError: the object store cannot be reached.
        OSError: it cannot be written.
    """
    if bases.is_intact(sha256):
        return
    if (generation := listed.get(sha256)) is None:
        raise DamagedError(f"{bucket.url} has no base {sha256[:200]!r}")
    path = base_path(sha256, generation)
    try:
        bases.add(sha256, lambda to: bucket.download(path, to))
    except (DamagedError, FileNotFoundError) as exc:
        raise DamagedError(f"{bucket.url}/{path} cannot be used: {exc}") from exc
