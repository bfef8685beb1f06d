"""How far from the others a value may be that statistics of a stream learn from.

A single value of 1e30 would stretch a mean and a deviation for as long as the stream lasts, and so make all other
values one. It is therefore winsorized first (Dixon 1960, "Simplified estimation from censored normal samples"): values
that are further from an anchor than 16 times the median distance of those that differ from it, or 4 times where these
are rare, count as if they were there. That is 11 to 22 standard deviations of a normal distribution, so that mean and
deviation of ordinary values are as they were. Half of the values of late would have to be wrong to move it.

The anchor is the median of the first values. Distances are counted by their binary exponent, so no value is kept once
there is an anchor. The counts are halved from time to time: after a change of the stream the bound follows within some
thousand values.

Legend: B values of an event each, n numbers of an event, H exponents.
"""

import numpy as np
from numpy.typing import NDArray

from learner.model.features.host_state import HostState

Floats = NDArray[np.float64]

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
_LEAST = -128
"""Distances with smaller exponents count as those of this one."""


class OutlierBounds:
    """The bounds of n numbers, in arrays of a module: its buffers.

    They are `first`, float64 `[32, n]`; `anchor`, float64 `[n]`; and `exponents`, int32 `[n, H]`, whose first column
    counts values that are the anchor.
    """

    def __init__(self, state: HostState) -> None:
        """Take a module with the buffers of `empty_bounds`."""
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
        exponent_Bn = (np.ascontiguousarray(self.distance(value_Bn)).view(np.int64) >> 52) - (1022 + _LEAST)
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
        return np.where(believed, wide * np.exp2(middle.astype(np.float64) + _LEAST), 0.0)


def empty_bounds(n: int, *, exponents: int) -> dict[str, Floats | NDArray[np.int32]]:
    """Return the arrays of bounds of n numbers without values; distances have up to `exponents` binary exponents."""
    counts = np.zeros((n, 1 + exponents), np.int32)
    return {"first": np.zeros((FIRST, n)), "anchor": np.zeros(n), "exponents": counts}
