"""The holdout set: events that are never trained on, and that measure the accuracy on old and new events.

Legend: G events in the set.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.identity import identity_hash, keyed_hash, partition_base
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.replay.erasure.erased_events import ErasedEvents

YOUNG = 4
"""The newest 1 / `YOUNG` of the events are young: they measure the accuracy on new events."""
_KEYS = 20
"""Once the set is full, the events of a key or group yield to others where they are more than 1 / `_KEYS` of it, and
more than twice what each key would have: whoever sends many events of a key that is held out does not decide alone."""
_SLACK = 16
_MOST_PARTS = 64
_MANY = 16
"""Additions, mostly of one or two events, that are joined at once."""


class HoldoutRows:
    """G held-out events in the order of arrival; immutable. Any thread may read it.

    The events are stored in parts, which are joined and trimmed to the size of the set on first access.
    """

    def __init__(self, parts: Sequence[Mapping[str, Array]], limit: int, *, classes: bool) -> None:
        self._parts = parts
        self._limit = limit
        self._classes = classes

    def __len__(self) -> int:
        return min(self._limit, sum(len(part["label"]) for part in self._parts))

    @cached_property
    def columns(self) -> Mapping[str, Array]:
        """The events as columns, each `[G, ...]`; none when there is no event."""
        return trimmed(joined(self._parts), self._limit, classes=self._classes)

    def without(self, hashes: NDArray[np.uint64]) -> "HoldoutRows":
        """Return the events without those of `hashes`."""
        stays = ~np.isin(self.columns["hash"].astype(np.uint64), hashes)
        columns = {name: column[stays] for name, column in self.columns.items()}
        return HoldoutRows([columns] if stays.any() else [], self._limit, classes=self._classes)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Hashes of the identities of these events, and of those that are not trimmed yet."""
        return np.concatenate([np.empty(0, np.uint64), *(part["hash"].astype(np.uint64) for part in self._parts)])


