"""The learner's end of the index: which stored events are near to others, and the clusters that they form.

The index is a process of its own (`replay.embedding_index.process`). Nothing here ever waits for it: what it has no
time for is declined and counted, and what it finds comes late.

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
"""Slots that events are not put into: for questions, removals and reports, so that these are declined last."""
_MOST_QUESTIONS = 4
"""Questions on the way: were there more, a slow index would answer each of them later than the last."""
_MOST_ANSWERS = 2 * _MOST_QUESTIONS
"""Answers that wait to be fetched; older ones are dropped."""
_MOST_REMOVALS = 1 << 16
_REPORT_SECONDS = 1.0
_STALE_SECONDS = 0.25
"""Pause after a reply that no embedding is stale."""
_FIRST_BACKOFF = timedelta(seconds=0.2)
_LONGEST_BACKOFF = timedelta(seconds=10)
_STEADY_SECONDS = 10.0
"""A process that has lived so long was well: the next one is started at once."""
_SILENT_SECONDS = 60.0
"""A process that owes a reply and gives none for so long hangs."""
_STOP_SECONDS = 2.0
_NONE: Ids = np.empty(0, np.int64)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NeighbourAnswer:
    """The neighbours of the queries of `step`: ids `[Q, k]`, nearest first, NO_ID where there are no more."""

    step: int
    ids: Ids


@dataclass(frozen=True)
class Centroids:
    """Clusters of embeddings, float32 `[C, D]`; `number` grows with each training."""

    number: int
    centroids: Vectors


@dataclass(frozen=True)
class IndexStats:
    """How the index stands; running totals go on when the process is started again.

    Attributes:
        process: what the process told last.
        waiting: requests that it has not replied to.
        declined: events, questions and removals that it had no time for.
        malformed: events whose embedding is not finite.
        full: events beyond the capacity.
        restarts: how often it died.
        answer_seconds: from the last question that was answered to its answer.
    """

    process: IndexFigures
    waiting: int
    declined: dict[str, int]
    malformed: int
    full: int
    restarts: int
    answer_seconds: float


class NeighbourClient:
    """The index, asked and fed by one thread; begins with `open` and ends with `close`. No method waits for it.

    When the process dies another one is started, and begins empty: `generation` tells, and embeddings are to be added
    anew.
    """

    def __init__(
        self, dim: int, capacity: int, *, clusters: int = 256, stale_after: int = 10_000, batch: int = 512
    ) -> None:
        """Take what is needed; nothing is started yet.

        Args:
            dim: D.
            capacity: events that may be held.
            clusters: C, at most; a small capacity makes them fewer.
            stale_after: steps after which an embedding is to be made anew.
            batch: the most queries of a question; events may come in any number.
        """
        self._settings = IndexSettings(dim, clusters, capacity, stale_after, batch)
        self._link: IndexLink | None = None
        self._closed = True
        self._asked: dict[int, float] = {}
        self._answers: list[NeighbourAnswer] = []
        self._removals = np.empty(_MOST_REMOVALS, np.int64)
        self._removed = 0
        self._stale = _NONE
        self._stale_asked = self._report_asked = False
        self._stale_at = self._report_at = self._heard_at = 0.0
        self._figures = IndexFigures()
        self._before = (0, 0)
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
        """Grows when the index has become empty."""
        self.reports = 0
        """How often the process has told how it stands."""
        self.problem: str | None = None
        """One sentence while there is no process."""

    def open(self) -> None:
        """Start the process; raises SettingsError where FAISS is not installed."""
        if importlib.util.find_spec("faiss") is None:
            raise SettingsError("similar and diverse replay need faiss: pip install 'anabranch[index]'")
        self._closed = False
        self._turn()

    def close(self) -> None:
        """End the process, within a few seconds."""
        self._closed = True
        if self._link is not None:
            self._link.close(_STOP_SECONDS)
            self._link = None

    def add(self, ids: Ids, embedding_nD: Vectors, step: int) -> int:
        """Add events with their embeddings at a step, or new embeddings of events that are there.

        Returns how many of the first were taken. The others are declined: the index is slower than the stream, and they
        are found as nobody's neighbours until they are added again. The newest are declined rather than the oldest
        of those that wait, since these are copied already, and either is a uniform sample of the stream.

        Args:
            ids: int64 `[n]`, any but NO_ID.
            embedding_nD: float32 `[n, D]` on the host.
            step: of the model that has made them.
        """
        if embedding_nD.shape != (len(ids), self._settings.dim):
            raise ValueError(f"embeddings are {list(embedding_nD.shape)}, not [{len(ids)}, {self._settings.dim}]")
        link, taken, size = self._turn(), 0, self._settings.batch
        # An event is not added before its earlier removal is said.
        while link is not None and taken < len(ids) and link.free > _KEPT_SLOTS and not self._removed:
            part, slot = ids[taken : taken + size], link.slot()
            link.slots.ids(slot, len(part))[:] = part
            link.slots.vectors(slot, len(part), after=len(part))[:] = embedding_nD[taken : taken + size]
            link.say(MessageType.ADD, slot, len(part), step=step)
            taken += len(part)
        self._declined["add"] += len(ids) - taken
        return taken

    def remove(self, ids: Ids) -> None:
        """Let events go, int64 `[n]`.

        Removals wait when the index is slow. What waits is bounded: beyond it a removal is declined, the event is found
        still, and `stale` names it in time; then remove it again.
        """
        link = self._turn()
        if link is None:
            return
        room = _MOST_REMOVALS - self._removed
        kept = ids[:room]
        self._removals[self._removed : self._removed + len(kept)] = kept
        self._removed += len(kept)
        self._declined["remove"] += len(ids) - len(kept)
        self._say_removals(link)

    def ask(self, step: int, query_QD: Vectors, k: int) -> bool:
        """Ask for the k nearest events of each query, float32 `[Q, D]` on the host; False when that is declined.

        The answer comes later, if at all: a process that dies takes its questions along.
        """
        queries, size = len(query_QD), self._settings.slot_bytes
        if query_QD.shape[1:] != (self._settings.dim,):
            raise ValueError(f"queries are {list(query_QD.shape)}, not [{queries}, {self._settings.dim}]")
        if queries > self._settings.batch or 8 * queries * k > size:
            raise ValueError(f"{queries} queries for {k} each do not fit into a batch of {self._settings.batch}")
        link = self._turn()
        if link is None or not link.free or len(self._asked) >= _MOST_QUESTIONS:
            self._declined["ask"] += 1
            return False
        slot = link.slot()
        link.slots.vectors(slot, queries)[:] = query_QD
        self._asked[slot] = time.monotonic()
        link.say(MessageType.ASK, slot, queries, k, step)
        return True

    def answers(self) -> list[NeighbourAnswer]:
        """Return the answers that have arrived since the last time, in the order of the questions."""
        self._turn()
        arrived, self._answers = self._answers, []
        return arrived

    def clusters(self) -> Centroids | None:
        """Return the newest clusters, once `assigned` has told of all events; None before the first training.

        Those of a process that died stay.
        """
        self._turn()
        return self._centroids

    def assigned(self) -> list[tuple[Ids, Ids]]:
        """Return events and the clusters that they are in, int64 `[n]` each, as far as was told since the last time.

        They are places in the centroids that `clusters` returns when all are told.
        """
        self._turn()
        arrived, self._assigned = self._assigned, []
        return arrived

    def stale(self, n: int) -> Ids:
        """Return at most n ids of events whose embeddings are older than `stale_after` steps, the oldest first.

        Each is named once in that many steps. They are asked for ahead, and come late. Those that are not held any more
        are to be removed.
        """
        link = self._turn()
        found, self._stale = self._stale[:n], self._stale[n:]
        wanted = not len(self._stale) and not self._stale_asked and time.monotonic() >= self._stale_at
        if wanted and link is not None and link.free:
            self._stale_asked = True
            link.say(MessageType.STALE, link.slot(), self._settings.batch)
        return found

    def stats(self) -> IndexStats:
        """Tell how it stands; what the process says is about a second old."""
        link = self._turn()
        malformed, full = self._before
        return IndexStats(
            process=self._figures,
            waiting=link.waiting if link is not None else 0,
            declined=dict(self._declined),
            malformed=malformed + int(self._figures.malformed),
            full=full + int(self._figures.full),
            restarts=self._restarts,
            answer_seconds=self._answer_seconds,
        )

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._link.pid if self._link is not None else None

    def _start(self) -> None:
        self._link = IndexLink.start(self._settings)
        self._asked.clear()
        self._removed = 0
        self._stale = _NONE
        self._stale_asked = self._report_asked = False
        self._stale_at = self._report_at = 0.0
        self._training = 0
        self._fresh, self._assigned, self._assigning = None, [], False

    def _turn(self) -> IndexLink | None:
        """Hear replies, say what waits, and start a process where there is none and it is time."""
        now = time.monotonic()
        if self._link is None and not self._closed and now >= self._restart_at:
            try:
                self._start()
            except OSError as exc:  # there is no memory or no descriptor for another process
                self._restart_later(f"the index process cannot be started: {exc.strerror}; it is tried again")
        if self._link is None:
            return None
        try:
            for record in self._link.hear():
                self._take(self._link, record)
        except GoneError:
            self._restart_later("the index process died; another one is started, and begins empty")
            return None
        if self._report_asked and now - max(self._report_at, self._heard_at) > _SILENT_SECONDS:
            self._restart_later("the index process did not answer; another one is started, and begins empty")
            return None
        self._say_removals(self._link)
        if self._fresh is not None and not self._assigning and not self._assigned and self._link.free > 1:
            self._assigning = True
            self._link.say(MessageType.CLUSTERS, self._link.slot(), self._piece, step=self._assigned_until)
        if not self._report_asked and self._link.free and now >= self._report_at:
            self._report_asked, self._report_at = True, now
            self._link.say(MessageType.REPORT, self._link.slot(), step=self._training)
        return self._link

    def _take(self, link: IndexLink, record: IndexMessage) -> None:
        """Take a reply, and its slot back."""
        kind, slot, rows, k, step = record
        self.problem, self._heard_at = None, time.monotonic()
        match kind:
            case MessageType.ASK:
                self._answers.append(NeighbourAnswer(step, link.slots.ids(slot, rows * k).reshape(rows, k).copy()))
                self._answer_seconds = time.monotonic() - self._asked.pop(slot)
                del self._answers[:-_MOST_ANSWERS]
            case MessageType.STALE:
                self._stale, self._stale_asked = link.slots.ids(slot, rows).copy(), False
                self._stale_at = time.monotonic() + (0.0 if rows else _STALE_SECONDS)
            case MessageType.REPORT:
                self._figures = IndexFigures(*link.slots.figures(slot).tolist())
                self._report_asked, self._report_at = False, time.monotonic() + _REPORT_SECONDS
                self.reports += 1
                if rows:
                    number = self._centroids.number + 1 if self._centroids is not None else 1
                    self._fresh = Centroids(number, link.slots.vectors(slot, rows, after=len(self._figures)).copy())
                    self._training, self._assigned, self._assigned_until = step, [], 0
            case MessageType.CLUSTERS:
                told = link.slots.ids(slot, 2 * rows).reshape(2, rows).copy()
                self._assigning = False
                if step == self._assigned_until:  # else it is of clusters that are old already
                    self._assigned.append((told[0], told[1]))
                    self._assigned_until += self._piece
                    if not k:
                        self._centroids, self._fresh = self._fresh, None
        link.give_back(slot)

    def _say_removals(self, link: IndexLink) -> None:
        begin = 0
        while begin < self._removed and link.free > 1:
            part, slot = self._removals[begin : min(self._removed, begin + self._settings.batch)], link.slot()
            link.slots.ids(slot, len(part))[:] = part
            link.say(MessageType.REMOVE, slot, len(part))
            begin += len(part)
        if begin:
            self._removals[: self._removed - begin] = self._removals[begin : self._removed].copy()
            self._removed -= begin

    def _restart_later(self, why: str) -> None:
        """End the process, if there is one, and let another one be started, the sooner the longer this one was well."""
        now = time.monotonic()
        if self._link is not None:
            if now - self._link.since > _STEADY_SECONDS:
                self._backoff.reset()
            self._link.close(0)
            self._link = None
            self._restarts += 1
            self.generation += 1
            self._before = (self._before[0] + int(self._figures.malformed), self._before[1] + int(self._figures.full))
            self._figures = IndexFigures()
        if why != self.problem:
            log.warning("%s", why)
        self.problem = why
        self._restart_at = now + self._backoff.next()
