"""The temporary folder of a rebuild, and those of rebuilds that were killed."""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from anabranch.core.failures import state_errors

_PREFIX = "anabranch-rebuild-"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Remove the folders of rebuilds that were killed, then yield an empty one, which is removed afterwards.

    A rebuild locks its folder before it writes there, and the kernel releases the lock when the process ends.

    Raises:
        DependencyError: the folder for temporary files cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with state_errors(f"{tempfile.gettempdir()} cannot be written"):
            _remove_left(Path(tempfile.gettempdir()))
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))
        with contextlib.suppress(OSError):  # a file system without such locks: nothing there is ever removed
            descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield scratch


def _remove_left(folder: Path) -> None:
    """Remove the folders of this user's rebuilds that no process has locked; an empty one may be about to be locked."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if any(path.iterdir()):
                    shutil.rmtree(path)
                    log.info("removed %s, which a rebuild that was killed had left", path)
            finally:
                os.close(descriptor)
