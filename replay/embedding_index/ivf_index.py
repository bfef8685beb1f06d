"""The index: embeddings of events, found by nearness, in the index process.

While there are few, a search looks at all of them. From 20,000 on they lie in lists, about as many as the square root
of their number, and a search looks into the nearest few of these: as many as it takes for a recall of 0.95. Lists and
clusters are trained anew when as many embeddings have come as would make four times those of the last training, new
events or old ones whose embeddings have changed: then the centres are of a model that is gone.

Everything that takes long is done in pieces of some milliseconds between requests, or by a thread that sees a copy.

Legend: n events of a call, D numbers of an embedding, C clusters, Q queries, k neighbours.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from replay.embedding_index.faiss_lists import InvertedLists, train
from replay.embedding_index.protocol import NO_ID, Ids, IndexFigures, IndexSettings, Vectors
from replay.embedding_index.row_table import RowTable

_ROWS_A_CLUSTER = 32
"""Fewer do not tell where a cluster lies."""
_SAMPLE_A_CENTRE = 48
_LISTS_FROM = 20_000
_ANEW_AFTER = 3
"""IVFIndex that come before the next training, for each that was there at the last."""
_TOMBSTONES = 8
"""One row in so many may be a tombstone: taking them out is one pass over everything."""
_LEAST_TOMBSTONES = 256
_SLACK = 4
_PIECE_ROWS = 1024
_GOOD_RECALL = 0.95
_SURE_RECALL = 0.97
"""What new lists must reach on a sample."""
_LEAST_PROBES = 64
"""One list in so many is looked into at least: the next queries may lie between lists where the last did not."""
_JUDGES = 32
"""Queries by which recall is judged."""
_RECALL_SHARE = 0.05
"""Part of the time that may go into measuring recall."""
_OUTLIERS = 200
"""One vector in so many may be one."""
_LARGEST = 1e15
"""Squares of larger numbers are no float32."""


class IVFIndex:
    """At most `capacity` events. Used by one thread; `work` is called between requests."""

    def __init__(self, settings: IndexSettings, seed: int = 0) -> None:
        self._settings = settings
        self._clusters = max(1, min(settings.clusters, settings.capacity // _ROWS_A_CLUSTER))
        # Beside the events: what is replaced until tombstones are taken out, also while lists are made.
        self._rows = RowTable(settings.capacity + settings.capacity // 2 + 4 * _PIECE_ROWS)
        self._lists = InvertedLists(settings.dim)
        self._next: InvertedLists | None = None
        self._renewal: Iterator[bool] | None = None
        self._thread = ThreadPoolExecutor(1, "index-training")
        self._rng = np.random.default_rng(seed)
        self._newest = 0
        self._came = 0
        self._trained = 0
        self._queries: deque[Vectors] = deque(maxlen=_JUDGES)
        self._unjudged: tuple[Vectors, int] | None = None
        self._recalls: deque[float] = deque(maxlen=_JUDGES)
        self._recall = math.nan
        self._judge_at = 0.0
        self._malformed = 0
        self._full = 0
        self._centres: Vectors | None = None
        self.centroids: Vectors | None = None
        """The newest clusters `[C, D]`."""
        self.training = 0
        """How often they were trained."""

    def add(self, ids: Ids, x_nD: Vectors, step: int) -> None:
        """Take up n events, or new embeddings of those that are there; what is malformed or too many is counted."""
        self._newest = max(self._newest, step)
        good = np.flatnonzero(_fit(x_nD) & (ids != NO_ID))
        self._malformed += len(ids) - len(good)
        # The last of those with one id; unique names the first.
        _, last = np.unique(ids[good][::-1], return_index=True)
        good = good[len(good) - 1 - last]
        ids = ids[good]
        self._rows.drop(ids)
        room = max(0, self._settings.capacity - self._rows.count)
        rows = self._rows.put(ids[:room], step, step + self._settings.stale_after)
        self._full += len(ids) - len(rows)
        x_nD = x_nD[good[: len(rows)]]
        self._came += len(rows)
        self._assign(rows, x_nD)
        self._lists.add(rows, x_nD)
        if self._next is not None:
            self._next.add(rows, x_nD)

    def remove(self, ids: Ids) -> None:
        """Let events go, those of them that are there."""
        self._rows.drop(np.unique(ids))

    def search(self, q_QD: Vectors, k: int, step: int) -> Ids:
        """Return the k nearest events of each query, nearest first, int64 `[Q, k]`, NO_ID where none."""
        self._newest = max(self._newest, step)
        good = _fit(q_QD)
        q_QD = np.where(good[:, None], q_QD, np.float32(0))
        found = self._rows.ids(self._find(self._lists, q_QD, k))
        found[~good] = NO_ID
        if good.any():
            one = q_QD[np.flatnonzero(good)[:1]]
            self._queries.append(one)
            self._unjudged = one, k
        return found

    def stale(self, n: int) -> Ids:
        """Return the n events whose embeddings are oldest and older than the bound; each is told once in that time."""
        return self._rows.stale(n, self._newest, self._newest + self._settings.stale_after)

    def assigned(self, begin: int, n: int) -> tuple[Ids, Ids, bool]:
        """Return events and their clusters, those in n rows from `begin` on, and whether there are rows after these."""
        return *self._rows.assigned(begin, n), begin + n < self._rows.top

    def figures(self) -> IndexFigures:
        """Tell how it stands."""
        mean, most, stale = self._rows.ages(self._newest, self._settings.stale_after)
        lists = self._lists.bytes + (self._next.bytes if self._next is not None else 0)
        return IndexFigures(
            rows=self._rows.count,
            tombstones=self._rows.tombstones,
            trained_rows=self._trained,
            lists=self._lists.count,
            probes=self._lists.probes,
            recall=self._recall,
            age_mean=mean,
            age_max=most,
            stale=stale,
            bytes=lists + self._rows.bytes,
            malformed=self._malformed,
            full=self._full,
            renewing=self.renewing,
        )

    @property
    def renewing(self) -> bool:
        """Whether clusters or lists are being made."""
        return self._renewal is not None

    def work(self) -> bool:
        """Do one piece of what is due, in some milliseconds; False when there is none for now."""
        if self._renewal is not None:
            busy = next(self._renewal, None)
            if busy is None:
                self._renewal = None
            return bool(busy)
        if self._rows.tombstones > max(_LEAST_TOMBSTONES, self._rows.top // _TOMBSTONES):
            self._clear()
            return True
        if self._due():
            self._renewal = self._renew()
            return True
        return self._judge()

    def _due(self) -> bool:
        """Whether it is time to train, or to train again."""
        if self._rows.count < _ROWS_A_CLUSTER * self._clusters:
            return False
        outgrown = self._lists.count == 1 and self._trained < _LISTS_FROM <= self._rows.count
        return outgrown or self._came >= _ANEW_AFTER * self._trained

    def _find(self, lists: InvertedLists, q_QD: Vectors, k: int, probes: int | None = None) -> Ids:
        """Return the rows of the k nearest events of each query, int64 `[Q, k]`, -1 where none."""
        if not self._rows.tombstones:
            return lists.search(q_QD, k, probes=probes)
        # Passing over tombstones takes a search twice the time; some more than k are mostly enough to leave them out.
        rows = lists.search(q_QD, k + k // 2 + _SLACK, probes=probes)
        dead = (rows >= 0) & ~self._rows.live[rows]
        order = np.argsort(dead | (rows < 0), axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(np.where(dead, -1, rows), order, axis=1)
        again = np.flatnonzero(dead.any(axis=1) & (found[:, -1] < 0))
        if len(again):
            found[again] = lists.search(q_QD[again], k, self._rows.live, probes=probes)
        return found

    def _clear(self) -> None:
        """Take the tombstones out."""
        self._lists.remove(~self._rows.live)
        self._rows.reclaim()

    def _renew(self) -> Iterator[bool]:
        """Train clusters, and where the events are many lists; yield False while the thread has the word."""
        self._came, self._trained = 0, self._rows.count
        count = _lists_for(self._rows.count)
        sample = self._sample(_SAMPLE_A_CENTRE * max(self._clusters, count))
        job = self._thread.submit(_train, sample, self._clusters, count)
        while not job.done():
            yield False
        clusters, centres = job.result()
        if clusters is not None:
            yield from self._assign_all(clusters)
        if (centres is None) != (count == 1) or count == self._lists.count == 1:
            return
        yield from self._move(InvertedLists(self._settings.dim, centres), sample)

    def _assign_all(self, clusters: Vectors) -> Iterator[bool]:
        """Find the clusters of all events, and then tell of them."""
        self._centres = clusters
        for which in range(self._lists.count):
            for begin in range(0, self._lists.size(which), _PIECE_ROWS):
                self._assign(*self._lists.part(which, begin, begin + _PIECE_ROWS))
                yield True
        self.centroids, self.training = clusters, self.training + 1

    def _assign(self, rows: Ids, x_nD: Vectors) -> None:
        if self._centres is not None and len(rows):
            self._rows.assign(rows, _distances(x_nD, self._centres).argmin(axis=1).astype(np.int16))

    def _move(self, lists: InvertedLists, sample: Vectors) -> Iterator[bool]:
        """Bring everything into other lists; what comes meanwhile goes into both."""
        self._rows.frozen, self._next = True, lists
        boundary = self._rows.top
        for which in range(self._lists.count):
            for begin in range(0, self._lists.size(which), _PIECE_ROWS):
                rows, x_nD = self._lists.part(which, begin, begin + _PIECE_ROWS)
                old: NDArray[np.bool_] = rows < boundary
                old &= self._rows.live[np.minimum(rows, boundary - 1)]
                if old.any():
                    lists.add(rows[old], x_nD[old])
                    yield True
        if lists.count > 1:
            yield from self._choose_probes(lists, sample)
        self._lists, self._next, self._rows.frozen = lists, None, False
        self._recalls.clear()
        self._clear()

    def _choose_probes(self, lists: InvertedLists, sample: Vectors) -> Iterator[bool]:
        """Look into as many lists as it takes for a good recall on the last queries, or without any on events."""
        k = self._unjudged[1] if self._unjudged is not None else 10
        queries = list(self._queries) or [sample[each : each + 1] for each in range(min(_JUDGES, len(sample)))]
        lists.probes = -(-lists.count // _LEAST_PROBES)
        exact = []
        for query in queries:
            exact.append(self._find(lists, query, k, lists.count))
            yield True
        while lists.probes < lists.count:
            recall = [_recall(self._find(lists, q, k), e) for q, e in zip(queries, exact, strict=True)]
            yield True
            if np.mean(recall) >= _SURE_RECALL:
                return
            lists.probes = min(lists.count, 2 * lists.probes)

    def _judge(self) -> bool:
        """Hold one query of late against an exhaustive search."""
        if self._unjudged is None or time.monotonic() < self._judge_at:
            return False
        begin = time.monotonic()
        (query, k), self._unjudged = self._unjudged, None
        exact = self._find(self._lists, query, k, self._lists.count)
        self._recalls.append(_recall(self._find(self._lists, query, k), exact))
        self._recall = float(np.mean(self._recalls))
        if len(self._recalls) == _JUDGES and self._recall < _GOOD_RECALL and self._lists.probes < self._lists.count:
            self._lists.probes = min(self._lists.count, 2 * self._lists.probes)
            self._recalls.clear()
        now = time.monotonic()
        self._judge_at = now + (now - begin) / _RECALL_SHARE
        return True

    def _sample(self, n: int) -> Vectors:
        rows, x_nD = self._lists.sample(n + n // 8, self._rng)
        return x_nD[self._rows.live[rows]]


def _lists_for(rows: int) -> int:
    """Return a power of 2 near the square root; it has to do until there are four times as many."""
    return 1 if rows < _LISTS_FROM else 1 << math.ceil(math.log2(math.sqrt(rows)))


def _train(x_nD: Vectors, clusters: int, lists: int) -> tuple[Vectors | None, Vectors | None]:
    """Return the centres of clusters and of lists; None where there are none, and when the vectors have no lists."""
    few = x_nD[: _SAMPLE_A_CENTRE * clusters]
    return (
        spread(few, clusters) if len(few) >= clusters else None,
        train(x_nD, lists) if 1 < lists <= len(x_nD) else None,
    )


def spread(x_nD: Vectors, clusters: int) -> Vectors:
    """Return the centres of clusters that cover the vectors, float32 `[C, D]`, however many lie where.

    The centres of k-means are as dense as the vectors, and as many of each cluster would be a uniform sample again. So
    each centre is the vector that is farthest from those before it (Gonzalez 1985, "Clustering to minimize the maximum
    intercluster distance"), but for the farthest few, which may be outliers; then it moves to the mean of its cluster.
    """
    chosen = [0]
    nearest = _distances(x_nD, x_nD[:1])[:, 0]
    rank = max(0, len(x_nD) - 1 - len(x_nD) // _OUTLIERS)
    for _ in range(clusters - 1):
        chosen.append(int(np.argpartition(nearest, rank)[rank]))
        np.minimum(nearest, _distances(x_nD, x_nD[chosen[-1:]])[:, 0], out=nearest)
    centres = x_nD[chosen].copy()
    mine = _distances(x_nD, centres).argmin(axis=1)
    for each in range(clusters):
        if (mine == each).any():
            centres[each] = x_nD[mine == each].mean(axis=0)
    return centres


def _distances(x_nD: Vectors, centres_CD: Vectors) -> Vectors:
    """Return the squared distance of each vector to each centre, `[n, C]`."""
    found: Vectors = np.square(x_nD).sum(axis=1)[:, None] + np.square(centres_CD).sum(axis=1) - 2 * x_nD @ centres_CD.T
    return found


def _fit(x_nD: Vectors) -> NDArray[np.bool_]:
    """Return which vectors are finite, and not so large that their squares are not."""
    fit: NDArray[np.bool_] = np.all(np.abs(x_nD) <= _LARGEST, axis=1)
    return fit


def _recall(found: Ids, exact: Ids) -> float:
    """Return which part of the rows that an exhaustive search has found was found."""
    wanted = exact[exact >= 0]
    return float(np.isin(wanted, found).mean()) if len(wanted) else 1.0
