"""Copies checkpoints into another state directory, with the rows that they name, while a learner may delete them."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anabranch.learner.checkpoints.format import CheckpointManifest, Checkpoints
from anabranch.learner.checkpoints.part_formats import FORMATS
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.replay.tiers.disk_files import find

_PIECE_BYTES = 1 << 24


def copy_checkpoint(
    source: Checkpoints, manifest: CheckpointManifest, target: Path, known: dict[str, Path]
) -> Mapping[str, Any]:
    """Copy the files of a checkpoint after a check of their digests, and return its state.

    `known`: copies by digest, which checkpoints share; those that are made are added.

    Raises:
        CheckpointError: a file is damaged.
        FileNotFoundError: the checkpoint was deleted meanwhile.
        OSError: a disk cannot be read or written.
    """
    folder = target / "checkpoints" / str(manifest.number)
    for name, digest in manifest.files.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy.hardlink_to(known[digest])
        except (KeyError, OSError):  # the first one, or the file system has no links
            shutil.copyfile(source.checked(manifest, name), copy)
            known[digest] = copy
    (folder / MANIFEST).write_bytes(source.folder(manifest.number).read(MANIFEST))
    copied = Checkpoints(target / "checkpoints", source.schema, 0)
    return copied.state(copied.manifest(manifest.number))


def copy_rows(states: Iterable[Mapping[str, Any]], state_dir: Path, target: Path) -> None:
    """Copy the files of rows that checkpoints with these states name.

    A slot is not written again while a checkpoint that names it is there: check afterwards that it still is. A file
    that is missing is left out: the checkpoint has the rows, or a learner refuses it.
    """
    for state in states:
        for part in FORMATS:
            if (file := part.file(state)) is None:
                continue
            path, copy = find(part.folder(state_dir), file), part.folder(target) / file.name
            if path.is_file() and not copy.exists():  # a tier of the user may have a folder of the name
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy_sparse(path, copy)


def copy_sparse(path: Path, copy: Path) -> None:
    """Copy the parts of a file that were ever written: files of rows are allocated in full, and may have few rows."""
    with path.open("rb") as source, copy.open("wb") as written:
        size = os.fstat(source.fileno()).st_size
        written.truncate(size)
        begin = 0
        while begin < size:
            begin, end = _data_from(source.fileno(), begin, size)
            while begin < end:
                piece = os.pread(source.fileno(), min(_PIECE_BYTES, end - begin), begin)
                if not piece:
                    return  # it was shortened meanwhile
                os.pwrite(written.fileno(), piece, begin)
                begin += len(piece)


def _data_from(descriptor: int, begin: int, size: int) -> tuple[int, int]:
    """Return the bounds of the next piece of a file that was ever written."""
    if not hasattr(os, "SEEK_DATA"):
        return begin, size
    try:
        data = os.lseek(descriptor, begin, os.SEEK_DATA)
        return data, os.lseek(descriptor, data, os.SEEK_HOLE)
    except OSError:  # there is none, or the file system does not say
        return (size, size) if begin else (0, size)
