"""Writes files durably and atomically. Imports no torch: readers of reports need none."""

import os
from collections.abc import Iterable
from pathlib import Path

from anabranch.core.files import sync_directory

_SYNC_BYTES = 4_000_000
"""Bytes that are written before each fsync."""


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file in parts, with an fsync after each. A piece may be computed when it is written.

    On file systems that order data before their journal, the fsync of another file waits for all unsynced data: a
    version would wait for the megabytes of a checkpoint.
    """
    with path.open("wb") as file:
        unsynced = 0
        for piece in pieces:
            for begin in range(0, len(piece), _SYNC_BYTES):
                part = memoryview(piece)[begin : begin + _SYNC_BYTES]
                file.write(part)
                unsynced += len(part)
                if unsynced >= _SYNC_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    unsynced = 0
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically: readers see the old or the new content, and if `durable` also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if durable:
        write_durably(temporary, [content])
    else:
        temporary.write_bytes(content)
    temporary.replace(path)
    if durable:
        sync_directory(path.parent)
