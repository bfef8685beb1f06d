"""`python -m replay.embedding_index.process --slots FD --connection FD --settings JSON`: the learner starts it.

The index process: stores embeddings, answers queries, trains in the background. It does not import torch. When it dies
the learner starts another, which begins empty.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections import deque

import msgspec
import numpy as np

from replay.embedding_index.ivf_index import IVFIndex
from replay.embedding_index.protocol import (
    IndexMessage,
    IndexSettings,
    MessageDecoder,
    MessageType,
    SharedSlots,
    encode,
)

_NICE = 10
_TRAINING_SECONDS = 0.02
"""Interval at which the training thread is polled."""
_BYTES = 65536


class IndexServer:
    """One loop: receives requests, answers them, and maintains the index in between. Queries have priority."""

    def __init__(self, embeddings: IVFIndex, slots: SharedSlots, connection: socket.socket) -> None:
        self._embeddings = embeddings
        self._slots = slots
        self._connection = connection
        self._decoder = MessageDecoder()
        self._queries: deque[IndexMessage] = deque()
        self._others: deque[IndexMessage] = deque()

    def run(self) -> None:
        """Serve the learner until it is gone."""
        wait: float | None = None
        while self._receive(wait):
            message = self._queries.popleft() if self._queries else self._others.popleft() if self._others else None
            if message is not None:
                self._connection.settimeout(None)
                self._connection.sendall(encode(self._handle(message)))
            # One piece of work after each request, so that maintenance is never starved.
            busy = self._embeddings.work() or message is not None
            wait = 0.0 if busy else _TRAINING_SECONDS if self._embeddings.renewing else None

    def _receive(self, wait: float | None) -> bool:
        """Receive messages, waiting up to `wait` seconds for one; return False when the learner is gone."""
        self._connection.settimeout(wait)
        try:
            data = self._connection.recv(_BYTES)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
        for message in self._decoder.take(data):
            (self._queries if message.kind == MessageType.QUERY else self._others).append(message)
        return bool(data)

    def _handle(self, message: IndexMessage) -> IndexMessage:
        kind, slot, rows, k, step = message
        match kind:
            case MessageType.ADD:
                embedding = self._slots.vectors(slot, rows, after=rows)
                self._embeddings.add(self._slots.ids(slot, rows).copy(), embedding, step)
            case MessageType.REMOVE:
                self._embeddings.remove(self._slots.ids(slot, rows))
            case MessageType.QUERY:
                nearest = self._embeddings.search(self._slots.vectors(slot, rows).copy(), k, step)
                self._slots.ids(slot, rows * k)[:] = nearest.reshape(-1)
            case MessageType.STALE:
                stale = self._embeddings.stale(rows)
                self._slots.ids(slot, len(stale))[:] = stale
                return message._replace(rows=len(stale))
            case MessageType.CLUSTERS:
                ids, clusters, more = self._embeddings.assigned(step, rows)
                self._slots.ids(slot, 2 * len(ids))[:] = np.concatenate([ids, clusters])
                return message._replace(rows=len(ids), k=int(more))
            case MessageType.REPORT:
                return self._report(message)
            case _:
                raise AssertionError(message)
        return message

    def _report(self, message: IndexMessage) -> IndexMessage:
        """Write the figures, and the clusters if the learner has older ones."""
        figures = self._slots.figures(message.slot)
        figures[:] = self._embeddings.figures()
        centroids = self._embeddings.centroids
        if centroids is None or self._embeddings.training == message.step:
            return message._replace(rows=0)
        np.copyto(self._slots.vectors(message.slot, len(centroids), after=len(figures)), centroids)
        return message._replace(rows=len(centroids), step=self._embeddings.training)


def main() -> int:
    """Serve one learner until it is gone, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--settings", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Ctrl-C, and the SIGTERM of some service managers, reach the whole group; the learner decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICE)
    settings = msgspec.json.decode(arguments.settings, type=IndexSettings)
    with socket.socket(fileno=arguments.connection) as connection:
        try:
            IndexServer(IVFIndex(settings), SharedSlots(settings, arguments.slots), connection).run()
        except (BrokenPipeError, ConnectionError):
            return 0
    return 0


if __name__ == "__main__":
    # The training thread may still be running; its results are not needed.
    code = main()
    sys.stderr.flush()
    os._exit(code)
