"""Files that are there whole or not at all. Imports no torch: whoever only reads reports needs none."""

import os
from pathlib import Path

from anabranch.core.files import sync_directory

_AT_ONCE = 4_000_000
"""Bytes that are written before they are synced."""


def write_durably(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a file and fsync it, now and then on the way: what others sync meanwhile may wait for all that is unsynced.

    On file systems that order data before their journal, a version would wait for the megabytes of a checkpoint.
    """
    with path.open("wb") as file:
        unsynced = 0
        for piece in pieces:
            for begin in range(0, len(piece), _AT_ONCE):
                part = memoryview(piece)[begin : begin + _AT_ONCE]
                file.write(part)
                unsynced += len(part)
                if unsynced >= _AT_ONCE:
                    file.flush()
                    os.fsync(file.fileno())
                    unsynced = 0
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically: readers see the old or the new content, and if `durable` also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if durable:
        write_durably(temporary, content)
    else:
        temporary.write_bytes(content)
    temporary.replace(path)
    if durable:
        sync_directory(path.parent)
