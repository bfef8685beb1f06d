"""Watches the versions directory, by inotify where that works, else by polling.

inotify reports the renames by which versions, verdicts and `state.json` appear. It does not report what other hosts do
on a network file system, and some systems do not have it: there the directory is polled. The package watchfiles would
replace `_Inotify` alone, and polls its own queue: a rename was seen after 100 ms with its default steps of 50 ms, and
after 1.7 ms with steps of 1 ms, which wake an idle thread 900 times a second; here after 0.1 ms, without such steps.
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
from typing import Self

from anabranch.core.files import number_of

POLL_EVERY = timedelta(milliseconds=50)
"""How often to poll without inotify."""

POLL_ANYWAY = timedelta(seconds=1)
"""How often to poll with inotify too: a sandbox may have its own kernel."""

_MOUNTS = Path("/proc/self/mountinfo")
_OF_ONE_HOST = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])
"""File systems on which all changes go through this kernel; others may be changed by other hosts."""

_MOVED_TO, _ONLY_DIRECTORY = 0x80, 0x0100_0000
_IGNORED = 0x8000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 65536


class DirectoryWatcher:
    """Waits for changes in a versions directory; a context manager. All but `wake` belong to one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_local: bool | None = None
        self._inotify: _Inotify | None = None

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()
        os.close(self._read_end)
        os.close(self._write_end)

    @property
    def uses_inotify(self) -> bool:
        """Whether inotify ends a `wait` at every change after the last `follow`."""
        return self._inotify is not None

    def wake(self) -> None:
        """End the current `wait`, or the next one. Any thread may call this inside the context."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so a wait will end
            os.write(self._write_end, b"\0")

    def follow(self) -> None:
        """Watch the existing versions. Called before each poll, so that no change is missed."""
        if self._inotify is not None and not self._inotify.is_there:
            self._drop()
        if self._inotify is None and self._path.is_dir():
            if self._is_local is None:
                self._is_local = file_system(self._path) in _OF_ONE_HOST
            self._inotify = _open_inotify(self._path) if self._is_local else None
        if self._inotify is not None:
            try:
                self._inotify.follow(
                    entry.name for entry in os.scandir(self._path) if number_of(entry.name) is not None
                )
            except OSError:  # the directory was deleted, or the kernel has no watches left
                self._drop()

    def wait(self, at_most: timedelta | None = None) -> None:
        """Wait for a change, for `wake`, or for the next poll; `at_most` limits the time."""
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.descriptor, select.POLLIN)
        every = POLL_EVERY if self._inotify is None else POLL_ANYWAY
        longest = every if at_most is None else min(every, at_most)
        poll.poll(longest.total_seconds() * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, _READ_BYTES)
        if self._inotify is not None:
            self._inotify.clear()

    def _drop(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class _Inotify:
    """Watches renames into a directory, and into the followed directories in it."""

    def __init__(self, libc: ctypes.CDLL, path: Path) -> None:
        """Raises OSError where the kernel has no watches left."""
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
        """Follow the directories of these names, and no others."""
        followed_names = set(names)
        self._followed = {name: watch for name, watch in self._followed.items() if name in followed_names}
        for name in followed_names - self._followed.keys():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._followed[name] = self._add(self._path / name)

    def clear(self) -> None:
        """Discard the pending events: one poll covers all of them."""
        while True:
            try:
                events = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, offset)
                offset += _EVENT.size + length
                if watch == self._root and mask & _IGNORED:
                    self.is_there = False

    def _add(self, path: Path) -> int:
        watch: int = self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), _MOVED_TO | _ONLY_DIRECTORY)
        _check(watch)
        return watch


def file_system(path: Path) -> str:
    """Return the type of a path's file system, such as `ext4`; "" where the system does not report it."""
    real = path.resolve()
    folders = {real, *real.parents}
    mounts = [(len(folder.parts), kind) for folder, kind in _mounts() if folder in folders]
    return max(mounts, key=lambda mount: mount[0])[1] if mounts else ""


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield mount points and file system types, the newest first: it hides earlier ones of the same path."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in reversed(lines):
        before, _, after = line.partition(" - ")
        mount_point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        yield Path(mount_point), after.partition(" ")[0]


def _open_inotify(path: Path) -> _Inotify | None:
    """Return the inotify of a directory; None where the system has none, or no watches left."""
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
