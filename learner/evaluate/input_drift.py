"""Drift of inputs: counts of a window of events against those of a reference, for training and for requests.

A column is a feature with one number or category, or an element of a short vector. Its bins are fixed by the first
events: percentiles, and each frequent value by itself; the last bin counts missing values. The population stability
index (PSI; Siddiqi 2006, "Credit Risk Scorecards") is taken over about ten groups of bins, and the Kolmogorov-Smirnov
statistic (KS) over all bins of known values, within 0.01.

A column has drifted when its PSI is above a bound, far above what was usual before, and beyond chance: a feature that
swings with the time of day has drifted only when it swings much further.

Legend: F columns, N events, E edges, K bins, G groups of bins.
"""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema

FILE = "inputs.json"
"""The reference, in the state directory: servers compare requests with it. Not durable; the learner writes it again."""

_FORMAT = 1
_MOST_COLUMNS, _LONGEST = 128, 16
"""Columns, and elements of a vector that has some."""
_EDGES = 99
_BINS = _EDGES + 2
"""K."""
_GROUPS = 64
"""G: with `_OWN` and `_GROUP` there are 53 at most."""
_OWN, _GROUP = 0.05, 0.0999
"""Mass of a value that is a group by itself, and of a group of other bins."""
WINDOW = 1000
"""Events of a window."""
FEWEST = 200
"""Events of a window that have to be counted."""
_REFERENCE, _WEIGHT = 10, 20
"""Windows before the first verdict, and as how many of them the reference weighs later, fading."""
_FACTOR, _FADES = 3.0, 0.99
"""A PSI is unusual from this factor on; what was usual fades with each window."""
_SIGMAS = 6.0
"""How far beyond chance a PSI has to be: a false alarm in 10^9 comparisons."""
_TINY = float(np.finfo(np.float64).tiny)
_MOVED = 0.5
"""Mass that has moved into one group, after which the bins no longer fit."""
_NAMED = 3


class InputColumn(NamedTuple):
    """A number or a category of an event."""

    name: str
    feature: str
    element: int


def columns_of(schema: Schema, ignored: Sequence[str] = ()) -> list[InputColumn]:
    """Return the first 128 columns; times, texts, images and vectors of more than 16 numbers have none.

    Raises:
        SettingsError: what is ignored is no feature.
    """
    names = [feature.name for feature in schema.features]
    for name in ignored:
        if name not in names:
            raise SettingsError(
                f'learner.drift.ignored: "{name}" is no feature of [schema.features]; write one of {", ".join(names)}'
            )
    found = []
    for feature in schema.features:
        shape = feature.column_shape
        size = int(np.prod(shape))
        if feature.name in ignored or feature.is_time or len(shape) > 1 or size > _LONGEST:
            continue
        name = feature.name
        found += [InputColumn(f"{name}[{element}]" if shape else name, name, element) for element in range(size)]
    return found[:_MOST_COLUMNS]


def values_of(columns: Sequence[InputColumn], features: Mapping[str, Array], prefix: str = "") -> NDArray[np.float64]:
    """Return a copy of the values of N events, float64 `[F, N]`; NaN is missing."""
    first = features[prefix + columns[0].feature]
    found = np.empty((len(columns), len(first)))
    for row, (_, feature, element) in zip(found, columns, strict=True):
        column = features[prefix + feature]
        row[:] = column if column.ndim == 1 else column.reshape(len(row), -1)[:, element]
    return found


def psi(window_FG: NDArray[Any], reference_FG: NDArray[Any]) -> NDArray[np.float64]:
    """Return the population stability index of counts, `[F]`; an empty group counts as half an event."""
    shares = [
        np.maximum(counts, 0.5) / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        for counts in (window_FG, reference_FG)
    ]
    each_FG = (shares[0] - shares[1]) * np.log(shares[0] / shares[1])
    found: NDArray[np.float64] = np.where((window_FG > 0) | (reference_FG > 0), each_FG, 0.0).sum(axis=1)
    return found


