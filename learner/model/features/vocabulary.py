"""A vocabulary that grows with the stream: which key has which row of a table of fixed size.

A key gets a row when a count sketch has seen it `min_count` times. It loses the row when it has not been seen for
`expire`, or when the table is full, to a key that has been seen more often of late than the rarest of those that were
not seen for the longest (as Einziger, Friedman & Manes 2017, "TinyLFU"). All follows from the keys, their batches and
the times of their records.

Keys without a row share the first rows, by a hash, which torch computes, so that a pass on any device gives what the
host has. A key that gets a row starts there with what a model has in the row that it shared until then.

Legend: B events, m keys, N rows; D rows of the sketch, W columns.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.ingest.settings.features import LearnedVocabulary
from anabranch.learner.model.features.host_state import HostState, write

_INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(key: Tensor) -> Tensor:
    """Return the hash of each int64, by the finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    key = key + _INCREMENT
    key = (key ^ _shifted(key, 30)) * _FIRST
    key = (key ^ _shifted(key, 27)) * _SECOND
    return key ^ _shifted(key, 31)


def crossed(keys: list[Tensor]) -> Tensor:
    """Return one hash for what several int64 tensors of one shape have together, in their order."""
    together = torch.zeros_like(keys[0])
    for key in keys:
        together = mixed(together * _SECOND + key)
    return together


def _shifted(key: Tensor, bits: int) -> Tensor:
    """Shift to the right as if the integers had no sign."""
    return (key >> bits) & ((1 << (64 - bits)) - 1)


DEPTH = 4
_MOST_COUNT = 255
"""The largest count."""

Counts = NDArray[np.uint8]


def sketch_width(rows: int) -> int:
    """Return the columns of the sketch of a vocabulary: 16 or more for each row, a power of two."""
    return 1 << (16 * rows - 1).bit_length()


