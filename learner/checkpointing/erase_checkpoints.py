"""Removes erased events from all checkpoints on the disk, and from the disk tier's files."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError
from learner.checkpointing.without_erased import Tensors, erased_parts, named_slots
from learner.errors import CheckpointError
from learner.state_dir.checkpoint import FORMAT, SEGMENT, CheckpointManifest, Checkpoints, part_of
from learner.state_dir.checkpoint_rewriter import CheckpointRewriter
from replay.erasure.erased_events import ErasedEvents
from replay.tiers.disk import DiskTier
from replay.tiers.disk_files import all_files, is_aside

log = logging.getLogger(__name__)


@dataclass
class Erased:
    """The result of an erasure.

    Attributes:
        checkpoints: how many were rewritten.
        named: the slots that checkpoints refer to afterwards, by the id of the tier's file.
    """

    checkpoints: int = 0
    named: dict[str, NDArray[np.int64]] = field(default_factory=dict)


class Eraser:
    """Erases events from files. The caller holds the state directory, and writes or deletes no checkpoint meanwhile."""

    def __init__(self, checkpoints: Checkpoints, folder: Path, erased: ErasedEvents) -> None:
        """Take the checkpoints, the folder of the disk tier's files, and the erased events."""
        self._checkpoints = checkpoints
        self._folder = folder
        self._erased = erased
        self._rewriter = CheckpointRewriter(checkpoints)

    def run(self, current: str | None = None) -> Erased:
        """Rewrite all checkpoints that have erased events, and delete damaged ones; can be repeated after a crash.

        Args:
            current: id of the tier file that a store uses; the store itself erases its unreferenced slots.

        Raises:
            OSError: a file cannot be read or written; or all checkpoints are damaged, and none is deleted, so that one
                can be restored.
        """
        self._checkpoints.delete_set_aside()
        done, damaged, intact = Erased(), dict[int, Exception](), 0
        for number in self._checkpoints.numbers():
            try:
                self._rewrite(self._checkpoints.manifest(number), done)
                intact += 1
            except (CheckpointError, DamagedError) as exc:
                damaged[number] = exc
        if damaged and not intact:
            raise OSError(
                f"all checkpoints are damaged, and are deleted once there is an intact one: {max(damaged.items())[1]}"
            )
        for number, damage in damaged.items():
            log.error("%s; it is deleted, since it may have erased events", damage)
            self._checkpoints.delete(number)
        for path in all_files(self._folder):
            _erase_unnamed(path, done.named, current)
        return done

    def _rewrite(self, manifest: CheckpointManifest, done: Erased) -> None:
        if manifest.format != FORMAT:
            log.error("checkpoint %d is of another release, and may have erased events; delete it", manifest.number)
            return
        self._rewriter.sweep(manifest)
        tensors, state = self._checkpoints.open(manifest)
        for name in manifest.files:
            if part_of(name).startswith(SEGMENT) and part_of(name) not in tensors:
                self._rewriter.remove(manifest.number, name)
        if unverified := erased_parts(tensors, state, self._erased):
            for part in unverified:
                if (content := self._verified(manifest, part)) is not None:
                    tensors[part] = content
                else:
                    del tensors[part]
            changed = erased_parts(tensors, state, self._erased)
            self._rewriter.replace(manifest, changed)
            tensors |= changed
            done.checkpoints += 1
        if (file := state.get("replay", {}).get("file")) is not None:
            before = done.named.get(file[1], np.empty(0, np.int64))
            done.named[file[1]] = np.union1d(before, named_slots(tensors, state))

    def _verified(self, manifest: CheckpointManifest, part: str) -> Tensors | None:
        """Read a part and check its digest; delete a damaged segment, without which a checkpoint can be restored.

        Returns None for a damaged segment.
        """
        try:
            return self._checkpoints.part(manifest.number, part)
        except CheckpointError as exc:
            if not part.startswith(SEGMENT):
                raise
            log.error("%s; it is deleted, since it has erased events", exc)  # noqa: TRY400
            self._rewriter.remove(manifest.number, self._checkpoints.name(manifest.number, part))
            return None


def _erase_unnamed(path: Path, named: Mapping[str, NDArray[np.int64]], current: str | None) -> None:
    """Overwrite all slots of a disk tier's file that no checkpoint refers to, unless it is the file `current`.

    A file that was moved aside is left unchanged, like the checkpoints moved away with it, unless they are back.
    """
    try:
        tier = DiskTier.open(path)
    except DependencyError as exc:
        raise OSError(str(exc)) from exc
    except SettingsError as exc:
        log.warning("%s", exc)
        return
    try:
        if tier.id != current and (tier.id in named or not is_aside(path)):
            free = np.setdiff1d(np.arange(tier.slots), named.get(tier.id, np.empty(0, np.int64)))
            tier.erase(free)
            tier.sync()
    finally:
        tier.close()
