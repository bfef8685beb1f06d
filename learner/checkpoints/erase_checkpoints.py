"""Removes erased events from checkpoints: from each that is loaded, and from all on the disk, with the files of rows.

Only erasures change a checkpoint: a part without the erased events is written as <part>.<n>.safetensors, then the
manifest is replaced, then the old file is deleted.
"""

import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError
from anabranch.core.temporary_files import remove_left
from anabranch.ingest.events.identity import partition_base
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.format import (
    ERASED,
    EXTENSION,
    FORMAT,
    RANK,
    ROWS,
    SEGMENT,
    SUFFIX,
    Checkpoint,
    CheckpointManifest,
    Checkpoints,
    part_of,
    rows_part,
    write_rows,
    write_tensors,
)
from anabranch.learner.checkpoints.part_formats import FORMATS, segments_of
from anabranch.learner.checkpoints.rows_file import ErasedRows
from anabranch.learner.errors import CheckpointError, MisfitError
from anabranch.learner.state_dir.folders import COPIES, MANIFEST, REBUILD, Folder, discard_partial, encode_manifest
from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.erasure.erasure_log import Applied, ErasureLog, now
from anabranch.replay.row_source import JoinedRows, RowSource
from anabranch.replay.segments import Tensors
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.disk_files import all_files, is_aside

IN_FILES = "disk"
"""The kind of tier whose files `erase` erases; the next start of a learner erases rows in others."""

log = logging.getLogger(__name__)


def without_erased(checkpoint: Checkpoint, erased: ErasedEvents) -> tuple[Checkpoint, tuple[int, int]]:
    """Return a checkpoint without erased events, and how many were removed: of all parts but one, and of that one, the
    holdout set."""
    before, state = checkpoint.tensors, checkpoint.state
    after = {**before, **erased_parts(before, state, erased)}
    events = sum(part.held(before, state) - part.held(after, state) for part in FORMATS if part.name in before)
    holdout = len(before["holdout"]["label"]) - len(after["holdout"]["label"]) if before.get("holdout") else 0
    return replace(checkpoint, tensors=after), (events, holdout)


def erased_parts(tensors: Mapping[str, Tensors], state: Mapping[str, Any], erased: ErasedEvents) -> dict[str, Tensors]:
    """Return the parts of a checkpoint that have erased events, without these events.

    Args:
        tensors: of the checkpoint, by part; lost segments are absent. Only tensors that are needed are read.
        state: of the checkpoint.
        erased: the erased events.
    """
    bases, changed = partition_bases(state), dict[str, Tensors]()
    for name in [each for each in tensors if each == "holdout" or each.startswith(EXTENSION)]:
        if not len(events := tensors[name]):
            continue
        covered = erased.covers(bases, {each: events[each].numpy() for each in ("partition", "offset", "key_hash")})
        if covered.any():
            stays = torch.from_numpy(~covered)
            changed[name] = {each: column[stays] for each, column in events.items()}
    for part in FORMATS:
        if part.name in tensors:
            changed |= part.without(tensors, state, lambda columns: erased.covers(bases, columns))
    return changed


