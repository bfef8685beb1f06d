"""Files in object stores and on web servers, by obstore. A read names the version that was listed."""

import fnmatch
import functools
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError, PreconditionError
from typing_extensions import override

from anabranch.core.failures import PanicError, panics_are_errors
from anabranch.core.object_store.client import open_store
from anabranch.ingest.backfill.files import FileMark, FileStore, tag_of
from anabranch.ingest.errors import HistoryAwayError, HistoryError

_WILD = "*?["


class ObjectStoreFiles(FileStore):
    """The objects of one bucket, container or web server."""

    def __init__(self, root: str, store: Any) -> None:
        """`root` is the URL that names begin with, and `store` an obstore store."""
        self._root = root
        self._store = store

    @classmethod
    def of(cls, url: str, options: Mapping[str, str]) -> "ObjectStoreFiles":
        """Return the store of a URL; raises SettingsError when obstore does not know it, or an option."""
        parts = urlsplit(url)
        root = f"{parts.scheme}://{parts.netloc}/"
        return cls(root, open_store(root, options, "stream.backfill.files"))

    @override
    def matching(self, pattern: str) -> list[FileMark]:
        path = pattern.removeprefix(self._root)
        if not any(char in path for char in _WILD):
            mark = self.find(pattern)
            return [] if mark is None else [mark]
        fixed = path[: min(path.index(char) for char in _WILD if char in path)].rpartition("/")[0]
        with _named(pattern):
            found = [meta for metas in obstore.list(self._store, fixed or None) for meta in metas]
        matching = [meta for meta in found if _matches(meta["path"], path)]
        return sorted((self._mark(meta["path"], meta) for meta in matching), key=lambda mark: mark.name)

    @override
    def find(self, name: str) -> FileMark | None:
        path = name.removeprefix(self._root)
        with _named(name):
            try:
                return self._mark(path, obstore.head(self._store, path))
            except (NotFoundError, FileNotFoundError):
                return None

    @override
    def open(self, mark: FileMark) -> BinaryIO:
        etag = None
        with _named(mark.name):
            etag = obstore.head(self._store, mark.name.removeprefix(self._root)).get("e_tag")
        return cast("BinaryIO", io.BufferedReader(_Ranges(self._store, mark, self._root, etag), 1 << 16))

    def _mark(self, path: str, meta: Any) -> FileMark:
        version = meta.get("e_tag") or str(meta["last_modified"])
        return FileMark(f"{self._root}{path}", meta["size"], tag_of(version))


@functools.cache
def object_store(root: str, options: tuple[tuple[str, str], ...]) -> ObjectStoreFiles:
    """Return the only client of a store in this process: connections are kept. Raises as `ObjectStoreFiles.of`."""
    return ObjectStoreFiles.of(root, dict(options))


class _Ranges(io.RawIOBase):
    """An object as a file: each read asks for a range of the version that was opened."""

    def __init__(self, store: Any, mark: FileMark, root: str, etag: str | None) -> None:
        self._store = store
        self._mark = mark
        self._path = mark.name.removeprefix(root)
        self._etag = etag
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._mark.size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._mark.size, self._at + len(buffer))
        if end <= self._at:
            return 0
        options: dict[str, Any] = {"range": (self._at, end)}
        if self._etag is not None:
            options["if_match"] = self._etag
        with _named(self._mark.name):
            found = bytes(obstore.get(self._store, self._path, options=cast("Any", options)).bytes())
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn obstore's errors into ours."""
    try:
        with panics_are_errors():
            yield
    except PreconditionError as exc:
        raise HistoryError(
            f"{name} was changed while it was read; put back the version that was listed, or move the checkpoints away "
            "to read the history again"
        ) from exc
    except (BaseError, OSError, PanicError) as exc:
        why = str(exc).partition("\n")[0]
        raise HistoryAwayError(f"{name} cannot be read: {why}; reading it is tried again") from exc


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path matches a glob whose `*` does not cross `/`, and whose `**` does."""
    if "**" in pattern:
        return fnmatch.fnmatchcase(path, pattern.replace("**/", "*").replace("**", "*"))
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
