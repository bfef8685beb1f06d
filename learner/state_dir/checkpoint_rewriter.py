"""Replaces files of checkpoints that are written: only erasures do this.

A part without the erased events is written as <part>.<n>.safetensors, then the manifest is replaced, then the old file
is deleted.
"""

from collections.abc import Mapping
from itertools import count

import msgspec
from torch import Tensor

from learner.state_dir.checkpoint import RANK, SUFFIX, CheckpointManifest, Checkpoints, write_rows, write_tensors
from learner.state_dir.folders import MANIFEST, Folder
from learner.state_dir.manifest_directory import encode_manifest
from replay.row_source import RowSource


class CheckpointRewriter:
    """Replaces and removes files of checkpoints. A file that several checkpoints share is written once.

    Used while no checkpoint is written or deleted. All methods raise OSError.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._written: dict[tuple[str, str], tuple[int, str, str]] = {}
        """Checkpoint, name and digest of each new file, by its part and the digest of the old file: those of two parts
        may be equal, and not have the same events erased."""

    def replace(
        self,
        manifest: CheckpointManifest,
        parts: Mapping[str, Mapping[str, Tensor]],
        rows: Mapping[str, RowSource] | None = None,
    ) -> None:
        """Replace parts of a checkpoint, and parts with rows; a crash leaves the old checkpoint or the new one.

        The content of a part that `has_written` is ignored.
        """
        rows = rows or {}
        folder, files = self._checkpoints.folder(manifest.number), dict(manifest.files)
        for part in [*parts, *rows]:
            old = self._checkpoints.name(manifest.number, part)
            digest, name = files.pop(old), _unused_name(folder, part)
            if (same := self._written.get((part, digest))) is not None:
                number, other, files[name] = same
                folder.link(name, self._checkpoints.folder(number), other)
            else:
                new = write_rows(folder, name, rows[part]) if part in rows else write_tensors(folder, name, parts[part])
                files[name] = new
                self._written[part, digest] = manifest.number, name, files[name]
        changed = msgspec.structs.replace(manifest, files=files)
        folder.replace(MANIFEST, encode_manifest(changed))
        self.sweep(changed)

    def has_written(self, manifest: CheckpointManifest, part: str) -> bool:
        """Return whether another checkpoint has this part too, and the part was replaced there."""
        return (part, manifest.files[self._checkpoints.name(manifest.number, part)]) in self._written

    def sweep(self, manifest: CheckpointManifest) -> None:
        """Delete the files in a checkpoint's directory that are not in its manifest."""
        folder = self._checkpoints.folder(manifest.number)
        for name in folder.files().keys() - manifest.files - {MANIFEST}:
            folder.remove(name)

    def remove(self, number: int, name: str) -> None:
        """Delete a file of a checkpoint, if it exists; the manifest keeps its name."""
        self._checkpoints.folder(number).remove(name)


def _unused_name(folder: Folder, part: str) -> str:
    """Return a name for a part that no file has yet."""
    taken = folder.files()
    return next(name for n in count(1) if (name := f"{RANK}/{part}.{n}{SUFFIX}") not in taken)