def named_slots(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> dict[str, NDArray[np.int64]]:
    """Return the slots that a checkpoint refers to, by the id of their file."""
    files = [(part, part.file(state)) for part in FORMATS]
    return {file.id: part.named_slots(tensors, state) for part, file in files if file is not None}


def partition_bases(state: Mapping[str, Any]) -> NDArray[np.uint64]:
    """Return `partition_base` of each partition of a checkpoint, by its index."""
    names = [
        TopicPartition(row["topic"], row["partition"], row["incarnation"], row["history"]) for row in state["ledger"]
    ]
    return np.array([partition_base(name) for name in names], np.uint64)


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

    def __init__(self, checkpoints: Checkpoints, erased: ErasedEvents, keep: int = sys.maxsize) -> None:
        """`keep`: how many checkpoints, the newest, may refer to slots whose last event is unknown. Those that are kept
        beyond have the rows, and slots that they named may have other events, which must not stay.
        """
        self._checkpoints = checkpoints
        self._pruning = CheckpointPruning(checkpoints, keep)
        self._folders = [part.folder(checkpoints.path.parent) for part in FORMATS]
        self._erased = erased
        self._rewriter = CheckpointRewriter(checkpoints)

    def run(self, current: Collection[str] = ()) -> Erased:
        """Rewrite all checkpoints that have erased events, and delete damaged ones; can be repeated after a crash.

        Args:
            current: ids of the files that are in use; their users erase unreferenced slots themselves.

        Raises:
            OSError: a file cannot be read or written; or all checkpoints are damaged, and none is deleted, so that one
                can be restored.
        """
        try:
            return self._run(current)
        finally:
            self._checkpoints.storage.drop_copies()  # they have erased events
            for prefix in (COPIES, REBUILD):
                remove_left(prefix)
            discard_partial(self._checkpoints.path.parent)

    def _run(self, current: Collection[str]) -> Erased:
        self._checkpoints.storage.delete_set_aside()
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
            if (layout := segments_of(segment)) is not None and (part := rows_part(segment)) in parts:
                if self._rewriter.has_written(manifest, part):
                    rows[part] = JoinedRows(0, [])
                    continue
                try:
                    source = self._checkpoints.rows(manifest.number, part)
                except CheckpointError as exc:
                    log.error("%s; it is deleted, since it has erased events", exc)  # noqa: TRY400
                    self._remove(manifest, part)
                else:
                    rows[part] = ErasedRows(source, layout.erased(changed[segment]))
        return rows

    def _remove(self, manifest: CheckpointManifest, part: str) -> None:
        """Delete a part, and the rows of a segment, in which the erased events cannot be found without it.

        The manifest keeps their names.
        """
        parts = {part_of(name): name for name in manifest.files}
        for each in {part, rows_part(part)} & parts.keys() if part.startswith(SEGMENT) else {part}:
            self._checkpoints.folder(manifest.number).remove(parts[each])


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
        parts: Mapping[str, Tensors],
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


def _unused_name(folder: Folder, part: str) -> str:
    """Return a name for a part that no file has yet."""
    taken = folder.files()
    return next(name for n in count(1) if (name := f"{RANK}/{part}.{n}{SUFFIX}") not in taken)


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


def applied_to_all(checkpoints: Checkpoints, through: int) -> int:
    """Return the last record of `erasures.log`, at most `through`, that is applied to all checkpoints.

    0 while a checkpoint is damaged or of another release.
    """
    for number in checkpoints.numbers():
        try:
            manifest = checkpoints.manifest(number)
            if not manifest.begins:
                through = min(through, int(checkpoints.state(manifest).get(ERASED, 0)))
        except CheckpointError:
            return 0
    return through


def erase(checkpoints: Checkpoints, written: ErasureLog, keep: int, *, whole: bool) -> Applied:
    """Erase the events of all pending records from checkpoints and files, and append the result to the log.

    No learner runs meanwhile.

    Args:
        checkpoints: those of the state directory, whose lock the caller holds.
        written: the log.
        keep: as in `Eraser`.
        whole: whether no rows are stored elsewhere; if not, the records stay pending.

    Raises:
        SettingsError: no checkpoint can be used.
        DependencyError: a file cannot be read or written; the next start of a learner tries again.
    """
    state_dir = checkpoints.path.parent
    through = written.count
    erased = ErasedEvents(written.since(written.through))
    try:
        store, holdout = _counted(checkpoints, erased)
        Eraser(checkpoints, erased, keep).run()
        done = Applied(time=now(), through=through if whole else written.through, store=store, holdout=holdout)
        written.append(done)
    except OSError as exc:
        raise DependencyError(
            f"the erasure is in the log, but its events cannot be removed yet: {exc.filename or state_dir}: "
            f"{exc.strerror or exc}; the next start of the learner removes them"
        ) from exc
    return done


def _counted(checkpoints: Checkpoints, erased: ErasedEvents) -> tuple[int, int]:
    """Return how many events of the store and the holdout set are erased from the newest checkpoint."""
    try:
        newest = checkpoints.newest()
    except MisfitError:
        return 0, 0  # of another schema or release, and erased all the same
    return without_erased(newest[1], erased)[1] if newest is not None else (0, 0)
