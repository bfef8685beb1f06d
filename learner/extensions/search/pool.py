"""Which challengers train in a step, for how long, and which one is better than the model.

Leases double, as in ChaCha (Wu et al. 2021, "ChaCha for online AutoML", ICML): a challenger first gets a short lease,
and after it a longer one if it was better on it. It starts each lease from the model's weights, so that both train on
the same events from the same point on. Its evidence goes on: what is bet on a step depends on earlier ones alone,
whatever weights the challenger begins from. All evidence ends where the model gets other settings.

At a promotion, the other challengers that train keep their weights: they were trained with their own settings from the
point on where the winner was, and what is still better than the winner is shown sooner.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from anabranch.learner.extensions.search.evidence import ErrorLevel, Evidence, log_threshold
from anabranch.learner.settings.search import ARGS, Range, SearchSettings, shown
from anabranch.learner.status.report import ChallengerReport, Judged

FIRST_LEASE = 128
"""Steps of the first lease of a challenger. In 32 steps, a learning rate that is too high or too low often seems better
than a good one."""
TEACHING, MOST_TAUGHT = 256, 4096
"""Steps that the model teaches such a challenger before each lease, and as often as they do not suffice; and in all.
After so many, neither its first weights nor an optimizer that has just begun make it better or worse."""
MARGIN = 0.03
"""By how much it has to be better. An equal network that was taught while the model itself still learned fast was ahead
of it by up to 0.019, in a first try; and another network costs a person a new pipeline."""
CAUGHT_UP, CLOSE = 32, 0.05
"""In the last steps of these it learns from labels alone: who learns from the model stays a little behind it. It has
caught up when its mean difference in them is above `-CLOSE`."""


@dataclass(eq=False)
class Challenger:
    """Settings that are compared with the model's."""

    number: int
    values: dict[str, float]
    rank: int
    """Its number since the model's settings changed, from 1: how much of the error rate it gets."""
    lease: int = FIRST_LEASE
    slot: int | None = None
    """Which copy of the model it trains; None: it waits for a lease."""
    left: int = 0
    """Steps that are left of the lease."""
    steps: int = 0
    total: float = 0.0
    """Sum of the differences."""
    better: Evidence = field(default_factory=Evidence)
    worse: Evidence = field(default_factory=Evidence)
    network: bool = False
    """Whether it has its own network, which it keeps between leases."""
    teaching: int = 0
    """Steps that are left in which the model teaches it; 0: it is compared."""
    taught: int = 0
    """Steps in which it was taught so far."""
    recent: list[float] = field(default_factory=list)
    """Its newest differences while it is taught."""

    @property
    def has_teacher(self) -> bool:
        """Whether it learns from the model's outputs in this step."""
        return self.teaching > CAUGHT_UP

    @property
    def margin(self) -> float:
        """What its mean difference has to be above to be better."""
        return MARGIN if self.network else 0.0

    @property
    def cost(self) -> int:
        """The steps that have to be saved up for its next lease."""
        return self.lease + (TEACHING if self.network else 0)

    def report(self, outcome: Judged | None = None, step: int = 0) -> ChallengerReport:
        """Return it for the learner's report."""
        return ChallengerReport(
            number=self.number,
            values=self.values,
            steps=self.steps,
            difference=self.total / max(1, self.steps),
            log_wealth=self.better.log_wealth,
            log_threshold=log_threshold(self.rank),
            taught=self.taught,
            outcome=outcome,
            step=step,
        )

    def state(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), **{name: vars(getattr(self, name)) for name in ("better", "worse")}}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Challenger":
        """Return the challenger of a state."""
        return cls(**{**state, **{name: Evidence(**state[name]) for name in ("better", "worse")}})


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


LONGEST_LEASE = 512
"""Steps of its last lease, unless it is promising."""
SAVED = 1024
"""Steps of challengers that may be saved up: a search begins with them, while a model has most to gain."""
_CREDIT = 2048
"""Steps that promising challengers may take before they are saved up: to wait would lose their weights, which matter
most where the model's are ruined, or are those of the beginning. A fresh network may need 1000 to be shown better."""
STEP_COST = 1.7
"""The time of a challenger's step in steps of the model, with copies, random numbers and comparisons: 1.2 to 1.5 with a
small network, and some room. It is a constant, since no clock may decide what is learned."""
_PROMISING = 1.0
"""Evidence from which on a challenger is promising."""
NETWORK_LEASE = 128
"""Steps of the first lease of a challenger with its own network: it has been taught for long by then."""
_WORSE = math.log(1000.0)
"""Evidence that a challenger is worse with which its lease ends at once. With 20, also those would end that a good
setting needs time for."""
_KEPT = 50
"""Ended challengers that are reported."""


log = logging.getLogger(__name__)


