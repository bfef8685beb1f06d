"""The client of the index: which stored events are near others, and the clusters that they form.

The index is a separate process (`replay.embedding_index.process`). No method waits for it: requests that it has no time
for are declined and counted, and answers arrive later.

Legend: n events of a call, D numbers of an embedding, C clusters, Q queries, k neighbours.
"""

import importlib.util
import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from anabranch.core.backoff import Backoff
from anabranch.core.errors import SettingsError
from replay.embedding_index.link import GoneError, IndexLink
from replay.embedding_index.protocol import Ids, IndexFigures, IndexMessage, IndexSettings, MessageType, Vectors

_KEPT_SLOTS = 6
"""Slots reserved for queries, removals and reports, so that additions are declined first."""
_MAX_QUERIES = 4
"""Queries in flight: with more, a slow index would answer each later than the one before."""
_MAX_ANSWERS = 2 * _MAX_QUERIES
"""Answers that are kept until they are fetched; older ones are dropped."""
_MAX_REMOVALS = 1 << 16
_REPORT_SECONDS = 1.0
_STALE_SECONDS = 0.25
"""Pause after a reply that no embedding is stale."""
_FIRST_BACKOFF = timedelta(seconds=0.2)
_LONGEST_BACKOFF = timedelta(seconds=10)
_STEADY_SECONDS = 10.0
"""After a process that ran this long, the next one is started at once."""
_SILENT_SECONDS = 60.0
"""A process that does not reply for this long hangs."""
_STOP_SECONDS = 2.0
_NONE: Ids = np.empty(0, np.int64)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NeighbourAnswer:
    """The neighbours of the queries of `step`: ids `[Q, k]`, nearest first, NO_ID if there are fewer than k."""

    step: int
    ids: Ids


@dataclass(frozen=True)
class Centroids:
    """Clusters of embeddings, float32 `[C, D]`; `number` grows with each training."""

    number: int
    centroids: Vectors


