"""How many old events a step replays for each new one.

`FixedRatio` is what the config says. `MeasuredRatio` replays where replay is seen to help, and else not at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from learner.config import LearnerSettings

Phase = Literal["off", "trial", "on"]


@dataclass(frozen=True)
class Tally:
    """Events that were scored, and the sum of their scores: 1 for right and 0 for wrong, or minus the error."""

    rows: int
    score: float


class Ratio(Protocol):
    """Asked before a step and told after it. A function of what it is told: the same again from the same checkpoint."""

    @property
    def now(self) -> float:
        """Old events for each new one in the next step."""
        ...

    def probes(self, step: int) -> bool:
        """Whether this step is to score old events, without training on them, before it trains."""
        ...

    def learned(self, new: Tally, old: Tally | None) -> None:
        """Hear of a finished step: scores before training, of its new events and of the old ones that it probed."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint, unless that was made under another kind of ratio."""
        ...


def make_ratio(settings: LearnerSettings, *, bounded: bool) -> Ratio:
    """Make what the config asks for; `bounded` says that scores are 0 to 1."""
    if settings.replay_ratio == "auto":
        return MeasuredRatio(settings.old_weight, bounded=bounded)
    return FixedRatio(settings.replay_ratio)


class FixedRatio:
    """Always the same."""

    def __init__(self, ratio: float) -> None:
        self.now = ratio

    def probes(self, step: int) -> bool:  # noqa: ARG002
        """Never: there is nothing to decide."""
        return False

    def learned(self, new: Tally, old: Tally | None) -> None:
        """Change nothing."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Change nothing."""


_COST = 0.2
"""What replay has to win back, in accuracy on old events at equal weights, to be worth its steps.

On streams whose old events are merely harder than the newest, replay wins back a few points and costs up to one on new
events; on streams that lose classes it wins back nearly all.
"""
_PROBE_EVERY = 4
_FEWEST = 200
"""Old events that have to be scored before anything is concluded."""
_HALF_LIFE = 50
"""Steps in which what was measured loses half its weight."""
_TRIAL = 200
"""Steps of a trial: four half lives, so that what is measured at its end is of the trial."""
_SURE = 50
"""Steps for which forgetting has to stay above the bar: what has just come over it by chance, or is still rising, does
not yet tell what a trial could win back."""
_RISE = 50
"""Steps in which replay that is missed comes back to its full ratio."""
_FALL = 8000
"""Steps in which replay that is not missed halves."""
_DOUBT = 5000
"""Steps in which the doubt that a trial without benefit leaves halves."""
_FULL = 1.0
_NEARLY_FULL = 0.9
_LEAST = 0.05