class HoldoutSet:
    """At most `rows` events: the youngest, and an equal share of the older ones for each class.

    Classes have shares if a label is one class. In a class, a hash of the identity decides which events stay. Before
    that, a key or group with too many events loses some. The set is trimmed when it has a sixteenth more than `rows`,
    since joining all parts for each event would cost more than a step. Used by one thread; what `held` returns may be
    read by others.
    """

    def __init__(self, schema: Schema, rows: int, seed: int) -> None:
        """`seed`: 128 secret bits, by which older events stay or go."""
        self._limit = rows
        self._seed = seed
        self._classes = bool(schema.label.one_of)
        self._names = [*schema.payload(), "time_ms", "partition", "offset", "key_hash"]
        self._names += ["group_hash"] if schema.group else []
        self._parts: tuple[Mapping[str, Array], ...] = ()
        self._waiting: list[Mapping[str, Array]] = []
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._rows = 0

    def __len__(self) -> int:
        return min(self._limit, self._rows)

    @property
    def held(self) -> HoldoutRows:
        """The current events."""
        return HoldoutRows(self._join_waiting(), self._limit, classes=self._classes)

    @property
    def older(self) -> int:
        """Number of events older than the youngest quarter, including those still to be trimmed."""
        return self._rows - self._rows // YOUNG

    def take(self, indices: NDArray[np.int64]) -> dict[str, Array]:
        """Return the columns of n events by their indices in the order in which they came, each `[n, ...]`.

        The result is in that order too.
        """
        parts, indices = self._join_waiting(), np.sort(indices)
        ends = np.cumsum([len(part["label"]) for part in parts])
        where = np.searchsorted(ends, indices, side="right")
        taken = []
        for number in np.unique(where).tolist():
            part = parts[number]
            within = indices[where == number] - (ends[number] - len(part["label"]))
            taken.append({name: column.take(within, axis=0) for name, column in part.items()})
        return dict(joined(taken))

    def add(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Add N held-out events, columns `[N, ...]`, which must not change any more."""
        if not columns:
            return
        self._register_partitions(partitions)
        self._waiting.append(columns)
        self._rows += len(columns["label"])
        if self._rows > self._limit + self._limit // _SLACK:
            self._replace(self.held.columns)
        elif len(self._waiting) == _MANY and len(self._join_waiting()) > _MOST_PARTS:
            self._replace(joined(self._parts))

    def relabel(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Replace the labels of those of N events, columns `[N, ...]`, that are in the set."""
        if not columns:
            return
        self._register_partitions(partitions)
        hashes = self._hashes(columns)
        self._parts = tuple(_relabelled(part, hashes, columns["label"]) for part in self._join_waiting())

    def _register_partitions(self, partitions: Sequence[TopicPartition]) -> None:
        if len(partitions) > len(self._bases):
            self._bases = np.array([partition_base(name) for name in partitions], np.uint64)

    def _hashes(self, columns: Mapping[str, Array]) -> NDArray[np.uint64]:
        offset, row = columns["offset"].astype(np.int64), columns["row"].astype(np.int32)
        return keyed_hash(identity_hash(self._bases[columns["partition"]], offset, row), self._seed)

    def _join_waiting(self) -> tuple[Mapping[str, Array], ...]:
        """Join the waiting events to a part, and return all parts, in the order of arrival."""
        if self._waiting:
            columns, self._waiting = joined(self._waiting), []
            self._parts += ({name: columns[name] for name in self._names} | {"hash": self._hashes(columns)},)
        return self._parts

    def erase(self, erased: ErasedEvents, bases: NDArray[np.uint64]) -> int:
        """Remove erased events, and return how many.

        Args:
            erased: the erased events.
            bases: `partition_base` of each partition by its index.
        """
        return len(self._take_out(lambda columns: erased.covers(bases, columns)).get("label", ()))

    def remove(self, hashes: NDArray[np.uint64]) -> Mapping[str, Array]:
        """Remove the events with these hashes, and return the columns of the removed ones."""
        return self._take_out(lambda columns: np.isin(columns["hash"].astype(np.uint64), hashes))

    def _take_out(self, which: Callable[[Mapping[str, Array]], NDArray[np.bool_]]) -> Mapping[str, Array]:
        """Remove the events that `which` returns for the columns of all, and return the columns of the removed ones."""
        columns = joined(self._join_waiting())
        leaves = which(columns) if columns else np.zeros(0, np.bool_)
        stays = columns if not leaves.any() else {name: column[~leaves] for name, column in columns.items()}
        self._replace({} if leaves.all() else stays)
        return {name: column[leaves] for name, column in columns.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the set for a checkpoint, with events that are not trimmed yet; later events do not change it."""
        self._replace(joined(self._join_waiting()))
        return {name: torch.from_numpy(column) for part in self._parts for name, column in part.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the set of a checkpoint."""
        self._replace({name: tensor.numpy() for name, tensor in tensors.items()})

    def _replace(self, columns: Mapping[str, Array]) -> None:
        """Replace all events by these, in one part."""
        self._parts, self._waiting = (columns,) if columns else (), []
        self._rows = len(columns["label"]) if columns else 0


def joined(parts: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """Return the events of several parts as columns."""
    if len(parts) < 2:
        return parts[0] if parts else {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _relabelled(part: Mapping[str, Array], hashes: NDArray[np.uint64], label: Array) -> Mapping[str, Array]:
    """Return a part with the new labels of the events that have these hashes."""
    _, among, index = np.intersect1d(part["hash"], hashes, return_indices=True)
    if not len(among):
        return part
    labels = part["label"].copy()
    labels[among] = label[index]
    return {**part, "label": labels}


def trimmed(columns: Mapping[str, Array], limit: int, *, classes: bool) -> Mapping[str, Array]:
    """Return at most `limit` of the events, in their order; `classes`: each class has an equal share."""
    if not columns or len(columns["label"]) <= limit:
        return columns
    crowded = _crowded(columns, limit)
    if crowded.any():
        columns = {name: column[~crowded] for name, column in columns.items()}
    stays = _stays(columns["label"], columns["hash"].astype(np.uint64), limit, classes=classes)
    return {name: column[stays] for name, column in columns.items()}


def _crowded(columns: Mapping[str, Array], limit: int) -> NDArray[np.bool_]:
    """Return which events yield to those of other keys and groups; no more than have to go.

    The youngest quarter of a key's share stays, and of its older events those with the smallest hashes.
    """
    who = columns["key_hash"].astype(np.uint64)
    if "group_hash" in columns:
        group = columns["group_hash"].astype(np.uint64)
        who = np.where(group != 0, group, who)
    keys, members = np.unique(who, return_inverse=True)
    share = max(limit // _KEYS, 2 * limit // len(keys), 1)
    age = np.arange(len(who))[::-1].astype(np.uint64)
    older = _rank(members, age) >= share // YOUNG
    rank = np.zeros(len(who), np.int64)
    rank[older] = _rank(members[older], columns["hash"].astype(np.uint64)[older])
    rank[who == 0] = 0
    crowded = np.zeros(len(who), np.bool_)
    most = np.argsort(-rank, kind="stable")[: len(who) - limit]
    crowded[most[rank[most] >= share - share // YOUNG]] = True
    return crowded


def _rank(members: NDArray[np.int64], hashed: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the rank of each event by its hash among the events of its class, key or group."""
    order = np.lexsort((hashed, members))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.searchsorted(members[order], members[order])
    return rank


def _stays(label: Array, hashed: NDArray[np.uint64], limit: int, *, classes: bool) -> NDArray[np.bool_]:
    total = len(label)
    young = limit // YOUNG
    stays = np.zeros(total, np.bool_)
    stays[total - young :] = True
    groups = label[: total - young].astype(np.float64) if classes else np.zeros(total - young)
    _, members = np.unique(groups, return_inverse=True)
    share = _water_level(np.bincount(members), limit - young)
    stays[: total - young] = _rank(members, hashed[: total - young]) < share[members]
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


_SECONDS = 60.0
_FAR = 3.0
"""Times more, or less, than expected."""
_FEWEST = 50
"""Fewer expected events may be off by that much by chance."""


class HeldOutShare:
    """Measures the share of each minute. `update` is called by one thread; any thread may read `warning`."""

    def __init__(self, fraction: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Take `gate.holdout_fraction`."""
        self._fraction = fraction
        self._clock = clock
        self._begin: tuple[float, int, int] | None = None
        self.warning: str | None = None
        """One sentence where the last minute's share was far from the fraction."""

    def update(self, outcomes: Mapping[str, int]) -> None:
        """Take how many events had each outcome until now."""
        held_out = outcomes.get("held_out", 0)
        now = self._clock(), held_out, held_out + outcomes.get("trained", 0)
        if self._begin is None:
            self._begin = now
        if now[0] - self._begin[0] < _SECONDS:
            return
        held_out, events = (after - before for after, before in zip(now[1:], self._begin[1:], strict=True))
        self._begin, expected = now, self._fraction * events
        is_far = held_out > _FAR * max(expected, _FEWEST) or (expected >= _FEWEST and held_out < expected / _FAR)
        self.warning = (
            f"{held_out / events:.2%} of the labelled events of a minute were held out, and gate.holdout_fraction is "
            f"{self._fraction:.2%}: few keys or groups send most events, or somebody sends many under one that is held "
            "out; check the keys in the topic"
            if is_far
            else None
        )
