"""Which challengers train in a step, for how long, and which one is better than the model.

Leases double, as in ChaCha (Wu et al. 2021, "ChaCha for online AutoML", ICML): a challenger first gets a short lease,
and after it a longer one if it was better on it. It starts each lease from the model's weights, so that both train on
the same events from the same point on. Its evidence goes on: what is bet on a step depends on earlier ones alone,
whatever weights the challenger begins from. All evidence ends where the model gets other settings.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from learner.search.evidence import Evidence, log_threshold
from learner.search.space import SearchSpace
from learner.sections.search import ARGS, SearchSettings
from learner.state_dir.search.control import ChallengerReport, Judged, shown

FIRST_LEASE, LONGEST_LEASE = 32, 256
"""Steps of the first lease of a challenger, and of its last."""
_SAVED = 1024
"""Steps of challengers that may be saved up: a search begins with them, while a model has most to gain."""
NETWORK_LEASE = 128
"""Steps of the first lease of a challenger with its own network: it has been taught for long by then."""
TEACHING, MOST_TAUGHT = 256, 4096
"""Steps that the model teaches such a challenger before each lease, and as often as they do not suffice; and in all.
After so many, neither its first weights nor an optimizer that has just begun make it better or worse."""
MARGIN = 0.03
"""By how much it has to be better. An equal network that was taught while the model itself still learned fast was ahead
of it by up to 0.019, in a first try; and another network costs a person a new pipeline."""
CAUGHT_UP, CLOSE = 32, 0.05
"""In the last steps of these it learns from labels alone: who learns from the model stays a little behind it. It has
caught up when its mean difference in them is above `-CLOSE`."""
_WORSE = math.log(20.0)
"""Evidence that a challenger is worse with which its lease ends at once; such an error costs a challenger, no more."""
_KEPT = 50
"""Ended challengers that are reported."""


log = logging.getLogger(__name__)


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
        self._saved = float(_SAVED)
        """Steps that challengers may take."""
        self._numbers = 0
        self._ranks = 0
        self._proposals = 0
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
        share = self._settings.share
        self._saved = min(_SAVED, self._saved + share / (1 - share))
        begun = list[Challenger]()
        while not (self.pinned or self.paused) and len(self.live) < self._settings.challengers:
            if not self._waiting and self._saved < FIRST_LEASE:
                break
            challenger = self._waiting.pop(0) if self._waiting else self._proposal()
            if challenger is None:
                break
            if self._saved < min(challenger.cost, _SAVED):
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

        A lease that is over, or that the challenger has lost, ends.
        """
        challenger.steps += 1
        challenger.left -= 1
        challenger.total += difference
        challenger.better.add(difference - challenger.margin)
        challenger.worse.add(challenger.margin - difference)
        self.trained += 1
        if challenger.better.log_wealth >= log_threshold(challenger.rank):
            return True
        over = challenger.left <= 0  # less than 0 after a promotion that failed
        if challenger.worse.log_wealth >= _WORSE or (over and challenger.total <= challenger.margin * challenger.steps):
            self.end(challenger, "no_better")
        elif over:
            if challenger.lease >= LONGEST_LEASE:
                self.end(challenger, "undecided")
            elif self._saved >= challenger.lease and not self.paused:
                self._saved -= challenger.lease
                challenger.left = challenger.lease
                challenger.lease *= 2
            else:
                self._wait(challenger)
                challenger.lease *= 2
        return False

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
            *(report.number, shown(report.values), self.step, outcome, report.steps, report.difference),
        )

    def take(self, values: Mapping[str, float]) -> None:
        """Give the model other settings: all comparisons with those before end."""
        self.stop()
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
            self._saved = min(_SAVED, self._saved + challenger.left + challenger.teaching)
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
        for number, values in self._space.around(self.values, self._proposals):
            if values not in tried:
                self._proposals, self._numbers, self._ranks = number + 1, self._numbers + 1, self._ranks + 1
                network = self._is_network(values)
                lease = NETWORK_LEASE if network else FIRST_LEASE
                return Challenger(self._numbers, values, self._ranks, lease, network=network)
        return None

    def _is_network(self, values: Mapping[str, float]) -> bool:
        """Whether settings are of another network than the model's."""
        return any(key.startswith(ARGS) and value != self.values.get(key) for key, value in values.items())

    def state(self) -> dict[str, Any]:
        """Return JSON values, for a checkpoint."""
        plain = {name: getattr(self, name) for name in (*_PLAIN, "given", "values")}
        return {
            **plain,
            "measure": self._settings.measure,
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


_PLAIN = ("_saved", "_numbers", "_ranks", "_proposals", "step", "trained", "pinned")


def _fields(report: ChallengerReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}
