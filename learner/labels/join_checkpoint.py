"""The part of a checkpoint with the events that wait for labels.

labels.safetensors               states of events and labels, decisions, retired extents, rows in memory, and one bit
                                 for each event or label of each segment
segment-labels-<n>.safetensors   some of the events added before checkpoint n, in order, without their payload
rows-labels-<n>.safetensors      with [storage], their payload
segment-kept-<n>.safetensors     likewise some of the labels that are kept

The payload is in the file that the part names; it is made durable before the checkpoint is written.

Legend: H events of a checkpoint.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import SettingsError
from learner.labels.decisions import Decisions
from learner.labels.join_counts import JoinCounts
from learner.labels.join_segments import KEPT_SEGMENT, LABEL_SEGMENT, PART, assembled, entries_of, segments_of
from learner.labels.kept_labels import KeptLabels
from learner.labels.payload_file import PayloadFile
from learner.labels.waiting_events import WaitingEvents
from learner.labels.waiting_table import WAITING, row_identity
from learner.state_dir.checkpoint import Checkpoint, rows_part
from learner.state_dir.rows_file import LoadRows, with_earlier
from replay.checkpoint.segments import Segment, Tensors, Written, advance, most_events
from replay.row_source import JoinedRows, RowSource, TierRows
from replay.snapshot import StoreDelta
from replay.tiers.disk_files import discard


@dataclass(frozen=True)
class JoinPart:
    """The join's part of a checkpoint.

    Attributes:
        tensors: new tensors, by part.
        rows: new payload, by part; it is read when it is written.
        carried: the parts that an earlier checkpoint has already, with its number.
        state: plain values.
    """

    tensors: Mapping[str, Tensors]
    rows: Mapping[str, RowSource]
    carried: Mapping[str, int]
    state: Mapping[str, Any]


@dataclass
class CapturedJoin:
    """The state of a join at a step boundary, which a checkpoint writes while the join is in use."""

    change: StoreDelta
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    file: PayloadFile
    number: int
    kept: StoreDelta
    """The labels."""
    segments: Sequence[Segment] = ()
    """Those of the checkpoint that the change is relative to; after `pack` those of this one."""
    kept_segments: Sequence[Segment] = ()
    """Likewise of labels."""

    @classmethod
    def of(
        cls,
        number: int,
        segments: tuple[Sequence[Segment], Sequence[Segment]],
        events: WaitingEvents,
        labels: KeptLabels,
        decisions: Decisions,
        state: Mapping[str, Any],
        *,
        complete: bool,
    ) -> "CapturedJoin":
        """Copy the state for checkpoint `number`; `segments`, of events and labels, are those of the last one written.

        `state` is stored as well. `complete`: the checkpoint has the payload.
        """
        changes = events.table.begin_snapshot(number)
        kept, states = labels.begin_snapshot(number)
        ids = changes.ids
        position = np.zeros(int(ids.max(initial=-1)) + 1, np.int32)
        position[ids] = np.arange(len(ids))
        tensors = {
            "state": torch.from_numpy(events.table.state[ids]),
            "retired": torch.from_numpy(events.file.begin_snapshot(number)),
            "memory": torch.from_numpy(events.file.memory.copy()),
            "label.state": torch.from_numpy(states),
            **decisions.tensors(position),
        }
        file = events.file.file
        values = {
            **state,
            "checkpoint": number,
            "file": [file.name, file.id],
            "own_keys": events.table.own_keys,
            "row_bytes": events.file.row_bytes if complete else None,
            "stamp": uuid.uuid4().hex[:16],
        }
        change = StoreDelta(changes.base, changes.alive, changes.new, None)
        return cls(change, tensors, values, events.file, number, kept, *segments)

    def pack(self, load: Callable[[int, str], Tensors], oldest: int = 0, load_rows: LoadRows | None = None) -> JoinPart:
        """Return the part, once the payload is durable; runs in the background.

        Args:
            load: reads a part of an earlier checkpoint, by the checkpoint's number and the part's name.
            oldest: the first checkpoint that may be restored once this one is written.
            load_rows: opens a part with rows likewise; for payload that the file cannot read.

        Raises:
            OSError: the payload cannot be made durable.
        """
        self.file.mark_intact(self.number, self.state["stamp"], oldest)
        self.file.sync()
        size, base = self.state["row_bytes"], self.change.base
        events = self._advance(LABEL_SEGMENT, self.segments, self.change, load, most_events(size or 0, WAITING))
        rows, carried = dict[str, RowSource](), dict[str, int]()
        for segment in events.segments if size is not None else ():
            part = _part(segment)
            if (new := events.new.get(segment.name)) is not None:
                fresh = self._rows(entries_of(new.tensors))
                merged = {rows_part(_part(each)): each for each in new.merged}
                rows[rows_part(part)] = with_earlier(fresh, merged, base, load_rows)
            else:
                assert base is not None
                carried[rows_part(part)] = base
        most, kept = most_events(0, self.kept.index.dtype), Written((), {})
        if len(self.tensors["label.state"]):
            kept = self._advance(KEPT_SEGMENT, self.kept_segments, self.kept, load, most)
        tensors: dict[str, Tensors] = {PART: self.tensors}
        for prefix, written, before in ((LABEL_SEGMENT, events, base), (KEPT_SEGMENT, kept, self.kept.base)):
            for segment in written.segments:
                if (new := written.new.get(segment.name)) is not None:
                    tensors[f"{prefix}{segment.name}"] = new.tensors
                else:
                    assert before is not None
                    carried[f"{prefix}{segment.name}"] = before
        self.segments, self.kept_segments = events.segments, kept.segments
        names = {"segments": _names(self.segments), "kept_segments": _names(self.kept_segments)}
        return JoinPart(tensors, rows, carried, {**self.state, **names})

    def _advance(
        self,
        prefix: str,
        before: Sequence[Segment],
        change: StoreDelta,
        load: Callable[[int, str], Tensors],
        limit: int,
    ) -> Written:
        """Return the segments of events or labels; which of them are held becomes part of the tensors."""

        def read(segment: Segment) -> Tensors:
            assert change.base is not None
            return load(change.base, f"{prefix}{segment.name}")

        written = advance(before, change, self.number, read, limit)
        for segment in written.segments:
            self.tensors[f"live.{prefix}{segment.name}"] = torch.from_numpy(np.packbits(segment.live))
        return written

    def _rows(self, entries: NDArray[np.void]) -> TierRows:
        """Return the payload of events, WAITING `[n]`, of which those in memory had it there at the step boundary."""
        memory, file = self.tensors["memory"].numpy(), self.file
        identity = row_identity(entries["partition"], entries["offset"], entries["key"])
        return TierRows(
            file.row_bytes,
            entries["slot"].astype(np.int64),
            identity,
            lambda slots, identity: file.read(slots.astype(np.int32), identity, memory),
        )


@dataclass(frozen=True)
class JoinContents:
    """The join's part of a checkpoint that was read.

    Attributes:
        entries: the H events, WAITING `[H]`.
        present: which events of the checkpoint these are, bool: those of damaged segments are lost.
        parts: all parts of the checkpoint; damaged segments are absent.
        tensors: of the part.
        state: of the part.
        segments: of the checkpoint.
        rows: the payload of the events, if the checkpoint has it; read where the file is missing.
    """

    entries: NDArray[np.void]
    present: NDArray[np.bool_]
    parts: Mapping[str, Tensors]
    tensors: Tensors
    state: Mapping[str, Any]
    segments: Sequence[Segment]
    rows: RowSource | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "JoinContents | None":
        """Read the part; None if the checkpoint has none."""
        if PART not in checkpoint.tensors:
            return None
        tensors, state = checkpoint.tensors[PART], checkpoint.state[PART]
        segments = segments_of(tensors, state["segments"], LABEL_SEGMENT)
        entries, present = assembled(segments, LABEL_SEGMENT, checkpoint.tensors, WAITING)
        size = state["row_bytes"]
        rows = [
            (checkpoint.rows[rows_part(part)], np.flatnonzero(segment.live))
            for segment in segments
            if size is not None and (part := _part(segment)) in checkpoint.tensors
        ]
        return cls(
            *(entries, present, checkpoint.tensors, tensors, state, segments),
            None if size is None else JoinedRows(size, rows),
        )


class JoinSnapshots:
    """Captures the state of a join for checkpoints, and restores it; used by one thread."""

    def __init__(
        self,
        events: WaitingEvents,
        labels: KeptLabels,
        decisions: Decisions,
        counts: JoinCounts,
        key: str | None,
        *,
        complete: bool,
    ) -> None:
        """Take the parts of the join, the name of the field by which labels find their events, and whether checkpoints
        have the payload."""
        self._complete = complete
        self._events, self._labels, self._decisions = events, labels, decisions
        self._counts, self._key = counts, key
        self._segments: tuple[Sequence[Segment], Sequence[Segment]] = (), ()
        """Those of the last checkpoint, of events and labels."""
        self._captured: CapturedJoin | None = None
        self._restored = 0
        """The number of the restored checkpoint."""
        self._old_files: Sequence[Path] = ()

    @property
    def file(self) -> PayloadFile:
        """The file with the payload."""
        return self._events.file

    def begin(self, number: int) -> CapturedJoin:
        """Copy the state for checkpoint `number`."""
        state = {
            "counts": asdict(self._counts),
            "key": self._key,
            "own_keys_of_labels": self._labels.own_keys,
        }
        parts = self._events, self._labels, self._decisions
        self._captured = CapturedJoin.of(number, self._segments, *parts, state, complete=self._complete)
        return self._captured

    def end(self, oldest: int | None, *, written: bool) -> None:
        """End the snapshot.

        Args:
            oldest: the number of the oldest checkpoint that may be restored; None without one.
            written: whether the checkpoint was written; if not, the next one has all events.
        """
        self._events.file.end_snapshot(oldest)
        if written and self._captured is not None:
            self._segments = self._captured.segments, self._captured.kept_segments
        else:
            self._events.table.not_written()
            self._labels.not_written()
            self._segments = (), ()
        self._captured = None
        if oldest is not None and oldest > self._restored:
            for path in self._old_files:
                discard(path)
            self._old_files = ()

    def discard_later(self, files: Sequence[Path]) -> None:
        """Remove files once no checkpoint of an earlier process is left: only those name them."""
        self._old_files = files

    def restore(self, contents: JoinContents, entries: NDArray[np.void], *, same_slots: bool) -> None:
        """Restore a checkpoint.

        Args:
            contents: the join's part of it.
            entries: its events, with the slots that their payload has now, WAITING `[H]`.
            same_slots: whether these are the slots that the checkpoint names.

        Raises:
            SettingsError: events wait, and labels had another key.
        """
        tensors, state, present = contents.tensors, contents.state, contents.present
        if len(entries) and state["key"] != self._key:
            raise SettingsError(
                f'stream.labels.key: {len(entries)} events wait for labels of the key "{state["key"]}", which is '
                f'"{self._key}" now; take "{state["key"]}", or start empty by moving the checkpoints away'
            )
        self._restored = int(state["checkpoint"])
        same_slots = same_slots and bool(present.all()) and (state["row_bytes"] is not None) == self._complete
        states = tensors["state"].numpy()[present]
        ids = self._events.restore(self._restored if same_slots else None, entries, states, own=state["own_keys"])
        numbers = np.full(len(present), -1, np.int32)
        numbers[present] = ids
        self._decisions.restore(tensors, numbers)
        kept = self._restore_labels(contents) if state["key"] == self._key else ()
        for name, value in state["counts"].items():
            setattr(self._counts, name, value)
        self._counts.damaged += int(np.count_nonzero(~present))
        self._segments = (contents.segments if same_slots else ()), kept

    def _restore_labels(self, contents: JoinContents) -> Sequence[Segment]:
        """Restore the labels of a checkpoint, and return their segments if the next one has the changes since."""
        segments = segments_of(contents.tensors, contents.state["kept_segments"], KEPT_SEGMENT)
        entries, present = assembled(segments, KEPT_SEGMENT, contents.parts, self._labels.entry)
        states = contents.tensors["label.state"].numpy()[present]
        number = self._restored if present.all() else None
        return segments if self._labels.restore(number, entries, states) else ()


def _part(segment: Segment) -> str:
    return f"{LABEL_SEGMENT}{segment.name}"


def _names(segments: Sequence[Segment]) -> list[tuple[str, int]]:
    return [(segment.name, len(segment.live)) for segment in segments]
