"""The messages between the learner and its index process.

Legend: n events or queries of a message, D numbers of an embedding.
"""

import enum
import math
import select
import socket
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.core.reported import Reported

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

NO_ID = -1
"""The id of no event."""


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


class IndexFigures(msgspec.Struct, frozen=True):
    """The statistics of the process.

    Attributes:
        lists: inverted lists; 1 while every search is exhaustive.
        probes: lists that a search reads.
        recall: over the last queries compared with an exhaustive search; NaN before the first.
        age_mean: mean age of the embeddings in steps.
        age_max: age of the oldest embedding in steps.
        malformed: events that were left out because their embedding was not finite.
        full: events that were left out because there was no room.
        renewing: whether clusters or lists are being trained.
    """

    rows: Annotated[int, Reported("anabranch_replay_index_rows", "Embeddings in the index.")] = 0
    trained_rows: Annotated[
        int,
        Reported("anabranch_replay_index_trained_rows", "Embeddings that were there when clusters were trained last."),
    ] = 0
    lists: int = 1
    probes: int = 1
    recall: Annotated[
        float,
        Reported(
            "anabranch_replay_index_recall_ratio",
            "Nearest events that are found, of those that an exhaustive search finds.",
        ),
    ] = math.nan
    age_mean: float = 0.0
    age_max: float = 0.0
    stale: Annotated[
        int, Reported("anabranch_replay_index_stale_rows", "Embeddings that are to be computed again.")
    ] = 0
    bytes: Annotated[int, Reported("anabranch_replay_index_bytes", "Memory of the index.")] = 0
    malformed: int = 0
    full: int = 0
    renewing: bool = False

    @Reported("anabranch_replay_index_age_steps", "Steps since embeddings were made.", "stat")
    def ages(self) -> dict[str, float]:
        """Mean and maximum."""
        return {"mean": self.age_mean, "max": self.age_max}


class MessageType(enum.IntEnum):
    """The kind of a request and of its reply."""

    ADD = 1
    REMOVE = 2
    QUERY = 3
    REPORT = 4


class IndexMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One request or reply.

    Attributes:
        kind: of both.
        step: of the learner; in a report, how often clusters were trained.
        rows: of a removal, how many events it names; in the request of a report, how many stale events to name.
        k: in a query and its reply, the number of neighbours.
        ids: int64 `[n]`; in a report those of stale events.
        vectors: float32 `[n, D]`; in a report the centroids of new clusters.
        clustered: in a report with new clusters, the ids of the events that are in them, and the cluster of each, int64
            `[2, n]`.
        figures: in a report.
    """

    kind: MessageType
    step: int = 0
    rows: int = 0
    k: int = 0
    ids: bytes = b""
    vectors: bytes = b""
    clustered: bytes = b""
    figures: IndexFigures | None = None


_LENGTH_BYTES = 4
_READ_BYTES = 1 << 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(IndexMessage).decode


class MessageSocket:
    """Sends and receives messages over a socket, each after its length. Only `wait` waits for the other side."""

    def __init__(self, connected: socket.socket) -> None:
        """Take a socket, which `close` closes."""
        connected.setblocking(False)
        self._socket = connected
        self._outgoing, self._incoming = bytearray(), bytearray()

    def send(self, message: IndexMessage) -> None:
        """Send a message; what the socket does not accept yet is sent by later calls of this class."""
        data = _encode(message)
        self._outgoing += len(data).to_bytes(_LENGTH_BYTES, "little") + data
        self._flush()

    def receive(self) -> list[IndexMessage]:
        """Return the messages that have arrived.

        Raises:
            EOFError: the other side is gone, and all messages that it sent were returned before.
        """
        self._flush()
        ended = False
        try:
            while data := self._socket.recv(_READ_BYTES):
                self._incoming += data
            ended = True
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = True
        messages: list[IndexMessage] = []
        while len(self._incoming) >= (end := self._end_of_first()):
            messages.append(_decode(self._incoming[_LENGTH_BYTES:end]))
            del self._incoming[:end]
        if ended and not messages:
            raise EOFError
        return messages

    def wait(self, seconds: float | None) -> None:
        """Wait up to `seconds` until the other side has sent something, or accepts what is to be sent."""
        select.select([self._socket], [self._socket] if self._outgoing else [], [], seconds)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _end_of_first(self) -> int:
        """Return where the first message ends, or would end at least, among the bytes that have arrived."""
        return _LENGTH_BYTES + int.from_bytes(self._incoming[:_LENGTH_BYTES], "little")

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except ConnectionError:
            self._outgoing.clear()  # `receive` raises, after the messages that the other side sent before its end


def ids_of(data: bytes) -> Ids:
    """Return the numbers in a field of a message, int64 `[n]`, which must not be changed."""
    return np.frombuffer(data, np.int64)


def vectors_of(data: bytes, dim: int) -> Vectors:
    """Return the vectors in a field of a message, float32 `[n, D]`, which must not be changed."""
    return np.frombuffer(data, np.float32).reshape(-1, dim)
