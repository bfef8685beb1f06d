"""Temporary files and folders. Imports little: the index process must start fast."""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from anabranch.core.failures import state_errors

_MARKER = ".anabranch-temporary"
"""Name of the file by which a temporary folder is known as one."""
_RANDOM = re.compile("[a-z0-9_]{8}")
"""What `mkdtemp` adds to a prefix."""

log = logging.getLogger(__name__)


def anonymous_file(size: int) -> int:
    """Create a file of `size` bytes without a name, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("anabranch-ring", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor


@contextlib.contextmanager
def temporary_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """Remove the folders of a prefix that killed processes have left, then yield a new one, which is removed later.

    It is readable by this user alone, and empty except for its marker: a file that is locked before anything else is
    written, and then has the folder's name. The kernel releases the lock when the process ends. No other prefix may
    begin with this one.

    Args:
        prefix: of the folder's name.
        within: the folder that it is made in; by default the one for temporary files.

    Raises:
        DependencyError: that folder cannot be written for now.
        SettingsError: it cannot be written; TMPDIR selects that for temporary files.
    """
    where = "the folder for temporary files (TMPDIR)" if within is None else f"{within}, for temporary files,"
    with contextlib.ExitStack() as stack:
        with state_errors(f"{where} cannot be written"):
            remove_left(prefix, within)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
            stack.callback(_remove, folder)
            descriptor = os.open(folder / _MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without locks: nothing there is ever removed
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, os.fsencode(folder.name))
        yield folder


def remove_left(prefix: str, within: Path | None = None) -> None:
    """Remove the temporary folders of a prefix, made by this user, that no process uses any more.

    Each has a name as `mkdtemp` gives, and the marker with that name: a folder that a person made, renamed or copied
    stays.
    """
    for path in (within or Path(tempfile.gettempdir())).iterdir():
        if not path.name.startswith(prefix) or _RANDOM.fullmatch(path.name.removeprefix(prefix)) is None:
            continue
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR((status := path.lstat()).st_mode) or status.st_uid != os.geteuid():
                continue
            descriptor = os.open(path / _MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(descriptor, len(path.name) + 1) == os.fsencode(path.name):
                    _remove(path)
                    log.info("removed %s, which a process that was killed had left", path)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a temporary folder, its marker last: what is left of it after an error or a crash is removed later."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _MARKER:
                path.unlink()
        shutil.rmtree(folder)
