"""The state directory is its owner's alone: it holds events in clear."""

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.config.loader import Config

OTHERS = 0o077
"""The permissions of the group and of all others."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make what is written meanwhile readable by this user alone.

    The umask is the process's, child processes included, and is restored at the end.
    """
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def private_state(config: "Config") -> Iterator[None]:
    """As `private_files`, and close the state directory to others where that can be."""
    with private_files():
        if is_exposed(config) and is_own(config):
            _close_to_others(config)
        yield


def is_exposed(config: "Config") -> bool:
    """Return whether the state directory exists, and users other than its owner may read it."""
    return is_open_to_others(config.state_dir)


def is_open_to_others(path: Path) -> bool:
    """Return whether a file or folder exists, and users other than its owner may use it."""
    try:
        return bool(path.stat().st_mode & OTHERS)
    except OSError:
        return False


def is_own(config: "Config") -> bool:
    """Whether the state directory is this user's, and holds no more than the state: not the pipeline's folder."""
    try:
        mine = config.state_dir.stat().st_uid == os.geteuid()
    except OSError:
        return False
    return mine and not config.folder.resolve().is_relative_to(config.state_dir.resolve())


def _close_to_others(config: "Config") -> None:
    mode = stat.S_IMODE(config.state_dir.stat().st_mode) & ~OTHERS
    try:
        config.state_dir.chmod(mode)
    except OSError as exc:
        log.warning("%s holds events, and stays open to others: %s", config.state_dir, exc.strerror)
    else:
        log.info("%s holds events: it is closed to others than its owner", config.state_dir)
