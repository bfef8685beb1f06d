"""Numbers as the model gets them: scaled by what the stream has had so far, and without missing values.

Legend: B events, n numbers of an event, K quantiles; H levels of a sketch, S values of a level; H exponents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.ingest.events.schema import Feature
from anabranch.ingest.settings.features import FeatureSettings
from anabranch.learner.model.features.host_state import HostState, Numbers, write

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """How many values there were, their mean, and the sum of their squared distances from it, float64 `[n]` each.

    Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    count: Floats
    mean: Floats
    squares: Floats

    @classmethod
    def of(cls, values: Floats) -> "Moments":
        """Return the moments of values `[B, n]`, of which NaN are missing.

        They are those of the distances from the first value, so that values which are all the same deviate by 0.
        """
        present = ~np.isnan(values)
        count = present.sum(axis=0, dtype=np.float64)
        first = (
            np.take_along_axis(values, present.argmax(axis=0)[None], axis=0)[0] if len(values) else np.zeros_like(count)
        )
        first = np.where(count > 0, first, 0.0)
        distance = np.where(present, values - first, 0.0)
        mean = distance.sum(axis=0) / np.maximum(count, 1.0)
        return cls(count, first + mean, np.square(np.where(present, distance - mean, 0.0)).sum(axis=0))

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of both parts together, in any order up to rounding."""
        count = self.count + other.count
        part = other.count / np.maximum(count, 1.0)
        delta = other.mean - self.mean
        mean = self.mean + delta * part
        return Moments(count, mean, self.squares + other.squares + delta * delta * self.count * part)

    @property
    def deviation(self) -> Floats:
        """The standard deviation of all values so far, float64 `[n]`; 0 without values."""
        return np.sqrt(self.squares / np.maximum(self.count, 1.0))


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


FIRST = 32
"""Values of which the anchor is the median; until there are as many, they are kept."""
_REACH = 16.0
_REACH_OF_RARE = 4.0
"""Where nearly all values are the anchor, whose deviation is far less than the distance of the others."""
_WINDOW = 8192
"""Values other than the anchor that are counted before all counts are halved."""
_BELIEVED = 8
"""So many values other than the anchor are believed, or half of all while there are fewer than twice as many."""
_MOST = 2**30
"""Of values that are the anchor, which are all others where they are not halved."""
_LEAST_EXPONENT = -128
"""Distances with smaller exponents count as those of this one."""


class OutlierBounds:
    """The bounds of n numbers, in arrays of a module: its buffers.

    They are `first`, float64 `[32, n]`; `anchor`, float64 `[n]`; and `exponents`, int32 `[n, H]`, whose first column
    counts values that are the anchor.
    """

    def __init__(self, state: HostState | Mapping[str, Numbers]) -> None:
        """`state`: the arrays of `empty_bounds`, or a module with these buffers."""
        self._state = state

    def add(self, value_Bn: Floats) -> tuple[Floats, NDArray[np.bool_], Floats]:
        """Count values, NaN for none; return what statistics have to learn now.

        Returns:
            The values `[B or B + 32, n]`; of which numbers they are all values so far, bool `[n]`, so that statistics
            begin again with them; and the largest allowed distance from the anchor, float64 `[n]`.
        """
        first, anchor, exponents = (self._state[name] for name in ("first", "anchor", "exponents"))
        count = exponents.sum(axis=1)
        again = count < FIRST
        if again.any():
            kept = again & (np.arange(FIRST)[:, None] < count)
            value_Bn = np.concatenate([np.where(kept, first, np.nan), value_Bn])
            compact = np.take_along_axis(value_Bn, np.isnan(value_Bn).argsort(axis=0, kind="stable"), axis=0)[:FIRST]
            present = (~np.isnan(compact)).sum(axis=0)
            middle = np.maximum(present - 1, 0) // 2
            # Between two values in the end, so that the anchor is no single event's.
            after = middle + (present == FIRST)
            median = np.take_along_axis(np.sort(compact, axis=0), np.stack([middle, after]), axis=0).mean(axis=0)
            anchor[again] = np.nan_to_num(median[again])
            exponents[again] = 0
            first[:] = np.where(again & (present < FIRST), np.nan_to_num(compact), 0.0)
        self._count(value_Bn)
        reach = self._reach(exponents)
        exponents[exponents[:, 1:].sum(axis=1) >= _WINDOW] >>= 1
        np.minimum(exponents[:, 0], _MOST, out=exponents[:, 0])
        return value_Bn, again, reach

    def clip(self, value_Bn: Floats, reach: Floats) -> Floats:
        """Return the values, those beyond the reach `[n]` of the anchor as if they were there."""
        anchor = self._state["anchor"]
        return np.clip(value_Bn, anchor - reach, anchor + reach)

    def distance(self, value_Bn: Floats) -> Floats:
        """Return how far each value is from the anchor, `[B, n]`."""
        return np.abs(value_Bn - self._state["anchor"])

    def _count(self, value_Bn: Floats) -> None:
        exponents = self._state["exponents"]
        # Bits 52 to 62 of a float64 are its exponent plus 1022, of numbers in 0.5..1; those of 0 are all 0.
        exponent_Bn = (np.ascontiguousarray(self.distance(value_Bn)).view(np.int64) >> 52) - (1022 + _LEAST_EXPONENT)
        np.clip(exponent_Bn, 0, exponents.shape[1] - 2, out=exponent_Bn)
        exponent_Bn += 1
        exponent_Bn[value_Bn == self._state["anchor"]] = 0
        exponent_Bn += np.arange(len(exponents)) * exponents.shape[1]
        missing = np.isnan(value_Bn)
        found = exponent_Bn[~missing] if missing.any() else exponent_Bn.reshape(-1)
        np.add.at(exponents.reshape(-1), found, np.int32(1))

    @staticmethod
    def _reach(exponents: NDArray[np.int32]) -> Floats:
        others = exponents[:, 1:].cumsum(axis=1)
        total = others[:, -1]
        middle = (others >= np.maximum((total + 1) // 2, 1)[:, None]).argmax(axis=1)
        count = np.maximum(exponents[:, 0] + total, 1)
        believed = (total > 0) & (total >= np.minimum(_BELIEVED, (count + 1) // 2))
        wide = np.maximum(_REACH * np.sqrt(total / count), _REACH_OF_RARE)
        return np.where(believed, wide * np.exp2(middle.astype(np.float64) + _LEAST_EXPONENT), 0.0)


def empty_bounds(n: int, *, exponents: int) -> dict[str, Numbers]:
    """Return the arrays of bounds of n numbers without values; distances have up to `exponents` binary exponents."""
    counts = np.zeros((n, 1 + exponents), np.int32)
    return {"first": np.zeros((FIRST, n)), "anchor": np.zeros(n), "exponents": counts}


LIMIT = 10.0
"""Scaled values are cut off here, so that one outlier cannot ruin the weights."""
MOST = 1e140
"""Larger values count as this one: float64 cannot hold the sum of their squares."""
FAR = 64.0
"""A value that is so many times as far from the others as statistics learn from is reported."""
FELL = 100.0
"""A factor that is so much smaller than it has been is reported."""
_OF_LATE = 0.01
"""What one batch counts in an average over the batches of late."""
_STEADY = 1000
"""Values after which a factor is one that may fall."""
_LEAST = 1e-38
"""Widths that are less are 0, since float32 cannot hold their inverse."""
INTERVALS = 32
"""Between the quantiles of `scale = "quantile"`."""
_GROWTH = 32
"""Quantiles are computed again when a 32th of the values is new."""
_EXACT = ("float64", "int32", "int64", "uint32")
"""Numbers that lose digits in float32; their mean is subtracted in float64."""
_PARTS = {"robust": np.array([0.0, 0.25, 0.5, 0.75, 1.0]), "quantile": np.arange(INTERVALS + 1) / INTERVALS}


class LearnedNumber(nn.Module):
    """Scales a feature, and replaces its missing values. A number that has not been seen yet becomes 0.

    Its buffers: `shift` and `factor`, float32 or float64 `[*shape]`; with `scale = "quantile"` `knots` instead of
    `shift`, `[*shape, K]`; and in `state` what they are computed from.
    """

    def __init__(self, feature: Feature, settings: FeatureSettings) -> None:
        """Take a feature of numbers and its settings; statistics begin without values."""
        super().__init__()
        self.name, self._shape = feature.name, feature.shape
        self._scale, self._missing = settings.scale, settings.missing
        self._exact = torch.float64 if feature.dtype.name in _EXACT else torch.float32
        n = int(np.prod(feature.shape))
        by_rank = self._scale in _PARTS
        self._learns = self._scale is not None or isinstance(self._missing, str)
        if not self._learns:
            return
        of_bounds = empty_bounds(n, exponents=600 if feature.dtype == np.float64 else 260)
        bounds = {name: torch.from_numpy(value) for name, value in of_bounds.items()}
        if by_rank:
            items, used, odd = map(torch.from_numpy, empty_sketches(n))
            count = torch.zeros(2, n, dtype=torch.int64)  # of all values, and of those at the last computation
            self.state = HostState(items=items, used=used, odd=odd, count=count, **bounds)
        else:
            moments = {name: torch.zeros(n, dtype=torch.float64) for name in Moments.__annotations__}
            self.state = HostState(**moments, **bounds)
        self.clipped = 0
        """Values since the start that statistics learned from as if they were nearer to the others."""
        self.fell = 1.0
        """How many times as small as it has been since the start the factor is, of the number where it is the most."""
        self._largest_factor = np.zeros(n)
        self.beyond = 0.0
        """The part of the values of late that are cut off, since the scale is fixed and they are beyond it."""
        self.register_buffer("factor", torch.zeros(feature.shape, dtype=self._exact))
        centre = (*feature.shape, INTERVALS + 1) if self._scale == "quantile" else feature.shape
        self.register_buffer("knots" if self._scale == "quantile" else "shift", torch.zeros(centre, dtype=self._exact))

    def forward(self, value_B: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the model for the values of B events, by name."""
        missing_B = torch.isnan(value_B) if self._missing is not None else None
        if missing_B is not None and not isinstance(self._missing, str):
            assert self._missing is not None
            value_B, missing_B = torch.where(missing_B, float(self._missing), value_B), None
        if self._scale is not None:
            scaled_B = self._scaled(value_B)
            inputs = {self.name: scaled_B if missing_B is None else torch.where(missing_B, 0.0, scaled_B)}
        elif missing_B is not None:
            inputs = {self.name: torch.where(missing_B, self.get_buffer("shift").to(value_B.dtype), value_B)}
        else:
            inputs = {self.name: value_B}
        if self._missing == "indicator":
            assert missing_B is not None
            inputs[f"{self.name}_missing"] = missing_B.float()
        return inputs

    def _scaled(self, value_B: Tensor) -> Tensor:
        value_B, factor, most = value_B.to(self._exact), self.get_buffer("factor"), torch.finfo(self._exact).max
        if self._scale != "quantile":
            distance_B = (value_B - self.get_buffer("shift")).clamp(-most, most)  # 0 times infinity is NaN
            return (distance_B * factor).clamp(-LIMIT, LIMIT).float()
        knots = self.get_buffer("knots")
        low, width = knots[..., :-1], knots.diff(dim=-1).clamp(max=most)
        above_BK = value_B[..., None] - low
        # Where several quantiles are one value, it is in the middle of them.
        inside_BK = torch.where(
            width > 0, (above_BK / torch.where(width > 0, width, 1.0)).clamp(0, 1), (above_BK.sign() + 1) / 2
        )
        return ((inside_BK.mean(dim=-1) - 0.5) * factor).float()

    def observe(self, column: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Learn from the values of B events `[B, *shape]`, on the host; NaN are missing.

        Returns:
            Which events have a value that is FAR from the others, bool `[B]`; None: there is none.
        """
        if not self._learns:
            return None
        value_Bn = np.clip(column.reshape(len(column), -1).astype(np.float64), -MOST, MOST)
        bounds = OutlierBounds(self.state)
        all_Bn, again, reach = bounds.add(value_Bn)
        clipped_Bn = bounds.clip(all_Bn, reach)
        if self._scale in _PARTS:
            self._observe_ranks(clipped_Bn, again)
        else:
            self._observe_moments(clipped_Bn, again)
        self._watch_factor()
        outside_Bn = (all_Bn != clipped_Bn)[len(all_Bn) - len(value_Bn) :] & ~np.isnan(value_Bn)
        if not outside_Bn.any():
            return None
        self.clipped += int(outside_Bn.sum())
        far_Bn = outside_Bn & (bounds.distance(value_Bn) > FAR * reach) & (reach > 0)
        return np.asarray(far_Bn.any(axis=1)) if far_Bn.any() else None

    def blur(self, random: np.random.Generator) -> None:
        """Move the values in sketches, and what follows from them, so that none of a single event is there any more."""
        if not self._learns:
            return
        state = self.state
        cold = state["exponents"].sum(axis=1) < FIRST  # whose first values are kept: these numbers begin again
        for name in ("exponents", "anchor", "used") if self._scale in _PARTS else ("exponents", "anchor"):
            state[name][cold] = 0
        state["first"][:] = 0
        if self._scale not in _PARTS:
            return
        for index in np.flatnonzero(state["used"].sum(axis=1) > 0):
            QuantileSketch(state["items"][index], state["used"][index], state["odd"][index]).blur(random)
        self._compute([int(index) for index in np.flatnonzero(state["used"].sum(axis=1) > 0)])

    def watch(self, column: NDArray[Any]) -> None:
        """Measure how many values of B events are cut off by a scale that is not learned any more."""
        if self._scale in ("standard", "robust"):
            shift, factor = (self.get_buffer(name).cpu().numpy().astype(np.float64) for name in ("shift", "factor"))
            with np.errstate(over="ignore"):
                clipped = np.abs((column.astype(np.float64) - shift) * factor) >= LIMIT
            self.beyond += _OF_LATE * (float(clipped.mean()) - self.beyond)

    def _observe_moments(self, value_Bn: Floats, again: NDArray[np.bool_]) -> None:
        state = self.state
        before = Moments(*(np.where(again, 0.0, state[name]) for name in ("count", "mean", "squares")))
        after = before.merged(Moments.of(value_Bn))
        state["count"][:], state["mean"][:], state["squares"][:] = after.count, after.mean, after.squares
        self._write("shift", after.mean)
        self._write("factor", _inverse(after.deviation))

    def _observe_ranks(self, value_Bn: Floats, again: NDArray[np.bool_]) -> None:
        state = self.state
        items, used, odd, (count, computed) = state["items"], state["used"], state["odd"], state["count"]
        for values in (used, odd):
            values[again] = 0
        count[again] = computed[again] = 0
        due = list[int]()
        for index, value_B in enumerate(value_Bn.T):
            present_B = value_B[~np.isnan(value_B)]
            QuantileSketch(items[index], used[index], odd[index]).add(present_B)
            count[index] += len(present_B)
            if count[index] > computed[index] + computed[index] // _GROWTH:
                due.append(index)
        if due:
            computed[due] = count[due]
            self._compute(due)

    def _compute(self, due: list[int]) -> None:
        """Compute the buffers of some numbers from their sketches."""
        state, parts = self.state, _PARTS[str(self._scale)]
        items, used, odd = state["items"], state["used"], state["odd"]
        if not due:
            return
        found = np.stack([QuantileSketch(items[i], used[i], odd[i]).quantiles(parts) for i in due])
        if self._scale == "quantile":
            self._write("knots", found, due)
            self._write("factor", np.full(len(due), 2.0), due)
            return
        least, low, median, high, most = found.T
        self._write("shift", median, due)
        # Where half of the values are one, as RealMLP does (Holzmüller et al. 2024, "Better by default").
        self._write("factor", np.where(high > low, _inverse(high - low), 2 * _inverse(most - least)), due)

    def _watch_factor(self) -> None:
        if self._scale not in ("standard", "robust"):
            return
        factor = self.get_buffer("factor").cpu().numpy().reshape(-1).astype(np.float64)
        count = self.state["count"] if self._scale == "standard" else self.state["count"][0]
        self._largest_factor = np.maximum(self._largest_factor, np.where(count >= _STEADY, factor, 0.0))
        fell = np.divide(self._largest_factor, factor, out=np.ones_like(factor), where=factor > 0)
        self.fell = float(fell.max(initial=1.0))

    def _write(self, name: str, values: Floats, at: list[int] | None = None) -> None:
        """Set a buffer, or a few of its n entries."""
        buffer = self.get_buffer(name)
        if at is not None and len(at) < max(1, int(np.prod(self._shape))):
            before = buffer.cpu().numpy().reshape(-1, *values.shape[1:]).astype(np.float64)
            before[at] = values
            values = before
        write(buffer, values.reshape(buffer.shape))


def _inverse(width: Floats) -> Floats:
    """Return 1 / width, and 0 where it is 0, or nearly: values that are all the same become 0."""
    return np.divide(1.0, width, out=np.zeros_like(width), where=width > _LEAST)
