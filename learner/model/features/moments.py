"""Mean and variance of a stream, by merging the moments of its parts.

Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".

Legend: B events, n numbers of an event.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """How many values there were, their mean, and the sum of their squared distances from it, float64 `[n]` each."""

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
