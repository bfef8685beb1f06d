"""How many old events a step replays for each new one.

`Ratio` is that of the config. `AdaptiveReplayRatio` replays only while measurements show that it helps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from anabranch.learner.evaluate.adwin import Winsorizer
from anabranch.learner.settings.learner import LearnerSettings

Phase = Literal["off", "trial", "on"]


@dataclass(frozen=True)
class ScoreSum:
    """The number of scored events and the sum of their scores: 1 for right and 0 for wrong, or minus the error."""

    rows: int
    score: float

    def __add__(self, other: "ScoreSum") -> "ScoreSum":
        return ScoreSum(self.rows + other.rows, self.score + other.score)


class Ratio:
    """The replay ratio of the next round, the same in every one.

    A subclass may change it by observed scores alone, so that a restored checkpoint repeats it.
    """

    def __init__(self, ratio: float) -> None:
        self.now = ratio
        """Old events per new one in the next round."""

    def probes(self, step: int) -> bool:  # noqa: ARG002 a hook
        """Return whether this step scores old events, without training on them, before it trains."""
        return False

    def observe(self, new: ScoreSum, old: ScoreSum | None, steps: int = 1) -> None:
        """Add the scores of a finished round of steps, each taken before its step: of new events, and of old ones if a
        step probed."""

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; the state of another kind of ratio is ignored."""


def make_ratio(settings: LearnerSettings, *, bounded: bool) -> Ratio:
    """Return the ratio of the config; `bounded`: whether scores are between 0 and 1."""
    if settings.replay_ratio == "auto":
        return AdaptiveReplayRatio(settings.old_weight, bounded=bounded)
    return Ratio(settings.replay_ratio)


_COST = 0.2
"""Least gain in accuracy on old events, at equal weights, for which replay stays on.

On streams whose old events are only harder than the newest, replay gains a few points and costs up to one on new
events. On streams that lose classes, replay regains nearly all of the loss.
"""
_PROBE_EVERY = 4
_FEWEST = 200
"""Fewest scored old events from which forgetting is computed."""
_HALF_LIFE = 50
"""Steps after which a measurement has half its weight."""
_TRIAL = 200
"""Steps of a trial: four half-lives, so that the means at its end come from the trial."""
_SURE = 50
"""Steps for which forgetting must stay above the bar before a trial: a value that exceeds it by chance, or still rises,
does not show yet how much a trial could gain."""
_RISE = 50
"""Steps in which the ratio rises from 0 to full while forgetting is too large."""
_FALL = 8000
"""Steps in which the ratio halves while forgetting stays small."""
_DOUBT = 5000
"""Steps in which the excess of the bar, raised by a trial without benefit, halves."""
_FULL = 1.0
_FULL_GAIN = 4
"""Gain, as a multiple of `cost`, for which the ratio is full; a smaller gain has a ratio in proportion. The first old
events of a step gain most: on streams that lose classes, a quarter of the full ratio has four fifths of its gain. The
cost of replay for new events grows with the ratio.
"""
_NEARLY_FULL = 0.9
_LEAST = 0.05


