"""The events whose wait has ended, in the order of the decisions, until the loop has used them; and their totals.

Legend: n events of a call, N events that the loop takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Label
from anabranch.learner.extensions.late_labels.indexes import Ids, joined_ids

_COLUMNS = ("id", "resolution", "waited_ms", "value", "label_partition", "label_offset")
MOST_OF_KEY = 64
"""Labels of one key that are kept, so that the time of a batch does not grow with those of a frequent key."""
NO_LABEL = -1
"""The partition of the label of an event that has none."""


class Resolution(IntEnum):
    """How the wait of an event ended."""

    LABELLED = 0
    """Its label came in time."""
    TIMED_OUT = 1
    """No label came within `wait`, or the space for waiting events was full."""
    CORRECTED = 2
    """Its label came after the event was used as a negative: on arrival with `early`, or when it had timed out."""


@dataclass(frozen=True)
class Ready:
    """N events whose fate is decided, in the order of the decisions.

    Attributes:
        columns: the schema's payload and `IDENTITY_COLUMNS`, each `[N, ...]`, with the label filled in and `labelled`
            true, save for TIMED_OUT: there the label is the schema's value for a missing one, and `labelled` false.
            `outcome` is PENDING and `reason` NONE. Columns may be views that are not contiguous.
        resolution: uint8 `[N]`.
        predictions: what was predicted when each event came, float32 `[N, *record]`; NaN where there was nothing.
        waited_ms: int64 `[N]`: the record time of the label minus that of the event, which is negative if the label's
            is earlier; of TIMED_OUT events the time that they waited.
        early: bool `[N]`: the event waited with `early`, so that the caller trained on it as a negative on arrival.
        stored: bool `[N]`: the event timed out as a negative, which was stored and not trained on.
        taken_back: bool `[N]`: the event was returned as TIMED_OUT before, so that it has ended already.
        damaged: bool `[N]`: its payload is damaged, so that it must not be trained on; it has its identity.
    """

    columns: dict[str, Array]
    resolution: NDArray[np.uint8]
    predictions: NDArray[np.float32]
    waited_ms: NDArray[np.int64]
    early: NDArray[np.bool_]
    stored: NDArray[np.bool_]
    taken_back: NDArray[np.bool_]
    damaged: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.resolution)


@dataclass
class JoinCounts:
    """Totals of a join since the pipeline began.

    Attributes:
        matched: events that got a label in time.
        timed_out: events that timed out; `early_timeouts` are those of them for which there was no space.
        taken_back: events that got a label after they had been returned as timed out.
        early_removals: timed-out events that were removed for lack of space, while a label could take them back.
        duplicate_labels: labels that came for an event that has one: an earlier label of their key was used.
        unmatched_labels: labels that no event has matched, counted once none can any more.
        late_labels: those of them whose key is that of an event that had timed out, of the last half to one million of
            these since the process began; one in 40 unmatched labels may be counted here instead.
        dropped_labels: labels that were dropped for lack of space while an event that comes could match them.
        crowded_labels: labels that were dropped because there were many others of their key.
        damaged: events whose payload was damaged.
    """

    matched: int = 0
    timed_out: int = 0
    early_timeouts: int = 0
    taken_back: int = 0
    early_removals: int = 0
    duplicate_labels: int = 0
    unmatched_labels: int = 0
    late_labels: int = 0
    dropped_labels: int = 0
    crowded_labels: int = 0
    damaged: int = 0

    @property
    def warning(self) -> str | None:
        """One sentence on labels that may be lost although there is space."""
        if not self.crowded_labels:
            return None
        return (
            f"{self.crowded_labels} labels were dropped, since there were {MOST_OF_KEY} of their key: an event of that "
            "key that comes later may end without its label; let keys name one event"
        )


class Decisions:
    """A queue of events by their numbers, each with its resolution, the time that it waited, and its label.

    Of the label the queue has the value, and the partition and offset of its message.
    """

    def __init__(self, label: Label) -> None:
        self._label = label
        self._parts: list[dict[str, Array]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(
        self,
        ids: Ids,
        resolution: NDArray[np.uint8],
        waited_ms: NDArray[np.int64],
        label: tuple[Array, NDArray[np.int32], NDArray[np.int64]] | None = None,
    ) -> None:
        """Append n events; `label`: values, partitions and offsets of their labels, None where they have none."""
        if label is None:
            count = len(ids)
            values = np.full((count, *self._label.shape), self._label.missing, self._label.dtype)
            label = values, np.full(count, NO_LABEL, np.int32), np.zeros(count, np.int64)
        self._append(dict(zip(_COLUMNS, (ids, resolution, waited_ms, *label), strict=True)))

    def repeat(self, rows: NDArray[np.bool_]) -> None:
        """Append those of the first events that `rows` selects once more; called before these are removed."""
        self._append({name: column[rows] for name, column in self.first(len(rows)).items()})

    def labels(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the partitions and the offsets of the labels of all events that have one."""
        columns = self.first(self._count)
        if not columns:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        found = columns["label_partition"] != NO_LABEL
        return columns["label_partition"][found], columns["label_offset"][found]

    def first(self, count: int) -> dict[str, Array]:
        """Return `id`, `resolution`, `waited_ms`, `value`, `label_partition` and `label_offset` of the first `count`
        events, which stay."""
        parts, found = [], 0
        for part in self._parts:
            if found >= count:
                break
            parts.append(part)
            found += len(part["id"])
        return {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]} if parts else {}

    def ids(self, resolution: int) -> Ids:
        """Return the events with this resolution."""
        return joined_ids([part["id"][part["resolution"] == resolution] for part in self._parts])

    def pop(self, count: int) -> None:
        """Remove the first `count` events."""
        self._count -= count
        while count:
            first = self._parts[0]
            if count < len(first["id"]):
                self._parts[0] = {name: column[count:] for name, column in first.items()}
                return
            count -= len(first["id"])
            del self._parts[0]

    def remove(self, ids: Ids) -> None:
        """Remove events by their numbers."""
        parts, self._parts, self._count = self._parts, [], 0
        for part in parts:
            stays = ~np.isin(part["id"], ids)
            self._append({name: column[stays] for name, column in part.items()})

    def tensors(self, position: NDArray[np.int32]) -> dict[str, Tensor]:
        """Return the queue for a checkpoint; `position`: of each event in the checkpoint, by its number."""
        columns = dict(self.first(self._count))
        if not columns:
            return {}
        columns["id"] = position[columns["id"]]
        return {f"decided.{name}": torch.from_numpy(column.copy()) for name, column in columns.items()}

    def restore(self, tensors: Mapping[str, Tensor], ids: Ids) -> None:
        """Restore the queue of a checkpoint; `ids`: the number of each event of the checkpoint, -1 if it is lost."""
        if "decided.id" in tensors:
            columns = {name: tensors[f"decided.{name}"].numpy() for name in _COLUMNS}
            columns["id"] = ids[columns["id"]]
            stays = columns["id"] >= 0
            self._append({name: column[stays] for name, column in columns.items()})

    def _append(self, part: dict[str, Array]) -> None:
        if len(part["id"]):
            self._parts.append(part)
            self._count += len(part["id"])
