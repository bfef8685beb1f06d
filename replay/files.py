"""Directories that survive a crash of the machine."""

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that what was made or renamed in it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
