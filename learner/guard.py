"""The guard set: held-out events, never trained on, by which old knowledge is measured.

Legend: G events in the set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ingest.block import Array, TopicPartition
from ingest.identity import identity_hash, partition_base
from ingest.schema import Schema
from replay.forgotten import Forgotten

YOUNG = 4
"""One in so many of the events held is young: the newest, by which accuracy on what is new is told."""
_SEED = 0x6A09E667


@dataclass(frozen=True)
class GuardRows:
    """G held-out events in the order in which they came; immutable."""

    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.columns["label"]) if self.columns else 0


class GuardSet:
    """At most `rows` events. The youngest quarter always stays; of the rest every class keeps its fair share.

    Who stays within a class is decided by a hash of the identity, so that the set does not depend on when it was
    trimmed. Used by one thread; `held` may be read by others.
    """

    def __init__(self, schema: Schema, rows: int) -> None:
        self._most = rows
        self._classes = schema.label.classes
        self._names = [*schema.payload(), "time_ms", "partition", "offset", "key_hash"]
        self._names += ["group_hash"] if schema.group else []
        self.held = GuardRows({})

    def add(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Take up N held-out events, columns `[N, ...]`."""
        if not columns:
            return
        bases = np.array([partition_base(name) for name in partitions], np.uint64)
        hashed = identity_hash(
            bases[columns["partition"]], columns["offset"].astype(np.int64), columns["row"].astype(np.int32), _SEED
        )
        added: dict[str, Array] = {name: columns[name] for name in self._names} | {"hash": hashed}
        before = self.held.columns
        joined = {name: np.concatenate([before[name], new]) if before else new for name, new in added.items()}
        if len(joined["label"]) > self._most:
            stays = self._stays(joined["label"].astype(np.float64), joined["hash"].astype(np.uint64))
            joined = {name: column[stays] for name, column in joined.items()}
        self.held = GuardRows(joined)

    def forget(self, forgotten: Forgotten, bases: NDArray[np.uint64]) -> int:
        """Let forgotten events leave, and return how many.

        Args:
            forgotten: what is.
            bases: `partition_base` of each partition by its index.
        """
        if not len(self.held):
            return 0
        columns = self.held.columns
        covered = forgotten.covers(bases, columns)
        if covered.any():
            self.held = GuardRows({name: column[~covered] for name, column in columns.items()})
        return int(np.count_nonzero(covered))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The set, for a cut: it shares memory with `held`, which is immutable."""
        return {name: torch.from_numpy(column) for name, column in self.held.columns.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take up the set of a cut."""
        self.held = GuardRows({name: tensor.numpy() for name, tensor in tensors.items()})

    def _stays(self, label: NDArray[np.float64], hashed: NDArray[np.uint64]) -> NDArray[np.bool_]:
        total = len(label)
        young = self._most // YOUNG
        stays = np.zeros(total, np.bool_)
        stays[total - young :] = True
        groups = label[: total - young] if self._classes else np.zeros(total - young)
        _, members = np.unique(groups, return_inverse=True)
        share = _water_level(np.bincount(members), self._most - young)
        order = np.lexsort((hashed[: total - young], members))
        rank = np.arange(len(order)) - np.searchsorted(members[order], members[order])
        stays[order[rank < share[members[order]]]] = True
        return stays


def _water_level(counts: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return how many of each class may stay: all of the rare ones, equal shares of the rest, at most `room` in all."""
    share = np.zeros_like(counts)
    left, open_ = room, np.flatnonzero(counts)
    while len(open_) and left:
        level = max(1, left // len(open_))
        given = np.minimum(counts[open_] - share[open_], level)[: left if level == 1 else None]
        share[open_[: len(given)]] += given
        left -= int(given.sum())
        open_ = open_[share[open_] < counts[open_]]
    return share
