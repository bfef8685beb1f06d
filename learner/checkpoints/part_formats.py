"""The files of those parts of a checkpoint that have events: of the store, and of events that wait for labels.

    replay.safetensors               all of the store but events: retired slots, plans, thresholds, and one bit for each
                                     event of each segment: whether it is held
    segment-<n>.safetensors          some of the events added before checkpoint n, in order: their index entries, and
                                     rows without a tier; segment-<n>-1 and so on have those beyond `PIECE_BYTES`
    rows-<n>.safetensors             with [storage], the rows of these events where a tier has them too
    labels.safetensors               with [stream.labels]: states of events and labels, decisions, retired extents, rows
                                     in memory, and one bit for each event or label of each segment
    segment-labels-<n>.safetensors   some of the events that wait, without their rows
    rows-labels-<n>.safetensors      with [storage], their rows
    segment-kept-<n>.safetensors     likewise some of the labels that are kept

Rows are in the file of a tier, or of waiting events, which the part names. Any process may read and erase these files,
whether or not its learner has such a part. Erased events are overwritten with zeros and keep their index in the
segment, since other checkpoints refer to events of a segment by index.

Legend: n entries of a segment, H held entries of a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.ingest.events.block import Array
from anabranch.learner.checkpoints.format import RANK, SEGMENT, Checkpoint, rows_part
from anabranch.replay.row_source import JoinedRows, RowSource
from anabranch.replay.sampling.base import BY_POSITION
from anabranch.replay.segments import Segment, Tensors, assemble
from anabranch.replay.snapshot import ENTRY, PLANNED, TierRef

Covers = Callable[[Mapping[str, Array]], NDArray[np.bool_]]
"""Returns which rows an erasure covers, by their columns `partition`, `offset` and `key_hash`."""

WAITING = np.dtype(
    [
        ("key", "u8"),
        ("key_hash", "u8"),
        ("time_ms", "i8"),
        ("offset", "i8"),
        ("partition", "i4"),
        ("slot", "i4"),
        ("before", "u1"),
    ]
)
"""An event that waits, without its payload, 41 bytes: `key` is that of labels, `key_hash` that of erasures."""
WAITING_BYTES = 64
"""Memory of an event that waits, at most."""
KEPT_LABEL = np.dtype([("key_hash", "u8"), ("time_ms", "i8"), ("offset", "i8"), ("partition", "i4"), ("order", "i8")])
"""A label without its value, which follows: `partition` and `offset` are those of its message, and `order` ascends as
labels came."""
NO_SLOT = -1
"""The slot of an event whose payload is lost. Rows in memory have slots from -2 down."""
_ERASED = -1
"""The offset of an entry that was overwritten."""
_COLUMNS = ("partition", "offset", "key_hash")


@dataclass(frozen=True)
class EventSegments:
    """The layout of events, or labels, in segments.

    Attributes:
        prefix: of the names of their parts.
        entry: the dtype of an entry; longer entries begin with it.
        live: prefix of the tensors that say which entries are held.
        key: of the state, for the names and lengths of the segments.
    """

    prefix: str
    entry: np.dtype[np.void]
    live: str
    key: str = "segments"

    def part(self, segment: Segment) -> str:
        """Return the name of the part with a segment."""
        return f"{self.prefix}{segment.name}"

    def of(self, tensors: Tensors, state: Mapping[str, Any]) -> list[Segment]:
        """Return the segments of a checkpoint, by the tensors and the state of the part that names them."""
        return [
            Segment(name, np.unpackbits(tensors[f"{self.live}{name}"].numpy(), count=rows).astype(np.bool_))
            for name, rows in state[self.key]
        ]

    def live_bits(self, segment: Segment) -> dict[str, Tensor]:
        """Return the tensor that says which entries of a segment are held, by name."""
        return {f"{self.live}{segment.name}": torch.from_numpy(np.packbits(segment.live))}

    def entries(self, segment: Tensors) -> NDArray[np.void]:
        """Return the entries of a segment, `entry` `[n]`, without a copy where they are not longer."""
        index = segment["index"].numpy()
        return np.ascontiguousarray(index[:, : self.entry.itemsize]).reshape(-1).view(self.entry)

    def held(
        self, segments: Sequence[Segment], parts: Mapping[str, Tensors], entry: np.dtype[np.void]
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Return the held entries, `entry` `[<= H]`, and which of all held ones these are, bool `[H]`.

        Damaged segments are absent among the parts, and their entries are lost.
        """
        entries, _, _ = assemble(segments, lambda segment: parts.get(self.part(segment)), entry)
        present = [np.full(segment.held, self.part(segment) in parts) for segment in segments]
        return entries, np.concatenate([np.zeros(0, np.bool_), *present])

    def rows(self, checkpoint: Checkpoint, segments: Sequence[Segment], row_bytes: int | None) -> RowSource | None:
        """Return the rows of the held events that a checkpoint has, None where it has none: `row_bytes` is None."""
        if row_bytes is None:
            return None
        there = [segment for segment in segments if self.part(segment) in checkpoint.tensors]
        rows = [checkpoint.rows[rows_part(self.part(segment))] for segment in there]
        return JoinedRows(row_bytes, [(each, np.flatnonzero(of.live)) for each, of in zip(rows, there, strict=True)])

    def covered(
        self, segments: Sequence[Segment], parts: Mapping[str, Tensors], covers: Covers
    ) -> dict[str, NDArray[np.bool_]]:
        """Return which entries an erasure covers, bool `[n]`, of each part with such entries."""
        hits = dict[str, NDArray[np.bool_]]()
        for part in map(self.part, segments):
            if part in parts:
                entries = self.entries(parts[part])
                hits |= {part: found} if (found := covers({name: entries[name] for name in _COLUMNS})).any() else {}
        return hits

    def release(
        self, tensors: dict[str, Tensor], segments: Sequence[Segment], covered: Mapping[str, NDArray[np.bool_]]
    ) -> NDArray[np.bool_]:
        """Set the covered entries as not held in the tensors; return which held ones stay, bool `[H]`."""
        stays = [np.zeros(0, np.bool_)]
        for segment in segments:
            left = segment.live & ~covered.get(self.part(segment), np.zeros(1, np.bool_))
            stays.append(left[segment.live])
            tensors |= self.live_bits(Segment(segment.name, left))
        return np.concatenate(stays)

    def zeroed(self, segment: Tensors, covered: NDArray[np.bool_]) -> dict[str, Tensor]:
        """Return a segment whose covered entries are zeros, with an offset of -1 and no slot."""
        changed, rows = {name: tensor.clone() for name, tensor in segment.items()}, torch.from_numpy(covered)
        for tensor in changed.values():
            tensor[rows] = 0
        assert self.entry.fields is not None
        for field in ("offset", "slot"):
            if field in self.entry.fields:
                kind, begin = self.entry.fields[field][:2]
                changed["index"][rows, begin : begin + kind.itemsize] = 0xFF
        return changed

    def erased(self, segment: Tensors) -> NDArray[np.bool_]:
        """Return which entries of a segment were overwritten, bool `[n]`."""
        erased: NDArray[np.bool_] = self.entries(segment)["offset"] == _ERASED
        return erased


