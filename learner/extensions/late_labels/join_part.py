"""The join's part of checkpoints: it is captured between two steps, and restored when the join is opened.

`part_formats.py` has the layout. The payload is in the file that the part names, which is made durable before the
checkpoint is written.

Legend: H events of a checkpoint, n events of a chunk.
"""

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.checkpoints.part_formats import KEPT, NO_SLOT, WAITING, WAITING_EVENTS, WAITS
from anabranch.learner.checkpoints.parts import CapturedPart, CheckpointPart, PackedPart
from anabranch.learner.extensions.late_labels.label_join import LabelJoin
from anabranch.learner.extensions.late_labels.payload_file import PayloadFile, read_rows
from anabranch.learner.extensions.late_labels.waiting_events import WaitingEvents, row_fields, row_identity
from anabranch.replay.checkpoint import read_in_chunks
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.row_source import RowSource, TierRows
from anabranch.replay.segments import Segment, Tensors
from anabranch.replay.snapshot import StoreDelta, TierRef
from anabranch.replay.tiers.disk import DiskTier, open_named
from anabranch.replay.tiers.disk_files import (
    FileUse,
    all_files,
    check_mounted,
    discard,
    discard_unnamed,
    is_aside,
    make_way,
    next_path,
)

_SLOTS_AT_ONCE = 4096
"""Slots that are overwritten between two steps."""

_Segments = tuple[Sequence[Segment], Sequence[Segment]]
"""Those of events, and those of labels."""


SETTING = "stream.labels"
_USE = FileUse(
    setting=SETTING,
    unread="; no event that waited for its label is trained on",
    unwritten="; events wait for their labels in memory",
    contents="the events that wait for labels are in",
)
_FEWEST = 64
"""Slots that a file has at least."""


log = logging.getLogger(__name__)


@dataclass
class CapturedJoin(CapturedPart):
    """The state of a join at a step boundary, which a checkpoint writes while the join is in use."""

    state: dict[str, Any]
    tensors: dict[str, Tensor]
    changes: tuple[StoreDelta, StoreDelta]
    """Of events and of labels, since the last checkpoint that was written."""
    segments: _Segments
    """Those of the last checkpoint; after `pack` those of this one."""
    tier: DiskTier
    """The file of the payload."""

    @override
    def pack(self, earlier: Checkpoints, oldest: int = 0) -> PackedPart:
        state, (events, labels), (before, kept) = self.state, self.changes, self.segments
        self.tier.mark_intact(state["checkpoint"], state["stamp"], oldest)
        self.tier.sync()
        name = WAITING_EVENTS.name
        packed = PackedPart(name, {**state, KEPT.key: []}, {name: self.tensors})
        if (size := state["row_bytes"]) is not None:
            memory = self.tensors["memory"].numpy()
            events = replace(events, rows=lambda entries: _payload(entries, self.tier, memory))
        before = packed.add(WAITS, before, events, earlier, size or 0)
        kept = packed.add(KEPT, kept, labels, earlier) if len(self.tensors["label.state"]) else ()
        self.segments = before, kept
        return packed

    @override
    def mark_named(self) -> None:
        self.tier.mark_named()


