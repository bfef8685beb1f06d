"""The reservoir: the table of held events, and the policy that admits and evicts them.

Legend: N added events, H events held, n events of a call, G quota groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.identity import identity_hash, keyed_hash
from replay.reservoir.admission import Admission, Candidates
from replay.reservoir.event_table import EventTable, records_of
from replay.reservoir.pending_events import WAITED
from replay.reservoir.quotas import Quotas
from replay.reservoir.watermarks import Watermarks
from replay.snapshot import DeltaTracker, StoreDelta, StoreState

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
        """Assign all events to the groups of new clusters, `[H]`.

        The clusters of earlier events are unknown: their counts are divided in proportion to the held events.
        """
        if self.admission.by_cluster:
            self.event_table.regroup(cluster)
            self.quotas.thresholds[:] = np.inf
            held = np.cumsum(self.event_table.counts)
            until = np.rint(self._added.sum() * (held / max(1, held[-1]))).astype(np.int64)
            self._added = np.diff(until, prepend=0)

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
        alike = self.event_table.records(self.event_table.slots[candidate_priorities[nearest] == priorities])
        held = {(record["partition"], record["offset"], record["row"]) for record in alike}
        for at in np.flatnonzero(candidates & new).tolist() if held else ():
            new[at] = tuple(names[at]) not in held
        return new
