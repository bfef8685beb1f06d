"""Whether one of two models is better, by a test that may be read after each step.

The wealth of a gambler who bets on differences, which are clipped to [-1, 1] in a unit that is known before, is a
non-negative supermartingale where their mean, given all earlier ones, is at most 0. So the probability that it ever
reaches 1 / alpha is at most alpha (Ville's inequality), however often it is read, and however the stream changes:
Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", section 4; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference".

So what is shown to be false is that the mean of the clipped difference, given all earlier ones, is at most 0 at each
step. It is not the mean difference: a challenger that is a little better in most steps, and far worse in few, can pass.
Where one of two equal models is ahead for many steps in turn, those means are not 0, and the bound does not hold.

Many challengers share one error rate: the j-th since the model got its settings has alpha / (j (j + 1)), and these add
up to alpha (alpha spending, as in Foster and Stine 2008, "Alpha-investing"). With other settings it begins again.
"""

import math
from collections.abc import Sequence

from anabranch.learner.evaluate.adwin import FEWEST, LIMIT

ALPHA = 1e-3
"""The probability that any challenger is shown to be better where none is, of all from one change of the model's
settings to the next."""
_BETS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Fractions of the wealth that are bet. The wealth is the mean of those of five gamblers, one with each of them."""
_WIDTH = 2.0
"""Differences are clipped to so many times their usual size, by earlier ones alone: a lucky step proves little."""
_MEMORY = 32
"""Differences over which the usual size is averaged."""
_LEVEL_MEMORY = 64
"""Steps over which the level of the model's error is averaged."""
_NEWEST = 16
"""Steps over which the newest errors are averaged."""
_LESS = 0.05
"""By which part of the first error they have to be lower."""


class Evidence:
    """The wealth of the gamblers, by the logarithm of each, and the mean square of differences."""

    def __init__(self, logs: Sequence[float] = (0.0,) * len(_BETS), square: float = 0.0, seen: int = 0) -> None:
        self.logs, self.square, self.seen = list(logs), square, seen

    def add(self, difference: float) -> None:
        """Add the mean difference of a step's events; positive where the challenger is better.

        Nothing is bet on the first: the size of bets depends on earlier differences alone.
        """
        if not difference:
            return
        if self.seen:
            unit = max(-1.0, min(1.0, difference / (_WIDTH * math.sqrt(self.square))))
            self.logs = [log + math.log1p(bet * unit) for log, bet in zip(self.logs, _BETS, strict=True)]
        self.seen += 1
        self.square += (difference * difference - self.square) / min(self.seen, _MEMORY)

    @property
    def log_wealth(self) -> float:
        """The logarithm of the mean wealth."""
        most = max(self.logs)
        return most + math.log(sum(math.exp(log - most) for log in self.logs) / len(self.logs))


def log_threshold(number: int) -> float:
    """Return the logarithm of the wealth at which the challenger of this number, counted from 1, is shown better."""
    return math.log(number * (number + 1) / ALPHA)


class ErrorLevel:
    """The usual size of the model's error. Differences without bounds are measured in twice this unit.

    Not in the size of the errors of one step: who is nearly always certain has next to no loss in most steps, and a
    huge one in few. As fractions of each step's errors, the many small ones would count as much as the few huge ones.
    """

    def __init__(self, size: float = 0.0, seen: int = 0, first: float = 0.0, newest: float = 0.0) -> None:
        self.size, self.seen = size, seen
        self.first, self.newest = first, newest
        """The first error, before the model has learned anything, and the mean of the newest."""

    def add(self, error: float) -> None:
        """Add the model's error of a step, after its differences were taken: the unit depends on earlier ones alone.

        One that is not finite, as a user's score may be, is left out: the unit would never be a number again. One that
        is far larger than those before, as of a label of 1e6, counts as ten times their size, or no later difference
        would count for hundreds of steps.
        """
        if not math.isfinite(error):
            return
        if self.seen >= FEWEST and self.size:
            error = max(-LIMIT * self.size, min(LIMIT * self.size, error))
        self.seen += 1
        self.size += (abs(error) - self.size) / min(self.seen, _LEVEL_MEMORY)
        self.newest += (error - self.newest) / min(self.seen, _NEWEST)
        if self.seen == 1:
            self.first = error

    @property
    def is_lower(self) -> bool:
        """Whether the newest errors are clearly lower than the first one: the model learns as it is set."""
        return self.newest < self.first - _LESS * abs(self.first)

    def difference(self, error: float, challenger: float) -> float:
        """Return how much lower a challenger's error is than the model's, -1..1; not finite where one of them is not.

        The first step has its own unit.
        """
        difference = error - challenger
        if not difference or not math.isfinite(difference):
            return difference
        unit = 2 * (self.size or abs(error))
        return max(-1.0, min(1.0, difference / unit)) if unit else math.copysign(1.0, difference)
