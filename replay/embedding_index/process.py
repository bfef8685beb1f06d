"""`python -m anabranch.replay.embedding_index.process --connection FD --settings JSON`: the learner starts it.

The index process: stores embeddings, answers queries, trains in the background. It does not import torch. When it dies
the learner starts another, which begins empty.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections import deque

import msgspec

from anabranch.core.logs import LogSettings, add_log_options, configure_logging
from anabranch.replay.embedding_index.ivf_index import IVFIndex
from anabranch.replay.embedding_index.protocol import (
    IndexMessage,
    IndexSettings,
    MessageSocket,
    MessageType,
    ids_of,
    vectors_of,
)

_NICE = 10
_TRAINING_SECONDS = 0.02
"""Interval at which the training thread is polled."""


class IndexServer:
    """One loop: receives requests, answers them, and maintains the index in between. Queries have priority."""

    def __init__(self, settings: IndexSettings, connection: MessageSocket) -> None:
        self._dim = settings.dim
        self._index = IVFIndex(settings)
        self._connection = connection
        self._queries: deque[IndexMessage] = deque()
        self._others: deque[IndexMessage] = deque()

    def run(self) -> None:
        """Serve the learner; raises EOFError when it is gone."""
        while True:
            for message in self._connection.receive():
                (self._queries if message.kind == MessageType.QUERY else self._others).append(message)
            requests = self._queries or self._others
            if answered := bool(requests):
                self._connection.send(self._handle(requests.popleft()))
            # One piece of work after each request, so that maintenance is never starved.
            if not self._index.work() and not answered:
                self._connection.wait(_TRAINING_SECONDS if self._index.renewing else None)

    def _handle(self, request: IndexMessage) -> IndexMessage:
        """Return the reply to a request."""
        kind, step = request.kind, request.step
        match kind:
            case MessageType.ADD:
                self._index.add(ids_of(request.ids), vectors_of(request.vectors, self._dim), step)
            case MessageType.REMOVE:
                self._index.remove(ids_of(request.ids))
            case MessageType.QUERY:
                nearest = self._index.search(vectors_of(request.vectors, self._dim), request.k, step)
                return IndexMessage(kind=kind, step=step, k=request.k, ids=nearest.tobytes())
            case MessageType.REPORT:
                return self._report(request)
        return IndexMessage(kind=kind, rows=request.rows)

    def _report(self, request: IndexMessage) -> IndexMessage:
        """Return the figures and stale events, and the clusters if the learner has those of another training."""
        index = self._index
        stale, figures = index.stale(request.rows).tobytes(), index.figures()
        if index.centroids is None or index.training == request.step:
            return IndexMessage(kind=MessageType.REPORT, step=request.step, ids=stale, figures=figures)
        return IndexMessage(
            kind=MessageType.REPORT,
            step=index.training,
            ids=stale,
            vectors=index.centroids.tobytes(),
            clustered=index.clustered().tobytes(),
            figures=figures,
        )


def main() -> int:
    """Serve one learner until it is gone, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--settings", required=True)
    add_log_options(parser)
    arguments = parser.parse_args()
    configure_logging(LogSettings(arguments.log_level, arguments.log_format))
    # Ctrl-C, and the SIGTERM of some service managers, reach the whole group; the learner decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICE)
    settings = msgspec.json.decode(arguments.settings, type=IndexSettings)
    with socket.socket(fileno=arguments.connection) as connected, contextlib.suppress(EOFError):
        IndexServer(settings, MessageSocket(connected)).run()
    return 0


if __name__ == "__main__":
    # The training thread may still be running; its results are not needed.
    code = main()
    sys.stderr.flush()
    os._exit(code)
