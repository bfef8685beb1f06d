"""A window that grows while the mean of its values stays the same, and bounds for values that have none.

ADWIN: Bifet & Gavaldà 2007, "Learning from time-changing data with adaptive windowing", SDM 2007, the variant with an
exponential histogram.

Errors without bounds are winsorised, so that a few wrong labels decide nothing (Dixon 1960, "Simplified estimation from
censored normal samples"; Huber 1964, "Robust estimation of a location parameter"): an error counts as `LIMIT` medians
at most. A median stays where most errors are while fewer than half of them are wrong, and errors of a normal
distribution exceed the limit less than once in 10^10.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 10.0
"""Medians."""
_RECENT = 63
"""Values of which the median is taken while they come."""
FEWEST = 8
"""With fewer values nothing is known of their size."""


def limit_of(scores: NDArray[np.float64]) -> float:
    """Return the size beyond which scores do not count: `LIMIT` medians of those that are finite and not 0.

    Events without any error say nothing of the size of the others. Infinity where there are no others.
    """
    sizes = np.abs(scores)
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return LIMIT * float(np.median(sizes)) if len(sizes) else np.inf


def winsorized(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores of which none is beyond their limit."""
    limit = limit_of(scores)
    return np.clip(scores, -limit, limit)


class Winsorizer:
    """Bounds values as they come by the median of the newest ones. State is plain numbers. Used by one thread."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, value: float) -> float:
        """Return a value within the limit, which depends on this value and on those before it."""
        self._recent.append(value)
        sizes = [abs(each) for each in self._recent if each]
        if len(self._recent) < FEWEST or not sizes:
            return value
        limit = LIMIT * median(sizes)
        return min(max(value, -limit), limit)

    def state(self) -> list[float]:
        """Return the newest values."""
        return [*self._recent]

    def restore(self, state: Sequence[float]) -> None:
        """Restore the newest values."""
        self._recent = deque(state, maxlen=_RECENT)


_PER_ROW = 5
"""Buckets of one size, beyond which the two oldest become one of twice the size."""
_SHORTEST = 5
"""Neither part of a window that is split has fewer values."""
_GRACE = 10
"""A window with so many values or fewer is not split."""
_FEWEST_COMPARED = 20
"""With fewer values the error of a difference is not known."""
_TAIL = 4.0
"""The bound's term for rare values, in standard deviations, where the range of values is unknown."""

Summary = tuple[int, float, float, float, list[float]]
"""Of a bucket: values, their weight, the weighted sum, the squared deviations from the mean, and other sums."""
_ALONE: NDArray[np.float64] = np.zeros(0)


@dataclass(slots=True)
class _Bucket:
    count: int
    weight: float
    total: float
    deviation: float
    extra: NDArray[np.float64]

    @property
    def summary(self) -> Summary:
        return self.count, self.weight, self.total, self.deviation, self.extra.tolist()

    def joined(self, other: "_Bucket") -> "_Bucket":
        weight = self.weight + other.weight
        difference = self.total / self.weight - other.total / other.weight
        deviation = self.deviation + other.deviation + self.weight * other.weight / weight * difference * difference
        extra = self.extra + other.extra if len(self.extra) else _ALONE
        return _Bucket(self.count + other.count, weight, self.total + other.total, deviation, extra)


