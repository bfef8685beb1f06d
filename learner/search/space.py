"""The settings that challengers try: first some that are spread over the range, then those around the model's."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from learner.sections.search import ARGS, Range

_RADII = (1 / 12, 1 / 24, 1 / 8)
"""Distances from the model's settings, as fractions of a range."""
_SPREAD = (1 / 2, 5 / 8, 3 / 4, 3 / 8)
"""Where in a range a search begins: what a person writes is near the middle more often than near an end."""
_NEAR = 1 / 60
"""Settings that are nearer to each other are the same, as fractions of a range."""
_WIDE = 10.0
"""A range whose ends have at least this ratio is divided by ratios, and other ones by differences."""


class SearchSpace:
    """The ranges of the keys."""

    def __init__(self, ranges: Mapping[str, Range], seed: int) -> None:
        self._ranges = ranges
        self._seed = seed

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def spread(self, values: Mapping[str, float], start: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield settings that are spread over the range of each key in turn, from number `start` on, with their
        numbers, without those that are next to `values`. None with arguments of networks, which have to be near the
        model's: the model teaches them."""
        keys = [] if any(key.startswith(ARGS) for key in self._ranges) else list(self._ranges)
        for number in range(start, len(_SPREAD) * len(keys)):
            key = keys[number % len(keys)]
            value = self._moved(key, self._ranges[key][0], _SPREAD[number // len(keys)])
            if abs(self._fraction(key, value) - self._fraction(key, values[key])) >= _NEAR:
                yield number, {**values, key: value}

    def around(self, values: Mapping[str, float], start: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield a round of proposals from number `start` on, with their numbers, without those that equal `values`.

        One key after the other moves down and up, by each distance; with several keys, then all at once in a random
        direction. Down is first, since a model that has learned for longer needs a lower rate; networks first grow. It
        depends on the arguments and the seed alone.
        """
        keys = list(self._ranges)
        directions = len(keys) + (len(keys) > 1)
        for number in range(start, start + 2 * len(_RADII) * directions):
            pair, sign = number // 2, 2 * (number % 2) - 1
            radius = _RADII[pair % len(_RADII)]
            which = pair // len(_RADII) % directions
            if which < len(keys):
                signs = {keys[which]: -sign if keys[which].startswith(ARGS) else sign}
            else:
                random = np.random.default_rng([self._seed, pair])
                signs = {key: sign * int(random.choice((-1, 1))) for key in keys}
            moved = {key: self._moved(key, values[key], signs.get(key, 0) * radius) for key in keys}
            if moved != dict(values):
                yield number, moved

    def _by_ratios(self, key: str) -> bool:
        low, high = self._ranges[key]
        return low > 0 and high / low >= _WIDE

    def _fraction(self, key: str, value: float) -> float:
        """Return the part of its range that is below a value, 0..1; beyond that outside of it."""
        low, high = self._ranges[key]
        if self._by_ratios(key):
            return math.log(max(value, math.ulp(0.0)) / low) / math.log(high / low)
        return (value - low) / (high - low)

    def _moved(self, key: str, value: float, by: float) -> float:
        if not by:
            return value
        low, high = self._ranges[key]
        before, value = value, max(low, min(high, value))
        ratios = self._by_ratios(key)
        moved = value * math.exp(by * math.log(high / low)) if ratios else value + by * (high - low)
        if key.startswith(ARGS) and (moved := round(moved)) == before:
            moved += 1 if by > 0 else -1
        return float(max(low, min(high, moved)))
