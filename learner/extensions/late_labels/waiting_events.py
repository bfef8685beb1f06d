"""The events that wait for a label: a table and indexes in memory, and the payload in a file.

Legend: n events of a call, H events of a checkpoint, R bytes of a row.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Array
from anabranch.ingest.events.identity import identity_hash
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.part_formats import NO_SLOT, WAITING
from anabranch.learner.extensions.late_labels.durable_table import DurableTable
from anabranch.learner.extensions.late_labels.indexes import DueTimes, Ids
from anabranch.learner.extensions.late_labels.payload_file import PayloadFile
from anabranch.replay.row_layout import Fields, RowLayout

PREDICTION = "prediction"
"""The column of a row with what was predicted when the event came."""
_IN_ROW = ("partition", "offset", "row", "time_ms", "key_hash", "group_hash")
"""The identity columns of a row; the other ones are those of an event without outcome."""
_COMPACTED = 8
"""Extents that are moved at once."""
_MORE_EVENTS = 2**16
"""There may be so many more events than twice the slots: some have their payload in memory."""
IDENTITY = ("partition", "offset", "time_ms", "key_hash")
"""The fields of an event that its outcome and its erasure need."""
_IDENTIFYING = ("partition", "offset", "key")


def row_fields(schema: Schema, record_shape: tuple[int, ...]) -> Fields:
    """Return the columns of a row."""
    identity = {name: (IDENTITY_COLUMNS[name], ()) for name in _IN_ROW}
    return {**schema.payload(), **identity, PREDICTION: (np.dtype(np.float32), record_shape)}


class Wait(IntEnum):
    """The state of an event in the join."""

    FREE = 0
    """There is no event of this number."""
    WAITING = 1
    """It has no label."""
    LABELLED = 2
    """Its label came; it is returned next."""
    TIMED_OUT = 3
    """Its label did not come in time; it is returned next."""
    KEPT = 4
    """It was returned as timed out, and is kept for its label."""
    TAKEN_BACK = 5
    """It was returned as timed out, then its label came; it is returned again next."""


class Before(IntEnum):
    """What became of an event before its label came."""

    NOTHING = 0
    EARLY = 1
    """It was trained on as a negative on arrival."""
    STORED = 2
    """It timed out as a negative, which was stored and not trained on."""


class WaitingEvents(DurableTable):
    """The events that wait, were decided and are not settled, or are kept for a late label. Used by one thread.

    Attributes:
        file: of their payload.
        due: those that wait, by record time; `add` has not added new ones.
        kept: those that were returned as timed out, by record time.
    """

    def __init__(self, layout: RowLayout, file: PayloadFile, *, own_keys: bool = False) -> None:
        """Take the layout of rows, their file, and whether the key of labels is another than that of erasures."""
        like_key = () if own_keys else ("key_hash",)
        super().__init__(WAITING, "key", 2 * file.slots + _MORE_EVENTS, len(Wait), like_key=like_key)
        self.file = file
        self._layout = layout
        self.due = DueTimes(self["time_ms"], lambda ids: self.state[ids] == Wait.WAITING)
        self.kept = DueTimes(self["time_ms"], lambda ids: self.state[ids] == Wait.KEPT)

    @property
    def waiting(self) -> int:
        """Events that have not ended: they wait for a label, or their fate is decided and not settled."""
        return int(self.counts[Wait.WAITING : Wait.TIMED_OUT + 1].sum())

    @property
    def room(self) -> int:
        """Events that can be added now."""
        return min(self.file.room, self.free)

    @property
    def nbytes(self) -> int:
        """Bytes of memory: of the table and the indexes."""
        return self.table_bytes + self.due.nbytes + self.kept.nbytes

    def not_ended(self) -> Ids:
        """Return the numbers of the events that have not ended."""
        return self.ids(Wait.WAITING, Wait.TIMED_OUT)

    def add(self, columns: Mapping[str, Array], predictions: NDArray[np.float32]) -> Ids:
        """Add n events that wait, and return their numbers; they are found by key from now on."""
        key = columns.get("label_key", columns["key_hash"]).astype(np.uint64)
        rows_nR = self._layout.pack({**columns, PREDICTION: predictions}, np.arange(len(key)))
        slot = self.file.append(row_identity({**columns, "key": key}), rows_nR)
        nothing = np.full(len(key), Before.NOTHING, np.uint8)
        return self.insert({**columns, "key": key, "slot": slot, "before": nothing}, Wait.WAITING)

    def keep(self, ids: Ids) -> None:
        """Keep n events that were returned as timed out."""
        self.change(ids, Wait.KEPT)
        self.kept.add(ids)

    def read(self, ids: Ids) -> tuple[dict[str, Array], NDArray[np.float32], NDArray[np.bool_]]:
        """Return the columns of n events, their predictions, and which are damaged, bool `[n]`; raises OSError.

        Damaged ones have their identity, and zeros for the rest.
        """
        rows_nR, valid = self._read_rows(ids)
        if not valid.all():
            rows_nR[torch.from_numpy(~valid)] = 0
        columns: dict[str, Array] = {name: column.numpy() for name, column in self._layout.unpack(rows_nR).items()}
        predictions = columns.pop(PREDICTION).astype(np.float32)
        for name in IDENTITY_COLUMNS.keys() - columns.keys():
            columns[name] = np.zeros(len(ids), IDENTITY_COLUMNS[name])
        return {**columns, **self.columns(IDENTITY, ids)}, predictions, ~valid

    def remove(self, ids: Ids) -> None:
        """Remove n events."""
        if not len(ids):  # as at most calls
            return
        self.file.release(self["slot"][ids])
        self.delete(ids)

    def erase(self, ids: Ids) -> None:
        """Overwrite the payload of n events and remove them; raises OSError when the file cannot be written."""
        self.file.erase(self["slot"][ids])
        self.remove(ids)

    def tidy(self) -> None:
        """Do a bounded part of what keeps memory and file small."""
        file = self.file
        self.index.shrink(len(self))
        self.due.shrink(int(self.counts[Wait.WAITING]))
        self.kept.shrink(int(self.counts[Wait.KEPT]))
        if file.retries:
            ids = self.ids()
            self._move(ids[self["slot"][ids] < NO_SLOT][: file.rows])
        extents = file.sparse(_COMPACTED)
        if len(extents):
            ids = self.ids()
            slots = self["slot"][ids]
            self._move(ids[np.isin(slots // file.rows, extents) & (slots >= 0)])

    def restore(self, number: int | None, entries: NDArray[np.void], state: NDArray[np.uint8]) -> Ids:
        """Restore the events of a checkpoint, as `load`, and return their numbers."""
        ids = self.load(number, entries, state)
        by_time = ids[np.argsort(self["time_ms"][ids], kind="stable")]
        self.due.add(by_time[self.state[by_time] == Wait.WAITING])
        self.kept.add(by_time[self.state[by_time] == Wait.KEPT])
        return ids

    def in_order(self, ids: Ids) -> Ids:
        """Return n events by record time, then partition and offset."""
        return ids[np.lexsort((self["offset"][ids], self["partition"][ids], self["time_ms"][ids]))]

    def _read_rows(self, ids: Ids) -> tuple[Tensor, NDArray[np.bool_]]:
        entries = self.columns(("slot", *_IDENTIFYING), ids)
        return self.file.read(entries["slot"], row_identity(entries))

    def _move(self, ids: Ids) -> None:
        """Write the rows of n events to other slots; those of damaged rows are lost."""
        before = self["slot"][ids]
        try:
            rows_nR, valid = self._read_rows(ids)
        except OSError:  # the file logs and reports it
            return
        after = np.full(len(ids), NO_SLOT, np.int32)
        identity = row_identity(self.columns(_IDENTIFYING, ids[valid]))
        after[valid] = self.file.append(identity, rows_nR.numpy()[valid])
        self.set("slot", ids, after)
        self.file.release(before)


def row_identity(events: Mapping[str, NDArray[Any]] | NDArray[np.void]) -> NDArray[np.uint64]:
    """Return what the checksums of the rows of n events depend on besides the row."""
    partition, offset, key = (events[name] for name in _IDENTIFYING)
    identity = identity_hash(partition.astype(np.uint64), offset, np.zeros(len(offset), np.int32))
    return identity ^ key.astype(np.uint64)