class Adwin:
    """Keeps the longest window of which no two parts have means that differ by more than chance allows.

    Its memory grows with the logarithm of the window's length. State is plain numbers, and results depend on the
    values alone. Used by one thread.

    Other totals of the same observations may be next to each value, which do not decide how long the window is: their
    means, and how the value differs from them, are of the same window.
    """

    def __init__(self, delta: float = 0.002, *, every: int = 32, bounded: bool = True, others: int = 0) -> None:
        """Create an empty window.

        Args:
            delta: chance of splitting a window in which nothing has changed.
            every: values between two checks.
            bounded: whether values are between 0 and 1; if not, the bound depends on their variance, and values are
                winsorised: one of any size would make the variance too large for a change to be found.
            others: how many totals are next to each value, K; they are bounded as the values are.
        """
        self._delta = delta
        self._every = every
        self._bounded = bounded
        self._rows: list[list[_Bucket]] = []  # by size, 1, 2, 4, ...; in each the oldest first
        self._all: _Bucket | None = None
        self._since = 0
        self._others = others
        self._winsorizers = [] if bounded else [Winsorizer() for _ in range(1 + others)]
        self._first: list[tuple[float, ...]] = []
        """The first weights, with the values and totals next to them, which are bounded once their size is known."""
        self.added: tuple[float, ...] = (0.0,) * (1 + others)
        """The total that was added last, and those next to it, as they count."""

    def add(self, total: float, weight: float = 1.0, others: Sequence[float] = ()) -> float:
        """Add one value: the mean of `weight` observations that sum to `total`, with the K `others` next to it.

        Returns:
            By how much the mean has changed, newer less older part, when the older has been dropped; else 0.
        """
        totals = (total, *others)
        if self._winsorizers:
            if self._all is None or self._first:
                self._first.append((weight, *totals))
            pairs = zip(self._winsorizers, totals, strict=True)
            totals = tuple(winsorizer.add(each / weight) * weight for winsorizer, each in pairs)
            if len(self._first) == FEWEST:
                self._begin_again()
                return 0.0
        self._append(totals, weight)
        self._since += 1
        if self._since < self._every:
            return 0.0
        self._since = 0
        return self._shorten()

    def _begin_again(self) -> None:
        """Put the first values into the window once more, bounded by the median of all of them."""
        first, self._first, self._rows, self._all = np.array(self._first), [], [], None
        weights = first[:, 0]
        totals = np.stack([winsorized(column / weights) * weights for column in first[:, 1:].T], axis=1)
        for weight, row in zip(weights.tolist(), totals.tolist(), strict=True):
            self._append(tuple(row), weight)
        self._since += 1

    def _append(self, totals: tuple[float, ...], weight: float) -> None:
        self.added, (total, *others) = totals, totals
        extra = _ALONE
        if others:
            differences = [total - other for other in others]
            squares = [each * each for each in differences]
            products = [weight * each for each in differences]
            extra = np.array([*others, *squares, *products, weight * weight])
        bucket = _Bucket(1, weight, total, 0.0, extra)
        self._all = bucket if self._all is None else self._all.joined(bucket)
        if not self._rows:
            self._rows.append([])
        self._rows[0].append(bucket)
        self._compress()

    @property
    def mean(self) -> float | None:
        """Mean over the window, or None before the first value."""
        return None if self._all is None else self._all.total / self._all.weight

    @property
    def totals(self) -> list[float]:
        """Total over the window, and the K next to it, as they count; zeros before the first value."""
        if self._all is None:
            return [0.0] * (1 + self._others)
        return [self._all.total, *self._all.extra[: self._others].tolist()]

    @property
    def weight(self) -> float:
        """Observations in the window."""
        return 0.0 if self._all is None else self._all.weight

    @property
    def length(self) -> int:
        """Values in the window."""
        return 0 if self._all is None else self._all.count

    @property
    def other_means(self) -> list[float]:
        """Means over the window of the K totals next to the values; zeros before the first."""
        return [total / (self.weight or 1.0) for total in self.totals[1:]]

    @property
    def other_errors(self) -> list[float]:
        """Standard errors of the differences of the mean from the K next to it; infinity for few values.

        Observations of one value are not taken for independent: each value is one cluster (Liang & Zeger 1986,
        "Longitudinal data analysis using generalized linear models").
        """
        if self._all is None or self._all.count < _FEWEST_COMPARED or not self._others:
            return [math.inf] * self._others
        count, weight, extra = self._all.count, self._all.weight, self._all.extra
        others, squares, products = extra[:-1].reshape(3, -1)
        mean = (self._all.total - others) / weight
        square = squares - 2 * mean * products + mean * mean * extra[-1]
        errors: list[float] = (np.sqrt(np.maximum(square, 0.0) * count / (count - 1)) / weight).tolist()
        return errors

    def state(self) -> dict[str, Any]:
        """Return plain numbers, for a checkpoint."""
        rows = [[bucket.summary for bucket in row] for row in self._rows]
        state: dict[str, Any] = {
            "rows": rows,
            "all": None if self._all is None else self._all.summary,
            "since": self._since,
        }
        if self._winsorizers:
            state |= {"recent": [each.state() for each in self._winsorizers], "first": self._first}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the window of a checkpoint."""
        self._rows = [[_bucket_of(summary) for summary in row] for row in state["rows"]]
        self._all = None if state["all"] is None else _bucket_of(state["all"])
        self._since = state["since"]
        if self._winsorizers:
            for winsorizer, recent in zip(self._winsorizers, state["recent"], strict=True):
                winsorizer.restore(recent)
            self._first = [tuple(each) for each in state["first"]]

    def _compress(self) -> None:
        for size, row in enumerate(self._rows):
            if len(row) <= _PER_ROW:
                return
            if size + 1 == len(self._rows):
                self._rows.append([])
            self._rows[size + 1].append(row[0].joined(row[1]))
            del row[:2]

    def _shorten(self) -> float:
        """Drop oldest buckets until no split shows a change; return by how much the mean has changed."""
        changed = 0.0
        while (change := self._change()) is not None:
            changed = changed or change
            self._drop_oldest()
        return changed

    def _change(self) -> float | None:
        """Return by how much the newer part differs at the oldest split that shows a change; None where none does."""
        whole = self._all
        if whole is None or whole.count <= _GRACE:
            return None
        confidence = math.log(2 * math.log(whole.count) / self._delta)
        variance = whole.deviation / whole.weight
        scale = 1.0 if self._bounded else _TAIL * math.sqrt(variance)
        count, weight, total = 0, 0.0, 0.0
        for row in reversed(self._rows):
            for bucket in row:
                count, weight, total = count + bucket.count, weight + bucket.weight, total + bucket.total
                newer = whole.count - count
                if newer < _SHORTEST:
                    return None
                if count < _SHORTEST:
                    continue
                change = (whole.total - total) / (whole.weight - weight) - total / weight
                few = 1 / (count - _SHORTEST + 1) + 1 / (newer - _SHORTEST + 1)
                if abs(change) > math.sqrt(2 * few * variance * confidence) + 2 / 3 * few * confidence * scale:
                    return change
        return None

    def _drop_oldest(self) -> None:
        assert self._all is not None
        oldest = self._rows[-1].pop(0)
        while self._rows and not self._rows[-1]:
            self._rows.pop()
        whole = self._all
        count, weight, total = whole.count - oldest.count, whole.weight - oldest.weight, whole.total - oldest.total
        difference = oldest.total / oldest.weight - total / weight
        lost = oldest.deviation + oldest.weight * weight / (oldest.weight + weight) * difference * difference
        extra = whole.extra - oldest.extra if len(whole.extra) else _ALONE
        self._all = _Bucket(count, weight, total, max(0.0, whole.deviation - lost), extra)


def _bucket_of(summary: Summary) -> _Bucket:
    """Return the bucket of a checkpoint."""
    return _Bucket(*summary[:4], np.array(summary[4]))
