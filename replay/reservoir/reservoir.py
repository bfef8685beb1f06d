"""Who is held: the index of the events, and what decides who enters it and who leaves.

Legend: N events offered, H events held, n events of a call, G quota groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.identity import identity_hash
from replay.reservoir.admission import Admission, Offered
from replay.reservoir.event_table import EventTable, records_of
from replay.reservoir.quotas import Quotas
from replay.reservoir.watermarks import Watermarks
from replay.snapshot import DeltaTracker, StoreDelta, StoreState

_LATEST = 2**32 - 1


@dataclass(frozen=True)
class ScoredEvents:
    """N events that were offered, of which the rows `admitted` are to be held.

    Attributes:
        admitted: int `[<= N]`.
        identity: uint64 `[N]`.
        priority: float64 `[N]`.
        group: int16 `[N]`.
        records: what the index holds of them, RECORD `[N]`: `label` is -1 for none and 0 where labels are no class
            indices, and `time_s` the record time.
    """

    admitted: NDArray[np.intp]
    identity: NDArray[np.uint64]
    priority: NDArray[np.float64]
    group: NDArray[np.int16]
    records: NDArray[np.void]


class Reservoir:
    """At most `quotas.limit` events and what is being inserted. Used by one thread."""

    def __init__(self, admission: Admission, quotas: Quotas, event_table: EventTable, seed: int) -> None:
        self.admission = admission
        self.quotas = quotas
        self.event_table = event_table
        self.changes = DeltaTracker()
        """Since the last checkpoint."""
        self._seed = seed
        self._watermarks = Watermarks()
        self._offered = np.zeros(admission.groups, np.int64)
        self._weight = 0.0

    def __len__(self) -> int:
        return len(self.event_table)

    def add(self, columns: Mapping[str, Array], cluster: NDArray[np.int16]) -> ScoredEvents:
        """Take note of N events, and tell which are to be held: those that `admits` and that are not held already.

        Args:
            columns: a block's columns, each `[N, ...]`, of partitions that are registered.
            cluster: of each event's embedding; 0 where it is not known.
        """
        # What has its dtype already is looked at and never written to.
        where, offset = (columns[name].astype(np.int64, copy=False) for name in ("partition", "offset"))
        row, weight = columns["row"].astype(np.int32, copy=False), columns["weight"].astype(np.float32, copy=False)
        identity = identity_hash(self.event_table.bases[where], offset, row, self._seed)
        label = (
            columns["label"].astype(np.int64, copy=False)
            if columns["label"].dtype.kind == "i"
            else np.zeros_like(where)
        )
        time_s = np.minimum(np.maximum(columns["time_ms"] // 1000, 0), _LATEST).astype(np.uint32)
        group = self.admission.group(label, cluster)
        priority = self.admission.priorities(Offered(identity, weight, time_s))
        admits = self.quotas.admits(priority, group)
        beyond = self._watermarks.pass_by(where, offset, row)
        if beyond is None:
            self._count(group, weight)
        else:
            # What lies before its partition's mark was offered already, and counted.
            self._count(group[beyond], weight[beyond])
            admits &= beyond if self.admission.by_cluster else self._is_new(columns, priority, admits)
        records = records_of({**columns, "label": label, "time_s": time_s})
        return ScoredEvents(np.flatnonzero(admits), identity, priority, group, records)

    def admits(self, offer: ScoredEvents, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return which rows of an offer are still to be held; the thresholds may have fallen since."""
        if not len(rows):
            return rows
        return rows[self.quotas.admits(offer.priority.take(rows), offer.group.take(rows))]

    def append(self, slots: NDArray[np.int32], offer: ScoredEvents, rows: NDArray[np.intp]) -> None:
        """Hold n events from now on, those in the rows of an offer, whose payload is in n slots."""
        # By `take`, which has half the cost of an index.
        self.event_table.append(slots, offer.priority.take(rows), offer.group.take(rows), offer.records.take(rows))

    def surplus(self) -> NDArray[np.bool_] | None:
        """Return who stays, bool `[H]`, when there are too many; else None."""
        if len(self.event_table) <= self.quotas.limit:
            return None
        return self.quotas.lower(self.event_table.priorities, self.event_table.groups, self.event_table.counts)

    def keep(self, stays: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Let those leave that do not stay, bool `[H]`, and return their slots."""
        self.changes.keep(stays)
        return self.event_table.keep(stays)

    def regroup(self, cluster: NDArray[np.int16]) -> None:
        """Put all events into the groups of other clusters, `[H]`; what was evicted under the old ones is gone.

        Of what was offered is not known which would have been in which: as much of each as of what is held.
        """
        if self.admission.by_cluster:
            self.event_table.regroup(cluster)
            self.quotas.thresholds[:] = np.inf
            held = np.cumsum(self.event_table.counts)
            until = np.rint(self._offered.sum() * (held / max(1, held[-1]))).astype(np.int64)
            self._offered = np.diff(until, prepend=0)

    def rates(
        self, records: NDArray[np.void], cluster: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what the importance of n events held is made of: their rates and shares, float64 `[n]` each."""
        group = self.admission.group(records["label"].astype(np.int64), cluster)
        share = self.event_table.counts / np.maximum(1, self._offered)
        # Nothing of weight is counted where all that is held was offered out of its partition's order.
        mean = self._weight / max(1, int(self._offered.sum())) or 1.0
        return self.admission.rates(self.quotas.thresholds[group], records["time_s"], share[group], mean)

    def begin_snapshot(self, number: int) -> tuple[StoreDelta, dict[str, Any]]:
        """Begin checkpoint `number`; return the changes since the previous one, and fields of its StoreState."""
        change = StoreDelta(self.changes.base, self.changes.alive, self.event_table.copy(self.changes.old), None)
        self.changes.begin(number, len(self))
        return change, {
            "policy": self.admission.name,
            "thresholds": self.quotas.thresholds.copy(),
            "offered": self._offered.copy(),
            "weight": self._weight,
            "bases": self.event_table.bases.tolist(),
            "watermarks": dict(self._watermarks.highest),
        }

    def take_up(self, standing: StoreState) -> None:
        """Restore the thresholds, counts and watermarks of a checkpoint; `event_table.restore` restores the events."""
        self.quotas.thresholds, self._offered = standing.thresholds.copy(), standing.offered.copy()
        self._weight = standing.weight
        self._watermarks = Watermarks(standing.watermarks)

    def _count(self, group: NDArray[np.int16], weight: NDArray[np.float32]) -> None:
        self._offered += len(group) if len(self._offered) == 1 else np.bincount(group, minlength=len(self._offered))
        # One after the other: a sum must not depend on how many were offered at once.
        self._weight = float(np.cumsum(np.append(self._weight, weight))[-1])

    def _is_new(
        self, columns: Mapping[str, Array], priority: NDArray[np.float64], candidates: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which of N events, some of which were offered before, are not held; only candidates are looked up.

        An event has one priority for ever, so that only those of an equal one are compared.
        """
        names = np.stack([columns["partition"], columns["offset"], columns["row"]], axis=1).astype(np.int64)
        new = np.zeros(len(names), np.bool_)
        new[np.unique(names, axis=0, return_index=True)[1]] = True
        wanted = np.sort(priority[candidates])
        if not len(wanted):
            return new
        priorities = self.event_table.priorities
        places = np.minimum(np.searchsorted(wanted, priorities), len(wanted) - 1)
        alike = self.event_table.records(self.event_table.slots[wanted[places] == priorities])
        held = {(each["partition"], each["offset"], each["row"]) for each in alike}
        for at in np.flatnonzero(candidates & new).tolist() if held else ():
            new[at] = tuple(names[at]) not in held
        return new