class MeasuredRatio:
    """Replays as far as forgetting is measured, and replaying is measured to undo it.

    Forgetting is how much worse the model does on a uniform sample of old events than on the newest ones, both scored
    before training on them. While it is below a bar nothing is replayed. When it stays above the bar replay is tried,
    in full, for some steps. If forgetting does not fall by `cost` or more, the old events are not forgotten but merely
    different (natural drift): replay stops, and the bar rises above what was seen, and sinks again slowly. If it falls,
    replay stays on: the ratio sinks slowly for as long as forgetting stays within half of `cost`, or twice what chance
    may part it by, of the least that replay has reached, and else rises at once. Where it stays nearly full for as
    long as it takes to halve, that least is gone by, and what is reached then takes its place: else old events that are
    merely different by now would keep it on for ever. The weight of the old sets the cost: 0.2 x (1 - old) / old, in
    accuracy, or for regression as part of the larger error.
    """

    def __init__(self, old_weight: float, *, bounded: bool) -> None:
        """Begin without replay.

        Args:
            old_weight: what old events count, of 1 in all; 0 never replays.
            bounded: whether scores lie between 0 and 1; else forgetting is relative to the error.
        """
        self._cost = _COST * (1 - old_weight) / old_weight if old_weight else math.inf
        self._bounded = bounded
        self._new, self._old = _Fading(), _Fading()
        self._phase: Phase = "off"
        self._bar = self._cost
        self._left = 0
        """Steps of the trial to come."""
        self._over = 0
        """Steps for which forgetting has been above the bar."""
        self._without, self._with = 0.0, 0.0
        self._full_for = 0
        """Steps for which the ratio has been nearly full."""
        self.now = 0.0

    @property
    def forgetting(self) -> float:
        """How much worse old events do than the newest: in accuracy, or as part of the larger error; 0 at first."""
        if self._old.seen < _FEWEST:
            return 0.0
        return (self._new.mean - self._old.mean) / self._unit

    @property
    def _unit(self) -> float:
        """What forgetting is told in parts of: the larger error, where scores are errors."""
        if self._bounded:
            return 1.0
        larger = max(-self._new.mean, -self._old.mean)
        return larger if larger > 0 else math.inf

    def probes(self, step: int) -> bool:
        """In each fourth step, in every phase, so that all that is compared was measured in one way."""
        return step % _PROBE_EVERY == 0

    def learned(self, new: Tally, old: Tally | None) -> None:
        """Measure, and decide for the next step."""
        self._new.add(new, 1)
        if old is not None:
            self._old.add(old, _PROBE_EVERY)
        if self._phase == "off":
            self._wait()
        elif self._phase == "trial":
            self._try()
        else:
            self._keep()

    def _wait(self) -> None:
        self._bar = self._cost + (self._bar - self._cost) * 0.5 ** (1 / _DOUBT) if self._bar > self._cost else self._bar
        self._over = self._over + 1 if self.forgetting > self._bar else 0
        if self._over > _SURE:
            self._phase, self._left, self._without, self.now = "trial", _TRIAL, self.forgetting, _FULL
            self._over = 0

    def _try(self) -> None:
        self._left -= 1
        self._without = max(self._without, self.forgetting)
        if self._left:
            return
        if self._without - self.forgetting >= self._cost:
            self._phase, self._with = "on", max(0.0, self.forgetting)
        else:
            self._stop(self._without + self._cost)

    def _keep(self) -> None:
        chance = math.hypot(*(each.chance(bounded=self._bounded) for each in (self._new, self._old))) / self._unit
        self._with = max(0.0, min(self._with, self.forgetting + chance))
        self._full_for = self._full_for + 1 if self.now > _NEARLY_FULL else 0
        if self._full_for == _FALL:
            self._with, self._full_for = self.forgetting, 0
        if self.forgetting - self._with > max(self._cost / 2, 2 * chance):
            self.now = min(_FULL, self.now + _FULL / _RISE)
            return
        self.now *= 0.5 ** (1 / _FALL)
        if self.now < _LEAST * _FULL:
            self._stop(self._cost)

    def _stop(self, bar: float) -> None:
        self._phase, self._bar, self.now, self._full_for = "off", bar, 0.0, 0

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
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

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint; one of a fixed ratio says nothing, and measuring begins anew."""
        if not state:
            return
        self._new, self._old = _Fading(*state["new"]), _Fading(*state["old"])
        self._phase, self._left, self.now = state["phase"], state["left"], state["now"]
        self._bar = self._cost if state["bar"] is None else max(self._cost, state["bar"])
        self._without, self._with = state["without"], state["with"]
        self._over, self._full_for = state["over"], state["full_for"]
        if self._cost == math.inf:
            self._stop(self._cost)


class _Fading:
    """A mean in which a step counts half as much as one `_HALF_LIFE` steps later."""

    def __init__(self, weight: float = 0.0, total: float = 0.0, seen: int = 0) -> None:
        self._weight, self._total, self.seen = weight, total, seen

    def add(self, tally: Tally, steps: int) -> None:
        """Take up what was found so many steps after the last time."""
        factor = 0.5 ** (steps / _HALF_LIFE)
        self._weight = self._weight * factor + tally.rows
        self._total = self._total * factor + tally.score
        self.seen += tally.rows

    @property
    def mean(self) -> float:
        return self._total / self._weight if self._weight else 0.0

    def chance(self, *, bounded: bool) -> float:
        """Two standard errors of the difference of two such means, at most for bounded scores, else about.

        What lies between 0 and 1 varies by `mean * (1 - mean)` at most; the error is taken to vary as it is large.
        """
        spread = math.sqrt(max(0.0, self.mean * (1 - self.mean))) if bounded else abs(self.mean)
        return 2 * spread / math.sqrt(self._weight) if self._weight else math.inf

    def state(self) -> tuple[float, float, int]:
        return self._weight, self._total, self.seen
