"""Opens a join with its file, and restores the events of a checkpoint into it.

Legend: H events of a checkpoint, n events of a chunk.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency
from ingest.events.schema import Schema
from learner.labels.join_checkpoint import JoinContents, JoinSnapshots
from learner.labels.label_join import JoinOptions, LabelJoin
from learner.labels.payload_file import NO_SLOT, PayloadFile
from learner.labels.waiting_events import WaitingEvents, row_fields
from learner.labels.waiting_table import row_identity
from learner.state_dir.checkpoint import RANK, Checkpoint
from replay.row_layout import RowLayout
from replay.snapshot import TierRef
from replay.tiers.disk import DiskTier
from replay.tiers.disk_factory import open_named
from replay.tiers.disk_files import FileUse, all_files, check_mounted, discard_unnamed, is_aside, make_way, next_path

SETTING = "stream.labels"
_USE = FileUse(
    setting=SETTING,
    unread="; no event that waited for its label is trained on",
    unwritten="; events wait for their labels in memory",
    contents="the events that wait for labels are in",
)
_CHUNK = 1024
_CHUNK_BYTES = 2**24
"""Rows that are read at once, and the bytes that these have at most."""

Rows = tuple[Tensor, NDArray[np.bool_]]
"""Rows of n events, uint8 `[n, R]`, and which are undamaged, bool `[n]`."""
_FEWEST = 64
"""Slots that a file has at least."""

log = logging.getLogger(__name__)


def label_folder(state_dir: Path) -> Path:
    """Return the folder of the files of a join."""
    return state_dir / "labels" / RANK


def open_join(
    options: JoinOptions,
    schema: Schema,
    output_shape: Sequence[int],
    folder: Path,
    checkpoint: tuple[int, Checkpoint] | None,
    *,
    first: bool,
) -> LabelJoin:
    """Open a join, and restore the checkpoint if it has the state of one.

    Args:
        options: the settings.
        schema: of the events.
        output_shape: of the model's output for one event.
        folder: of the join's files, and of no others.
        checkpoint: to restore, without erased events, after its number.
        first: whether no checkpoint names an event of the join, so that its files are not needed.

    Raises:
        SettingsError: the file is missing or cannot be created, or the settings do not fit the checkpoint.
        DependencyError: the file cannot be read now.
    """
    if first:
        make_way(folder, SETTING)
    layout = RowLayout(row_fields(schema, tuple(output_shape)))
    slots = DiskTier.slots_in(options.bytes, layout.row_bytes)
    if slots < _FEWEST:
        raise SettingsError(
            f"stream.labels.bytes = {options.bytes} has space for {slots} events of {layout.row_bytes} bytes, and the "
            f"least is {_FEWEST}; raise it"
        )
    contents = None if checkpoint is None else JoinContents.of(checkpoint[1])
    before = None if contents is None or checkpoint is None else _named_file(folder, contents, checkpoint[0], layout)
    same = before is not None and before.slots == slots
    with contextlib.ExitStack() as opened:
        if before is not None and not same:
            opened.callback(before.close)
        tier = before if before is not None and same else _new_file(folder, layout, slots)
        events = WaitingEvents(layout, PayloadFile(tier))
        join = LabelJoin(options, schema, tuple(output_shape), events)
        if contents is not None:
            try:
                _restore(join.snapshots, events.file, contents, before, same=same)
            except BaseException:
                join.close()
                raise
    join.snapshots.discard_later([path for path in all_files(folder) if path != tier.path and not is_aside(path)])
    return join


def _new_file(folder: Path, layout: RowLayout, slots: int) -> DiskTier:
    return DiskTier.create(next_path(folder), layout.row_bytes, slots, use=_USE)


def _named_file(folder: Path, contents: JoinContents, number: int, layout: RowLayout) -> DiskTier | None:
    """Open the file that checkpoint `number` names; return None where it is missing and the checkpoint has the rows."""
    tier: DiskTier | None = None
    try:
        stamp = None if contents.rows is None else contents.state["stamp"]
        tier = open_named(folder, TierRef(*contents.state["file"]), number, use=_USE, stamp=stamp)
    except SettingsError as exc:
        if contents.rows is None:
            raise
        check_mounted(folder, SETTING)
        discard_unnamed(folder, SETTING)
        log.warning("%s", exc)
        log.warning("its %d events are restored from checkpoint %d", len(contents.entries), number)
    size = contents.state["row_bytes"] if tier is None else tier.row_bytes
    if size != layout.row_bytes:
        if tier is not None:
            tier.close()
        raise SettingsError(
            "the events that wait for labels have other columns than [schema] and the model's output declare; put "
            "those back, or start empty by moving the checkpoints away"
        )
    return tier


def _restore(
    snapshots: JoinSnapshots, file: PayloadFile, contents: JoinContents, before: DiskTier | None, *, same: bool
) -> None:
    """Restore the events of a checkpoint.

    Args:
        snapshots: of the join.
        file: of the join.
        contents: of the checkpoint.
        before: the file that it names; None: it is missing, and the checkpoint has the payload.
        same: whether `file` is that one, so that no payload is copied.
    """
    entries, memory = contents.entries, contents.tensors["memory"].numpy()
    retired, number = contents.tensors["retired"].numpy(), int(contents.state["checkpoint"])
    same_slots = same or (before is None and int(entries["slot"].max(initial=NO_SLOT)) < file.slots)
    if same_slots:
        # No checkpoint names a retired extent of a new file.
        file.restore(entries["slot"], retired if same else retired[:0], number, memory)
        if not same:
            _rewrite(entries, _reader(contents, None), file)
    else:
        if len(entries) > file.slots:
            raise SettingsError(
                f"stream.labels.bytes has space for {file.slots} events, and {len(entries)} wait for labels; raise it"
            )
        file.restore(entries["slot"][:0], retired[:0], number, memory[:0])
        entries = entries.copy()
        source = None
        if before is not None:
            source = PayloadFile(before)
            source.restore(entries["slot"], retired[:0], number, memory)
        _copy(entries, _reader(contents, source), file)
        log.info("stream.labels.bytes has changed: the events that wait for labels are in a new file")
    snapshots.restore(contents, entries, same_slots=same_slots)


def _reader(contents: JoinContents, source: PayloadFile | None) -> Callable[[slice], Rows]:
    """Return a function that reads the payload of a slice of H events, from a file or from the checkpoint."""

    def read(part: slice) -> Rows:
        events = contents.entries[part]
        with away_is_dependency(SETTING):
            if source is not None:
                identity = row_identity(events["partition"], events["offset"], events["key"])
                return source.read(events["slot"], identity)
            assert contents.rows is not None
            return contents.rows.read(np.arange(part.start, part.start + len(events)))

    return read


def _copy(entries: NDArray[np.void], read: Callable[[slice], Rows], file: PayloadFile) -> None:
    """Copy the rows of H events to another file, and set their slots; those of damaged rows are lost."""
    for part, events, identity in _chunks(entries, file.row_bytes):
        rows_nR, valid = read(part)
        events["slot"] = NO_SLOT
        events["slot"][valid] = file.append(identity[valid], rows_nR.numpy()[valid])


def _rewrite(entries: NDArray[np.void], read: Callable[[slice], Rows], file: PayloadFile) -> None:
    """Write the rows of H events into their slots of a new file; damaged ones are found when they are read."""
    for part, events, identity in _chunks(entries, file.row_bytes):
        rows_nR, valid = read(part)
        valid &= events["slot"] >= 0
        with away_is_dependency(SETTING):
            file.rewrite(events["slot"][valid], identity[valid], rows_nR.numpy()[valid])


def _chunks(entries: NDArray[np.void], row_bytes: int) -> Iterator[tuple[slice, NDArray[np.void], NDArray[np.uint64]]]:
    """Yield slices of events with views of them and what their checksums depend on."""
    count = max(1, min(_CHUNK, _CHUNK_BYTES // row_bytes))
    for begin in range(0, len(entries), count):
        part = slice(begin, begin + count)
        events = entries[part]
        yield part, events, row_identity(events["partition"], events["offset"], events["key"])
