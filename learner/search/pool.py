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
from collections.abc import Mapping
from itertools import count
from typing import Any

from learner.search.challenger import CAUGHT_UP, CLOSE, FIRST_LEASE, MOST_TAUGHT, TEACHING, Challenger
from learner.search.evidence import ErrorLevel, Evidence, log_threshold
from learner.search.space import SearchSpace
from learner.sections.search import ARGS, SearchSettings
from learner.state_dir.search.control import ChallengerReport, Judged, shown

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
            *(report.number, shown(report.values), self.step, outcome, report.steps, report.difference),
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
