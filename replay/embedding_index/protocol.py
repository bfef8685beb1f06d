"""The protocol between the learner and its index process: slots in shared memory, and messages over a socket.

Each request occupies a slot, which its reply releases. So there are never more messages in flight than slots, the
socket is never full, and neither side waits for the other to read.

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

from anabranch.core.temporary_files import anonymous_file

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

NO_ID = -1
"""The id of no event."""
_POOL_BYTES = 16_000_000
_MAX_SLOTS, _MIN_SLOTS = 64, 12


class IndexSettings(msgspec.Struct, frozen=True):
    """The settings that both sides share."""

    dim: int
    """D."""
    clusters: int
    """Clusters to train."""
    capacity: int
    """Events that the index may hold."""
    stale_after: int
    """Steps after which an embedding is stale."""
    batch: int
    """Events or queries that fit in a slot."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, for a batch with its ids or for a report."""
        report = 8 * len(IndexFigures._fields) + 4 * self.clusters * self.dim
        return -(-max(self.batch * (8 + 4 * self.dim), report) // 64) * 64

    @property
    def slots(self) -> int:
        """The number of slots."""
        return max(_MIN_SLOTS, min(_MAX_SLOTS, _POOL_BYTES // self.slot_bytes))


class IndexFigures(NamedTuple):
    """The statistics of the process.

    Attributes:
        rows: events in the index.
        tombstones: rows of removed or replaced events that are not reclaimed yet.
        trained_rows: events at the last training; 0 before the first.
        lists: inverted lists; 1 while every search is exhaustive.
        probes: lists that a search reads.
        recall: part of the nearest k that a search finds, over the last queries compared with an exhaustive search; NaN
            before the first.
        age_mean: mean age of the embeddings in steps.
        age_max: age of the oldest embedding in steps.
        stale: embeddings older than the bound.
        bytes: memory of vectors and tables.
        malformed: events that were left out because their embedding was not finite.
        full: events that were left out because there was no room.
        renewing: 1 while clusters or lists are being trained.
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


class MessageType(enum.IntEnum):
    """The kind of a request and of its reply."""

    ADD = 1
    REMOVE = 2
    QUERY = 3
    STALE = 4
    REPORT = 5
    CLUSTERS = 6


class IndexMessage(NamedTuple):
    """One request or reply.

    Attributes:
        kind: a MessageType.
        slot: the slot with its arrays.
        rows: how many events, queries, ids or clusters these are.
        k: in a query, the number of neighbours; in a reply with clusters, whether there are more.
        step: of the learner; in a report, the number of the training of the clusters; in a request for clusters, the
            row to begin from.
    """

    kind: int
    slot: int
    rows: int
    k: int
    step: int


_MESSAGE = struct.Struct("<iiiiq")


class MessageDecoder:
    """Splits the bytes that arrive over a socket into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[IndexMessage]:
        """Return the messages that `data` completes."""
        data = self._rest + data
        end = len(data) - len(data) % _MESSAGE.size
        self._rest = data[end:]
        return [IndexMessage(*fields) for fields in _MESSAGE.iter_unpack(data[:end])]


def encode(message: IndexMessage) -> bytes:
    """Return the bytes of a message."""
    return _MESSAGE.pack(*message)


class SharedSlots:
    """The shared memory. It has no name and exists only as open descriptors, so a kill -9 leaves nothing behind."""

    def __init__(self, settings: IndexSettings, descriptor: int | None = None) -> None:
        """Create the memory, or map that of another process, given its descriptor."""
        self._dim, self._slot_bytes = settings.dim, settings.slot_bytes
        size = settings.slots * settings.slot_bytes
        self.descriptor = anonymous_file(size) if descriptor is None else descriptor
        try:
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError:
            self.close()
            raise

    def ids(self, slot: int, n: int) -> Ids:
        """Return a view of the first n ids of a slot."""
        return np.frombuffer(self._memory, np.int64, n, slot * self._slot_bytes)

    def vectors(self, slot: int, n: int, *, after: int = 0) -> Vectors:
        """Return a view of n vectors `[n, D]` of a slot, which follow `after` ids or figures."""
        offset = slot * self._slot_bytes + 8 * after
        return np.frombuffer(self._memory, np.float32, n * self._dim, offset).reshape(n, self._dim)

    def figures(self, slot: int) -> NDArray[np.float64]:
        """Return a view of the figures of a report."""
        return np.frombuffer(self._memory, np.float64, len(IndexFigures._fields), slot * self._slot_bytes)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last view."""
        os.close(self.descriptor)
