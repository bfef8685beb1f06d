"""The events that wait for a label: a table and indexes in memory, and the payload in a file.

Legend: n events of a call, H events of a checkpoint, R bytes of a row.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import IDENTITY_COLUMNS, Array
from ingest.events.schema import Schema
from learner.labels.index.due_times import DueTimes
from learner.labels.index.key_index import KeyIndex
from learner.labels.index.numbers import Ids
from learner.labels.payload_file import NO_SLOT, PayloadFile
from learner.labels.waiting_table import Wait, WaitingTable
from replay.row_layout import Fields, RowLayout

PREDICTION = "prediction"
"""The column of a row with the model's output when the event came."""
_IN_ROW = ("partition", "offset", "row", "time_ms", "key_hash", "group_hash")
"""The identity columns of a row; the other ones are those of an event without outcome."""
_COMPACTED = 8
"""Extents that are moved at once."""
_MORE_NUMBERS = 2**16


def row_fields(schema: Schema, output_shape: tuple[int, ...]) -> Fields:
    """Return the columns of a row."""
    identity = {name: (IDENTITY_COLUMNS[name], ()) for name in _IN_ROW}
    return {**schema.payload(), **identity, PREDICTION: (np.dtype(np.float32), output_shape)}


EVENT_BYTES = 64
"""Memory of an event, at most."""


class WaitingEvents:
    """Used by one thread.

    Attributes:
        table: the events.
        file: of their payload.
    """

    def __init__(self, layout: RowLayout, file: PayloadFile) -> None:
        # More events than slots: numbers of removed events stay unused until the next checkpoint.
        self.table = table = WaitingTable(2 * file.slots + _MORE_NUMBERS)
        self.file = file
        self._layout = layout
        self._index = KeyIndex(table.key, table.state)
        self._due = DueTimes(table.time_ms, lambda ids: table.state[ids] == Wait.WAITING)
        self._kept = DueTimes(table.time_ms, lambda ids: table.state[ids] == Wait.KEPT)

    @property
    def room(self) -> int:
        """Events that can be added now."""
        return min(self.file.room, self.table.free)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether space runs low, and a checkpoint lets space be used again."""
        return self.file.needs_checkpoint or self.table.needs_checkpoint

    @property
    def frees_soon(self) -> bool:
        """Whether room comes without events that leave."""
        return self.file.frees_soon or self.table.needs_checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of memory: of the table and the indexes."""
        return self.table.nbytes + self._index.nbytes + self._due.nbytes + self._kept.nbytes

    def add(self, columns: Mapping[str, Array], predictions: NDArray[np.float32]) -> Ids:
        """Add n events that wait, and return their numbers; they are found by key from now on."""
        table, ids = self.table, self.table.add(columns)
        rows_nR = self._layout.pack({**columns, PREDICTION: predictions}, np.arange(len(ids)))
        table.slot[ids] = self.file.append(table.identity(ids), rows_nR)
        self._index.add(ids)
        return ids

    def wait(self, ids: Ids) -> None:
        """Let n events that wait time out when they are due."""
        self._due.add(ids)

    def keep(self, ids: Ids) -> None:
        """Keep n events that were returned as timed out."""
        self.table.change(ids, Wait.KEPT)
        self._kept.add(ids)

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.intp], Ids]:
        """Return the events of n keys, as `KeyIndex.find`."""
        return self._index.find(keys)

    def due(self, time_ms: int) -> Ids:
        """Return the events that wait and have a record time below `time_ms`; they are no longer due."""
        return self.table.in_order(self._due.pop_before(time_ms))

    def remove_kept(self, time_ms: int) -> None:
        """Remove the kept events with a record time below `time_ms`."""
        self.remove(self._kept.pop_before(time_ms))

    def oldest(self, n: int) -> tuple[Ids, Ids]:
        """Return the oldest n events: kept ones, and if these are fewer, others that wait; they are not due again."""
        kept = self._kept.pop_oldest(n)
        waiting = self._due.pop_oldest(n - len(kept)) if len(kept) < n else kept[:0]
        return kept, self.table.in_order(waiting)

    def read(self, ids: Ids) -> tuple[dict[str, Array], NDArray[np.float32], NDArray[np.bool_]]:
        """Return the columns of n events, their predictions, and which are undamaged, bool `[n]`; raises OSError."""
        rows_nR, valid = self.file.read(self.table.slot[ids], self.table.identity(ids))
        columns: dict[str, Array] = {name: column.numpy() for name, column in self._layout.unpack(rows_nR).items()}
        predictions = columns.pop(PREDICTION).astype(np.float32)
        for name in IDENTITY_COLUMNS.keys() - columns.keys():
            columns[name] = np.zeros(len(ids), IDENTITY_COLUMNS[name])
        return columns, predictions, valid

    def remove(self, ids: Ids) -> None:
        """Remove n events."""
        if not len(ids):  # as at most calls of `remove_kept`
            return
        self.file.release(self.table.slot[ids])
        self.table.remove(ids)

    def erase(self, ids: Ids) -> None:
        """Overwrite the payload of n events and remove them; raises OSError when the file cannot be written."""
        self.file.erase(self.table.slot[ids])
        self.remove(ids)

    def begin_overwrite(self) -> None:
        """Begin to overwrite the payload of removed events."""
        self.file.begin_overwrite(self.table.slot[self.table.ids()])

    def tidy(self) -> None:
        """Do a bounded part of what keeps memory and file small."""
        table, file = self.table, self.file
        self._index.shrink(len(table))
        self._due.shrink(int(table.counts[Wait.WAITING]))
        self._kept.shrink(int(table.counts[Wait.KEPT]))
        if file.retries:
            ids = table.ids()
            self._move(ids[table.slot[ids] < NO_SLOT][: file.rows])
        extents = file.sparse(_COMPACTED)
        if len(extents):
            ids = table.ids()
            self._move(ids[np.isin(table.slot[ids] // file.rows, extents) & (table.slot[ids] >= 0)])

    def restore(self, number: int | None, entries: NDArray[np.void], state: NDArray[np.uint8], *, own: bool) -> Ids:
        """Restore the events of a checkpoint, as `WaitingTable.restore`, and return their numbers."""
        table, ids = self.table, self.table.restore(number, entries, state, own=own)
        self._index.add(ids)
        by_time = ids[np.argsort(table.time_ms[ids], kind="stable")]
        self._due.add(by_time[table.state[by_time] == Wait.WAITING])
        self._kept.add(by_time[table.state[by_time] == Wait.KEPT])
        return ids

    def _move(self, ids: Ids) -> None:
        """Write the rows of n events to other slots; those of damaged rows are lost."""
        before, identity = self.table.slot[ids], self.table.identity(ids)
        try:
            rows_nR, valid = self.file.read(before, identity)
        except OSError:  # the file logs and reports it
            return
        after = np.full(len(ids), NO_SLOT, np.int32)
        after[valid] = self.file.append(identity[valid], rows_nR.numpy()[valid])
        self.table.move(ids, after)
        self.file.release(before)
