"""Numbers as the model gets them: scaled by what the stream has had so far, and without missing values.

Legend: B events, n numbers of an event, K quantiles.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ingest.events.schema import Feature
from ingest.feature_settings import FeatureSettings
from learner.model.features.host_state import HostState, write
from learner.model.features.moments import Floats, Moments
from learner.model.features.outliers import FIRST, OutlierBounds, empty_bounds
from learner.model.features.quantiles import QuantileSketch, empty_sketches

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