@dataclass(frozen=True)
class IndexStats:
    """Statistics of the index. Totals go on when the process is restarted.

    Attributes:
        process: the last report of the process.
        waiting: requests without a reply.
        declined: events (`add`), queries (`ask`) and removals (`remove`) that it had no time for.
        malformed: events whose embedding is not finite.
        full: events beyond the capacity.
        restarts: how often the process died.
        answer_seconds: from the last answered query to its answer.
    """

    process: IndexFigures
    waiting: int
    declined: dict[str, int]
    malformed: int
    full: int
    restarts: int
    answer_seconds: float


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
        self._settings = IndexSettings(dim, clusters, capacity, stale_after, batch)
        self._link: IndexLink | None = None
        self._closed = True
        self._sent: dict[int, float] = {}
        self._answers: list[NeighbourAnswer] = []
        self._removals = np.empty(_MAX_REMOVALS, np.int64)
        self._removed = 0
        self._stale = _NONE
        self._stale_requested = self._report_requested = False
        self._stale_at = self._report_at = self._received_at = 0.0
        self._figures = IndexFigures()
        self._malformed = self._full = 0
        """Events left out by earlier processes."""
        self._declined = {"add": 0, "ask": 0, "remove": 0}
        self._answer_seconds = 0.0
        self._restarts = 0
        self._restart_at = 0.0
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF, retry_at_once=True)
        self._centroids: Centroids | None = None
        self._fresh: Centroids | None = None
        self._piece = batch // 2
        self._assigned: list[tuple[Ids, Ids]] = []
        self._assigned_until = 0
        self._assigning = False
        self._training = 0
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
        """End the process, within a few seconds."""
        self._closed = True
        if self._link is not None:
            self._link.close(_STOP_SECONDS)
            self._link = None

    def add(self, ids: Ids, embedding_nD: Vectors, step: int) -> int:
        """Add events with their embeddings, or new embeddings of events in the index.

        Returns how many were accepted, from the first on. If the index is slower than the stream the others are
        declined, and are no neighbours until they are added again. The newest are declined, not the oldest pending
        ones, which are already copied; either way the index has a uniform sample of the stream.

        Args:
            ids: int64 `[n]`, any but NO_ID.
            embedding_nD: float32 `[n, D]` on the host.
            step: of the model that computed them.
        """
        if embedding_nD.shape != (len(ids), self._settings.dim):
            raise ValueError(f"embeddings are {list(embedding_nD.shape)}, not [{len(ids)}, {self._settings.dim}]")
        link, taken, size = self._poll(), 0, self._settings.batch
        # An event must not be added before its pending removal is sent.
        while link is not None and taken < len(ids) and link.free > _KEPT_SLOTS and not self._removed:
            part, slot = ids[taken : taken + size], link.slot()
            link.slots.ids(slot, len(part))[:] = part
            link.slots.vectors(slot, len(part), after=len(part))[:] = embedding_nD[taken : taken + size]
            link.send(MessageType.ADD, slot, len(part), step=step)
            taken += len(part)
        self._declined["add"] += len(ids) - taken
        return taken

    def remove(self, ids: Ids) -> None:
        """Remove events, int64 `[n]`.

        Removals stay pending while the index is slow, up to a bound. Beyond it a removal is declined: the event stays
        in the index until `stale` returns it, and then has to be removed again.
        """
        link = self._poll()
        if link is None:
            return
        room = _MAX_REMOVALS - self._removed
        kept = ids[:room]
        self._removals[self._removed : self._removed + len(kept)] = kept
        self._removed += len(kept)
        self._declined["remove"] += len(ids) - len(kept)
        self._send_removals(link)

    def query(self, step: int, query_QD: Vectors, k: int) -> bool:
        """Query the k nearest events of each row of `query_QD`, float32 on the host; return False if it is declined.

        `answers` returns the answer later, unless the process dies first.
        """
        queries, size = len(query_QD), self._settings.slot_bytes
        if query_QD.shape[1:] != (self._settings.dim,):
            raise ValueError(f"queries are {list(query_QD.shape)}, not [{queries}, {self._settings.dim}]")
        if queries > self._settings.batch or 8 * queries * k > size:
            raise ValueError(f"{queries} queries for {k} each do not fit into a batch of {self._settings.batch}")
        link = self._poll()
        if link is None or not link.free or len(self._sent) >= _MAX_QUERIES:
            self._declined["ask"] += 1
            return False
        slot = link.slot()
        link.slots.vectors(slot, queries)[:] = query_QD
        self._sent[slot] = time.monotonic()
        link.send(MessageType.QUERY, slot, queries, k, step)
        return True

    def answers(self) -> list[NeighbourAnswer]:
        """Return the answers that arrived since the previous call, in the order of the queries."""
        self._poll()
        arrived, self._answers = self._answers, []
        return arrived

    def clusters(self) -> Centroids | None:
        """Return the newest clusters whose events `assigned` has returned; None before the first training.

        The clusters of a process that died remain.
        """
        self._poll()
        return self._centroids

    def assigned(self) -> list[tuple[Ids, Ids]]:
        """Return the ids and clusters of events that arrived since the previous call, int64 `[n]` each.

        Clusters are row numbers of the centroids that `clusters` returns once all events have arrived.
        """
        self._poll()
        arrived, self._assigned = self._assigned, []
        return arrived

    def stale(self, n: int) -> Ids:
        """Return up to n ids of events whose embeddings are older than `stale_after` steps, oldest first.

        Each id is returned once in that many steps. They are requested in advance, and arrive late: the caller removes
        those that are not held any more.
        """
        link = self._poll()
        stale, self._stale = self._stale[:n], self._stale[n:]
        is_due = not len(self._stale) and not self._stale_requested and time.monotonic() >= self._stale_at
        if is_due and link is not None and link.free:
            self._stale_requested = True
            link.send(MessageType.STALE, link.slot(), self._settings.batch)
        return stale

    def stats(self) -> IndexStats:
        """Return statistics; those of the process are up to about a second old."""
        link = self._poll()
        return IndexStats(
            process=self._figures,
            waiting=link.waiting if link is not None else 0,
            declined=dict(self._declined),
            malformed=self._malformed + int(self._figures.malformed),
            full=self._full + int(self._figures.full),
            restarts=self._restarts,
            answer_seconds=self._answer_seconds,
        )

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return self._link.pid if self._link is not None else None

    def _start(self) -> None:
        self._link = IndexLink.start(self._settings)
        self._sent.clear()
        self._removed = 0
        self._stale = _NONE
        self._stale_requested = self._report_requested = False
        self._stale_at = self._report_at = 0.0
        self._training = 0
        self._fresh, self._assigned, self._assigning = None, [], False

    def _poll(self) -> IndexLink | None:
        """Receive replies, send pending requests, and start a process if there is none and one is due."""
        now = time.monotonic()
        if self._link is None and not self._closed and now >= self._restart_at:
            try:
                self._start()
            except OSError as exc:  # no memory or no descriptor for another process
                self._restart_later(f"the index process cannot be started: {exc.strerror}; it is tried again")
        if self._link is None:
            return None
        try:
            for message in self._link.receive():
                self._handle(self._link, message)
        except GoneError:
            self._restart_later("the index process died; another one is started, and begins empty")
            return None
        if self._report_requested and now - max(self._report_at, self._received_at) > _SILENT_SECONDS:
            self._restart_later("the index process did not answer; another one is started, and begins empty")
            return None
        self._send_removals(self._link)
        if self._fresh is not None and not self._assigning and not self._assigned and self._link.free > 1:
            self._assigning = True
            self._link.send(MessageType.CLUSTERS, self._link.slot(), self._piece, step=self._assigned_until)
        if not self._report_requested and self._link.free and now >= self._report_at:
            self._report_requested, self._report_at = True, now
            self._link.send(MessageType.REPORT, self._link.slot(), step=self._training)
        return self._link

    def _handle(self, link: IndexLink, message: IndexMessage) -> None:
        """Process a reply, and release its slot."""
        kind, slot, rows, k, step = message
        self.problem, self._received_at = None, time.monotonic()
        match kind:
            case MessageType.QUERY:
                self._answers.append(NeighbourAnswer(step, link.slots.ids(slot, rows * k).reshape(rows, k).copy()))
                self._answer_seconds = time.monotonic() - self._sent.pop(slot)
                del self._answers[:-_MAX_ANSWERS]
            case MessageType.STALE:
                self._stale, self._stale_requested = link.slots.ids(slot, rows).copy(), False
                self._stale_at = time.monotonic() + (0.0 if rows else _STALE_SECONDS)
            case MessageType.REPORT:
                self._figures = IndexFigures(*link.slots.figures(slot).tolist())
                self._report_requested, self._report_at = False, time.monotonic() + _REPORT_SECONDS
                self.reports += 1
                if rows:
                    number = self._centroids.number + 1 if self._centroids is not None else 1
                    self._fresh = Centroids(number, link.slots.vectors(slot, rows, after=len(self._figures)).copy())
                    self._training, self._assigned, self._assigned_until = step, [], 0
            case MessageType.CLUSTERS:
                ids, clusters = link.slots.ids(slot, 2 * rows).reshape(2, rows).copy()
                self._assigning = False
                if step == self._assigned_until:  # else it is of outdated clusters
                    self._assigned.append((ids, clusters))
                    self._assigned_until += self._piece
                    if not k:
                        self._centroids, self._fresh = self._fresh, None
        link.release(slot)

    def _send_removals(self, link: IndexLink) -> None:
        begin = 0
        while begin < self._removed and link.free > 1:
            part, slot = self._removals[begin : min(self._removed, begin + self._settings.batch)], link.slot()
            link.slots.ids(slot, len(part))[:] = part
            link.send(MessageType.REMOVE, slot, len(part))
            begin += len(part)
        if begin:
            self._removals[: self._removed - begin] = self._removals[begin : self._removed].copy()
            self._removed -= begin

    def _restart_later(self, why: str) -> None:
        """End the process, if there is one, and schedule the next start; with back-off unless it ran long."""
        now = time.monotonic()
        if self._link is not None:
            if now - self._link.since > _STEADY_SECONDS:
                self._backoff.reset()
            self._link.close(0)
            self._link = None
            self._restarts += 1
            self.generation += 1
            self._malformed += int(self._figures.malformed)
            self._full += int(self._figures.full)
            self._figures = IndexFigures()
        if why != self.problem:
            log.warning("%s", why)
        self.problem = why
        self._restart_at = now + self._backoff.next()