def count_keys(table: Counts, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count each of m distinct keys; return how often each was seen, int64 `[m]`: exact, or too much.

    `table` is a count-min sketch (Cormode & Muthukrishnan 2005) with the conservative update of Estan & Varghese 2002,
    uint8 `[D, W]`, with W a power of two.
    """
    cells = _cells(keys, table.shape[1])
    depth = np.arange(len(table))[:, None]
    seen: NDArray[np.int64] = np.minimum(table[depth, cells].min(axis=0) + counts, _MOST_COUNT)
    np.maximum.at(table, (np.broadcast_to(depth, cells.shape), cells), seen.astype(np.uint8))
    return seen


def _cells(keys: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the column of each key in each row, int64 `[D, m]`."""
    hashes = torch.from_numpy(keys)
    rows = list[NDArray[np.int64]]()
    for _ in range(DEPTH):
        hashes = mixed(hashes)
        rows.append(hashes.numpy() & (width - 1))
    return np.stack(rows)


EMPTY = 2**63 - 1
"""In place of a key where there is none."""
NOBODY, SEVERAL = 0, -1
_STEP, _CLOCK, _ADDED, _USED, _BEHIND = range(5)
_TIMES = 9
"""Batches by whose middle time the clock goes."""
_SLEW = 1 / 1024
"""Of `expire`: how far the clock may move in a batch besides twice what the time usually does from batch to batch."""
_USUAL = 1 / 8
"""Of `expire`: what that may be at most."""
_CONFIRMED = 256
"""Batches in a row by which a step of time is believed."""
_EXPIRE_MS = 30 * 86_400_000.0
"""In place of `expire` where there is none, which a later start may set."""
_OLDEST = 1024
"""Rows whose order of age is computed at once."""
_WINDOW = 32
"""Keys without a row, for each row of the table, that are counted before all counts are halved."""
_COMPARED = 32
"""How many of the oldest rows a new value is compared with: it takes that of the rarest value."""
_SHARED = 4
"""One of so many rows is shared."""

_BY_ROW = ("seen_step", "seen_ms", "count", "owner")

Ints = NDArray[np.int64]


class Restarted(NamedTuple):
    """The rows that have a new key, and the shared row that each of these keys had before, int64 `[m]` each."""

    rows: Ints
    shared: Ints


@dataclass
class _Cache:
    """What follows from the buffers, and is computed again after a load: as of step `step`."""

    step: int
    keys: Ints
    rows: Ints
    free: list[int]
    oldest: deque[tuple[int, int]] = field(default_factory=deque)
    """Step and row of those that were not seen for the longest, in this order; not those seen since."""


class VocabularyTable(nn.Module):
    """Row numbers of keys.

    Its buffers: `keys`, int64 `[N - shared]`, sorted, EMPTY at the end; `rows`, int64, the row of each; and in
    `state`, by row, `seen_step`, `seen_ms`, `count` and `owner`, which is whose events alone have had the key, NOBODY,
    or SEVERAL; the count sketch `sketch`, `totals`, and `times` of the last batches.
    """

    def __init__(self, settings: LearnedVocabulary) -> None:
        """Start without keys."""
        super().__init__()
        self.size = settings.learn
        self.shared = max(1, self.size // _SHARED)
        """How many of the first rows are shared by keys without a row."""
        self._min_count = settings.min_count
        self._expires = settings.expire is not None
        self._expire_ms = _EXPIRE_MS if settings.expire is None else settings.expire.total_seconds() * 1000
        self.register_buffer("keys", torch.full((self.size - self.shared,), EMPTY))
        self.register_buffer("rows", torch.zeros(self.size - self.shared, dtype=torch.int64))
        by_row = {name: torch.zeros(self.size, dtype=torch.int64) for name in _BY_ROW}
        sketch = torch.zeros(DEPTH, sketch_width(self.size), dtype=torch.uint8)
        totals, times = torch.zeros(5, dtype=torch.int64), torch.zeros(_TIMES, dtype=torch.int64)
        self.state = HostState(**by_row, sketch=sketch, totals=totals, times=times)
        self._cache: _Cache | None = None
        self.marker: int | None = None
        """One row for all keys, to find who takes it; None: each key has its row."""

    def forward(self, keys: Tensor) -> Tensor:
        """Return the row of each key, int64 of the same shape."""
        if self.marker is not None:
            return torch.full_like(keys, self.marker)
        keys = keys.clamp(max=EMPTY - 1)
        table = self.get_buffer("keys")
        at = _search(table, keys).clamp(max=len(table) - 1)
        return torch.where(table[at] == keys, self.get_buffer("rows")[at], self._shared_row(keys))

    def _shared_row(self, keys: Tensor) -> Tensor:
        return torch.remainder(mixed(keys), self.shared)

    def observe(self, keys: Ints, time_ms: int, owners: Ints | None = None) -> Restarted:
        """Learn from the keys of one batch, at a time; return the rows that have a new key now.

        `owners`: whose event has each key; None: events are of nobody.
        """
        all_keys = np.minimum(keys, EMPTY - 1)
        keys, counts = np.unique(all_keys, return_counts=True)
        counts = counts.astype(np.int64)
        cache, state = self._current(), self.state
        totals = state["totals"]
        totals[_STEP] += 1
        self._advance(time_ms)
        cache.step = int(totals[_STEP])
        at = np.searchsorted(cache.keys, keys)
        known = at < len(cache.keys)
        known[known] = cache.keys[at[known]] == keys[known]
        hits = cache.rows[at[known]]
        self._see(hits, state["count"][hits] + counts[known])
        gone = self._expired(cache)
        seen = count_keys(state["sketch"], keys[~known], counts[~known])
        enough = seen >= self._min_count
        fresh = self._admit(cache, keys[~known][enough], seen[enough], gone)
        self._age(int(counts[~known].sum()))
        if gone or fresh:
            self._rewrite(cache, gone, fresh)
        rows = np.fromiter(fresh.values(), np.int64, len(fresh))
        state["owner"][[*gone, *rows]] = NOBODY
        if owners is not None:
            self._own(cache, all_keys, owners)
        return Restarted(rows, self._shared_row(torch.tensor([*fresh], dtype=torch.int64)).numpy())

    def erase(self, owners: Ints) -> Restarted:
        """Take their rows from the keys that events of these owners alone have had; return the rows, and the shared
        rows that these keys have now."""
        cache, state = self._current(), self.state
        mine = np.isin(state["owner"][cache.rows], owners)
        keys, rows = cache.keys[mine], cache.rows[mine]
        if len(rows):
            for name in _BY_ROW:
                state[name][rows] = 0
            cache.oldest.clear()
            cache.free += rows.tolist()
            heapq.heapify(cache.free)
            self._rewrite(cache, {*rows.tolist()}, {})
        return Restarted(rows, self._shared_row(torch.from_numpy(keys)).numpy())

    def _own(self, cache: _Cache, keys: Ints, owners: Ints) -> None:
        """Keep for the row of each key whose event had it, as long as it is one owner."""
        at = np.searchsorted(cache.keys, keys)
        known = at < len(cache.keys)
        known[known] = cache.keys[at[known]] == keys[known]
        rows, owners = cache.rows[at[known]], owners[known]
        if not len(rows):
            return
        order = np.lexsort((owners, rows))
        rows, first = np.unique(rows[order], return_index=True)
        last = np.append(first[1:], len(order)) - 1
        lowest, highest, before = owners[order][first], owners[order][last], self.state["owner"][rows]
        one = (lowest == highest) & ((before == NOBODY) | (before == lowest))
        self.state["owner"][rows] = np.where(one, lowest, SEVERAL)

    def _advance(self, time_ms: int) -> None:
        """Move the clock towards the middle time of the last batches, in both directions.

        Times are those that senders write. A step of time would expire whatever is not in the batches that have it, so
        the clock follows slowly: of a thousand batches without a value, it moves by `expire`. It follows at once where
        the time moves like this from batch to batch, as it does where there is one an hour; and where the step has
        lasted for many batches, in which values are seen as of then.

        It starts once most times are known; what was seen before counts as seen then.
        """
        totals, times = self.state["totals"], self.state["times"]
        step = int(totals[_STEP])
        times[step % _TIMES] = time_ms
        middle, clock = int(np.sort(times)[_TIMES // 2]), int(totals[_CLOCK])
        if clock == 0:
            self.state["seen_ms"][:] = totals[_CLOCK] = middle
            return
        between = np.diff(np.roll(times, -1 - step % _TIMES))
        usual = min(max(int(np.sort(between)[(_TIMES - 2) // 2]), 0), self._expire_ms * _USUAL)
        slew = self._expire_ms * _SLEW
        moved = int(np.clip(middle - clock, -slew, 2 * usual + slew))
        totals[_BEHIND] = totals[_BEHIND] + 1 if clock + moved < middle else 0
        if totals[_BEHIND] > _CONFIRMED:
            since = self.state["seen_step"] > step - _CONFIRMED
            self.state["seen_ms"][since] += middle - clock
            moved = middle - clock
            totals[_BEHIND] = 0
        totals[_CLOCK] = clock + moved

    def _see(self, rows: Ints, counts: Ints) -> None:
        state = self.state
        state["seen_step"][rows], state["seen_ms"][rows] = state["totals"][_STEP], state["totals"][_CLOCK]
        state["count"][rows] = counts

    def _expired(self, cache: _Cache) -> set[int]:
        """Free the rows whose key was not seen for too long, and return them."""
        if not self._expires:
            return set()
        seen_ms, before = self.state["seen_ms"], int(self.state["totals"][_CLOCK]) - self._expire_ms
        oldest = self._oldest(cache, set(), 1)
        if not oldest or seen_ms[oldest[0]] >= before:
            return set()
        gone = cache.rows[seen_ms[cache.rows] < before].tolist()
        cache.oldest.clear()  # it has rows that are free now
        cache.free += gone
        heapq.heapify(cache.free)
        return {*gone}

    def _admit(self, cache: _Cache, keys: Ints, seen: Ints, gone: set[int]) -> dict[int, int]:
        """Give keys a row, the most frequent first; add the rows that others lose to `gone`. Return rows by key."""
        fresh, count = dict[int, int](), self.state["count"]
        for index in np.lexsort((keys, -seen)):
            if cache.free:
                row = heapq.heappop(cache.free)
            else:
                oldest = self._oldest(cache, gone, _COMPARED)
                row = min(oldest, key=count.__getitem__, default=0)
                if not oldest or count[row] >= seen[index]:
                    break  # the others have been seen no more often
                gone.add(row)
            fresh[int(keys[index])] = row
            self._see(np.array([row]), seen[index : index + 1])
        return fresh

    def _oldest(self, cache: _Cache, gone: set[int], limit: int) -> list[int]:
        """Return up to `limit` rows that were not seen for the longest, in order, the lowest first of several; none of
        `gone`, or seen in this step.

        A row that was seen since its order was computed is younger than all in that order, so what remains of it are
        the oldest.
        """
        seen = self.state["seen_step"]
        found = list[int]()
        for fill in (False, True):
            if fill:
                rows = cache.rows[np.isin(cache.rows, [*gone], invert=True)] if gone else cache.rows
                order = seen[rows] * self.size + rows
                order = np.sort(np.partition(order, _OLDEST - 1)[:_OLDEST] if len(order) > _OLDEST else order)
                cache.oldest = deque((int(each) // self.size, int(each) % self.size) for each in order)
            valid = ((row, step) for step, row in cache.oldest if seen[row] == step < cache.step and row not in gone)
            found = [row for row, _ in islice(valid, limit)]
            if len(found) == limit:
                break
        while cache.oldest and cache.oldest[0][1] not in found[:1]:
            cache.oldest.popleft()
        return found

    def _age(self, added: int) -> None:
        totals = self.state["totals"]
        totals[_ADDED] += added
        if totals[_ADDED] >= _WINDOW * self.size:
            totals[_ADDED] //= 2
            self.state["sketch"][:] >>= 1
            self.state["count"][:] >>= 1

    def _rewrite(self, cache: _Cache, gone: set[int], fresh: dict[int, int]) -> None:
        """Take out the keys of rows that are gone, and put fresh ones in."""
        if gone:
            stay = np.isin(cache.rows, [*gone], invert=True)
            cache.keys, cache.rows = cache.keys[stay], cache.rows[stay]
        keys = np.sort(np.fromiter(fresh, np.int64, len(fresh)))
        at = np.searchsorted(cache.keys, keys)
        rows = np.array([fresh[int(key)] for key in keys], np.int64)
        cache.keys, cache.rows = np.insert(cache.keys, at, keys), np.insert(cache.rows, at, rows)
        used = len(cache.keys)
        self.state["totals"][_USED] = used
        padding = self.size - self.shared - used
        write(self.get_buffer("keys"), np.append(cache.keys, np.full(padding, EMPTY)))
        write(self.get_buffer("rows"), np.append(cache.rows, np.zeros(padding, np.int64)))

    def _current(self) -> _Cache:
        """Return what follows from the buffers, which were loaded if they are of another step."""
        totals = self.state["totals"]
        if self._cache is None or self._cache.step != totals[_STEP]:
            used = int(totals[_USED])
            keys, rows = (self.get_buffer(name)[:used].cpu().numpy().copy() for name in ("keys", "rows"))
            free = np.setdiff1d(np.arange(self.shared, self.size), rows).tolist()
            self._cache = _Cache(int(totals[_STEP]), keys, rows, free)
        return self._cache


def _search(table: Tensor, keys: Tensor) -> Tensor:
    """Return the index of the first entry of a sorted table that is not below each key."""
    if not torch.compiler.is_exporting():
        return torch.searchsorted(table, keys.contiguous())
    # ONNX has no operator for it.
    at = torch.zeros_like(keys)
    for bit in reversed(range(len(table).bit_length())):
        there = at + (1 << bit)
        below = table[there.clamp(max=len(table)) - 1] < keys
        at = torch.where((there <= len(table)) & below, there, at)
    return at
