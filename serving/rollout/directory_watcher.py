"""Notices what happens in the versions directory: by the kernel's word where it has one, else by looking again.

The kernel tells of renames (inotify), by which versions, verdicts and `state.json` appear. It knows nothing of what
other hosts do on a network file system, and not every system has it: there the directory is looked at again and again.
"""

import contextlib
import ctypes
import os
import re
import select
import struct
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from anabranch.core.files import number_of

POLL_EVERY = timedelta(milliseconds=50)
"""How often to look where nothing tells of changes."""

LOOK_ANYWAY = timedelta(seconds=1)
"""How often to look where the kernel tells of them: a sandbox may have a kernel of its own."""

_MOUNTS = Path("/proc/self/mountinfo")
_OF_ONE_HOST = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])
"""File systems on which all changes go through this kernel; of others it is not known."""

_MOVED_TO, _ONLY_DIRECTORY = 0x80, 0x0100_0000
_IGNORED = 0x8000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 65536


class DirectoryWatcher:
    """Waits for changes in a versions directory; a context manager. All but `wake` belong to one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_told: bool | None = None
        self._inotify: _Inotify | None = None

    def __enter__(self) -> Self:
        self._ours, self._theirs = os.pipe()
        os.set_blocking(self._ours, False)
        os.set_blocking(self._theirs, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def by_the_kernel(self) -> bool:
        """Whether changes after the last `follow` end a `wait` at once."""
        return self._inotify is not None

    def wake(self) -> None:
        """End the `wait` that is under way, or the next; to be called by any thread, inside the context."""
        with contextlib.suppress(BlockingIOError):  # then many are there already
            os.write(self._theirs, b"\0")

    def follow(self) -> None:
        """Follow the versions that are there now; to be called before each look, so that no change is missed."""
        if self._inotify is not None and not self._inotify.is_there:
            self._drop()
        if self._inotify is None and self._path.is_dir():
            if self._is_told is None:
                self._is_told = file_system(self._path) in _OF_ONE_HOST
            self._inotify = _open_inotify(self._path) if self._is_told else None
        if self._inotify is not None:
            try:
                self._inotify.follow(
                    entry.name for entry in os.scandir(self._path) if number_of(entry.name) is not None
                )
            except OSError:  # the directory is gone, or the kernel follows no more
                self._drop()

    def wait(self, at_most: timedelta | None = None) -> None:
        """Wait for a change, for `wake`, or until it is time to look anyway: after `at_most` if that comes first."""
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.descriptor, select.POLLIN)
        every = POLL_EVERY if self._inotify is None else LOOK_ANYWAY
        longest = every if at_most is None else min(every, at_most)
        poll.poll(longest.total_seconds() * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._ours, _READ_BYTES)
        if self._inotify is not None:
            self._inotify.clear()

    def _drop(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class _Inotify:
    """The kernel's word on the renames into a directory, and into those in it that are followed."""

    def __init__(self, libc: ctypes.CDLL, path: Path) -> None:
        """Raises OSError where the kernel has none left."""
        self._libc, self._path = libc, path
        self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        _check(self.descriptor)
        self._followed: dict[str, int] = {}
        self.is_there = True
        try:
            self._root = self._add(path)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)

    def follow(self, names: Iterable[str]) -> None:
        """Follow the directories of these names, and no longer those that are gone."""
        found = set(names)
        self._followed = {name: watch for name, watch in self._followed.items() if name in found}
        for name in found - self._followed.keys():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._followed[name] = self._add(self._path / name)

    def clear(self) -> None:
        """Take what the kernel has told so far; one look answers all of it."""
        while True:
            try:
                told = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            place = 0
            while place < len(told):
                watch, mask, _, length = _EVENT.unpack_from(told, place)
                place += _EVENT.size + length
                if watch == self._root and mask & _IGNORED:
                    self.is_there = False

    def _add(self, path: Path) -> int:
        watch: int = self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), _MOVED_TO | _ONLY_DIRECTORY)
        _check(watch)
        return watch


def file_system(path: Path) -> str:
    """Return the type of the file system that a path lies on, such as `ext4`; "" where that is not told."""
    real = path.resolve()
    places = {real, *real.parents}
    found = [(len(place.parts), kind) for place, kind in _mounts() if place in places]
    return max(found, key=lambda each: each[0])[1] if found else ""


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield where file systems are mounted, and their types; later ones hide earlier ones, and come first."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in reversed(lines):
        before, _, after = line.partition(" - ")
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        yield Path(place), after.partition(" ")[0]


def _open_inotify(path: Path) -> _Inotify | None:
    """Return the kernel's word on a directory; None where it has none, or no more to give."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None
    try:
        return _Inotify(libc, path)
    except OSError:
        return None


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