STORED = EventSegments(SEGMENT, ENTRY, "live.")
WAITS = EventSegments(f"{SEGMENT}labels-", WAITING, f"live.{SEGMENT}labels-")
KEPT = EventSegments(f"{SEGMENT}kept-", KEPT_LABEL, f"live.{SEGMENT}kept-", "kept_segments")


class PartFormat:
    """What any process can do with the files of a part: its state and its tensors are under its name."""

    name: str
    events: EventSegments
    """Those whose rows are in the file that the state names."""

    def folder(self, state_dir: Path) -> Path:
        """Return the folder of the files with rows."""
        return state_dir / self.name / RANK

    def file(self, state: Mapping[str, Any]) -> TierRef | None:
        """Return the file that a checkpoint with this state names; None if it has the rows, or no such part."""
        file = state.get(self.name, {}).get("file")
        return None if file is None else TierRef(*file)

    def has_rows(self, state: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this state has all rows, so that it needs no file."""
        return self.file(state) is None or state[self.name].get("row_bytes") is not None

    def named_slots(self, parts: Mapping[str, Tensors], state: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return the slots of the file that a checkpoint refers to."""
        slots = [np.empty(0, np.int64)]
        for segment in self.events.of(parts[self.name], state[self.name]) if self.name in parts else ():
            if (part := self.events.part(segment)) in parts:
                slots.append(self.events.entries(parts[part])["slot"][segment.live].astype(np.int64))
        named = np.concatenate(slots)
        return named[named >= 0]

    def without(self, parts: Mapping[str, Tensors], state: Mapping[str, Any], covers: Covers) -> dict[str, Tensors]:
        """Return the parts that have erased events, without these; `parts` lack damaged segments, and have `name`."""
        raise NotImplementedError

    def held(self, parts: Mapping[str, Tensors], state: Mapping[str, Any]) -> int:
        """Return how many events a checkpoint has."""
        return sum(segment.held for segment in self.events.of(parts[self.name], state[self.name]))


class StoreFormat(PartFormat):
    """The part of the store."""

    name = "replay"
    events = STORED

    @override
    def without(self, parts: Mapping[str, Tensors], state: Mapping[str, Any], covers: Covers) -> dict[str, Tensors]:
        before, segments = parts[self.name], STORED.of(parts[self.name], state[self.name])
        covered, part = STORED.covered(segments, parts, covers), dict(before)
        stays = STORED.release(part, segments, covered)
        if not stays.all():
            for name in BY_POSITION.intersection(state[self.name]["sampler"]):
                part[f"sampler.{name}"] = before[f"sampler.{name}"][torch.from_numpy(stays)]
        for step in self._dropped_plans(before, state[self.name]["plans"], covers):
            del part[f"plan.{step}"], part[f"planned.{step}"]
        changed: dict[str, Tensors] = {name: STORED.zeroed(parts[name], rows) for name, rows in covered.items()}
        return changed if stays.all() and part.keys() == set(before) else {**changed, self.name: part}

    def _dropped_plans(self, tensors: Tensors, steps: Sequence[int], covers: Covers) -> Sequence[int]:
        """Return the steps from the first one on whose plan has an erased event; they are planned again."""
        planned = [step for step in steps if f"plan.{step}" in tensors]
        for index, step in enumerate(planned):
            events = records_of(tensors[f"planned.{step}"], PLANNED)
            if covers({name: events[name] for name in _COLUMNS}).any():
                return planned[index:]
        return ()


class WaitingFormat(PartFormat):
    """The part of the events that wait for labels, and of the labels that are kept for events."""

    name = "labels"
    events = WAITS

    @override
    def without(self, parts: Mapping[str, Tensors], state: Mapping[str, Any], covers: Covers) -> dict[str, Tensors]:
        own, part = state[self.name], dict(parts[self.name])
        segments, kept = WAITS.of(part, own), KEPT.of(part, own)
        events = WAITS.covered(segments, parts, covers)
        labels = KEPT.covered(kept, parts, lambda each: covers(erasable(each, own_keys=own["own_keys_of_labels"])))
        for segment in segments:
            if (covered := events.get(WAITS.part(segment))) is not None:
                slots = WAITS.entries(parts[WAITS.part(segment)])["slot"][segment.live & covered]
                part["memory"] = part["memory"].clone()
                part["memory"][memory_index(slots[slots < NO_SLOT]).tolist()] = 0
        dropped = self._drop_events(part, WAITS.release(part, segments, events))
        stays = KEPT.release(part, kept, labels)
        part["label.state"] = part["label.state"][torch.from_numpy(stays)]
        changed: dict[str, Tensors] = {name: WAITS.zeroed(parts[name], covered) for name, covered in events.items()}
        changed |= {name: KEPT.zeroed(parts[name], covered) for name, covered in labels.items()}
        return {**changed, self.name: part} if dropped or not stays.all() else changed

    def _drop_events(self, part: dict[str, Tensor], stays_H: NDArray[np.bool_]) -> bool:
        """Leave out the states and decisions of events that do not stay; return whether there are any."""
        if stays_H.all():
            return False
        part["state"] = part["state"][torch.from_numpy(stays_H)]
        if "decided.id" in part:
            position = part["decided.id"].numpy()
            left = torch.from_numpy(stays_H[position])
            moved = np.cumsum(stays_H, dtype=np.int32) - 1
            part["decided.id"] = torch.from_numpy(moved[position])
            for name in [name for name in part if name.startswith("decided.")]:
                part[name] = part[name][left]
        return True


STORE, WAITING_EVENTS = StoreFormat(), WaitingFormat()
FORMATS: Sequence[PartFormat] = (STORE, WAITING_EVENTS)
"""All parts with events. A checkpoint may have any of them."""


def segments_of(part: str) -> EventSegments | None:
    """Return the layout of a part with a segment, by its name; None for another part."""
    return next((each for each in (KEPT, WAITS, STORED) if part.startswith(each.prefix)), None)


def records_of(values: Tensor, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Return a tensor of bytes as records of `dtype`, without a copy."""
    return values.numpy().reshape(-1).view(dtype)


def memory_index(slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the index of rows in memory, by their slots."""
    return (NO_SLOT - 1 - slots).astype(np.int32)


def erasable(columns: Mapping[str, Array], *, own_keys: bool) -> dict[str, Array]:
    """Return the columns of labels with the keys of erasures: none if the labels have other keys."""
    return {**columns, "key_hash": np.zeros_like(columns["key_hash"])} if own_keys else dict(columns)