class JoinContents:
    """The join's part of a checkpoint that was read, which has it.

    Attributes:
        entries: the H events, WAITING `[H]`.
        present: which events of the checkpoint these are, bool: those of damaged segments are lost.
        parts: all parts of the checkpoint; damaged segments are absent.
        tensors: of the part.
        state: of the part.
        segments: of the checkpoint.
        rows: the payload of the events, if the checkpoint has it; read where the file is missing.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.parts = checkpoint.tensors
        self.tensors: Tensors = checkpoint.tensors[WAITING_EVENTS.name]
        self.state: dict[str, Any] = checkpoint.state[WAITING_EVENTS.name]
        self.segments = WAITS.of(self.tensors, self.state)
        self.entries, self.present = WAITS.held(self.segments, self.parts, WAITING)
        self.rows: RowSource | None = WAITS.rows(checkpoint, self.segments, self.state["row_bytes"])


class JoinPart(CheckpointPart):
    """The join's part of checkpoints, and what restores it; used by the loop's thread."""

    format = WAITING_EVENTS

    def __init__(self, join: LabelJoin, key: str | None, *, complete: bool) -> None:
        """Take the join, the name of the field by which labels find their events, and whether checkpoints have the
        payload."""
        self.join, self._key, self._complete = join, key, complete
        self._segments: _Segments = (), ()
        """Those of the last checkpoint, of events and labels."""
        self._captured: CapturedJoin | None = None
        self._restored = 0
        """The number of the restored checkpoint."""
        self.old_files: Sequence[Path] = ()
        """Files to remove once no checkpoint of an earlier process is left: only those name them."""

    @override
    def is_full(self) -> bool:
        return self.join.payload.needs_checkpoint

    @override
    def capture(self, number: int) -> CapturedJoin:
        events, labels, file = self.join.events, self.join.labels, self.join.payload
        changed_events, ids = events.begin_snapshot(number)
        changed_labels, label_ids = labels.begin_snapshot(number)
        position = np.zeros(int(ids.max(initial=-1)) + 1, np.int32)
        position[ids] = np.arange(len(ids))
        tensors = {
            "state": torch.from_numpy(events.state[ids]),
            "retired": torch.from_numpy(file.extents.begin_snapshot(number)),
            "memory": torch.from_numpy(file.memory.copy()),
            "label.state": torch.from_numpy(labels.state[label_ids]),
            **self.join.decisions.tensors(position),
        }
        state = {
            "counts": asdict(self.join.counts),
            "key": self._key,
            "own_keys_of_labels": labels.own_keys,
            "checkpoint": number,
            "file": [file.tier.file.name, file.tier.file.id],
            "row_bytes": file.tier.row_bytes if self._complete else None,
            "stamp": uuid.uuid4().hex[:16],
        }
        changes = changed_events, changed_labels
        self._captured = CapturedJoin(state, tensors, changes, self._segments, file.tier)
        return self._captured

    @override
    def end(self, oldest: int | None, *, written: bool) -> None:
        self.join.payload.extents.end_snapshot(oldest)
        if written and self._captured is not None:
            self._segments = self._captured.segments
        else:
            self.join.events.not_written()
            self.join.labels.not_written()
            self._segments = (), ()
        self._captured = None
        if oldest is not None and oldest > self._restored:
            for path in self.old_files:
                discard(path)
            self.old_files = ()

    @property
    @override
    def file(self) -> TierRef:
        return self.join.payload.tier.file

    @override
    def begin_overwrite(self) -> None:
        events = self.join.events
        self.join.payload.begin_overwrite(events["slot"][events.ids()])

    @override
    def overwrite(self, named: NDArray[np.int64]) -> Iterator[None]:
        return self.join.payload.overwrite(named, _SLOTS_AT_ONCE)

    @override
    def sync(self) -> None:
        self.join.payload.tier.sync()

    def restore(self, contents: JoinContents, named: DiskTier | None) -> None:
        """Restore a checkpoint.

        Args:
            contents: the join's part of it.
            named: the file that it names, which may be that of the join; None: it is missing, and the checkpoint has
                the payload.

        Raises:
            SettingsError: events wait, and labels had another key; or the file of the join is too small.
            DependencyError: the payload cannot be read or written now.
        """
        tensors, state, present, entries = contents.tensors, contents.state, contents.present, contents.entries
        if len(entries) and state["key"] != self._key:
            raise SettingsError(
                f'stream.labels.key: {len(entries)} events wait for labels of the key "{state["key"]}", which is '
                f'"{self._key}" now; take "{state["key"]}", or start empty by moving the checkpoints away'
            )
        self._restored = int(state["checkpoint"])
        file, retired, memory = self.join.payload, tensors["retired"].numpy(), tensors["memory"].numpy()
        if named is file.tier:
            file.restore(entries["slot"], retired, self._restored, memory)
            same_slots = True
        else:
            # No checkpoint names a retired extent of a new file.
            same_slots = named is None and int(entries["slot"].max(initial=NO_SLOT)) < file.slots
            used, memory_then = (entries, memory) if same_slots else (entries[:0], memory[:0])
            file.restore(used["slot"], retired[:0], self._restored, memory_then)
            rows = contents.rows if named is None else _payload(entries, named, memory)
            assert rows is not None
            entries = self._copied(entries, rows, same_slots=same_slots)
        changes = same_slots and bool(present.all()) and (state["row_bytes"] is not None) == self._complete
        states = tensors["state"].numpy()[present]
        numbers = np.full(len(present), -1, np.int32)
        numbers[present] = self.join.events.restore(self._restored if changes else None, entries, states)
        self.join.decisions.restore(tensors, numbers)
        kept = self._restore_labels(contents) if state["key"] == self._key else ()
        for name, value in state["counts"].items():
            setattr(self.join.counts, name, value)
        self.join.counts.damaged += int(np.count_nonzero(~present))
        self._segments = (contents.segments if changes else ()), kept

    def _copied(self, entries: NDArray[np.void], rows: RowSource, *, same_slots: bool) -> NDArray[np.void]:
        """Write the rows of H events to the file, and return the events with their slots there."""
        entries, file = entries.copy(), self.join.payload
        if not same_slots and len(entries) > file.slots:
            raise SettingsError(
                f"stream.labels.bytes has space for {file.slots} events, and {len(entries)} wait for labels; raise it"
            )
        with away_is_dependency(SETTING):
            for chunk, rows_nR, valid in read_in_chunks(rows, np.arange(len(entries))):
                slot, identity = entries["slot"][chunk], row_identity(entries[chunk])
                if same_slots:  # damaged ones are found when they are read
                    valid &= slot >= 0
                    file.tier.write(slot[valid].astype(np.int64), identity[valid], rows_nR[valid])
                else:  # those of damaged rows are lost
                    slot[:] = NO_SLOT
                    slot[valid] = file.append(identity[valid], rows_nR[valid])
        if not same_slots:
            log.info("stream.labels.bytes has changed: the events that wait for labels are in a new file")
        return entries

    def _restore_labels(self, contents: JoinContents) -> Sequence[Segment]:
        """Restore the labels of a checkpoint, and return their segments if the next one has the changes since."""
        segments = KEPT.of(contents.tensors, contents.state)
        entries, present = KEPT.held(segments, contents.parts, self.join.labels.entry)
        states = contents.tensors["label.state"].numpy()[present]
        number = self._restored if present.all() else None
        return segments if self.join.labels.restore(number, entries, states) else ()


def open_join(
    settings: LabelStreamSettings,
    schema: Schema,
    record_shape: Sequence[int],
    folder: Path,
    checkpoint: tuple[int, Checkpoint] | None,
    *,
    first: bool,
    complete: bool = False,
) -> JoinPart:
    """Open a join, restore the checkpoint if it has the state of one, and return its part of checkpoints.

    Args:
        settings: `[stream.labels]`.
        schema: of the events.
        record_shape: of what is predicted of one event.
        folder: of the join's files, and of no others.
        checkpoint: to restore, without erased events, after its number.
        first: whether no checkpoint names an event of the join, so that its files are not needed.
        complete: whether checkpoints have the payload too, for a host without the file.

    Raises:
        SettingsError: the file is missing or cannot be created, or the settings do not fit the checkpoint.
        DependencyError: the file cannot be read now.
    """
    if first:
        make_way(folder, SETTING)
    layout = RowLayout(row_fields(schema, tuple(record_shape)))
    slots = DiskTier.slots_in(int(settings.bytes), layout.row_bytes)
    if slots < _FEWEST:
        raise SettingsError(
            f"stream.labels.bytes = {int(settings.bytes)} has space for {slots} events of {layout.row_bytes} bytes, "
            f"and the least is {_FEWEST}; raise it"
        )
    has_join = checkpoint is not None and WAITING_EVENTS.name in checkpoint[1].tensors
    contents = JoinContents(checkpoint[1]) if checkpoint is not None and has_join else None
    named = None if contents is None or checkpoint is None else _named_file(folder, contents, checkpoint[0], layout)
    with contextlib.ExitStack() as files:
        if named is not None:
            files.callback(named.close)
        if named is not None and named.slots == slots:
            tier = named
        else:
            tier = DiskTier.create(next_path(folder), layout.row_bytes, slots, use=_USE)
            files.callback(tier.close)
        events = WaitingEvents(layout, PayloadFile(tier), own_keys=schema.join_column != "key_hash")
        part = JoinPart(LabelJoin(settings, schema, tuple(record_shape), events), schema.join_key, complete=complete)
        if contents is not None:
            part.restore(contents, named)
        files.pop_all()
    if named is not None and named is not tier:
        named.close()
    part.old_files = [path for path in all_files(folder) if path != tier.path and not is_aside(path)]
    return part


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


def _payload(events: NDArray[np.void], tier: DiskTier, memory: NDArray[np.uint8]) -> TierRows:
    """Return the rows of events, WAITING `[n]`, of which those in memory are in a copy of that; read in any thread."""
    return TierRows(
        tier.row_bytes,
        events["slot"].astype(np.int64),
        row_identity(events),
        lambda slots, identity: read_rows(tier, memory, slots.astype(np.int32), identity),
    )
