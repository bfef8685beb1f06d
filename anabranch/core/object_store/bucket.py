"""Objects below a URL: read, written, and replaced under compare-and-swap."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from anabranch.core.errors import DependencyError
from anabranch.core.failures import DamagedError, PanicError, panics_are_errors
from anabranch.core.files import sync_directory
from anabranch.core.object_store.client import open_store, reason_of, without_query

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, UpdateVersion

Content = bytes | Path | BinaryIO

_PIECE_BYTES = 8_000_000
"""Bytes of a request of `download`."""
_PARTS_AT_ONCE = 4
"""Parts of a file that are uploaded at once: with more, each takes longer than a request may on a slow connection."""
_VERSION = "\n"
"""Separates etag and version in a tag."""
_PART_BYTES, _MOST_PARTS = 5 << 20, 9_000
"""Of an object that is written in parts: S3 allows 10,000 of them."""
_DELETED_AT_ONCE = 1000
_LOCK_SECONDS, _LOCK_POLL_SECONDS = 5.0, 0.01
_LOCK = ".lock"
"""Suffix of the file that is locked while an object of a folder is replaced."""


class BucketAwayError(OSError, DependencyError):
    """An object store cannot be reached, or answers with an error: the same may work later."""


class ReplacedError(Exception):
    """An object is not the one that was to be replaced."""


class Bucket:
    """The objects below one URL. May be used by several threads.

    A path is relative to the URL, with `/` between its parts. All methods raise BucketAwayError where the store cannot
    be reached, after the retries of its client.
    """

    def __init__(self, url: str, options: Mapping[str, str], key: str = "storage.url", retries: int = 3) -> None:
        """Open the store without a request; raises SettingsError as `open_store`."""
        self.url = without_query(url).rstrip("/")
        """The URL as messages may have it."""
        self._store = open_store(url, options, key, retries)
        self._options, self._key = options, key
        self._folder = Path(unquote(urlsplit(url).path)) if urlsplit(url).scheme == "file" else None

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return an object; raises FileNotFoundError, and DamagedError when it has more than `max_bytes`."""
        return self.read_tagged(path, max_bytes)[0]

    def read_tagged(self, path: str, max_bytes: int | None = None) -> tuple[bytes, str]:
        """Return an object and its tag, for `replace`; raises as `read`."""
        import obstore

        with self._named(path):
            found = obstore.get(self._store, path)
            content = self._bounded(path, found, max_bytes)
            return content, self._tag(found.meta, content)

    def read_changed(self, path: str, tag: str | None, max_bytes: int | None = None) -> tuple[bytes, str] | None:
        """Return an object and its tag if it does not have this tag any more; raises as `read`."""
        import obstore
        from obstore.exceptions import NotModifiedError

        if tag is None or self._folder is not None:
            content, now = self.read_tagged(path, max_bytes)
            return None if now == tag else (content, now)
        with self._named(path):
            try:
                found = obstore.get(self._store, path, options={"if_none_match": _etag(tag)})
            except NotModifiedError:
                return None
            content = self._bounded(path, found, max_bytes)
            return content, self._tag(found.meta, content)

    def _bounded(self, path: str, found: "GetResult", max_bytes: int | None) -> bytes:
        """Read what a request has found, unless it is too large."""
        if max_bytes is not None and found.meta["size"] > max_bytes:
            raise DamagedError(f"{self.url}/{path} has {found.meta['size']} bytes, and at most {max_bytes} are read")
        return bytes(found.bytes())

    def download(self, path: str, to: Path) -> None:
        """Write an object into a new local file, piece by piece; raises FileNotFoundError, and OSError of the file.

        Each piece is a request: the time limit of one does not depend on the size of the object.
        """
        import obstore

        with to.open("xb") as file, self._named(path):
            found = obstore.get(self._store, path)  # its contents are read later
            size, tag = found.meta["size"], found.meta["e_tag"]
            if size <= _PIECE_BYTES:
                file.write(found.bytes())
                return
            for begin in range(0, size, _PIECE_BYTES):
                options: GetOptions = {"range": (begin, min(begin + _PIECE_BYTES, size))}
                if tag is not None and self._folder is None:
                    options["if_match"] = tag
                file.write(obstore.get(self._store, path, options=options).bytes())

    def write(self, path: str, content: Content) -> None:
        """Write an object, atomically; one that exists is replaced."""
        import obstore

        with self._named(path), self._bucket_exists():
            part_bytes = max(_PART_BYTES, -(-_size_of(content) // _MOST_PARTS))
            obstore.put(self._store, path, content, max_concurrency=_PARTS_AT_ONCE, chunk_size=part_bytes)
            self._sync(path)

    def create(self, path: str, content: bytes) -> str:
        """Write an object that must not exist, and return its tag; raises ReplacedError where another one exists.

        One with the same contents is taken for that of this call: the reply to an earlier attempt may have been lost.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._named(path):
            try:
                with self._bucket_exists():
                    tag = self._tag(obstore.put(self._store, path, content, mode="create"), content)
            except (AlreadyExistsError, PreconditionError) as exc:
                return self._tag_if_equal(path, content, exc)
            self._sync(path)
            return tag

    def replace(self, path: str, content: bytes, tag: str) -> str:
        """Replace the object that has this tag, and return the new tag; raises ReplacedError where it has another one.

        One with the same contents is taken for that of this call, as `create` does.
        """
        import obstore
        from obstore.exceptions import PreconditionError

        with self._named(path):
            if self._folder is not None:
                return self._replace_file(path, content, tag)
            try:
                return self._tag(obstore.put(self._store, path, content, mode=_version_of(tag)), content)
            except (PreconditionError, FileNotFoundError) as exc:
                return self._tag_if_equal(path, content, exc)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of each object whose path begins with `prefix` and a `/`, by path."""
        import obstore

        with self._named(prefix):
            found = [meta for metas in obstore.list(self._store, prefix) for meta in metas]
            return {meta["path"]: meta["size"] for meta in found}

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        import obstore

        if urlsplit(self.url).scheme in ("file", "memory"):  # where one that is missing is an error
            for path in paths:
                with self._named(path), contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, path)
            return
        for begin in range(0, len(paths), _DELETED_AT_ONCE):
            some = paths[begin : begin + _DELETED_AT_ONCE]
            with self._named(some[0]):
                obstore.delete(self._store, some)

    def _tag_if_equal(self, path: str, content: bytes, exc: Exception) -> str:
        try:
            there, tag = self.read_tagged(path)
        except FileNotFoundError:
            raise ReplacedError(f"{self.url}/{path} was deleted") from exc
        if there != content:
            raise ReplacedError(f"{self.url}/{path} was written by another process") from exc
        return tag

    def _tag(self, meta: Any, content: bytes) -> str:
        """Return the tag of an object: its etag, and its version if the store has one.

        Google Cloud Storage replaces only by version. A file has no etag that is sure to change: its tag is the digest
        of its contents.
        """
        if self._folder is not None:
            import hashlib

            return hashlib.sha256(content).hexdigest()
        version = meta.get("version")
        return str(meta["e_tag"]) if version is None else f"{meta['e_tag']}{_VERSION}{version}"

    def _replace_file(self, path: str, content: bytes, tag: str) -> str:
        """Replace a file under a lock, which all processes that replace it take."""
        import obstore

        assert self._folder is not None
        lock = self._folder / f"{path}{_LOCK}"
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock_file(descriptor, lock)
            try:
                there, now = self.read_tagged(path)
            except FileNotFoundError:
                raise ReplacedError(f"{self.url}/{path} was deleted") from None
            if now != tag and there != content:
                raise ReplacedError(f"{self.url}/{path} was written by another process")
            tag = self._tag(obstore.put(self._store, path, content), content)
            self._sync(path)
            return tag
        finally:
            os.close(descriptor)

    def _lock_file(self, descriptor: int, path: Path) -> None:
        """Lock a file; raises BucketAwayError where another process holds it for long, such as one that was stopped."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise BucketAwayError(
                        f"{self._key}: {path} is locked by another process, which may be stopped: end it"
                    ) from exc
            time.sleep(_LOCK_POLL_SECONDS)

    def _sync(self, path: str) -> None:
        """Let the object of a folder outlast a loss of power, before another one names it."""
        if self._folder is not None:
            file = self._folder / path
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            sync_directory(file.parent)

    @contextlib.contextmanager
    def _bucket_exists(self) -> Iterator[None]:
        """Turn the error that says that there is nothing to write into."""
        try:
            yield
        except FileNotFoundError as exc:
            reason = reason_of(exc, self._options)
            raise BucketAwayError(f"{self._key}: {self.url}: is there such a bucket? {reason}") from exc

    @contextlib.contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Turn obstore's errors into ours, without secrets."""
        from obstore.exceptions import BaseError

        try:
            with panics_are_errors():  # by what a store answers
                yield
        except FileNotFoundError as exc:
            raise FileNotFoundError(f"{self.url}/{path} does not exist") from exc
        except (BaseError, PanicError) as exc:
            raise BucketAwayError(f"{self._key}: {self.url}/{path}: {reason_of(exc, self._options)}") from exc


def _etag(tag: str) -> str:
    return tag.partition(_VERSION)[0]


def _version_of(tag: str) -> "UpdateVersion":
    etag, separator, version = tag.partition(_VERSION)
    return {"e_tag": etag, "version": version} if separator else {"e_tag": etag}


def _size_of(content: Content) -> int:
    if isinstance(content, bytes):
        return len(content)
    return content.stat().st_size if isinstance(content, Path) else os.fstat(content.fileno()).st_size
