"""The reservoir: the table of held events, and the policy that admits and evicts them.

Legend: K blocks of N added events, H events held, n events of a call, G quota groups, D numbers of an embedding, R
bytes of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.identity import identity_hash, keyed_hash
from anabranch.replay.reservoir.admission import Admission, Candidates
from anabranch.replay.reservoir.event_table import EventTable, records_of
from anabranch.replay.reservoir.quotas import Quotas
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.snapshot import DeltaTracker, StoreDelta, StoreState

MAX_PENDING = 1024
"""About how many events may be pending, so that none is pending for long and adding them takes little time."""

MAX_PENDING_BYTES = 16_000_000
"""About how many bytes of events may be pending."""

_SCORED_COLUMNS = ("partition", "offset", "row", "time_ms", "key_hash", "weight", "label")
"""Columns that decide which events are held."""

WAITED = "waited"
"""A column that blocks may have, bool `[N]`: the event waited for its label. It comes behind later events of its
partition, and only once."""


@dataclass
class PendingEvents:
    """K blocks of columns, each `[N, ...]`, that read like one block; they are copied once, into rows."""

    blocks: list[Mapping[str, Array]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where each block ends among the N events."""
    embeddings: list[NDArray[np.float32] | None] = field(default_factory=list)
    """Of each block, float32 `[rows, D]`."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def put(self, columns: Mapping[str, Array], embedding: NDArray[np.float32] | None) -> None:
        """Add a block, whose columns must not change any more."""
        self.embeddings.append(embedding)
        self.ends.append(len(self) + len(columns["offset"]))
        self.blocks.append(columns)

    @property
    def embedding(self) -> NDArray[np.float32] | None:
        """Of all events, float32 `[N, D]`, NaN where it is unknown; None: of no event."""
        dim = next((part.shape[1] for part in self.embeddings if part is not None), None)
        if dim is None or len(self.blocks) == 1:
            return self.embeddings[0] if self.embeddings else None
        rows = np.diff(self.ends, prepend=0)
        parts = zip(self.embeddings, rows, strict=True)
        return np.concatenate([np.full((n, dim), np.nan, np.float32) if part is None else part for part, n in parts])

    def columns(self) -> Mapping[str, Array]:
        """Return the columns that decide which events are held, each `[N, ...]`."""
        if len(self.blocks) == 1:
            return self.blocks[0]
        columns = {name: np.concatenate([block[name] for block in self.blocks]) for name in _SCORED_COLUMNS}
        if any(WAITED in block for block in self.blocks):
            waited = [block.get(WAITED, np.zeros(len(block["offset"]), np.bool_)) for block in self.blocks]
            columns[WAITED] = np.concatenate(waited)
        return columns

    def pack(self, layout: RowLayout, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Pack n events, given by their ascending row numbers, into rows, uint8 `[n, R]`."""
        if len(self.blocks) == 1:
            return layout.pack(self.blocks[0], rows)
        rows_nR = np.empty((len(rows), layout.row_bytes), np.uint8)
        bounds = [0, *np.searchsorted(rows, self.ends).tolist()]
        for block, end, first, last in zip(self.blocks, self.ends, bounds, bounds[1:], strict=False):
            layout.pack(block, rows[first:last] - (end - len(block["offset"])), rows_nR[first:last])
        return rows_nR

    def parts(self, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Split ascending row numbers by block into K arrays."""
        return np.split(rows, np.searchsorted(rows, self.ends[:-1]))


def pending_limit(row_bytes: int) -> int:
    """Return how many events of `row_bytes` bytes may be pending before they are added."""
    return min(MAX_PENDING, max(1, MAX_PENDING_BYTES // row_bytes))


_LATEST = 2**32 - 1


@dataclass(frozen=True)
class ScoredEvents:
    """N added events, of which the rows `admitted` are to be held.

    Attributes:
        admitted: int `[<= N]`.
        identity: uint64 `[N]`.
        priority: float64 `[N]`.
        group: int16 `[N]`.
        records: for the event table, RECORD `[N]`: `label` is -1 for none and 0 if labels are no class indices, and
            `time_s` is the record time.
    """

    admitted: NDArray[np.intp]
    identity: NDArray[np.uint64]
    priority: NDArray[np.float64]
    group: NDArray[np.int16]
    records: NDArray[np.void]


class Reservoir:
    """At most `quotas.limit` events, and those that are being inserted. Used by one thread."""

    def __init__(self, admission: Admission, quotas: Quotas, event_table: EventTable, seed: int) -> None:
        self.admission = admission
        self.quotas = quotas
        self.event_table = event_table
        self.changes = DeltaTracker()
        """Since the last checkpoint."""
        self._seed = seed
        self._watermarks = Watermarks()
        self._added = np.zeros(admission.groups, np.int64)
        self._weight = 0.0

    def __len__(self) -> int:
        return len(self.event_table)

    def add(self, columns: Mapping[str, Array], cluster: NDArray[np.int16]) -> ScoredEvents:
        """Count N events, and return which are to be held: those that are admitted and not held already.

        Args:
            columns: a block's columns, each `[N, ...]`, of registered partitions, and WAITED where events waited.
            cluster: of each event's embedding; 0 where it is unknown.
        """
        # Columns of the right dtype are not copied, and must not be written.
        where, offset = (columns[name].astype(np.int64, copy=False) for name in ("partition", "offset"))
        row, weight = columns["row"].astype(np.int32, copy=False), columns["weight"].astype(np.float32, copy=False)
        identity = identity_hash(self.event_table.bases[where], offset, row)
        labels = columns["label"]
        is_class = labels.dtype.kind == "i" and labels.ndim == 1  # it may also be a class at each position
        label = labels.astype(np.int64, copy=False) if is_class else np.zeros_like(where)
        time_s = np.minimum(np.maximum(columns["time_ms"] // 1000, 0), _LATEST).astype(np.uint32)
        group = self.admission.group(label, cluster)
        priority = self.admission.priorities(Candidates(keyed_hash(identity, self._seed), weight, time_s))
        admits = self.quotas.admits(priority, group)
        beyond, waited = self._watermarks.advance(where, offset, row), columns.get(WAITED)
        if beyond is not None and waited is not None:
            beyond |= waited.astype(np.bool_, copy=False)
        if beyond is None or beyond.all():
            self._count(group, weight)
        else:
            # An event before its partition's watermark was already added and counted, unless it waited.
            self._count(group[beyond], weight[beyond])
            admits &= beyond if self.admission.by_cluster else beyond | self._is_new(columns, priority, admits)
        records = records_of({**columns, "label": label, "time_s": time_s})
        return ScoredEvents(np.flatnonzero(admits), identity, priority, group, records)

    def admits(self, scored: ScoredEvents, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return which rows of scored events are still to be held; the thresholds may have fallen since."""
        if not len(rows):
            return rows
        return rows[self.quotas.admits(scored.priority.take(rows), scored.group.take(rows))]

    def append(self, slots: NDArray[np.int32], scored: ScoredEvents, rows: NDArray[np.intp]) -> None:
        """Hold n events from now on, those in rows of scored events, whose payload is in n slots."""
        # `take` costs half as much as fancy indexing.
        self.event_table.append(slots, scored.priority.take(rows), scored.group.take(rows), scored.records.take(rows))

    def surplus(self) -> NDArray[np.bool_] | None:
        """Return which events stay, bool `[H]`, when there are too many; else None."""
        if len(self.event_table) <= self.quotas.limit:
            return None
        return self.quotas.lower(self.event_table.priorities, self.event_table.groups, self.event_table.counts)

    def keep(self, stays: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Remove the events that do not stay, bool `[H]`, and return their slots."""
        self.changes.keep(stays)
        return self.event_table.keep(stays)

    def regroup(self, cluster: NDArray[np.int16]) -> None:
        """Assign all events to the groups of new clusters, `[H]`. Only the total of the added events is known then."""
        if self.admission.by_cluster:
            self.event_table.regroup(cluster)
            self.quotas.thresholds[:] = np.inf

    def rates(
        self, records: NDArray[np.void], cluster: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rates and shares from which the importance of n held events follows, float64 `[n]` each."""
        group = self.admission.group(records["label"].astype(np.int64), cluster)
        share = self.event_table.counts / np.maximum(1, self._added)
        # The sum of weights is 0 if all held events were added out of their partition's order.
        mean = self._weight / max(1, int(self._added.sum())) or 1.0
        return self.admission.rates(self.quotas.thresholds[group], records["time_s"], share[group], mean)

    def begin_snapshot(self, number: int) -> tuple[StoreDelta, dict[str, Any]]:
        """Begin checkpoint `number`; return the changes since the previous one, and fields of its StoreState."""
        change = StoreDelta(self.changes.base, self.changes.alive, self.event_table.copy(self.changes.old), None)
        self.changes.begin(number, len(self))
        return change, {
            "policy": self.admission.name,
            "thresholds": self.quotas.thresholds.copy(),
            "added": self._added.copy(),
            "weight": self._weight,
            "bases": self.event_table.bases.tolist(),
            "watermarks": dict(self._watermarks.highest),
        }

    def restore(self, state: StoreState) -> None:
        """Restore the thresholds, counts and watermarks of a checkpoint; `event_table.restore` restores the events."""
        self.quotas.thresholds, self._added = state.thresholds.copy(), state.added.copy()
        self._weight = state.weight
        self._watermarks = Watermarks(state.watermarks)

    def _count(self, group: NDArray[np.int16], weight: NDArray[np.float32]) -> None:
        self._added += len(group) if len(self._added) == 1 else np.bincount(group, minlength=len(self._added))
        # In sequence: the sum must not depend on how many events are added at once.
        self._weight = float(np.cumsum(np.append(self._weight, weight))[-1])

    def _is_new(
        self, columns: Mapping[str, Array], priority: NDArray[np.float64], candidates: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which of N events, some of which were added before, are not held; only candidates are looked up.

        The priority of an event never changes, so only events of equal priority are compared.
        """
        names = np.stack([columns["partition"], columns["offset"], columns["row"]], axis=1).astype(np.int64)
        new = np.zeros(len(names), np.bool_)
        new[np.unique(names, axis=0, return_index=True)[1]] = True
        candidate_priorities = np.sort(priority[candidates])
        if not len(candidate_priorities):
            return new
        priorities = self.event_table.priorities
        nearest = np.minimum(np.searchsorted(candidate_priorities, priorities), len(candidate_priorities) - 1)
        alike = self.event_table.by_slot.take(self.event_table.slots[candidate_priorities[nearest] == priorities])
        held = {(record["partition"], record["offset"], record["row"]) for record in alike}
        for at in np.flatnonzero(candidates & new).tolist() if held else ():
            new[at] = tuple(names[at]) not in held
        return new


class Watermarks:
    """The highest `(offset, row)` that was added, by index of the partition: events beyond it are new."""

    def __init__(self, highest: Mapping[int, tuple[int, int]] | None = None) -> None:
        self.highest: dict[int, tuple[int, int]] = dict(highest or {})

    def advance(
        self, partition: NDArray[np.int64], offset: NDArray[np.int64], row: NDArray[np.int32]
    ) -> NDArray[np.bool_] | None:
        """Advance the watermarks by N events, and return which are beyond all earlier events of their partition.

        Returns:
            bool `[N]`; None: all are, which is the normal case.
        """
        if not len(partition):
            return None
        if (partition == partition[0]).all():
            return self._advance_one(int(partition[0]), offset, row)
        beyond, ordered = np.ones(len(partition), np.bool_), True
        for index in np.unique(partition).tolist():
            members = partition == index
            new = self._advance_one(index, offset[members], row[members])
            if new is not None:
                beyond[members], ordered = new, False
        return None if ordered else beyond

    def _advance_one(self, index: int, offset: NDArray[np.int64], row: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """Advance the watermark of one partition."""
        steps = offset[1:] - offset[:-1]
        rising = bool((steps > 0).all()) or bool(((steps > 0) | ((steps == 0) & (np.diff(row) > 0))).all())
        mark = self.highest.get(index, (-1, -1))
        if rising and (int(offset[0]), int(row[0])) > mark:
            self.highest[index] = int(offset[-1]), int(row[-1])
            return None
        order = np.lexsort((row, offset))
        another = np.concatenate([[True], (np.diff(offset[order]) > 0) | (np.diff(row[order]) > 0)])
        rank = np.empty(len(order), np.int64)
        rank[order] = np.cumsum(another)
        before = np.concatenate([[0], np.maximum.accumulate(rank)[:-1]])
        self.highest[index] = max(mark, (int(offset[order[-1]]), int(row[order[-1]])))
        beyond: NDArray[np.bool_] = (offset > mark[0]) | ((offset == mark[0]) & (row > mark[1]))
        return beyond & (rank > before)
