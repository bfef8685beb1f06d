"""Files that are there whole or not at all. Imports no torch: whoever only reads reports needs none."""

import os
from pathlib import Path

from replay.files import sync_directory


def write_durably(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
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
