"""`python -m replay.embedding_index.process --slots FD --connection FD --settings JSON`: the learner starts it.

The index process: holds embeddings, answers questions, trains in the background. It imports no torch, and has no state
that matters: when it dies the learner starts another, which begins empty.
"""

import argparse
import os
import signal
import socket
import sys
from collections import deque

import msgspec
import numpy as np

from anabranch.core.logs import LogSettings, add_log_options, configure_logging
from replay.embedding_index.ivf_index import IVFIndex
from replay.embedding_index.protocol import IndexMessage, IndexSettings, MessageType, Records, SharedSlots, encode

_NICE = 10
_TRAINING_SECONDS = 0.02
"""Pause between two looks at the training thread."""
_BYTES = 65536


class IndexServer:
    """One loop: hear requests, answer them, and work on the index in between. Questions come before all else."""

    def __init__(self, embeddings: IVFIndex, slots: SharedSlots, connection: socket.socket) -> None:
        self._embeddings = embeddings
        self._slots = slots
        self._connection = connection
        self._records = Records()
        self._questions: deque[IndexMessage] = deque()
        self._others: deque[IndexMessage] = deque()

    def run(self) -> None:
        """Serve the learner until it is gone."""
        wait: float | None = None
        while self._hear(wait):
            record = self._questions.popleft() if self._questions else self._others.popleft() if self._others else None
            if record is not None:
                self._connection.settimeout(None)
                self._connection.sendall(encode(self._handle(record)))
            # One piece after each request: what the index owes itself is never put off for ever.
            busy = self._embeddings.work() or record is not None
            wait = 0.0 if busy else _TRAINING_SECONDS if self._embeddings.renewing else None

    def _hear(self, wait: float | None) -> bool:
        """Take in what was said, waiting so long for it; False when the learner is gone."""
        self._connection.settimeout(wait)
        try:
            data = self._connection.recv(_BYTES)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
        for record in self._records.take(data):
            (self._questions if record.kind == MessageType.ASK else self._others).append(record)
        return bool(data)

    def _handle(self, record: IndexMessage) -> IndexMessage:
        kind, slot, rows, k, step = record
        match kind:
            case MessageType.ADD:
                embedding = self._slots.vectors(slot, rows, after=rows)
                self._embeddings.add(self._slots.ids(slot, rows).copy(), embedding, step)
            case MessageType.REMOVE:
                self._embeddings.remove(self._slots.ids(slot, rows))
            case MessageType.ASK:
                found = self._embeddings.search(self._slots.vectors(slot, rows).copy(), k, step)
                self._slots.ids(slot, rows * k)[:] = found.reshape(-1)
            case MessageType.STALE:
                found = self._embeddings.stale(rows)
                self._slots.ids(slot, len(found))[:] = found
                return record._replace(rows=len(found))
            case MessageType.CLUSTERS:
                ids, clusters, more = self._embeddings.assigned(step, rows)
                self._slots.ids(slot, 2 * len(ids))[:] = np.concatenate([ids, clusters])
                return record._replace(rows=len(ids), k=int(more))
            case MessageType.REPORT:
                return self._report(record)
            case _:
                raise AssertionError(record)
        return record

    def _report(self, record: IndexMessage) -> IndexMessage:
        """Write the figures, and the clusters where the learner knows older ones."""
        figures = self._slots.figures(record.slot)
        figures[:] = self._embeddings.figures()
        centroids = self._embeddings.centroids
        if centroids is None or self._embeddings.training == record.step:
            return record._replace(rows=0)
        np.copyto(self._slots.vectors(record.slot, len(centroids), after=len(figures)), centroids)
        return record._replace(rows=len(centroids), step=self._embeddings.training)


def main() -> int:
    """Serve one learner until it is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--settings", required=True)
    add_log_options(parser)
    arguments = parser.parse_args()
    configure_logging(LogSettings(arguments.log_level, arguments.log_format))
    # Ctrl-C, and the SIGTERM of many a service manager, reach the whole group; the learner decides when this ends.
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
    # The training thread may still be at work; nothing is lost by leaving it.
    code = main()
    sys.stderr.flush()
    os._exit(code)
