"""The disk tier's files: what they say of themselves, and which of them a learner keeps.

    <number>.rows          that of the store; and, while checkpoints name them, those of earlier arrangements
    <number>.rows.before   put aside: checkpoints named it that are not there now; found again when they are back

A file that a checkpoint has named is marked, and is never removed because the checkpoints are not there: they may have
been moved away, or their disk is not mounted. One without the mark is of a start that never got as far as a checkpoint.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import number_of, open_file, sync_directory
from replay.snapshot import TierFile

SUFFIX = ".rows"
ASIDE = ".before"
PAGE = 4096
FORMAT = 3

log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the first page of a file says."""

    format: int
    id: str
    row_bytes: int
    slots: int
    named: bool = False
    """Whether there was a checkpoint that names the file."""

    def page(self) -> bytes:
        """Return the page."""
        return msgspec.json.encode(self).ljust(PAGE)


def read_header(path: Path) -> Header:
    """Return what a file says of itself; raises DamagedError for a file of something else, and OSError."""
    descriptor = open_file(path)
    try:
        return decoded(os.pread(descriptor, PAGE, 0), Header)
    finally:
        os.close(descriptor)


def next_path(folder: Path) -> Path:
    """Return the path of a new file, of a number that no other has, also none that is aside."""
    files = [*_files(folder), *_aside(folder)]
    return folder / f"{max(map(_number, files), default=0) + 1}{SUFFIX}"


def make_way(folder: Path) -> None:
    """Where there is no checkpoint: put files aside that a checkpoint has named, and remove the others.

    Those that were put aside before are removed when others take their place.

    Raises:
        DependencyError: they cannot be read, or moved, for now.
    """
    with away_is_dependency(f"replay.disk: files in {folder} cannot be put aside"):
        for path in folder.glob(f".tmp-*{SUFFIX}"):
            discard(path)
        _put_aside(folder, _aside(folder))


def take_back(folder: Path, file: TierFile) -> Path:
    """Return the path of the file that a checkpoint names; where it is aside, it takes its old name again.

    What another learner has made in the meantime goes aside for it: the checkpoints that name that are not there now.

    Raises:
        DependencyError: files cannot be read, or moved, for now.
    """
    found, path = find(folder, file), folder / file.name
    if found != path:
        with away_is_dependency(f"replay.disk: {found} cannot be moved back"):
            _put_aside(folder, ())
            found.rename(path)
            sync_directory(folder)
            log.info("the checkpoints of %s are back: it is %s again", found, path)
    return path


def find(folder: Path, file: TierFile) -> Path:
    """Return where the file is that a checkpoint names, perhaps aside; where it is not there, the path that it should
    have."""
    path = folder / file.name
    with away_is_dependency("replay.disk"):
        candidates = [path, *_aside(folder)]
        return next((each for each in candidates if _id(each) == file.id), path)


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
        log.warning("removing %s, since a newer file is put aside in its place", path)
        path.unlink()
    for path in named:
        aside = path.with_name(path.name + ASIDE)
        if aside.exists():
            aside = path.with_name(next_path(folder).name + ASIDE)
        path.rename(aside)
        log.warning(
            "the checkpoints that name %s are not there: it is kept as %s, and is found by itself when they are back; "
            "delete "
            "it if they are not to come back",
            *(path, aside.name),
        )
    if named:
        sync_directory(folder)


def _is_named(path: Path) -> bool:
    """Return whether a checkpoint has named a file; also when it does not say, being damaged or of another release."""
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