class InputComparison(NamedTuple):
    """A window against the reference; each is `[F]`."""

    psi: NDArray[np.float64]
    ks: NDArray[np.float64]
    missing: NDArray[np.float64]
    """Part of the window's values that are missing."""
    drifted: NDArray[np.bool_]


class DriftedInput(NamedTuple):
    """A column that has drifted."""

    name: str
    psi: float


def drifted(columns: Sequence[InputColumn], found: InputComparison) -> list[DriftedInput]:
    """Return the columns that have drifted."""
    return [
        DriftedInput(columns[index].name, float(found.psi[index])) for index in np.flatnonzero(found.drifted).tolist()
    ]


class _Document(msgspec.Struct, frozen=True):
    format: int
    bound: float
    fits: int
    columns: list[InputColumn]
    arrays: dict[str, str]


@dataclass
class InputReference:
    """The counts that windows are compared with, and the bins of both. Used by one thread."""

    columns: Sequence[InputColumn]
    bound: float
    """A smaller PSI is no drift."""
    edges: NDArray[np.float64]
    """Where a bin begins, ascending, `[F, E]`; infinite beyond the last."""
    ends: NDArray[np.float64]
    """The last bin of each group, ascending, `[F, G]`."""
    counts: NDArray[np.float64]
    """`[F, K]`, fading."""
    fitted: NDArray[np.float64]
    """Mass of each group as the bins were fitted, `[F, G]`."""
    usual: NDArray[np.float64]
    """The largest PSI of windows without drift, fading, `[F]`."""
    windows: NDArray[np.float64]
    """Windows since the bins were fitted, `[F]`; -1: they are to be fitted."""
    fits: int
    """How often bins have changed."""

    @classmethod
    def of(cls, columns: Sequence[InputColumn], bound: float) -> "InputReference":
        """Return one without bins."""
        empty = {name: np.zeros((len(columns), *shape)) for name, shape in _ARRAYS.items()}
        empty["windows"] -= 1
        return cls(columns, bound, fits=0, **empty)

    @property
    def unfitted(self) -> bool:
        """Whether bins are to be fitted."""
        return bool((self.windows < 0).any())

    def fit(self, values_FN: NDArray[np.float64]) -> None:
        """Choose bins for those columns whose bins are to be fitted, and count their values."""
        for row in np.flatnonzero(self.windows < 0):
            values = values_FN[row]
            edges, ends = _fit(values[~np.isnan(values)])
            self.edges[row], self.ends[row] = np.inf, _BINS - 1
            self.edges[row, : len(edges)], self.ends[row, : len(ends)] = edges, ends
        new_F = self.windows < 0
        self.counts[new_F] = self.count(values_FN)[new_F]
        self.fitted[new_F] = _shares(self._grouped(self.counts))[new_F]
        self.windows[new_F] = 0
        self.fits += 1

    def count(self, values_FN: NDArray[np.float64]) -> NDArray[np.int64]:
        """Count values by bin, `[F, K]`."""
        bin_FN = torch.searchsorted(torch.from_numpy(self.edges), torch.from_numpy(values_FN), right=True).numpy()
        bin_FN = np.where(np.isnan(values_FN), _BINS - 1, np.minimum(bin_FN, _BINS - 2))
        bin_FN += _BINS * np.arange(len(bin_FN))[:, None]
        return np.bincount(bin_FN.reshape(-1), minlength=_BINS * len(bin_FN)).reshape(len(bin_FN), _BINS)

    def compare(self, window_FK: NDArray[np.int64]) -> InputComparison:
        """Compare the counts of a window."""
        window_FG, reference_FG = self._grouped(window_FK), self._grouped(self.counts)
        size_F, reference_F = (np.maximum(each.sum(axis=1), 1) for each in (window_FK, self.counts))
        psi_F = np.where(self.windows < 0, 0.0, psi(window_FG, reference_FG))
        free_F = np.maximum(1, np.count_nonzero((window_FG > 0) | (reference_FG > 0), axis=1) - 1)
        drifted_F = psi_F > np.maximum(self.bound, self.bound / 2 + _FACTOR * self.usual)
        drifted_F &= psi_F / (1 / size_F + 1 / reference_F) > _by_chance(free_F)
        drifted_F &= self.windows >= _REFERENCE
        ks_F = _ks(window_FK[:, :-1], self.counts[:, :-1])
        return InputComparison(psi_F, ks_F, window_FK[:, -1] / size_F, drifted_F)

    def add(self, window_FK: NDArray[np.int64], found: InputComparison) -> None:
        """Add those columns of a window that have not drifted, and mark those whose bins no longer fit."""
        kept_F = ~found.drifted & (self.windows >= 0)
        self.counts[kept_F & (self.windows >= _WEIGHT)] *= 1 - 1 / _WEIGHT
        self.counts[kept_F] += window_FK[kept_F]
        self.usual[kept_F] = np.maximum(self.usual * _FADES, found.psi)[kept_F]
        self.windows[kept_F] += 1
        moved_F = (_shares(self._grouped(self.counts)) - self.fitted).max(axis=1) > _MOVED
        self.windows[moved_F] = -1

    def _grouped(self, counts_FK: NDArray[Any]) -> NDArray[Any]:
        up_to_FG = np.take_along_axis(np.cumsum(counts_FK, axis=1), self.ends.astype(np.int64), axis=1)
        return np.diff(up_to_FG, axis=1, prepend=0)

    def encode(self) -> bytes:
        """Return it as JSON."""
        arrays = {name: encode_array(getattr(self, name)) for name in _ARRAYS}
        return msgspec.json.encode(_Document(_FORMAT, self.bound, self.fits, list(self.columns), arrays))

    @classmethod
    def decode(cls, content: bytes | str) -> "InputReference | None":
        """Return one from what `encode` returned; None if it cannot be used."""
        try:
            found = msgspec.json.decode(content, type=_Document)
            arrays = {
                name: decode_array(found.arrays[name], (len(found.columns), *shape)) for name, shape in _ARRAYS.items()
            }
        except (msgspec.MsgspecError, ValueError, KeyError):
            return None
        return cls(found.columns, found.bound, fits=found.fits, **arrays) if found.format == _FORMAT else None


