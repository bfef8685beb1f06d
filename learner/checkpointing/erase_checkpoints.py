"""Removes erased events from all checkpoints on the disk, and from the files of the disk tier and of waiting events."""

import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError
from anabranch.core.temporary_files import remove_left
from learner.checkpointing.checkpoint_copy import REBUILD
from learner.checkpointing.checkpoint_pruning import CheckpointPruning
from learner.checkpointing.without_erased import Tensors, erased_in, erased_parts, named_slots
from learner.errors import CheckpointError
from learner.labels.opening import label_folder
from learner.object_storage.bucket_storage import FETCHED
from learner.object_storage.fetching import discard_partial
from learner.state_dir.checkpoint import FORMAT, ROWS, SEGMENT, CheckpointManifest, Checkpoints, part_of, rows_part
from learner.state_dir.checkpoint_rewriter import CheckpointRewriter
from learner.state_dir.rows_file import ErasedRows
from replay.erasure.erased_events import ErasedEvents
from replay.row_source import JoinedRows, RowSource
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

    def __init__(self, checkpoints: Checkpoints, folder: Path, erased: ErasedEvents, keep: int = sys.maxsize) -> None:
        """Take the checkpoints, the folder of the disk tier's files, and the erased events.

        `keep`: how many checkpoints, the newest, may refer to slots whose last event is unknown. Those that are kept
        beyond have the rows, and slots that they named may have other events, which must not stay.
        """
        self._checkpoints = checkpoints
        self._pruning = CheckpointPruning(checkpoints, keep)
        self._folders = folder, label_folder(checkpoints.path.parent)
        self._erased = erased
        self._rewriter = CheckpointRewriter(checkpoints)

    def run(self, current: Collection[str] = ()) -> Erased:
        """Rewrite all checkpoints that have erased events, and delete damaged ones; can be repeated after a crash.

        Args:
            current: ids of the files that a store and a join use, which erase their unreferenced slots themselves.

        Raises:
            OSError: a file cannot be read or written; or all checkpoints are damaged, and none is deleted, so that one
                can be restored.
        """
        try:
            return self._run(current)
        finally:
            self._checkpoints.drop_copies()  # they have erased events
            for prefix in (FETCHED, REBUILD):
                remove_left(prefix)
            discard_partial(self._checkpoints)

    def _run(self, current: Collection[str]) -> Erased:
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
        for path in (path for folder in self._folders for path in all_files(folder)):
            _erase_unnamed(path, done.named, current)
        return done

    def _rewrite(self, manifest: CheckpointManifest, done: Erased) -> None:
        if manifest.format != FORMAT:
            log.error("checkpoint %d is of another release, and may have erased events; delete it", manifest.number)
            return
        self._rewriter.sweep(manifest)
        tensors, state = self._checkpoints.open(manifest)
        for part in sorted(map(part_of, manifest.files)):
            if part.startswith((SEGMENT, ROWS)) and part not in tensors:
                self._remove(manifest, part)
        if unverified := erased_parts(tensors, state, self._erased):
            for part in unverified:
                if (content := self._verified(manifest, part)) is not None:
                    tensors[part] = content
                else:
                    del tensors[part]
            changed = erased_parts(tensors, state, self._erased)
            self._rewriter.replace(manifest, changed, self._rows_of(manifest, changed))
            tensors |= changed
            done.checkpoints += 1
        if not self._pruning.names_slots(manifest.number):
            return
        for file, slots in named_slots(tensors, state).items():
            done.named[file] = np.union1d(done.named.get(file, np.empty(0, np.int64)), slots)

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
            self._remove(manifest, part)
            return None

    def _rows_of(self, manifest: CheckpointManifest, changed: Mapping[str, Tensors]) -> dict[str, RowSource]:
        """Return the rows without those of erased events, for those segments among changed parts that have rows.

        Damaged rows are deleted: a checkpoint can be restored without them, from the tier or without their events.
        """
        parts, rows = {part_of(name) for name in manifest.files}, dict[str, RowSource]()
        for segment in changed:
            if segment.startswith(SEGMENT) and (part := rows_part(segment)) in parts:
                if self._rewriter.has_written(manifest, part):
                    rows[part] = JoinedRows(0, [])
                    continue
                try:
                    source = self._checkpoints.rows(manifest.number, part)
                except CheckpointError as exc:
                    log.error("%s; it is deleted, since it has erased events", exc)  # noqa: TRY400
                    self._remove(manifest, part)
                else:
                    rows[part] = ErasedRows(source, erased_in(segment, changed[segment]))
        return rows

    def _remove(self, manifest: CheckpointManifest, part: str) -> None:
        """Delete a part, and the rows of a segment, in which the erased events cannot be found without it."""
        parts = {part_of(name): name for name in manifest.files}
        for each in {part, rows_part(part)} & parts.keys() if part.startswith(SEGMENT) else {part}:
            self._rewriter.remove(manifest.number, parts[each])


def _erase_unnamed(path: Path, named: Mapping[str, NDArray[np.int64]], current: Collection[str]) -> None:
    """Overwrite all slots of a disk tier's file that no checkpoint refers to, unless it is one of `current`.

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
        if tier.id not in current and (tier.id in named or not is_aside(path)):
            free = np.setdiff1d(np.arange(tier.slots), named.get(tier.id, np.empty(0, np.int64)))
            tier.erase(free)
            tier.sync()
    finally:
        tier.close()
