"""The files of the disk tier: their headers, and which of them a learner keeps.

    <number>.rows          the file of the store, and earlier files that checkpoints still name
    <number>.rows.before   a file that is put aside: the checkpoints that name it are missing; restored with them

A file lists the checkpoints whose rows it has. One that was restored from a backup lacks rows of later checkpoints, and
one that is ahead of a checkpoint may have others in its slots: then the checkpoint's rows are used, if it has them.

A file that a checkpoint has named is marked. It is not removed when the checkpoints are missing: they may have been
moved away, or their disk is not mounted. A file without the mark is from a start that wrote no checkpoint.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from anabranch.core.errors import DependencyError
from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import number_of, open_file, sync_directory
from anabranch.replay.snapshot import TierRef

SUFFIX = ".rows"
ASIDE = ".before"
PAGE = 4096
FORMAT = 3
_MOST_LISTED = 63
"""Checkpoints that the first page has space for besides the newest one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileUse:
    """What a file of rows is for, as error sentences say it.

    Attributes:
        setting: of its size.
        unread: the effect while it cannot be read, after a semicolon.
        unwritten: the effect while it cannot be written, likewise.
        contents: what is in it, before its path.
    """

    setting: str = "replay.disk"
    unread: str = "; its events are not replayed"
    unwritten: str = "; events are not stored"
    contents: str = "the replay contents are in"


REPLAY = FileUse()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first page of a file."""

    format: int
    id: str
    row_bytes: int
    slots: int
    named: bool = False
    """Whether a checkpoint has named the file."""
    intact: list[tuple[int, str]] = []
    """Number and stamp of the checkpoints whose rows are in the slots that they name, or will be once these exist."""

    def lists(self, stamp: str) -> bool:
        """Return whether the file has the rows of the checkpoint with this stamp."""
        return any(stamp == each for _, each in self.intact)

    def listing(self, number: int, stamp: str, oldest: int) -> "Header":
        """Return the header with one more checkpoint, and without those before `oldest`."""
        kept = [each for each in self.intact if each[0] >= oldest]
        return msgspec.structs.replace(self, intact=[*kept[-_MOST_LISTED:], (number, stamp)])

    def without_after(self, number: int) -> "Header":
        """Return the header without the checkpoints after this one."""
        return msgspec.structs.replace(self, intact=[each for each in self.intact if each[0] <= number])

    def page(self) -> bytes:
        """Return the bytes of the page."""
        return msgspec.json.encode(self).ljust(PAGE)


def read_header(path: Path) -> Header:
    """Return the header of a file; raises DamagedError for another kind of file, and OSError."""
    descriptor = open_file(path)
    try:
        return decoded(os.pread(descriptor, PAGE, 0), Header)
    finally:
        os.close(descriptor)


def next_path(folder: Path) -> Path:
    """Return the path of a new file, with a number above those of all files, also of those put aside."""
    files = [*_files(folder), *_aside(folder)]
    return folder / f"{max(map(_number, files), default=0) + 1}{SUFFIX}"


def make_way(folder: Path, setting: str = "replay.disk") -> None:
    """When there is no checkpoint: put the files aside that a checkpoint has named, and remove the others.

    Files that were put aside before are removed if there are newer ones.

    Raises:
        DependencyError: files cannot be read or moved now.
    """
    with away_is_dependency(f"{setting}: files in {folder} cannot be put aside"):
        for path in folder.glob(f".tmp-*{SUFFIX}"):
            discard(path)
        _put_aside(folder, _aside(folder))


def take_back(folder: Path, file: TierRef, setting: str = "replay.disk") -> Path:
    """Return the path of the file that a checkpoint names; a file that was put aside gets its old name back.

    The files of a learner that ran in the meantime are put aside in turn: the checkpoints that name them are missing.

    Raises:
        DependencyError: files cannot be read or moved now.
    """
    current, path = find(folder, file, setting), folder / file.name
    if current != path:
        with away_is_dependency(f"{setting}: {current} cannot be moved back"):
            _put_aside(folder, ())
            current.rename(path)
            sync_directory(folder)
            log.info("the checkpoints of %s are back: it is %s again", current, path)
    return path


def find(folder: Path, file: TierRef, setting: str = "replay.disk") -> Path:
    """Return the path of the file that a checkpoint names, which may be aside; if it is missing, its own path."""
    path = folder / file.name
    with away_is_dependency(setting):
        candidates = [path, *_aside(folder)]
        return next((candidate for candidate in candidates if _id(candidate) == file.id), path)


def discard(path: Path) -> None:
    """Remove a file."""
    log.info("removing %s, which belongs to no checkpoint", path)
    path.unlink(missing_ok=True)


def discard_unnamed(folder: Path, setting: str) -> None:
    """Remove the files that no checkpoint has named: starts left them that restored a missing file and wrote none.

    Raises:
        DependencyError: files cannot be read or removed now.
    """
    with away_is_dependency(f"{setting}: files in {folder} cannot be removed"):
        for path in _files(folder):
            if not _is_named(path):
                discard(path)
        remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """Remove a folder of files and its parent where they are empty: they would be taken for a disk that is missing."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def check_mounted(folder: Path, setting: str) -> None:
    """Raise DependencyError where files are missing since their disk is: its mount point is an empty folder."""
    with away_is_dependency(f"{setting}: {folder} cannot be read"):
        for path in (folder, folder.parent):
            if path.is_dir() and not any(path.iterdir()) and not path.is_mount():
                raise DependencyError(
                    f"{setting}: {path} is empty: mount its disk; or if that is lost, remove the folder, and the "
                    "events are restored from the checkpoint"
                )


def is_aside(path: Path) -> bool:
    """Return whether a file was put aside."""
    return path.name.endswith(ASIDE)


def all_files(folder: Path) -> list[Path]:
    """Return all files, also those aside."""
    return [*_files(folder), *_aside(folder)]


def _put_aside(folder: Path, older: Sequence[Path]) -> None:
    named = [path for path in _files(folder) if _is_named(path)]
    for path in set(_files(folder)) - set(named):
        discard(path)
    for path in older if named else ():
        log.warning("removing %s, since a newer file is put aside", path)
        path.unlink()
    for path in named:
        aside = path.with_name(path.name + ASIDE)
        if aside.exists():
            aside = path.with_name(next_path(folder).name + ASIDE)
        path.rename(aside)
        log.warning(
            "the checkpoints that name %s are missing: it is kept as %s, and is restored when they are back; "
            "delete it if they are not to come back",
            path,
            aside.name,
        )
    if named:
        sync_directory(folder)


def _is_named(path: Path) -> bool:
    """Return whether a checkpoint has named a file, or may have: it is damaged, or of another release."""
    try:
        header = read_header(path)
    except DamagedError:
        return True
    return header.named or header.format != FORMAT


def _id(path: Path) -> str | None:
    with contextlib.suppress(DamagedError, FileNotFoundError):
        return read_header(path).id
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"), key=_number)


def _aside(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}{ASIDE}"), key=_number)


def _number(path: Path) -> int:
    return number_of(path.name.partition(".")[0]) or 0