_ARRAYS = {"edges": (_EDGES,), "ends": (_GROUPS,), "counts": (_BINS,), "fitted": (_GROUPS,), "usual": (), "windows": ()}
"""Those of a reference, with their shapes after `[F]`."""


def encode_array(array: NDArray[Any]) -> str:
    """Return an array as text, for JSON."""
    return base64.b64encode(array.astype("<f8").tobytes()).decode()


def decode_array(text: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the array of a text; raises ValueError."""
    return np.frombuffer(base64.b64decode(text), "<f8").astype(np.float64).reshape(shape)


def _fit(values_N: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[int]]:
    """Return the edges of a column with these known values, and the last bin of each group."""
    if not len(values_N):
        return np.empty(0), [_BINS - 2, _BINS - 1]
    ordered = np.sort(values_N)
    ranks = np.ceil(np.arange(1, _EDGES + 1) / (_EDGES + 1) * len(ordered)).astype(np.int64) - 1
    quantiles, times = np.unique(ordered[ranks], return_counts=True)
    frequent = quantiles[times > 1]
    with np.errstate(over="ignore"):  # what follows the largest number is infinity
        # The learner's thread takes denormal numbers for 0, a server does not: no edge may be one.
        following = np.where(np.abs(frequent) <= _TINY, _TINY, np.nextafter(frequent, np.inf))
    edges = np.unique(np.concatenate([quantiles, following]))
    mass = np.bincount(np.searchsorted(edges, ordered, side="right"), minlength=len(edges) + 1) / len(ordered)
    own = np.r_[False, np.isin(edges, frequent)] & (mass >= _OWN)
    ends, sum_ = list[int](), 0.0
    for index, each in enumerate(mass):
        if own[index]:
            ends += [index - 1] * (index > 0 and ends[-1:] != [index - 1]) + [index]
            sum_ = 0.0
        elif (sum_ := sum_ + each) >= _GROUP:
            ends.append(index)
            sum_ = 0.0
    if ends[-1:] == [len(mass) - 1] or (ends and sum_ < _OWN and not own[ends[-1]]):
        ends.pop()
    return edges, [*ends, _BINS - 2, _BINS - 1]


def _shares(counts_FG: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts_FG / np.maximum(counts_FG.sum(axis=1, keepdims=True), 1.0)
    return shares


def _ks(window_FK: NDArray[Any], reference_FK: NDArray[Any]) -> NDArray[np.float64]:
    """Return the largest difference of the distribution functions; 0 where one has no value."""
    sums = [np.cumsum(counts, axis=1) for counts in (window_FK, reference_FK)]
    known_F = (sums[0][:, -1] > 0) & (sums[1][:, -1] > 0)
    parts = [each / np.maximum(each[:, -1:], 1e-9) for each in sums]
    return np.where(known_F, np.abs(parts[0] - parts[1]).max(axis=1), 0.0)


def _by_chance(free_F: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the quantile of chi-squared at `_SIGMAS` (Wilson & Hilferty 1931), by degrees of freedom."""
    spread = 2 / (9 * free_F)
    quantile: NDArray[np.float64] = free_F * (1 - spread + _SIGMAS * np.sqrt(spread)) ** 3
    return quantile


class TimeShare:
    """Runs work that takes a small share of the time: after it there is a rest. Used by one thread."""

    def __init__(
        self,
        part: int,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Work takes at most 1 / `part` of the time; 1: it never rests."""
        self._part, self._clock, self._work_clock = part, clock, work_clock
        self._rested_at = float("-inf")

    @property
    def rests(self) -> bool:
        """Whether it is to rest."""
        return self._clock() < self._rested_at

    def run(self, work: Callable[[], object]) -> None:
        """Call `work`, unless it is to rest."""
        if not self.rests:
            begin = self._work_clock()
            work()
            self._rested_at = self._clock() + (self._part - 1) * (self._work_clock() - begin)


class InputWindow:
    """The events since the last comparison: their values, or the counts of these. Used by one thread."""

    def __init__(self, columns: int) -> None:
        self.counts = np.zeros((columns, _BINS), np.int64)
        """Of what was added before `count`, `[F, K]`."""
        self._values = list[NDArray[np.float64]]()

    @property
    def rows(self) -> int:
        """Events that were added."""
        return int(self.counts[0].sum()) + sum(len(values[0]) for values in self._values)

    def add(self, values_FN: NDArray[np.float64]) -> None:
        """Add the values of events."""
        self._values.append(values_FN)

    @property
    def values(self) -> NDArray[np.float64]:
        """The values that were added and not counted yet, float64 `[F, N]`."""
        return np.concatenate([np.empty((len(self.counts), 0)), *self._values], axis=1)

    def count(self, reference: InputReference, *, keep: bool = False) -> NDArray[np.int64]:
        """Return the counts of the window, `[F, K]`; `keep`: the values too, else they are counted and gone."""
        counts = self.counts + reference.count(self.values) if self._values else self.counts
        if not keep:
            self.counts, self._values = counts, []
        return counts


def sentence(what: str, found: Sequence[DriftedInput], against: str) -> str:
    """Name the columns that have drifted, the worst first; `what` they are, such as `feature`."""
    worst = sorted(found, key=lambda each: -each.psi)
    named, more = worst[:_NAMED], len(worst) - _NAMED
    names = ", ".join(each.name for each in named) + f" and {more} more" * (more > 0)
    begin = f"{what} {names} has" if len(worst) == 1 else f"{what}s {names} have"
    return f"{begin} drifted: PSI {', '.join(f'{each.psi:.2f}' for each in named)} {against}"
