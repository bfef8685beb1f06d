"""The client of the index: which stored events are near others, and the clusters that they form.

The index is a separate process (`replay.embedding_index.process`). No method waits for it: requests that it has no time
for are declined and counted, and answers arrive later.

Legend: n events of a call, D numbers of an embedding, C clusters, Q queries, k neighbours.
"""

import importlib.util
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import msgspec
import numpy as np

from anabranch.core.backoff import Backoff
from anabranch.core.errors import SettingsError
from anabranch.core.logs import log_arguments
from anabranch.core.reported import Reported
from anabranch.replay.embedding_index.protocol import (
    Ids,
    IndexFigures,
    IndexMessage,
    IndexSettings,
    MessageSocket,
    MessageType,
    Vectors,
    ids_of,
    vectors_of,
)

_MAX_WAITING_BYTES = 16_000_000
"""About how many bytes of additions wait for the process."""
_MAX_WAITING, _MIN_WAITING = 58, 6
"""Requests in flight from which on additions are declined: within these bounds, as many as have those bytes."""
_MAX_QUERIES = 4
"""Queries in flight: with more, a slow index would answer each later than the one before."""
_MAX_ANSWERS = 2 * _MAX_QUERIES
"""Answers that are kept until they are fetched; older ones are dropped."""
_MAX_REMOVALS = 1 << 16
"""Events in flight that are to be removed."""
_REPORT_SECONDS = 1.0
_MAX_STALE = 4096
"""Stale events of one report."""
_FIRST_BACKOFF = timedelta(seconds=0.2)
_LONGEST_BACKOFF = timedelta(seconds=10)
_STEADY_SECONDS = 10.0
"""After a process that ran this long, the next one is started at once."""
_SILENT_SECONDS = 60.0
"""A process that does not reply for this long hangs."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Training must not take the cores that the step uses."""
_NONE: Ids = np.empty(0, np.int64)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NeighbourAnswer:
    """The neighbours of the queries of `step`: ids `[Q, k]`, nearest first, NO_ID if there are fewer than k."""

    step: int
    ids: Ids


@dataclass(frozen=True)
class Clusters:
    """Clusters of embeddings.

    Attributes:
        number: grows with each training.
        centroids: float32 `[C, D]`.
        ids: of the events that are in clusters, int64 `[n]`.
        assigned: the cluster of each of them, a row number of the centroids, int64 `[n]`.
    """

    number: int
    centroids: Vectors
    ids: Ids
    assigned: Ids


class IndexStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the index. Totals go on when the process is restarted.

    Attributes:
        process: the last report of the process.
        malformed: events whose embedding is not finite.
        full: events beyond the capacity.
    """

    process: IndexFigures
    waiting: Annotated[int, Reported("anabranch_replay_index_waiting_requests", "Requests without a reply.")]
    pending_removals: Annotated[
        int,
        Reported(
            "anabranch_replay_index_tombstone_rows",
            "Embeddings that were removed or replaced and not taken out yet.",
        ),
    ]
    declined: Annotated[
        dict[str, int],
        Reported(
            "anabranch_replay_index_declined_total",
            "Embeddings, questions and removals that the index had no time for.",
            "request",
        ),
    ]
    malformed: int
    full: int
    restarts: Annotated[int, Reported("anabranch_replay_index_restarts_total", "How often the index process died.")]
    answer_seconds: Annotated[
        float, Reported("anabranch_replay_index_answer_seconds", "From the last question to its answer.")
    ]

    @Reported(
        "anabranch_replay_index_left_out_rows_total",
        "Embeddings that were left out, being malformed or more than fit.",
        "reason",
    )
    def left_out(self) -> dict[str, int]:
        """By why."""
        return {"malformed": self.malformed, "full": self.full}


class _IndexProcess:
    """A process, and the requests that it has not answered. Used by one thread; only `close` waits."""

    def __init__(self, settings: IndexSettings) -> None:
        """Start the process, which takes a millisecond or two; it is ready once it replies.

        Raises:
            OSError: the system has no memory or no descriptor for it.
        """
        self.since = time.monotonic()
        """When it was started."""
        self.waiting = 0
        """How many requests have no reply yet."""
        ours, theirs = socket.socketpair()
        # -P: a folder named replay in the working directory must not shadow this package.
        command = [
            sys.executable,
            "-P",
            "-m",
            "anabranch.replay.embedding_index.process",
            "--connection",
            str(theirs.fileno()),
        ]
        options = ["--settings", msgspec.json.encode(settings).decode(), *log_arguments()]
        try:
            self._process = subprocess.Popen(
                [*command, *options],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = MessageSocket(ours)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, request: IndexMessage) -> None:
        """Send a request."""
        self.waiting += 1
        self._connection.send(request)

    def replies(self) -> list[IndexMessage]:
        """Return the replies that have arrived; raises EOFError when the process is gone."""
        arrived = self._connection.receive()
        self.waiting -= len(arrived)
        return arrived

    def close(self) -> None:
        """Kill the process, which has nothing to save."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class NeighbourClient:
    """The index, used by one thread between `open` and `close`.

    When the process dies another one is started, which begins empty: then `generation` grows, and embeddings have to be
    added again.
    """

    def __init__(
        self, dim: int, capacity: int, *, clusters: int = 256, stale_after: int = 10_000, batch: int = 512
    ) -> None:
        """Prepare; `open` starts the process.

        Args:
            dim: D.
            capacity: the most events that are held.
            clusters: the most clusters, C; a small capacity has fewer.
            stale_after: steps after which an embedding is stale.
            batch: the most queries of one call; events may be added in any number.
        """
        self._settings = IndexSettings(dim, clusters, capacity, stale_after)
        self._batch = batch
        self._most_waiting = max(_MIN_WAITING, min(_MAX_WAITING, _MAX_WAITING_BYTES // (batch * (8 + 4 * dim))))
        self._process: _IndexProcess | None = None
        self._closed = True
        self._sent: deque[float] = deque()
        """When each query in flight was sent."""
        self._answers: list[NeighbourAnswer] = []
        self._removing = 0
        """Events in flight that are to be removed."""
        self._stale = _NONE
        self._report_requested = False
        self._report_at = self._received_at = 0.0
        self._figures = IndexFigures()
        self._malformed = self._full = 0
        """Events left out by earlier processes."""
        self._declined = {"add": 0, "ask": 0, "remove": 0}
        self._answer_seconds = 0.0
        self._restarts = 0
        self._restart_at = 0.0
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF, retry_at_once=True)
        self._clusters: Clusters | None = None
        self._trainings = 0
        self._training = 0
        """The training of the present process whose clusters have arrived."""
        self.generation = 0
        """Grows each time that the index becomes empty."""
        self.reports = 0
        """How many reports the process has sent."""
        self.problem: str | None = None
        """One sentence while there is no process."""

    def open(self) -> None:
        """Start the process; raises SettingsError if FAISS is not installed."""
        if importlib.util.find_spec("faiss") is None:
            raise SettingsError("similar and diverse replay need faiss: pip install 'anabranch[index]'")
        self._closed = False
        self._poll()

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None:
            self._process.close()
            self._process = None

    def add(self, ids: Ids, embedding_nD: Vectors, step: int) -> int:
        """Add events with their embeddings, or new embeddings of events in the index.

        Returns how many were accepted, from the first on. If the index is slower than the stream the others are
        declined, and are no neighbours until they are added again. The newest are declined, not the oldest pending
        ones, which are already copied; either way the index has a uniform sample of the stream.

        Args:
            ids: int64 `[n]`, from 0 on. Of those with the same upper half the index has one event, the last one.
            embedding_nD: float32 `[n, D]` on the host.
            step: of the model that computed them.
        """
        if embedding_nD.shape != (len(ids), self._settings.dim):
            raise ValueError(f"embeddings are {list(embedding_nD.shape)}, not [{len(ids)}, {self._settings.dim}]")
        process, taken = self._poll(), 0
        while process is not None and taken < len(ids) and process.waiting < self._most_waiting:
            part = slice(taken, taken + self._batch)
            vectors = embedding_nD[part].tobytes()
            process.send(IndexMessage(kind=MessageType.ADD, step=step, ids=ids[part].tobytes(), vectors=vectors))
            taken += len(ids[part])
        self._declined["add"] += len(ids) - taken
        return taken

    def remove(self, ids: Ids) -> None:
        """Remove events, int64 `[n]`.

        Removals are pending while the index is slow, up to a bound. Beyond it a removal is declined: the event stays in
        the index until `stale` returns it, and then has to be removed again.
        """
        process = self._poll()
        if process is None:
            return
        kept = ids[: _MAX_REMOVALS - self._removing]
        self._declined["remove"] += len(ids) - len(kept)
        self._removing += len(kept)
        if len(kept):
            process.send(IndexMessage(kind=MessageType.REMOVE, rows=len(kept), ids=kept.tobytes()))

    def query(self, step: int, query_QD: Vectors, k: int) -> bool:
        """Query the k nearest events of each row of `query_QD`, float32 on the host; return False if it is declined.

        `answers` returns the answer later, unless the process dies first.
        """
        queries = len(query_QD)
        if query_QD.shape[1:] != (self._settings.dim,):
            raise ValueError(f"queries are {list(query_QD.shape)}, not [{queries}, {self._settings.dim}]")
        if queries > self._batch:
            raise ValueError(f"{queries} queries do not fit into a batch of {self._batch}")
        process = self._poll()
        if process is None or len(self._sent) >= _MAX_QUERIES:
            self._declined["ask"] += 1
            return False
        self._sent.append(time.monotonic())
        process.send(IndexMessage(kind=MessageType.QUERY, step=step, k=k, vectors=query_QD.tobytes()))
        return True

    def answers(self) -> list[NeighbourAnswer]:
        """Return the answers that arrived since the previous call, in the order of the queries."""
        self._poll()
        arrived, self._answers = self._answers, []
        return arrived

    def clusters(self) -> Clusters | None:
        """Return the newest clusters if they arrived since the previous call, else None."""
        self._poll()
        arrived, self._clusters = self._clusters, None
        return arrived

    def stale(self, n: int) -> Ids:
        """Return up to n ids of events whose embeddings are older than `stale_after` steps, oldest first.

        Each id is returned once in that many steps. They arrive with reports: the caller removes those that are not
        held any more.
        """
        self._poll()
        stale, self._stale = self._stale[:n], self._stale[n:]
        return stale

    def stats(self) -> IndexStats:
        """Return statistics; those of the process are up to about a second old."""
        process = self._poll()
        return IndexStats(
            process=self._figures,
            waiting=process.waiting if process is not None else 0,
            pending_removals=self._removing,
            declined=dict(self._declined),
            malformed=self._malformed + self._figures.malformed,
            full=self._full + self._figures.full,
            restarts=self._restarts,
            answer_seconds=self._answer_seconds,
        )

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def _start(self) -> None:
        self._process = _IndexProcess(self._settings)
        self._sent.clear()
        self._removing = 0
        self._stale = _NONE
        self._report_requested, self._report_at = False, 0.0
        self._training = 0

    def _poll(self) -> _IndexProcess | None:
        """Receive replies, request a report if one is due, and start a process if there is none and one is due."""
        now = time.monotonic()
        if self._process is None and not self._closed and now >= self._restart_at:
            try:
                self._start()
            except OSError as exc:  # no memory or no descriptor for another process
                self._restart_later(f"the index process cannot be started: {exc.strerror}; it is tried again")
        if self._process is None:
            return None
        try:
            for reply in self._process.replies():
                self._handle(reply)
        except EOFError:
            self._restart_later("the index process died; another one is started, and begins empty")
            return None
        if self._report_requested and now - max(self._report_at, self._received_at) > _SILENT_SECONDS:
            self._restart_later("the index process did not answer; another one is started, and begins empty")
            return None
        if not self._report_requested and now >= self._report_at:
            self._report_requested, self._report_at = True, now
            stale = 0 if len(self._stale) else _MAX_STALE
            self._process.send(IndexMessage(kind=MessageType.REPORT, step=self._training, rows=stale))
        return self._process

    def _handle(self, reply: IndexMessage) -> None:
        now = time.monotonic()
        self.problem, self._received_at = None, now
        match reply.kind:
            case MessageType.REMOVE:
                self._removing -= reply.rows
            case MessageType.QUERY:
                self._answers.append(NeighbourAnswer(reply.step, ids_of(reply.ids).reshape(-1, reply.k)))
                del self._answers[:-_MAX_ANSWERS]
                self._answer_seconds = now - self._sent.popleft()
            case MessageType.REPORT:
                assert reply.figures is not None
                self._figures = reply.figures
                self._report_requested, self._report_at = False, now + _REPORT_SECONDS
                self.reports += 1
                self._stale = np.concatenate([self._stale, ids_of(reply.ids)])
                if reply.step != self._training:
                    self._training, self._trainings = reply.step, self._trainings + 1
                    centroids = vectors_of(reply.vectors, self._settings.dim)
                    self._clusters = Clusters(self._trainings, centroids, *ids_of(reply.clustered).reshape(2, -1))

    def _restart_later(self, why: str) -> None:
        """End the process, if there is one, and schedule the next start; with back-off unless it ran long."""
        now = time.monotonic()
        if self._process is not None:
            if now - self._process.since > _STEADY_SECONDS:
                self._backoff.reset()
            self._process.close()
            self._process = None
            self._restarts += 1
            self.generation += 1
            self._malformed += self._figures.malformed
            self._full += self._figures.full
            self._figures = IndexFigures()
        if why != self.problem:
            log.warning("%s", why)
        self.problem = why
        self._restart_at = now + self._backoff.next()
