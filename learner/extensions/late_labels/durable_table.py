"""What the join has of events and of labels in memory and in checkpoints: entries by number, each with a state.

Legend: n entries of a call, B entries of the last checkpoint, H of a checkpoint, m matches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.learner.extensions.late_labels.indexes import Ids, KeyIndex, Numbers
from anabranch.replay.snapshot import StoreDelta


class DurableTable:
    """At most `limit` entries, found by number or by key, and how they differ from those of the last checkpoint.

    An entry that has changed since is written once more, as one that was removed and one that was added. Used by one
    thread.

    Attributes:
        entry: the dtype of an entry, in memory and in checkpoints.
        limit: of entries.
        state: uint8 `[limit]`, by number: 0 where there is no entry. `change` alone sets it.
        counts: entries by state.
        index: finds entries by their key.
    """

    def __init__(
        self, entry: np.dtype[np.void], key: str, limit: int, states: int, *, like_key: Sequence[str] = ()
    ) -> None:
        """Take the dtype of an entry, the field with its key, the most entries, and how many states there are.

        `like_key`: further fields that have the key, and take no memory.
        """
        self.entry, self.limit = entry, limit
        # Pages of these arrays take memory once they are used.
        self._fields = {name: np.zeros((limit, *entry[name].shape), entry[name].base) for name in entry.names or ()}
        self._fields |= dict.fromkeys(like_key, self._fields[key])
        self._entry_bytes = sum(entry[name].itemsize for name in self._fields if name not in like_key)
        self.state = np.zeros(limit, np.uint8)
        self.counts = np.zeros(states, np.int64)
        self.index = KeyIndex(self._fields[key], self.state)
        self._numbers = Numbers(limit)
        self._base: int | None = None
        """The number of the last checkpoint; None if the next one has all entries."""
        self._base_ids: Ids = np.empty(0, np.int32)
        self._saved = np.zeros(limit, np.bool_)
        """Which entries are as in that checkpoint."""

    def __len__(self) -> int:
        return int(self.counts[1:].sum())

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a field of all entries, by number. Those that checkpoints have are set by `set` alone."""
        return self._fields[name]

    @property
    def free(self) -> int:
        """Entries that can be added."""
        return self._numbers.free

    @property
    def table_bytes(self) -> int:
        """Bytes of memory: of the arrays up to the highest number that was used, and of the indexes."""
        arrays = self._numbers.used * (self._entry_bytes + self.state.itemsize + self._saved.itemsize)
        return arrays + self._numbers.nbytes + self._base_ids.nbytes + self.index.nbytes

    def ids(self, first: int = 1, last: int = 255) -> Ids:
        """Return the numbers of all entries, or of those whose state is one from `first` to `last`."""
        state = self.state[: self._numbers.used]
        return np.flatnonzero((state >= first) & (state <= last)).astype(np.int32)

    def columns(self, names: Sequence[str], ids: Ids) -> dict[str, NDArray[Any]]:
        """Return fields of n entries."""
        return {name: self[name][ids] for name in names}

    def insert(self, columns: Mapping[str, Array], state: int) -> Ids:
        """Add n entries, whose fields are among the columns, and return their numbers."""
        return self._insert(columns, np.full(len(columns["offset"]), state, np.uint8))

    def change(self, ids: Ids, state: int) -> None:
        """Set the state of n entries."""
        self.counts -= np.bincount(self.state[ids], minlength=len(self.counts))
        self.state[ids] = state
        self.counts[state] += len(ids)

    def set(self, name: str, ids: Ids, values: Array | int) -> None:
        """Set a field of n entries."""
        self[name][ids] = values
        self._saved[ids] = False

    def delete(self, ids: Ids) -> None:
        """Remove n entries."""
        self.change(ids, 0)
        self._saved[ids] = False
        self._numbers.release(ids)

    def begin_snapshot(self, number: int) -> tuple[StoreDelta, Ids]:
        """Return the entries of checkpoint `number` as changes, from which changes are tracked from now on, and their
        numbers in the order of the checkpoint, `[H]`."""
        alive, new = self._saved[self._base_ids], self.ids()
        new = new[~self._saved[new]]
        entries = np.empty(len(new), self.entry)
        for name, field in self._fields.items():
            entries[name] = field[new]
        change = StoreDelta(self._base, alive, entries, None)
        self._track(number, np.concatenate([self._base_ids[alive], new]))
        return change, self._base_ids

    def not_written(self) -> None:
        """Let the next checkpoint have all entries: the last one was not written."""
        self._saved[: self._numbers.used] = False
        self._track(None, np.empty(0, np.int32))

    def load(self, number: int | None, entries: NDArray[np.void], state: NDArray[np.uint8]) -> Ids:
        """Add the entries of a checkpoint in their order, `[H]`, and return their numbers.

        `number`: of the checkpoint, if the next one has the changes since; None if the next one has all entries.
        """
        ids = self._insert(entries, state)
        self._track(number, ids if number is not None else ids[:0])
        return ids

    def _insert(self, columns: Mapping[str, Array] | NDArray[np.void], state: NDArray[np.uint8]) -> Ids:
        ids = self._numbers.take(len(state))
        for name, field in self._fields.items():
            field[ids] = columns[name]
        self.state[ids] = state
        self.counts += np.bincount(state, minlength=len(self.counts))
        self.index.add(ids)
        return ids

    def _track(self, number: int | None, ids: Ids) -> None:
        self._base, self._base_ids = number, ids
        self._saved[ids] = True