class ChallengerPool:
    """The challengers, and the steps that they may take. It depends on the observed differences alone."""

    def __init__(self, settings: SearchSettings, given: Mapping[str, float], seed: int) -> None:
        """Start with the settings of the config, `given`."""
        self._settings = settings
        self._space = SearchSpace(settings.space, seed)
        self.given = dict(given)
        self.values = dict(given)
        """The model's settings, by key."""
        self.live: list[Challenger] = []
        """Those that train now."""
        self._waiting: list[Challenger] = []
        self._saved = float(SAVED)
        """Steps that challengers may take."""
        self._earned = settings.share / (1 - settings.share) / STEP_COST
        """Steps that they may take more for each step of the model."""
        self._numbers = 0
        self._ranks = 0
        self._proposals = self._spread = 0
        self.level = ErrorLevel()
        """Of the model's error: the unit of differences."""
        self.step = 0
        """Steps of the model."""
        self.trained = 0
        """Steps of challengers."""
        self.outcomes: Counter[str] = Counter()
        self.history: deque[ChallengerReport] = deque(maxlen=_KEPT)
        self.paused = False
        """Whether no lease begins, or is made longer, now: the learner has no time to spare."""
        self.pinned = False
        self.alert: ChallengerReport | None = None
        """The newest challenger that is better than the model with its settings of now, and is not promoted."""

    def begin(self) -> list[Challenger]:
        """Begin a step: return the challengers whose lease begins now, which copy the model first."""
        self.step += 1
        self._saved = min(SAVED, self._saved + self._earned)
        begun = list[Challenger]()
        while not (self.pinned or self.paused) and len(self.live) < self._settings.challengers:
            if self._saved < (min(self._waiting[0].cost, SAVED) if self._waiting else FIRST_LEASE):
                break
            challenger = self._waiting.pop(0) if self._waiting else self._proposal()
            if challenger is None:
                break
            if self._saved < min(challenger.cost, SAVED):
                self._waiting.insert(0, challenger)
                break
            self._saved -= challenger.cost
            challenger.left, challenger.teaching = challenger.lease, challenger.cost - challenger.lease
            challenger.slot = next(slot for slot in count() if all(slot != each.slot for each in self.live))
            self.live.append(challenger)
            begun.append(challenger)
        return begun

    def observe(self, challenger: Challenger, difference: float) -> bool:
        """Add the difference of one step, in -1..1; return whether the challenger is shown to be better, by its margin.

        Where the model learns, that takes a first lease: in the first 30 steps of a model, a rate that is too high is
        ahead. One that does not learn has nothing to lose. A lease that is over, or that the challenger has lost, ends.
        """
        challenger.steps += 1
        challenger.left -= 1
        challenger.total += difference
        challenger.better.add(difference - challenger.margin)
        challenger.worse.add(challenger.margin - difference)
        self.trained += 1
        lasting = challenger.steps >= FIRST_LEASE or not self.level.is_lower
        if lasting and challenger.better.log_wealth >= log_threshold(challenger.rank):
            return True
        over = challenger.left <= 0  # less than 0 after a promotion that failed
        if challenger.worse.log_wealth >= _WORSE or (over and challenger.total <= challenger.margin * challenger.steps):
            self.end(challenger, "no_better")
        elif over:
            self._after_lease(challenger)
        return False

    def _after_lease(self, challenger: Challenger) -> None:
        """Let a challenger that was better on its lease go on, or wait for another lease, unless it was the last."""
        promising = challenger.better.log_wealth >= _PROMISING and not challenger.network
        last = challenger.lease >= LONGEST_LEASE
        least = -_CREDIT if promising else 0
        if (promising or not last) and not self.paused and self._saved - challenger.lease >= least:
            self._saved -= challenger.lease
            challenger.left = challenger.lease
        elif last:
            self.end(challenger, "undecided")
            return
        else:
            self._wait(challenger)
        challenger.lease = min(2 * challenger.lease, LONGEST_LEASE)

    def observe_taught(self, challenger: Challenger, difference: float) -> None:
        """Add the difference of a step in which a challenger was taught.

        After `TEACHING` steps it is compared from the next one on, if it has caught up. Else it is taught again, for
        which it may have to wait, or ends.
        """
        challenger.teaching -= 1
        challenger.taught += 1
        challenger.recent = [*challenger.recent[1 - CAUGHT_UP :], difference]
        self.trained += 1
        if challenger.teaching:
            return
        if sum(challenger.recent) > -CLOSE * len(challenger.recent):
            challenger.recent = []
        elif challenger.taught >= MOST_TAUGHT:
            self.end(challenger, "not_caught_up")
        elif self._saved >= TEACHING and not self.paused:
            self._saved -= TEACHING
            challenger.teaching = TEACHING
        else:
            self._wait(challenger)

    def end(self, challenger: Challenger, outcome: Judged) -> None:
        """End a challenger, which trains or waits."""
        if outcome in ("no_memory", "too_slow") or (challenger.network and outcome == "raised"):
            # Its steps are lost, or the next would be tried at once, and fail as well.
            challenger.left = challenger.teaching = 0
        self._release(challenger)
        if challenger in self._waiting:
            self._waiting.remove(challenger)
        self.outcomes[outcome] += 1
        report = challenger.report(outcome, self.step)
        self.history.append(report)
        if outcome == "better":
            self.alert = report
        log.info(
            "challenger %d with %s ends at step %d: %s after %d steps, difference %.3g",
            report.number,
            shown(report.values),
            self.step,
            outcome,
            report.steps,
            report.difference,
        )

    def promote(self, challenger: Challenger) -> None:
        """Let the model have the settings of a challenger that trains, which ends; the others are compared with it from
        now on, for a first lease at least where enough steps are saved up."""
        self.end(challenger, "promoted")
        for each in self._waiting[:]:
            self.end(each, "stopped")
        self._take(challenger.values)
        for each in self.live[:]:
            if each.values == self.values:
                self.end(each, "stopped")
        for each in self.live:
            self._ranks += 1
            each.rank, each.steps, each.total = self._ranks, 0, 0.0
            each.better, each.worse = Evidence(), Evidence()
            more = max(0, min(FIRST_LEASE - each.left, int(self._saved)))
            self._saved -= more
            each.left += more
            each.lease = max(FIRST_LEASE, each.left)

    def take(self, values: Mapping[str, float]) -> None:
        """Give the model other settings: all comparisons with those before end."""
        self.stop()
        self._take(values)

    def _take(self, values: Mapping[str, float]) -> None:
        self.values = {key: float(values.get(key, own)) for key, own in self.values.items()}
        self._ranks = self._proposals = 0
        self.alert = None

    def stop(self) -> None:
        """End all challengers."""
        for challenger in [*self.live, *self._waiting]:
            self.end(challenger, "stopped")

    @property
    def challengers(self) -> list[Challenger]:
        """All that have not ended."""
        return [*self.live, *self._waiting]

    def _release(self, challenger: Challenger) -> None:
        """End a lease; steps that are left are saved."""
        if challenger in self.live:
            self.live.remove(challenger)
            self._saved = min(SAVED, self._saved + challenger.left + challenger.teaching)
        challenger.slot, challenger.left, challenger.teaching, challenger.recent = None, 0, 0, []

    def _wait(self, challenger: Challenger) -> None:
        """End a lease of a challenger that is to have another one."""
        self._release(challenger)
        self._waiting.append(challenger)
        self._waiting.sort(key=lambda each: -each.better.log_wealth)

    def _proposal(self) -> Challenger | None:
        """Return a challenger with settings that no other one tries now; None where all near ones are tried."""
        tried = [each.values for each in self.challengers]
        if self.alert is not None and self._is_network(self.alert.values):
            tried.append(self.alert.values)
        for number, values in self._space.spread(self.values, self._spread):
            self._spread = number + 1
            if values not in tried:
                return self._challenger(values)
        for number, values in self._space.around(self.values, self._proposals):
            if values not in tried:
                self._proposals = number + 1
                return self._challenger(values)
        return None

    def _challenger(self, values: dict[str, float]) -> Challenger:
        self._numbers, self._ranks = self._numbers + 1, self._ranks + 1
        network = self._is_network(values)
        lease = NETWORK_LEASE if network else FIRST_LEASE
        return Challenger(self._numbers, values, self._ranks, lease, network=network)

    def _is_network(self, values: Mapping[str, float]) -> bool:
        """Whether settings are of another network than the model's."""
        return any(key.startswith(ARGS) and value != self.values.get(key) for key, value in values.items())

    def state(self) -> dict[str, Any]:
        """Return JSON values, for a checkpoint."""
        plain = {name: getattr(self, name) for name in (*_PLAIN, "given", "values")}
        return {
            **plain,
            "measure": self._settings.measure,
            "level": vars(self.level),
            "live": [each.state() for each in self.live],
            "waiting": [each.state() for each in self._waiting],
            "outcomes": dict(self.outcomes),
            "history": [_fields(each) for each in self.history],
            "alert": self.alert and _fields(self.alert),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the state of a checkpoint; return whether its challengers go on.

        They end where the space, the measure or a value of the config has changed since, or where there are fewer
        challengers. A value that was found stays, unless the user has changed it or taken its key out of the space.
        """
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.level = ErrorLevel(**state["level"])
        self.outcomes = Counter(state["outcomes"])
        self.history = deque((ChallengerReport(**each) for each in state["history"]), maxlen=_KEPT)
        self.alert = state["alert"] and ChallengerReport(**state["alert"])
        self.live = [Challenger.of_state(each) for each in state["live"]]
        self._waiting = [Challenger.of_state(each) for each in state["waiting"]]
        before, found = state["given"], state["values"]
        kept = {key: found[key] for key, value in self.given.items() if before.get(key) == value}
        slots = range(self._settings.challengers)
        same = (before, state.get("measure")) == (self.given, self._settings.measure)
        if same and all(each.slot in slots for each in self.live) and self._all_within():
            self.values = kept
            return True
        self.take(kept)
        return False

    def _all_within(self) -> bool:
        """Whether all settings that are compared are in the ranges of the config."""
        ranges = self._settings.space
        return all(
            low <= each.values[key] <= high or each.values[key] == self.values[key]
            for each in self.challengers
            for key, (low, high) in ranges.items()
        )


_PLAIN = ("_saved", "_numbers", "_ranks", "_proposals", "_spread", "step", "trained", "pinned")


def _fields(report: ChallengerReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}
