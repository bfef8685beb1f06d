"""Takes what is erased out of all checkpoints that lie on the disk, and out of the disk tier's files."""

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
from replay.erasure.erased_events import ErasedEvents
from replay.tiers.disk import DiskTier
from replay.tiers.disk_files import all_files, is_aside

log = logging.getLogger(__name__)


@dataclass
class Erased:
    """What was done.

    Attributes:
        checkpoints: how many were rewritten.
        named: the slots that checkpoints name afterwards, by the id of the tier's file.
    """

    checkpoints: int = 0
    named: dict[str, NDArray[np.int64]] = field(default_factory=dict)


class Eraser:
    """Used while no checkpoint is written or deleted, by whoever holds the state directory."""

    def __init__(self, checkpoints: Checkpoints, folder: Path, erased: ErasedEvents) -> None:
        """Take the checkpoints, the folder of the disk tier's files, and what is erased."""
        self._checkpoints = checkpoints
        self._folder = folder
        self._erased = erased
        self._known: dict[str, tuple[int, str, str]] = {}

    def run(self, current: str | None = None) -> Erased:
        """Rewrite all checkpoints that have erased events; a checkpoint of which that cannot be told is deleted.

        Done again after a crash it does what is left.

        Args:
            current: id of the file that a store is at work in, which erases there itself what no checkpoint names.

        Raises:
            OSError: something cannot be read or written, or all checkpoints are damaged: one of them may be put back by
                a person, and without any the next start would begin anew.
        """
        self._checkpoints.delete_set_aside()
        done, damaged, whole = Erased(), dict[int, Exception](), 0
        for number in self._checkpoints.numbers():
            try:
                self._rewrite(self._checkpoints.manifest(number), done)
                whole += 1
            except (CheckpointError, DamagedError) as exc:
                damaged[number] = exc
        if damaged and not whole:
            raise OSError(
                f"all checkpoints are damaged, and are deleted once there is a whole one: {max(damaged.items())[1]}"
            )
        for number, damage in damaged.items():
            log.error("%s; it is deleted, since what was erased may be in it", damage)
            self._checkpoints.delete(number)
        for path in all_files(self._folder):
            _erase_unnamed(path, done.named, current)
        return done

    def _rewrite(self, manifest: CheckpointManifest, done: Erased) -> None:
        if manifest.format != FORMAT:
            log.error(
                "checkpoint %d is of another release, and what was erased may be in it; delete it", manifest.number
            )
            return
        self._checkpoints.sweep(manifest)
        tensors, state = self._checkpoints.open(manifest)
        for name in manifest.files:
            if part_of(name).startswith(SEGMENT) and part_of(name) not in tensors:
                self._checkpoints.remove(manifest.number, name)
        changed = erased_parts(tensors, state, self._erased)
        file = state.get("replay", {}).get("file")
        if changed:
            whole = {part: self._whole(manifest, part) for part in changed}
            lost = {part for part, each in whole.items() if each is None}
            tensors = {part: each for part, each in tensors.items() if part not in lost}
            verified = {**tensors, **{part: each for part, each in whole.items() if each is not None}}
            changed = erased_parts(verified, state, self._erased)
            self._checkpoints.replace(manifest, changed, self._known)
            tensors = {**tensors, **changed}
            done.checkpoints += 1
        if file is not None:
            before = done.named.get(file[1], np.empty(0, np.int64))
            done.named[file[1]] = np.union1d(before, named_slots(tensors, state))

    def _whole(self, manifest: CheckpointManifest, part: str) -> Tensors | None:
        """Read a part that has its digest; a segment without it is deleted, since a checkpoint can do without: None."""
        try:
            return self._checkpoints.part(manifest.number, part)
        except CheckpointError as exc:
            if not part.startswith(SEGMENT):
                raise
            log.error("%s; it is deleted, since what was erased is in it", exc)  # noqa: TRY400
            self._checkpoints.remove(manifest.number, self._checkpoints.name(manifest.number, part))
            return None


def _erase_unnamed(path: Path, named: Mapping[str, NDArray[np.int64]], current: str | None) -> None:
    """Overwrite all slots of a disk tier's file that no checkpoint names, but for the file with the id `current`.

    What is aside stays as it is, as checkpoints do that were moved away, unless its checkpoints are back.
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
