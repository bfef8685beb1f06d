"""The index in the index process: a nearest-neighbour search over the embeddings of events. Imports no torch.

A search over few embeddings is exhaustive. From 20,000 on they are stored in inverted lists, about the square root of
their number, and a search reads the nearest lists, as many as a recall of 0.95 needs. Lists and clusters are trained
again after three times as many additions as there were embeddings at the last training, be it new events or new
embeddings of old ones: by then the centres are of an outdated model. FAISS finds the place of an id in the lists, so
that an embedding is removed when its event is.

Long work is done in pieces of some milliseconds between requests, or by a thread on a copy.

Measured with 10^6 vectors of 64 numbers on one core, 64 queries, k = 10: 1024 lists of half-precision numbers, 32 of
them probed, take 17 ms at a recall of 1.00; single precision takes twice of both, and 8 bits take as long as half
precision at a recall of 0.97 to 0.99.

Legend: n events of a call, D numbers of an embedding, C clusters or centres, Q queries, k neighbours.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
from numpy.typing import NDArray

from anabranch.replay.embedding_index.protocol import NO_ID, Ids, IndexFigures, IndexSettings, Vectors

_ROWS_A_CLUSTER = 32
"""Events that a cluster needs at least."""
_SAMPLE_A_CENTRE = 48
_LISTS_FROM = 20_000
_RETRAIN_FACTOR = 3
"""Embeddings that are added before the next training, for each that was there at the last."""
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
_FIRST_ROOM = 4096
_NO_CLUSTER = -1
"""The cluster of an event that is in none yet."""
_NEVER = np.iinfo(np.int64).max
_ID_BYTES = 48
"""Bytes that an id takes in its list, and in the table of positions."""
_MAX_HALF = 60_000.0
_ITERATIONS = 10


class InvertedLists:
    """Vectors with ids, each in the list of its nearest centre."""

    def __init__(self, dim: int, centres_CD: Vectors | None = None) -> None:
        """Begin empty. Without centres there is one list of float32 vectors, and searches are exhaustive."""
        self.count = 1 if centres_CD is None else len(centres_CD)
        self.probes = 1
        """Lists that a search reads."""
        self._scale = np.float32(1.0)
        self._limit = np.float32(np.inf)
        quantizer = faiss.IndexFlatL2(dim)
        if centres_CD is None:
            quantizer.add(np.zeros((1, dim), np.float32))
            self._index = faiss.IndexIVFFlat(quantizer, dim, 1)
        else:
            # The largest half-precision number is 65504: a power of 2 scales numbers to about 1, without rounding.
            size = float(np.sqrt(np.mean(np.square(centres_CD, dtype=np.float64))))
            self._scale = np.float32(2.0 ** -np.round(np.log2(size)) if size > 0 else 1.0)
            self._limit = np.float32(_MAX_HALF)
            quantizer.add(centres_CD * self._scale)
            half = faiss.ScalarQuantizer.QT_fp16
            self._index = faiss.IndexIVFScalarQuantizer(quantizer, dim, self.count, half, faiss.METRIC_L2, False)
        # FAISS does not own the quantizer that Python created.
        self._quantizer = quantizer
        self._index.is_trained = True
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def bytes(self) -> int:
        """Bytes of codes and ids."""
        return len(self) * (int(self._index.code_size) + _ID_BYTES)

    def add(self, ids: Ids, x_nD: Vectors) -> None:
        """Append n vectors with their ids, which the lists do not have."""
        self._index.add_with_ids(self._scaled(x_nD), ids)

    def remove(self, ids: Ids) -> None:
        """Remove the vectors of n ids; unknown ids are ignored. The last vector of a list takes its position."""
        if len(ids):
            self._index.remove_ids(faiss.IDSelectorArray(len(ids), faiss.swig_ptr(ids)))

    def search(self, q_QD: Vectors, k: int, probes: int | None = None) -> Ids:
        """Return the ids of the k nearest vectors of each query, nearest first, int64 `[Q, k]`, NO_ID for none.

        `probes`: lists to read; None: `self.probes`. With `self.count` the search is exhaustive.
        """
        parameters = faiss.SearchParametersIVF(nprobe=min(probes or self.probes, self.count))
        ids: Ids = self._index.search(self._scaled(q_QD), k, params=parameters)[1]
        return ids

    def vectors(self, ids: Ids) -> Vectors:
        """Return the vectors of n ids, which the lists have."""
        x_nD: Vectors = self._index.reconstruct_batch(ids)
        return x_nD / self._scale

    def _scaled(self, x_nD: Vectors) -> Vectors:
        scaled: Vectors = np.clip(x_nD * self._scale, -self._limit, self._limit)
        return scaled


class IVFIndex:
    """At most `capacity` events. Used by one thread, which calls `work` between requests.

    The upper half of an id is the number of a row in its tables, so that a row has one event at most.
    """

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._clusters = max(1, min(settings.clusters, settings.capacity // _ROWS_A_CLUSTER))
        self._lists = InvertedLists(settings.dim)
        self._next: InvertedLists | None = None
        """The lists that events are being copied to."""
        self._id = np.full(_FIRST_ROOM, NO_ID, np.int64)
        self._step = np.zeros(_FIRST_ROOM, np.int64)
        self._due = np.full(_FIRST_ROOM, _NEVER, np.int64)
        """The step from which the embedding of a row is stale, or is so again."""
        self._cluster = np.full(_FIRST_ROOM, _NO_CLUSTER, np.int16)
        self._moved = 0
        """The rows before this one are in `_next` too."""
        self._count = 0
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
        good = np.flatnonzero(_fit(x_nD) & (ids >= 0))
        self._malformed += len(ids) - len(good)
        # Of equal rows the last counts; `unique` returns the first.
        rows, last = np.unique(ids[good][::-1] >> 32, return_index=True)
        good = good[len(good) - 1 - last]
        self._make_room(int(rows[-1]) + 1 if len(rows) else 0)
        self._drop(rows)
        room = max(0, self._settings.capacity - self._count)
        self._full += len(rows[room:])
        rows, good = rows[:room], good[:room]
        ids, x_nD = ids[good], x_nD[good]
        self._id[rows], self._step[rows], self._due[rows] = ids, step, step + self._settings.stale_after
        self._count += len(rows)
        self._added += len(rows)
        self._assign(ids, x_nD)
        self._lists.add(ids, x_nD)
        if self._next is not None:
            moved = rows < self._moved
            self._next.add(ids[moved], x_nD[moved])

    def remove(self, ids: Ids) -> None:
        """Remove events; unknown ids are ignored."""
        ids = np.unique(ids)
        ids = ids[(ids >= 0) & (ids >> 32 < len(self._id))]
        self._drop(ids[self._id[ids >> 32] == ids] >> 32)

    def search(self, q_QD: Vectors, k: int, step: int) -> Ids:
        """Return the ids of the k nearest events of each query, nearest first, int64 `[Q, k]`, NO_ID for none."""
        self._newest = max(self._newest, step)
        good = _fit(q_QD)
        q_QD = np.where(good[:, None], q_QD, np.float32(0))
        nearest = self._lists.search(q_QD, k)
        nearest[~good] = NO_ID
        if good.any():
            one = q_QD[np.flatnonzero(good)[:1]]
            self._queries.append(one)
            self._unevaluated = one, k
        return nearest

    def stale(self, n: int) -> Ids:
        """Return the ids of the n oldest embeddings beyond the bound, the oldest first; each once in `stale_after`
        steps."""
        due = np.flatnonzero(self._due <= self._newest)
        if len(due) > n:
            due = due[np.argpartition(self._step[due], n)[:n]]
        due = due[np.argsort(self._step[due], kind="stable")]
        self._due[due] = self._newest + self._settings.stale_after
        return self._id[due]

    def clustered(self) -> Ids:
        """Return the ids of the events that are in clusters, and the cluster of each, int64 `[2, n]`."""
        rows = np.flatnonzero(self._cluster != _NO_CLUSTER)
        return np.stack([self._id[rows], self._cluster[rows]])

    def figures(self) -> IndexFigures:
        """Return the statistics."""
        ages = self._newest - self._step[self._id != NO_ID]
        lists = self._lists.bytes + (self._next.bytes if self._next is not None else 0)
        return IndexFigures(
            rows=self._count,
            trained_rows=self._trained,
            lists=self._lists.count,
            probes=self._lists.probes,
            recall=self._recall,
            age_mean=float(ages.mean()) if len(ages) else 0.0,
            age_max=float(ages.max(initial=0)),
            stale=int(np.count_nonzero(ages > self._settings.stale_after)),
            bytes=lists + 26 * len(self._id),
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
        if self._due_for_training():
            self._renewal = self._renew()
            return True
        return self._evaluate()

    def _due_for_training(self) -> bool:
        """Whether it is time to train, or to train again."""
        if self._count < _ROWS_A_CLUSTER * self._clusters:
            return False
        outgrown = self._lists.count == 1 and self._trained < _LISTS_FROM <= self._count
        return outgrown or self._added >= _RETRAIN_FACTOR * self._trained

    def _make_room(self, rows: int) -> None:
        more = len(self._id)
        while more < rows:
            more *= 2
        if more := more - len(self._id):
            self._id = np.append(self._id, np.full(more, NO_ID, np.int64))
            self._step = np.append(self._step, np.zeros(more, np.int64))
            self._due = np.append(self._due, np.full(more, _NEVER, np.int64))
            self._cluster = np.append(self._cluster, np.full(more, _NO_CLUSTER, np.int16))

    def _drop(self, rows: Ids) -> None:
        """Remove the events of different rows, where there are any."""
        rows = rows[self._id[rows] != NO_ID]
        ids = self._id[rows]
        self._lists.remove(ids)
        if self._next is not None:
            self._next.remove(ids)
        self._id[rows], self._due[rows], self._cluster[rows] = NO_ID, _NEVER, _NO_CLUSTER
        self._count -= len(rows)

    def _renew(self) -> Iterator[bool]:
        """Train clusters, and lists if there are many events; yield False while the training thread runs."""
        self._added, self._trained = 0, self._count
        count = _lists_for(self._count)
        n = _SAMPLE_A_CENTRE * max(self._clusters, count)
        present = self._id[self._id != NO_ID]
        sample = self._lists.vectors(self._rng.choice(present, min(n, len(present)), replace=False))
        job = self._thread.submit(_train, sample, self._clusters, count)
        while not job.done():
            yield False
        clusters, centres = job.result()
        if clusters is not None:
            self._centres = clusters
            for ids in self._pieces():
                self._assign(ids, self._lists.vectors(ids))
                yield True
            self.centroids, self.training = clusters, self.training + 1
        if (centres is None) != (count == 1) or count == self._lists.count == 1:
            return
        yield from self._move(InvertedLists(self._settings.dim, centres), sample)

    def _pieces(self) -> Iterator[Ids]:
        """Yield the ids of all events, some rows at a time."""
        begin = 0
        while begin < len(self._id):
            ids = self._id[begin : begin + _PIECE_ROWS]
            yield ids[ids != NO_ID]
            begin += _PIECE_ROWS

    def _assign(self, ids: Ids, x_nD: Vectors) -> None:
        if self._centres is not None and len(ids):
            self._cluster[ids >> 32] = _distances(x_nD, self._centres).argmin(axis=1)

    def _move(self, lists: InvertedLists, sample: Vectors) -> Iterator[bool]:
        """Copy all events to other lists; those that are added meanwhile to rows that are copied are put into both."""
        self._next, self._moved = lists, 0
        for ids in self._pieces():
            lists.add(ids, self._lists.vectors(ids))
            self._moved += _PIECE_ROWS
            yield True
        self._moved = _NEVER
        if lists.count > 1:
            yield from self._choose_probes(lists, sample)
        self._lists, self._next = lists, None
        self._recalls.clear()

    def _choose_probes(self, lists: InvertedLists, sample: Vectors) -> Iterator[bool]:
        """Choose how many lists a search reads, by the recall of the last queries or, without any, of a sample."""
        k = self._unevaluated[1] if self._unevaluated is not None else 10
        queries = list(self._queries) or [sample[row : row + 1] for row in range(min(_EVALUATED, len(sample)))]
        lists.probes = -(-lists.count // _LISTS_PER_PROBE)
        exact = []
        for query in queries:
            exact.append(lists.search(query, k, lists.count))
            yield True
        while lists.probes < lists.count:
            recall = [_recall(lists.search(q, k), e) for q, e in zip(queries, exact, strict=True)]
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
        exact = self._lists.search(query, k, self._lists.count)
        self._recalls.append(_recall(self._lists.search(query, k), exact))
        self._recall = float(np.mean(self._recalls))
        if len(self._recalls) == _EVALUATED and self._recall < _MIN_RECALL and self._lists.probes < self._lists.count:
            self._lists.probes = min(self._lists.count, 2 * self._lists.probes)
            self._recalls.clear()
        now = time.monotonic()
        self._evaluate_at = now + (now - begin) / _RECALL_SHARE
        return True


def train(x_nD: Vectors, centres: int) -> Vectors | None:
    """Return the centres of k-means, float32 `[C, D]`; None when the vectors cannot be clustered."""
    clustering = faiss.Clustering(x_nD.shape[1], centres)
    clustering.niter = _ITERATIONS
    clustering.min_points_per_centroid = 1
    try:
        clustering.train(x_nD, faiss.IndexFlatL2(x_nD.shape[1]))
    except RuntimeError:
        return None
    centres_CD: Vectors = faiss.vector_to_array(clustering.centroids).reshape(centres, -1)
    return centres_CD if np.isfinite(centres_CD).all() else None


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
    """Return the part of the ids of an exhaustive search that are in `found`."""
    expected = exact[exact >= 0]
    return float(np.isin(expected, found).mean()) if len(expected) else 1.0
