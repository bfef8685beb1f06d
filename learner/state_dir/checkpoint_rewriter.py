"""Replaces files of checkpoints that are written: only erasures do this.

A part without the erased events is written as <part>.<n>.safetensors, then the manifest is replaced, then the old file
is deleted.
"""

from collections.abc import Mapping
from itertools import count

import msgspec
from torch import Tensor

from learner.state_dir.checkpoint import RANK, SUFFIX, CheckpointManifest, Checkpoints, write_tensors
from learner.state_dir.folders import MANIFEST, Folder
from learner.state_dir.manifest_directory import encode_manifest


class CheckpointRewriter:
    """Replaces and removes files of checkpoints. A file that several checkpoints share is written once.

    Used while no checkpoint is written or deleted. All methods raise OSError.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._written: dict[str, tuple[int, str, str]] = {}
        """Checkpoint, name and digest of each new file, by the digest of the old file."""

    def replace(self, manifest: CheckpointManifest, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace parts of a checkpoint; a crash leaves the old checkpoint or the new one."""
        folder, files = self._checkpoints.folder(manifest.number), dict(manifest.files)
        for part, tensors in parts.items():
            old = self._checkpoints.name(manifest.number, part)
            digest, name = files.pop(old), _unused_name(folder, part)
            if (same := self._written.get(digest)) is not None:
                number, other, files[name] = same
                folder.link(name, self._checkpoints.folder(number), other)
            else:
                files[name] = write_tensors(folder, name, tensors)
                self._written[digest] = manifest.number, name, files[name]
        changed = msgspec.structs.replace(manifest, files=files)
        folder.replace(MANIFEST, encode_manifest(changed))
        self.sweep(changed)

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