class AdaptiveReplayRatio(Ratio):
    """Replays while forgetting is measured and replay is measured to reduce it.

    Forgetting is the mean score of the newest events less that of a uniform sample of old events, both scored before
    training on them. The ratio has three phases:

    * off: nothing is replayed while forgetting is below a bar. When it stays above the bar, a trial starts.
    * trial: replay at the full ratio for some steps. If forgetting falls by `cost` or more, the phase is on. Otherwise
      old events are only harder (natural drift): replay stops, the bar rises above the measured forgetting, and then
      decays slowly.
    * on: the ratio begins in proportion to the gain of the trial, which it never exceeds. It decays slowly while
      forgetting exceeds the lowest value reached with replay by no more than half of `cost`, or twice the sampling
      error if that is larger; otherwise it rises at once. After `_FALL` steps nearly at its highest, the current
      forgetting replaces the lowest value: otherwise old events that have become only harder would keep replay on
      permanently.

    `cost` is 0.2 * (1 - old_weight) / old_weight, in accuracy, or for regression as a fraction of the larger error.
    """

    def __init__(self, old_weight: float, *, bounded: bool) -> None:
        """Start in the phase off.

        Args:
            old_weight: weight of old events, where old and new sum to 1; with 0 nothing is ever replayed.
            bounded: whether scores are between 0 and 1; if not, forgetting is relative to the error.
        """
        super().__init__(0.0)
        self._cost = _COST * (1 - old_weight) / old_weight if old_weight else math.inf
        self._bounded = bounded
        self._new, self._old = _DecayedMean(bounded=bounded), _DecayedMean(bounded=bounded)
        self._phase: Phase = "off"
        self._bar = self._cost
        self._left = 0
        """Remaining steps of the trial."""
        self._over = 0
        """Steps in a row in which forgetting was above the bar."""
        self._without, self._with = 0.0, 0.0
        self._full_for = 0
        """Steps in a row in which the ratio was nearly full."""

    @property
    def forgetting(self) -> float:
        """How much lower old events score than the newest: in accuracy, or as a fraction of the larger error.

        0 until enough old events are scored.
        """
        if self._old.seen < _FEWEST:
            return 0.0
        return (self._new.mean - self._old.mean) / self._unit

    @property
    def _unit(self) -> float:
        """The unit of forgetting: 1 for accuracy, the larger mean error for regression."""
        if self._bounded:
            return 1.0
        larger = max(-self._new.mean, -self._old.mean)
        return larger if larger > 0 else math.inf

    @property
    def _highest(self) -> float:
        """The ratio that is in proportion to the measured gain; a gain of `cost` is the least that has one."""
        full = _FULL_GAIN * self._cost
        return _FULL * min(1.0, max(self._cost, self._without - self._with) / full) if full else _FULL

    @override
    def probes(self, step: int) -> bool:
        return step % _PROBE_EVERY == 0  # in every phase alike, so that its measurements can be compared

    @override
    def observe(self, new: ScoreSum, old: ScoreSum | None, steps: int = 1) -> None:
        self._new.add(new, steps)
        if old is not None:
            self._old.add(old, max(_PROBE_EVERY, steps))
        if self._phase == "off":
            self._wait(steps)
        elif self._phase == "trial":
            self._try(steps)
        else:
            self._keep(steps)

    def _wait(self, steps: int) -> None:
        excess = self._bar - self._cost
        self._bar = self._cost + excess * 0.5 ** (steps / _DOUBT) if excess > 0 else self._bar
        self._over = self._over + steps if self.forgetting > self._bar else 0
        if self._over > _SURE:
            self._phase, self._left, self._without, self.now = "trial", _TRIAL, self.forgetting, _FULL
            self._over = 0

    def _try(self, steps: int) -> None:
        self._left -= steps
        self._without = max(self._without, self.forgetting)
        if self._left > 0:
            return
        if self._without - self.forgetting >= self._cost:
            self._phase, self._with = "on", max(0.0, self.forgetting)
            self.now = self._highest
        else:
            self._stop(self._without + self._cost)

    def _keep(self, steps: int) -> None:
        bounded, forgetting = self._bounded, self.forgetting
        error = math.hypot(self._new.error(bounded=bounded), self._old.error(bounded=bounded)) / self._unit
        self._with = max(0.0, min(self._with, forgetting + error))
        self._without = max(self._without, forgetting)
        self._full_for = self._full_for + steps if self.now > _NEARLY_FULL * self._highest else 0
        if self._full_for >= _FALL:
            self._with, self._full_for = forgetting, 0
        if forgetting - self._with > max(self._cost / 2, 2 * error):
            self.now = min(self._highest, self.now + steps * _FULL / _RISE)
            return
        self.now *= 0.5 ** (steps / _FALL)
        if self.now < _LEAST * _FULL:
            self._stop(self._cost)

    def _stop(self, bar: float) -> None:
        self._phase, self._bar, self.now, self._full_for = "off", bar, 0.0, 0

    @override
    def state(self) -> dict[str, Any]:
        return {
            "new": self._new.state(),
            "old": self._old.state(),
            "phase": self._phase,
            "bar": self._bar if self._cost < math.inf else None,
            "left": self._left,
            "over": self._over,
            "without": self._without,
            "with": self._with,
            "full_for": self._full_for,
            "now": self.now,
        }

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        if not state:  # of a fixed ratio
            return
        self._new.restore(state["new"])
        self._old.restore(state["old"])
        self._phase, self._left, self.now = state["phase"], state["left"], state["now"]
        self._bar = self._cost if state["bar"] is None else max(self._cost, state["bar"])
        self._without, self._with = state["without"], state["with"]
        self._over, self._full_for = state["over"], state["full_for"]
        if self._cost == math.inf:
            self._stop(self._cost)


class _DecayedMean:
    """A mean in which a step counts half as much as one `_HALF_LIFE` steps later; unless bounded, of winsorised
    values."""

    def __init__(self, *, bounded: bool) -> None:
        self._weight, self._total, self.seen = 0.0, 0.0, 0
        self._winsorizer = None if bounded else Winsorizer()

    def add(self, scored: ScoreSum, steps: int) -> None:
        """Add scores, `steps` steps after the last ones."""
        score = scored.score
        if self._winsorizer is not None and scored.rows:
            score = self._winsorizer.add(score / scored.rows) * scored.rows
        factor = 0.5 ** (steps / _HALF_LIFE)
        self._weight = self._weight * factor + scored.rows
        self._total = self._total * factor + score
        self.seen += scored.rows

    @property
    def mean(self) -> float:
        return self._total / self._weight if self._weight else 0.0

    def error(self, *, bounded: bool) -> float:
        """Return two standard errors of the mean: an upper limit for bounded scores, else an estimate.

        The variance of values between 0 and 1 is at most `mean * (1 - mean)`; the standard deviation of other errors is
        assumed to equal their mean.
        """
        mean = self.mean
        spread = math.sqrt(max(0.0, mean * (1 - mean))) if bounded else abs(mean)
        return 2 * spread / math.sqrt(self._weight) if self._weight else math.inf

    def state(self) -> tuple[float, float, int, list[float]]:
        return self._weight, self._total, self.seen, [] if self._winsorizer is None else self._winsorizer.state()

    def restore(self, state: tuple[float, float, int, list[float]]) -> None:
        self._weight, self._total, self.seen, recent = state
        if self._winsorizer is not None:
            self._winsorizer.restore(recent)
