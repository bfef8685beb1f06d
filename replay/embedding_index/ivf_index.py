"""The index in the index process: a nearest-neighbour search over the embeddings of events.

A search over few embeddings is exhaustive. From 20,000 on they are stored in inverted lists, about the square root of
their number, and a search reads the nearest lists, as many as a recall of 0.95 needs. Lists and clusters are trained
again after three times as many additions as there were embeddings at the last training, be it new events or new
embeddings of old ones: by then the centres are of an outdated model.

Long work is done in pieces of some milliseconds between requests, or by a thread on a copy.

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
"""Events that a cluster needs at least."""
_SAMPLE_A_CENTRE = 48
_LISTS_FROM = 20_000
_RETRAIN_FACTOR = 3
"""Embeddings that are added before the next training, for each that was there at the last."""
_TOMBSTONES = 8
"""One row in _TOMBSTONES may be a tombstone: removing them takes one pass over all lists."""
_MIN_TOMBSTONES = 256
_SLACK = 4
_PIECE_ROWS = 1024
_MIN_RECALL = 0.95
_TARGET_RECALL = 0.97
"""The recall that new lists must reach on a sample."""
_LISTS_PER_PROBE = 64
"""A search reads at least one in _LISTS_PER_PROBE lists: later queries may be harder than those evaluated."""
_EVALUATED = 32
"""Queries over which recall is measured."""
_RECALL_SHARE = 0.05
"""Part of the time that may be spent on measuring recall."""
_OUTLIERS = 200
"""One vector in _OUTLIERS may be an outlier."""
_MAX_NUMBER = 1e15
"""The largest number whose square is a finite float32, with a margin."""


class IVFIndex:
    """At most `capacity` events. Used by one thread, which calls `work` between requests."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._clusters = max(1, min(settings.clusters, settings.capacity // _ROWS_A_CLUSTER))
        # With room for replaced rows until tombstones are removed, also while lists are built.
        self._rows = RowTable(settings.capacity + settings.capacity // 2 + 4 * _PIECE_ROWS)
        self._lists = InvertedLists(settings.dim)
        self._next: InvertedLists | None = None
        self._renewal: Iterator[bool] | None = None
        self._thread = ThreadPoolExecutor(1, "index-training")
        self._rng = np.random.default_rng(0)
        self._newest = 0
        self._added = 0
        self._trained = 0
        self._queries: deque[Vectors] = deque(maxlen=_EVALUATED)
        self._unevaluated: tuple[Vectors, int] | None = None
        self._recalls: deque[float] = deque(maxlen=_EVALUATED)
        self._recall = math.nan
        self._evaluate_at = 0.0
        self._malformed = 0
        self._full = 0
        self._centres: Vectors | None = None
        self.centroids: Vectors | None = None
        """The newest clusters `[C, D]`."""
        self.training = 0
        """How often clusters were trained."""

    def add(self, ids: Ids, x_nD: Vectors, step: int) -> None:
        """Add n events, or new embeddings of present ones; malformed and excess events are counted."""
        self._newest = max(self._newest, step)
        good = np.flatnonzero(_fit(x_nD) & (ids != NO_ID))
        self._malformed += len(ids) - len(good)
        # Of equal ids the last counts; `unique` returns the first.
        _, last = np.unique(ids[good][::-1], return_index=True)
        good = good[len(good) - 1 - last]
        ids = ids[good]
        self._rows.drop(ids)
        room = max(0, self._settings.capacity - self._rows.count)
        rows = self._rows.put(ids[:room], step, step + self._settings.stale_after)
        self._full += len(ids) - len(rows)
        x_nD = x_nD[good[: len(rows)]]
        self._added += len(rows)
        self._assign(rows, x_nD)
        self._lists.add(rows, x_nD)
        if self._next is not None:
            self._next.add(rows, x_nD)

    def remove(self, ids: Ids) -> None:
        """Remove events; unknown ids are ignored."""
        self._rows.drop(np.unique(ids))

    def search(self, q_QD: Vectors, k: int, step: int) -> Ids:
        """Return the ids of the k nearest events of each query, nearest first, int64 `[Q, k]`, NO_ID for none."""
        self._newest = max(self._newest, step)
        good = _fit(q_QD)
        q_QD = np.where(good[:, None], q_QD, np.float32(0))
        nearest = self._rows.ids(self._find(self._lists, q_QD, k))
        nearest[~good] = NO_ID
        if good.any():
            one = q_QD[np.flatnonzero(good)[:1]]
            self._queries.append(one)
            self._unevaluated = one, k
        return nearest

    def stale(self, n: int) -> Ids:
        """Return the ids of the n oldest embeddings beyond the bound; each is returned once in `stale_after` steps."""
        return self._rows.stale(n, self._newest, self._newest + self._settings.stale_after)

    def assigned(self, begin: int, n: int) -> tuple[Ids, Ids, bool]:
        """Return the ids and clusters of the events in n rows from `begin` on, and whether more rows follow."""
        return *self._rows.assigned(begin, n), begin + n < self._rows.top

    def figures(self) -> IndexFigures:
        """Return the statistics."""
        mean, oldest, stale = self._rows.ages(self._newest, self._settings.stale_after)
        lists = self._lists.bytes + (self._next.bytes if self._next is not None else 0)
        return IndexFigures(
            rows=self._rows.count,
            tombstones=self._rows.tombstones,
            trained_rows=self._trained,
            lists=self._lists.count,
            probes=self._lists.probes,
            recall=self._recall,
            age_mean=mean,
            age_max=oldest,
            stale=stale,
            bytes=lists + self._rows.bytes,
            malformed=self._malformed,
            full=self._full,
            renewing=self.renewing,
        )

    @property
    def renewing(self) -> bool:
        """Whether clusters or lists are being trained."""
        return self._renewal is not None

    def work(self) -> bool:
        """Do one piece of maintenance, in some milliseconds; return False when none is due."""
        if self._renewal is not None:
            busy = next(self._renewal, None)
            if busy is None:
                self._renewal = None
            return bool(busy)
        if self._rows.tombstones > max(_MIN_TOMBSTONES, self._rows.top // _TOMBSTONES):
            self._clear()
            return True
        if self._due():
            self._renewal = self._renew()
            return True
        return self._evaluate()

    def _due(self) -> bool:
        """Whether it is time to train, or to train again."""
        if self._rows.count < _ROWS_A_CLUSTER * self._clusters:
            return False
        outgrown = self._lists.count == 1 and self._trained < _LISTS_FROM <= self._rows.count
        return outgrown or self._added >= _RETRAIN_FACTOR * self._trained

    def _find(self, lists: InvertedLists, q_QD: Vectors, k: int, probes: int | None = None) -> Ids:
        """Return the rows of the k nearest events of each query, int64 `[Q, k]`, -1 for none."""
        if not self._rows.tombstones:
            return lists.search(q_QD, k, probes=probes)
        # Skipping tombstones doubles the time of a search; searching for some more than k is usually enough.
        rows = lists.search(q_QD, k + k // 2 + _SLACK, probes=probes)
        dead = (rows >= 0) & ~self._rows.live[rows]
        order = np.argsort(dead | (rows < 0), axis=1, kind="stable")[:, :k]
        nearest = np.take_along_axis(np.where(dead, -1, rows), order, axis=1)
        again = np.flatnonzero(dead.any(axis=1) & (nearest[:, -1] < 0))
        if len(again):
            nearest[again] = lists.search(q_QD[again], k, self._rows.live, probes=probes)
        return nearest

    def _clear(self) -> None:
        """Remove the tombstones."""
        self._lists.remove(~self._rows.live)
        self._rows.reclaim()

    def _renew(self) -> Iterator[bool]:
        """Train clusters, and lists if there are many events; yield False while the training thread runs."""
        self._added, self._trained = 0, self._rows.count
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
        """Compute the clusters of all events, and then publish them."""
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
        """Copy all events to other lists; events that are added meanwhile are put into both."""
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
        """Choose how many lists a search reads, by the recall of the last queries or, without any, of a sample."""
        k = self._unevaluated[1] if self._unevaluated is not None else 10
        queries = list(self._queries) or [sample[row : row + 1] for row in range(min(_EVALUATED, len(sample)))]
        lists.probes = -(-lists.count // _LISTS_PER_PROBE)
        exact = []
        for query in queries:
            exact.append(self._find(lists, query, k, lists.count))
            yield True
        while lists.probes < lists.count:
            recall = [_recall(self._find(lists, q, k), e) for q, e in zip(queries, exact, strict=True)]
            yield True
            if np.mean(recall) >= _TARGET_RECALL:
                return
            lists.probes = min(lists.count, 2 * lists.probes)

    def _evaluate(self) -> bool:
        """Compare the search for a recent query with an exhaustive search."""
        if self._unevaluated is None or time.monotonic() < self._evaluate_at:
            return False
        begin = time.monotonic()
        (query, k), self._unevaluated = self._unevaluated, None
        exact = self._find(self._lists, query, k, self._lists.count)
        self._recalls.append(_recall(self._find(self._lists, query, k), exact))
        self._recall = float(np.mean(self._recalls))
        if len(self._recalls) == _EVALUATED and self._recall < _MIN_RECALL and self._lists.probes < self._lists.count:
            self._lists.probes = min(self._lists.count, 2 * self._lists.probes)
            self._recalls.clear()
        now = time.monotonic()
        self._evaluate_at = now + (now - begin) / _RECALL_SHARE
        return True

    def _sample(self, n: int) -> Vectors:
        rows, x_nD = self._lists.sample(n + n // 8, self._rng)
        return x_nD[self._rows.live[rows]]


def _lists_for(rows: int) -> int:
    """Return a power of 2 near the square root of `rows`; it is used until there are four times as many."""
    return 1 if rows < _LISTS_FROM else 1 << math.ceil(math.log2(math.sqrt(rows)))


def _train(x_nD: Vectors, clusters: int, lists: int) -> tuple[Vectors | None, Vectors | None]:
    """Return the centres of clusters and of lists; None if there are too few vectors, or they cannot be clustered."""
    few = x_nD[: _SAMPLE_A_CENTRE * clusters]
    return (
        spread(few, clusters) if len(few) >= clusters else None,
        train(x_nD, lists) if 1 < lists <= len(x_nD) else None,
    )


def spread(x_nD: Vectors, clusters: int) -> Vectors:
    """Return the centres of clusters that cover the vectors regardless of their density, float32 `[C, D]`.

    The centres of k-means are as dense as the vectors, so as many events of each cluster would be a uniform sample
    again. Here each centre is the vector farthest from the previous ones (Gonzalez 1985, "Clustering to minimize the
    maximum intercluster distance"), except the farthest few, which may be outliers. Then it moves to the mean of its
    cluster.
    """
    chosen = [0]
    nearest = _distances(x_nD, x_nD[:1])[:, 0]
    rank = max(0, len(x_nD) - 1 - len(x_nD) // _OUTLIERS)
    for _ in range(clusters - 1):
        chosen.append(int(np.argpartition(nearest, rank)[rank]))
        np.minimum(nearest, _distances(x_nD, x_nD[chosen[-1:]])[:, 0], out=nearest)
    centres = x_nD[chosen].copy()
    assigned = _distances(x_nD, centres).argmin(axis=1)
    for cluster in range(clusters):
        if (assigned == cluster).any():
            centres[cluster] = x_nD[assigned == cluster].mean(axis=0)
    return centres


def _distances(x_nD: Vectors, centres_CD: Vectors) -> Vectors:
    """Return the squared distance of each vector to each centre, `[n, C]`."""
    squared: Vectors = np.square(x_nD).sum(axis=1)[:, None] + np.square(centres_CD).sum(axis=1)
    return squared - 2 * x_nD @ centres_CD.T


def _fit(x_nD: Vectors) -> NDArray[np.bool_]:
    """Return which vectors are finite and have finite squares."""
    fit: NDArray[np.bool_] = np.all(np.abs(x_nD) <= _MAX_NUMBER, axis=1)
    return fit


def _recall(found: Ids, exact: Ids) -> float:
    """Return the part of the rows of an exhaustive search that are in `found`."""
    expected = exact[exact >= 0]
    return float(np.isin(expected, found).mean()) if len(expected) else 1.0
