"""Files of the history: listing them, recognizing them, and opening them, on this host or in an object store."""

import glob
import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.ingest.errors import HistoryAwayError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint
from anabranch.ingest.settings.backfill import BackfillSettings

DISORDER = timedelta(minutes=5)
"""Records of a topic may be so much later than others before them: producers send again for two minutes by default."""
_UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
"""Categories of characters that end a line, command a terminal, or stand for bytes that are no text."""
_MOST_PARTITIONS = 10_000
"""Each file has an account in the ledger and in reports, for each pass."""


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the history ends and the topics begin: an event from before `until_ms` is a row of a file, and no other is.

    One key decides on both sides. Files can have no record that arrived after they were listed, whatever its time is.
    """

    until_ms: int
    """Milliseconds since 1970."""
    own: bool = False
    """Whether it is compared with the event's own time, as files are read by it; else with the record time."""
    ends: dict[str, int] = {}
    """The end of each partition before the files were listed, by `topic:partition`."""


class FileMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file is recognized by; as JSON it is the `topic_id` of its partition, in checkpoints too."""

    name: str
    """Path or URL."""
    size: int
    tag: str
    """A digest of its version: of the etag in an object store, else of the time of its last change."""
    rows: int = 0
    until_ms: int | None = None
    """Rows from this time on are left to the topics; milliseconds since 1970, the same for all files."""
    shuffle: int = 0
    """Rows of a window that are shuffled."""
    seed: int = 0
    """Of the order in a window."""
    identity: bool = False
    """Whether rows are events of the topics."""
    switch: Switch | None = None
    """Of the first file only: which records of the topics are rows of files."""

    def encoded(self) -> str:
        """Return the mark as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decoded(cls, text: str) -> "FileMark":
        """Return the mark of a text."""
        return msgspec.json.decode(text, type=cls)


def switch_of(partitions: Iterable[TopicPartition], marks: Iterable[PartitionFingerprint]) -> Switch | None:
    """Return the switch of the history that these partitions began with, if they did."""
    for name, mark in zip(partitions, marks, strict=True):
        if name.history:
            return FileMark.decoded(mark.topic_id or "").switch
    return None


def rows_of(partition: PartitionFingerprint) -> int:
    """Return the end of the partition of a file, by what it is recognised by: with an identity it has one offset."""
    mark = FileMark.decoded(partition.topic_id or "")
    return 1 if mark.identity else mark.rows


class FileStore(Protocol):
    """Lists, checks and opens files; all methods raise HistoryAwayError when the storage does not answer."""

    def matching(self, pattern: str) -> list[FileMark]:
        """Return the files of a pattern, by name."""
        ...

    def find(self, name: str) -> FileMark | None:
        """Return a file as it is now; None if it is gone."""
        ...

    def open(self, mark: FileMark) -> BinaryIO:
        """Open a file, to read from any byte on."""
        ...


class LocalFiles(FileStore):
    """Files on this host, and on file systems that are mounted."""

    @override
    def matching(self, pattern: str) -> list[FileMark]:
        with _named(pattern):
            names = sorted(glob.glob(pattern.removeprefix("file://"), recursive=True))  # noqa: PTH207 absolute ones too
        return [mark for name in names if Path(name).is_file() and (mark := self.find(name)) is not None]

    @override
    def find(self, name: str) -> FileMark | None:
        path = Path(name)
        with _named(name):
            status = _status(path)
            if status is None and not _has_entries(path.absolute().parent):
                # An empty folder may be a mount point.
                raise HistoryAwayError(
                    f"{name} cannot be read: its folder is missing or empty; mount it again, or put its files back"
                )
            status = status or _status(path)  # the folder may have been mounted in between
        if status is None:
            return None
        return FileMark(name, status.st_size, tag_of(str(status.st_mtime_ns)))

    @override
    def open(self, mark: FileMark) -> BinaryIO:
        with _named(mark.name):
            return Path(mark.name).open("rb")


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn errors of the file system into ours."""
    try:
        yield
    except OSError as exc:
        why = exc.strerror or exc
        raise HistoryAwayError(f"{name} cannot be read: {why}; reading it is tried again") from exc


def tag_of(version: str) -> str:
    """Return the digest of a file's version."""
    return hashlib.blake2b(version.encode(), digest_size=8).hexdigest()


def store_of(name: str, settings: BackfillSettings) -> FileStore:
    """Return the store of a file or pattern: URLs need the extra `storage`."""
    if "://" not in name or name.startswith("file://"):
        return LocalFiles()
    with needs(f"stream.backfill.files: {name}", "obstore", "storage"):
        from anabranch.ingest.backfill.object_store import object_store
    parts = urlsplit(name)
    options = tuple((key, value.get_secret_value()) for key, value in settings.storage.items())
    return object_store(f"{parts.scheme}://{parts.netloc}/", options)


def listed(settings: BackfillSettings) -> list[FileMark]:
    """Return the files of all patterns, each once: by name, or in the order of the patterns with `order = "given"`.

    Raises:
        SettingsError: a pattern matches no file, or there are too many files.
        HistoryAwayError: the storage does not answer.
    """
    found: dict[str, FileMark] = {}
    for pattern in settings.files:
        matching = store_of(pattern, settings).matching(pattern)
        if not matching:
            raise SettingsError(
                f'stream.backfill.files: no file matches "{pattern}"; correct it, or remove [stream.backfill]'
            )
        unprintable = [mark.name for mark in matching if _UNPRINTABLE & set(map(unicodedata.category, mark.name))]
        if unprintable:
            raise SettingsError(
                "stream.backfill.files: the name of a file has control characters or is not UTF-8: "
                f"{unprintable[0]!a}; rename it"
            )
        found |= {mark.name: mark for mark in matching if mark.name not in found}
    if len(found) * settings.epochs > _MOST_PARTITIONS:
        raise SettingsError(
            f"stream.backfill.files: {len(found)} files match, which makes {len(found) * settings.epochs} partitions "
            f"with epochs = {settings.epochs}, and {_MOST_PARTITIONS} are allowed; join small files"
        )
    marks = list(found.values())
    return sorted(marks, key=lambda mark: mark.name) if settings.order == "name" else marks
