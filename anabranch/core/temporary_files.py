"""Temporary files and folders. Imports little: the index process must start fast."""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from anabranch.core.failures import state_errors

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
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Remove the folders of a prefix that killed processes have left, then yield an empty one, which is removed later.

    A folder is locked before anything is written to it, and the kernel releases the lock when the process ends. No
    other prefix may begin with this one.

    Raises:
        DependencyError: the folder for temporary files cannot be written for now.
        SettingsError: there is none that can be written; TMPDIR selects it.
    """
    with contextlib.ExitStack() as stack:
        with state_errors("the folder for temporary files (TMPDIR) cannot be written"):
            _remove_left(prefix)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
        with contextlib.suppress(OSError):  # a file system without such locks: nothing there is ever removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder


def _remove_left(prefix: str) -> None:
    """Remove the folders of this user that no process has locked; an empty one may be about to be locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if any(path.iterdir()):
                    shutil.rmtree(path)
                    log.info("removed %s, which a process that was killed had left", path)
            finally:
                os.close(descriptor)
