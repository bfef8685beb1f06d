"""Quantiles of a stream from a sketch of fixed size.

A value is added at level 0. A full level is sorted, and every other value of it moves one level up, where it counts
twice; from which of the first two on alternates. It is the compactor of Manku, Rajagopalan & Lindsay 1998 ("Approximate
medians and other quantiles in one pass and with limited memory"), with levels of one size. A compaction of level h
changes the rank of any value by at most 2^h, so that after N values the error of a rank is at most log2(N / SIZE) /
(2 SIZE) of N; since the errors of two compactions in a row have opposite signs, it is far less in practice.

Legend: n numbers of an event, H levels, S values of a level.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SIZE = 256
LEVELS = 20
_COMMON = 0.05
"""A value that so many events have, of all, says nothing of one of them."""


class QuantileSketch:
    """The sketch of one number of an event, in arrays that others own: the buffers of a module."""

    def __init__(self, items: Floats, used: NDArray[np.int64], odd: NDArray[np.int64]) -> None:
        """Take values `[H, S]`, and of each level how many there are, and whether the next compaction is an odd one."""
        self._items, self._used, self._odd = items, used, odd

    def add(self, values: Floats) -> None:
        """Add values `[B]`, none of which is NaN."""
        begin = 0
        while begin < len(values):
            free = self._items.shape[1] - int(self._used[0])
            part = values[begin : begin + free]
            self._items[0, self._used[0] : self._used[0] + len(part)] = part
            self._used[0] += len(part)
            begin += len(part)
            if len(part) == free:
                self._compact(0)

    def quantiles(self, parts: Floats) -> Floats:
        """Return the value below which each part of all values is, float64; there has to be a value.

        Of two values between which a part falls, it is one in between.
        """
        levels = np.repeat(np.arange(len(self._used)), self._used)
        values = np.concatenate([self._items[level, :count] for level, count in enumerate(self._used)])
        order = np.argsort(values, kind="stable")
        weight = np.exp2(levels[order].astype(np.float64))
        middle = np.cumsum(weight) - weight / 2
        found: Floats = np.interp(parts * weight.sum(), middle, values[order])
        return found

    def blur(self, random: np.random.Generator) -> None:
        """Move each value to a random value between its neighbours, unless it is that of many events; equal values
        together. Ranks change by less than the weight of a value."""
        levels = np.repeat(np.arange(len(self._used)), self._used)
        slots = np.concatenate([np.arange(count) for count in self._used])
        values, group = np.unique(self._items[levels, slots], return_inverse=True)
        weight = np.bincount(group, np.exp2(levels.astype(np.float64)))
        between = (values[:-1] + values[1:]) / 2
        low, high = np.append(values[:1], between), np.append(between, values[-1:])
        moved = low + random.random(len(values)) * (high - low)
        values = np.where(weight < _COMMON * weight.sum(), moved, values)
        unused = np.arange(self._items.shape[1]) >= self._used[:, None]
        self._items[unused] = 0.0
        self._items[levels, slots] = values[group]

    def _compact(self, level: int) -> None:
        if level + 1 == len(self._used):
            self._halve()
            return
        odd = int(self._odd[level])
        half = np.sort(self._items[level])[odd::2]
        self._odd[level] = 1 - odd
        self._used[level] = 0
        begin = int(self._used[level + 1])
        self._items[level + 1, begin : begin + len(half)] = half
        self._used[level + 1] += len(half)
        if self._used[level + 1] == self._items.shape[1]:
            self._compact(level + 1)

    def _halve(self) -> None:
        """Let all values count half as much, and drop those of level 0, when the last level is full."""
        last = len(self._used) - 1
        half = np.sort(self._items[last])[int(self._odd[last]) :: 2]
        self._odd[last] = 1 - self._odd[last]
        self._items[:last] = self._items[1:].copy()
        self._used[:last] = self._used[1:].copy()
        self._items[last, : len(half)] = half
        self._used[last] = len(half)
        # What was the last level is the one before it now, with the values that moved up.
        self._used[last - 1] = 0


def empty_sketches(n: int) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return the arrays of `n` empty sketches: values `[n, H, S]`, counts and parities `[n, H]`."""
    return np.zeros((n, LEVELS, SIZE)), np.zeros((n, LEVELS), np.int64), np.zeros((n, LEVELS), np.int64)
