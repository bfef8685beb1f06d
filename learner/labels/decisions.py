"""The events whose wait has ended, in the order of the decisions, until the loop has used them.

Legend: n events of a call.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.block import Array
from ingest.events.schema import Label
from learner.labels.index.numbers import Ids, joined_ids

_COLUMNS = ("id", "resolution", "waited_ms", "value", "label_partition", "label_offset")
NO_LABEL = -1
"""The partition of the label of an event that has none."""


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
