"""What the learner and its index process share: slots of memory, and records over a socket that pass them to and fro.

Every request lies in a slot, and its reply gives the slot back. So there are never more records on the way than slots,
the socket is never full, and neither side ever waits for the other to read.

Legend: n events or queries of a slot, D numbers of an embedding.
"""

import enum
import math
import mmap
import os
import struct
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.core.shared_memory import anonymous_file

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

NO_ID = -1
"""No event has this id."""
_POOL_BYTES = 16_000_000
_MOST_SLOTS, _LEAST_SLOTS = 64, 12


class IndexSettings(msgspec.Struct, frozen=True):
    """What both sides must agree on."""

    dim: int
    """D."""
    clusters: int
    """Coarse clusters to be told of."""
    capacity: int
    """Events that the index may hold."""
    stale_after: int
    """Steps after which an embedding is to be made anew."""
    batch: int
    """Events or queries that a slot has room for."""

    @property
    def slot_bytes(self) -> int:
        """Room for a batch with its ids, and for a report."""
        report = 8 * len(Figures._fields) + 4 * self.clusters * self.dim
        return -(-max(self.batch * (8 + 4 * self.dim), report) // 64) * 64

    @property
    def slots(self) -> int:
        """How many there are."""
        return max(_LEAST_SLOTS, min(_MOST_SLOTS, _POOL_BYTES // self.slot_bytes))


class Figures(NamedTuple):
    """What the process tells of itself.

    Attributes:
        rows: events that it has.
        tombstones: rows of events that were removed or replaced, not taken out yet.
        trained_rows: events that were there at the last training; 0 before the first.
        lists: lists that events lie in; 1 while every search is exhaustive.
        probes: lists that a search looks into.
        recall: part of the nearest k that a search finds, over the last queries that were held against an exhaustive
            one; NaN before the first.
        age_mean: steps since an embedding was made.
        age_max: the same, of the oldest.
        stale: embeddings older than the bound.
        bytes: memory of vectors and all that is noted beside them.
        malformed: events that were left out since they had no finite embedding.
        full: events that were left out since there was no room.
        renewing: 1 while clusters or lists are being made.
    """

    rows: float = 0.0
    tombstones: float = 0.0
    trained_rows: float = 0.0
    lists: float = 1.0
    probes: float = 1.0
    recall: float = math.nan
    age_mean: float = 0.0
    age_max: float = 0.0
    stale: float = 0.0
    bytes: float = 0.0
    malformed: float = 0.0
    full: float = 0.0
    renewing: float = 0.0


class Kind(enum.IntEnum):
    """What a record asks for; its reply is of the same kind."""

    ADD = 1
    REMOVE = 2
    ASK = 3
    STALE = 4
    REPORT = 5
    CLUSTERS = 6


class Record(NamedTuple):
    """One request or reply.

    Attributes:
        kind: what is asked for.
        slot: where its arrays lie.
        rows: how many events, queries, ids or clusters these are.
        k: of a question, how many neighbours; of a reply with clusters, whether there are more.
        step: the learner's; of a report, the number of the training of the clusters; of a request for clusters, the row
            to begin from.
    """

    kind: int
    slot: int
    rows: int
    k: int
    step: int


_RECORD = struct.Struct("<iiiiq")


class Records:
    """Checkpoints what comes over a socket into records."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Record]:
        """Return the records that are whole with `data`."""
        data = self._rest + data
        whole = len(data) - len(data) % _RECORD.size
        self._rest = data[whole:]
        return [Record(*each) for each in _RECORD.iter_unpack(data[:whole])]


def encode(record: Record) -> bytes:
    """Return the bytes of a record."""
    return _RECORD.pack(*record)


class Slots:
    """The shared memory. It has no name: it exists as open descriptors only, so a kill -9 leaves nothing behind."""

    def __init__(self, settings: IndexSettings, descriptor: int | None = None) -> None:
        """Make the memory, or map what another process made when its descriptor is given."""
        self._dim, self._slot_bytes = settings.dim, settings.slot_bytes
        size = settings.slots * settings.slot_bytes
        self.descriptor = anonymous_file(size) if descriptor is None else descriptor
        try:
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError:
            self.close()
            raise

    def ids(self, slot: int, n: int) -> Ids:
        """Return the first n ids of a slot, a view."""
        return np.frombuffer(self._memory, np.int64, n, slot * self._slot_bytes)

    def vectors(self, slot: int, n: int, *, after: int = 0) -> Vectors:
        """Return n vectors `[n, D]` that follow so many ids or figures, a view."""
        offset = slot * self._slot_bytes + 8 * after
        return np.frombuffer(self._memory, np.float32, n * self._dim, offset).reshape(n, self._dim)

    def figures(self, slot: int) -> NDArray[np.float64]:
        """Return the figures of a report, a view."""
        return np.frombuffer(self._memory, np.float64, len(Figures._fields), slot * self._slot_bytes)

    def close(self) -> None:
        """Close the descriptor; the memory itself goes when the last view of it does."""
        os.close(self.descriptor)
