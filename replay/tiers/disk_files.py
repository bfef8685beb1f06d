"""The files of the disk tier: their headers, and which of them a learner keeps.

    <number>.rows          the file of the store, and earlier files that checkpoints still name
    <number>.rows.before   a file that is put aside: the checkpoints that name it are missing; restored with them

A file that a checkpoint has named is marked. It is not removed when the checkpoints are missing: they may have been
moved away, or their disk is not mounted. A file without the mark is from a start that wrote no checkpoint.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import number_of, open_file, sync_directory
from replay.snapshot import TierRef

SUFFIX = ".rows"
ASIDE = ".before"
PAGE = 4096
FORMAT = 3

log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first page of a file."""

    format: int
    id: str
    row_bytes: int
    slots: int
    named: bool = False
    """Whether a checkpoint has named the file."""

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


def make_way(folder: Path) -> None:
    """When there is no checkpoint: put the files aside that a checkpoint has named, and remove the others.

    Files that were put aside before are removed if there are newer ones.

    Raises:
        DependencyError: files cannot be read or moved now.
    """
    with away_is_dependency(f"replay.disk: files in {folder} cannot be put aside"):
        for path in folder.glob(f".tmp-*{SUFFIX}"):
            discard(path)
        _put_aside(folder, _aside(folder))


def take_back(folder: Path, file: TierRef) -> Path:
    """Return the path of the file that a checkpoint names; a file that was put aside gets its old name back.

    The files of a learner that ran in the meantime are put aside in turn: the checkpoints that name them are missing.

    Raises:
        DependencyError: files cannot be read or moved now.
    """
    found, path = find(folder, file), folder / file.name
    if found != path:
        with away_is_dependency(f"replay.disk: {found} cannot be moved back"):
            _put_aside(folder, ())
            found.rename(path)
            sync_directory(folder)
            log.info("the checkpoints of %s are back: it is %s again", found, path)
    return path


def find(folder: Path, file: TierRef) -> Path:
    """Return the path of the file that a checkpoint names, which may be aside; if it is missing, its own path."""
    path = folder / file.name
    with away_is_dependency("replay.disk"):
        candidates = [path, *_aside(folder)]
        return next((candidate for candidate in candidates if _id(candidate) == file.id), path)


def discard(path: Path) -> None:
    """Remove a file."""
    log.info("removing %s, which belongs to no checkpoint", path)
    path.unlink(missing_ok=True)


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
            *(path, aside.name),
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
