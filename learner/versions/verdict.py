"""The verdict: decides from scores on the same held-out events whether a candidate may be served. Pure.

Legend: G held-out events.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.learner.evaluate.adwin import limit_of
from anabranch.learner.evaluate.measures import Difference, Measure, Outcomes
from anabranch.learner.evaluate.scoring import Scores
from anabranch.learner.evaluate.slices import Slice, reports_of
from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.status.report import SliceReport
from anabranch.learner.versions.format import Verdict

Marks = NDArray[np.bool_]
"""Which events belong to a set, `[G]`."""

_Z_95 = 1.645
"""Standard errors of the one-sided 95 % limit."""
_Z_99 = 2.326
"""Standard errors of the one-sided 99 % limit."""
_Z_999 = 3.09
"""Standard errors of the one-sided 99.9 % limit, for repeated comparisons."""
_Z_MONITOR = 4.5
"""Standard errors that chance exceeds once in 300,000 comparisons: monitoring makes thousands a day."""
_LEAST = 1e-12
_ERROR_RATE = 0.005
"""Of verdicts by measures on versions that are as good as the served one, the part that fails by chance."""
_ERROR_RATE_OF_ROW = 0.01
"""Of rows of versions that are as good as the one before them, the part that `DropEvidence` ever fails by chance."""
_BATCH, _BATCH_OF_OTHERS = 20, 200
"""What events of two classes, and others, weigh in a batch at least; see `weight_of`."""
_ERROR_RATE_OF_SLICES = 0.005
"""Of verdicts on versions that are as good as the served one, the part that fails by chance over all slices."""
_FEWEST_OF_SLICE, _FEWEST_WEIGHT = 50, 40
"""Events of a slice that are compared, and what they weigh for a measure; see `weight_of`."""
_NAMED_SLICES = 3
_MIXED = 2
"""Batches after which evidence of a small drop is found soonest."""


@dataclass(frozen=True)
class Drop:
    """How much worse a candidate scores than a baseline on the same events: absolute for accuracy, else relative.

    Of errors, the means are of winsorised ones.
    """

    rows: int
    candidate: float
    """Mean score."""
    baseline: float
    """Mean score."""
    drop: float
    error: float
    """Standard error of `drop`, from the paired differences."""

    @property
    def upper(self) -> float:
        """Upper one-sided 95 % limit."""
        return self.drop + _Z_95 * self.error

    def possible(self, limit: float) -> bool:
        """Return whether there is a drop (99 %), and it may exceed `limit` (95 %).

        The second condition alone is not enough: two equally good models differ on some events, and where those are few
        the upper limit exceeds `limit` by chance most of the time.
        """
        return self.upper > limit and self.drop > _Z_99 * self.error

    @property
    def certainly_better(self) -> bool:
        """Whether the candidate is better, and not by chance."""
        return -self.drop > _Z_999 * self.error

    def certain(self, limit: float) -> bool:
        """Return whether the drop exceeds `limit` and is not by chance, even over a thousand comparisons a day."""
        return self.drop > limit and self.drop > _Z_MONITOR * self.error


class DropEvidence:
    """That a row of versions is worse by a measure than the version before them, from batches of held-out events.

    No two batches share an event, and each compares the newest version of the row. A batch cannot show a small drop: 40
    positives distinguish a ROC AUC from one that is 0.02 lower in one case of five. Together they do, after some
    hundred positives, at whatever batch they are compared: the statistic is a mixture, over all drops above 0, of
    likelihood ratios of the sum of drops, which exceeds 1 / a ever with a probability of a at most where there is no
    drop (Robbins 1970, "Statistical methods related to the law of the iterated logarithm"; Howard et al. 2021,
    "Time-uniform, nonparametric, nonasymptotic confidence sequences", one-sided normal mixture). Standard errors are
    estimated, so that it holds for batches of many events (Waudby-Smith et al. 2021, "Time-uniform central limit theory
    and asymptotic confidence sequences"). The benchmark `verdicts` measures both rates.
    """

    def __init__(self) -> None:
        self._batches, self._sum, self._variance = 0, 0.0, 0.0
        self.weight = 0
        """What all batches weigh; see `weight_of`."""

    def add(self, difference: Difference, weight: int) -> None:
        """Add the difference on the events of one batch."""
        self._batches, self.weight = self._batches + 1, self.weight + weight
        self._sum += weight * difference.drop
        self._variance += (weight * difference.error) ** 2

    @property
    def drop(self) -> float:
        """The mean drop."""
        return self._sum / max(1, self.weight)

    @property
    def upper(self) -> float:
        """Upper one-sided 95 % limit of the drop."""
        return self.drop + _Z_95 * math.sqrt(self._variance) / max(1, self.weight)

    def certain(self, limit: float, measures: int) -> bool:
        """Return whether there is a drop, and it may exceed `limit`; `measures`: how many are followed (Bonferroni)."""
        if not 0 < self._variance < math.inf or self.upper <= limit:
            return False
        mixed = _MIXED * self._variance / self._batches
        z = self._sum / math.sqrt(self._variance + mixed)
        ratio = z * z / 2 + math.log(mixed / (self._variance + mixed)) / 2
        found = ratio + math.log(2 * NormalDist().cdf(z)) if z > 0 else 0.0
        return found > math.log(measures / _ERROR_RATE_OF_ROW)


def weight_of(outcomes: Outcomes) -> tuple[int, int]:
    """Return what events weigh as evidence, and how much a batch needs: those of the rarer of two classes, or all."""
    if outcomes.kind != "two-classes":
        return len(outcomes), _BATCH_OF_OTHERS
    positives = int(np.count_nonzero(outcomes.label == 1))
    return min(positives, len(outcomes) - positives), _BATCH


@dataclass(frozen=True)
class GateInput:
    """The inputs of a verdict; scores and marks are of the same G events.

    Attributes:
        candidate: scores of the version to be judged.
        served: scores of the served version; None without one to compare with.
        best: scores of the best version served within `max_hold`; None where it is the served one.
        new: the youngest events.
        old: events that measure old knowledge; events that came while nothing passed are in neither set.
        classes: the events of each class that has enough of them, by its name.
        measures: those that decide too, each with the drop that is allowed.
        outcomes: of the `candidate`, the `served` version, and the `best` one as far as it is another; none without
            measures.
        held: whether nothing has passed since a version failed: then `min_rows` no longer makes it inconclusive.
        label: labels of the events, for the slices.
        slices: the events of each slice, by its name.
    """

    candidate: Scores
    served: Scores | None
    best: Scores | None
    new: Marks
    old: Marks
    classes: Mapping[str, Marks]
    held: bool = False
    measures: Sequence[tuple[Measure, float]] = ()
    outcomes: Mapping[str, Outcomes] = field(default_factory=dict)
    label: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    slices: Mapping[str, Slice] = field(default_factory=dict)


def compare(candidate_G: Scores, baseline_G: Scores, *, bounded: bool) -> Drop:
    """Compare scores of the same G events, at least one, all finite.

    Where scores are not `bounded`, between 0 and 1, those of both versions are winsorised by one limit, and events on
    which both are beyond it are left out: their labels are wrong, or no version can predict them, and a single one of
    them would make each difference small.
    """
    rows = len(candidate_G)
    if not bounded:
        limit = limit_of(np.concatenate([candidate_G, baseline_G]))
        either_G = (np.abs(candidate_G) <= limit) | (np.abs(baseline_G) <= limit)
        candidate_G, baseline_G = (np.clip(each[either_G], -limit, limit) for each in (candidate_G, baseline_G))
    difference_G = baseline_G - candidate_G
    counted, baseline = len(difference_G), float(baseline_G.mean())
    unit = 1.0 if bounded else max(abs(baseline), _LEAST)
    error = float(difference_G.std(ddof=1)) / math.sqrt(counted) if counted > 1 else math.inf
    return Drop(rows, float(candidate_G.mean()), baseline, float(difference_G.mean()) / unit, error / unit)


def judge(inputs: GateInput, settings: GateSettings, *, bounded: bool) -> Verdict:
    """Return a verdict with numbers and reasons; `inconclusive` where too little is known."""
    rows = len(inputs.candidate)
    if wrong := _not_finite(inputs):
        return Verdict("fail", [f"its score is not finite on {wrong} of {rows} held-out events"], {"rows": rows})
    slices = reports_of(inputs.slices, inputs.candidate, inputs.label, bounded=bounded)
    if inputs.served is None:
        return Verdict("inconclusive", ["there is no served version to compare it with"], {"rows": rows}, slices)
    if not rows or (rows < settings.min_rows and not inputs.held):
        reason = f"{rows} of {settings.min_rows} held-out events, fewer than gate.min_rows"
        return Verdict("inconclusive", [reason], {"rows": rows}, slices)
    failed, unsure, numbers = [], [], {"rows": float(rows)}
    for name, drop, limit in _drops(inputs, inputs.served, settings, bounded=bounded):
        numbers |= {name: drop.candidate, f"{name}_rows": drop.rows, f"{name}_drop": drop.drop}
        numbers |= {f"{name}_rival": drop.baseline, f"{name}_drop_upper": drop.upper}
        sentence = f"{_WORDS[name]}: {_amount(drop, bounded=bounded)}, of {limit:g} that are allowed"
        if drop.possible(limit) or (name != "new" and drop.drop > limit):
            failed.append(f"worse than {sentence}")
        elif not drop.upper <= limit:
            unsure.append(f"too few events to distinguish it from {sentence}")
    failed_measures, unsure_measures, numbers_of_measures = _judge_measures(inputs)
    worse, slices = _judge_slices(inputs, inputs.served, slices, settings, bounded=bounded)
    failed, unsure = [*failed, *failed_measures, *worse], [*unsure, *unsure_measures]
    numbers |= numbers_of_measures | _classes(inputs, inputs.served, bounded=bounded)
    if inputs.held and not inputs.old.any():
        failed.append("no held-out event is left by which the served version was judged: serve one by hand")
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if failed:
        return Verdict("fail", failed, finite, slices)
    return Verdict("inconclusive" if unsure else "pass", unsure, finite, slices)


def _judge_measures(inputs: GateInput) -> tuple[list[str], list[str], dict[str, float]]:
    """Return why measures fail a version, why they are not sure, and their numbers.

    A version that is as good as both others fails in one of 200 verdicts at most, whatever the number of measures
    (Bonferroni).
    """
    failed, unsure, numbers = [], [], dict[str, float]()
    found = [
        (name, measure, limit, difference)
        for name, marks in (("served", inputs.new | inputs.old), ("best", inputs.old))
        if name in inputs.outcomes
        for measure, limit in inputs.measures
        for difference in [_difference(inputs, name, measure, marks)]
    ]
    z = NormalDist().inv_cdf(1 - _ERROR_RATE / max(1, len(found)))
    for name, measure, limit, difference in found:
        if difference is None:
            unsure.append(f"{measure.name} is not defined on these held-out events")
            continue
        upper = difference.upper
        prefix = measure.name if name == "served" else f"{name}_{measure.name}"
        numbers |= {prefix: difference.candidate, f"{prefix}_rival": difference.baseline}
        numbers |= {f"{prefix}_drop": difference.drop, f"{prefix}_drop_upper": upper}
        amount = f"{difference.drop + 0.0:.4f} (at most {upper:.4f}, {difference.rows} events)"
        sentence = f"{_RIVALS[name]} by {measure.name}: {amount}, of {limit:g} that are allowed"
        if upper > limit and difference.drop > z * difference.error:
            failed.append(f"worse than {sentence}")
        elif not upper <= limit:
            unsure.append(f"too few events to distinguish it from {sentence}")
    if inputs.measures and inputs.outcomes["candidate"].constant:
        served_too = inputs.outcomes["served"].constant
        constant = f"it answers the same for all {len(inputs.candidate)} held-out events"
        (unsure if served_too else failed).append(constant)
    return failed, unsure, numbers


class _Compared(NamedTuple):
    """One comparison of a slice with the served version, by the score or a measure."""

    name: str
    words: str
    """By what it is worse, and by how much."""
    beyond: bool
    """Whether the drop may exceed the allowed one."""
    chance: float
    """The most with which two versions that are as good would differ so, as a logarithm."""


def _judge_slices(
    inputs: GateInput,
    served_G: Scores,
    reports: Mapping[str, SliceReport],
    settings: GateSettings,
    *,
    bounded: bool,
) -> tuple[list[str], dict[str, SliceReport]]:
    """Return why slices fail a version, and the reports with what was compared.

    A version that is as good as the served one in all slices fails in one of 200 verdicts at most, however many slices
    and measures there are (Bonferroni).
    """
    found, slices = list[_Compared](), dict(reports)
    counted_G = (inputs.new | inputs.old) & np.isfinite(served_G) & np.isfinite(inputs.candidate)
    for name, report in reports.items():
        marks_G = inputs.slices[name].marks & counted_G
        if np.count_nonzero(marks_G) < _FEWEST_OF_SLICE:
            continue
        drop = compare(inputs.candidate[marks_G], served_G[marks_G], bounded=bounded)
        amount, limit = _amount(drop, bounded=bounded), settings.max_drop_old
        found.append(_Compared(name, f": {amount}, of {limit:g}", drop.upper > limit, _chance(drop, drop.rows)))
        measures = dict[str, float]()
        for measure, limit in inputs.measures:
            weight = weight_of(inputs.outcomes["candidate"].where(marks_G))[0]
            if weight < _FEWEST_WEIGHT or (difference := _difference(inputs, "served", measure, marks_G)) is None:
                continue
            measures[measure.name] = difference.candidate
            words = f" by {measure.name}: {difference.drop:.4f} (at most {difference.upper:.4f}, {drop.rows} events)"
            beyond, chance = difference.upper > limit, _chance(difference, weight)
            found.append(_Compared(name, f"{words}, of {limit:g}", beyond, chance))
        changes = {"compared": True, "drop": drop.drop, "upper": drop.upper if math.isfinite(drop.upper) else None}
        slices[name] = msgspec.structs.replace(report, measures=measures, **changes)
    allowed = math.log(_ERROR_RATE_OF_SLICES / max(1, len(found)))
    worse = sorted((each for each in found if each.beyond and each.chance < allowed), key=lambda each: each.chance)
    for each in worse:
        slices[each.name] = msgspec.structs.replace(slices[each.name], worse=True)
    reasons = [
        f"worse than the served version where {each.name}{each.words} that are allowed"
        for each in worse[:_NAMED_SLICES]
    ]
    if worse:
        reasons[-1] += (
            f"; in {len(found)} comparisons of slices, of which {len(worse)} fail, versions that are as good fail in "
            f"{_ERROR_RATE_OF_SLICES:.1%} of verdicts at most"
        )
    return reasons, slices


def _chance(drop: Drop | Difference, weight: int) -> float:
    """Return a bound on the probability, as a logarithm, of a drop where none of two versions is better.

    It is that of a sum of `weight` symmetric differences by the sum of their squares, exact for any number of events
    (Efron 1969, "Student's t-test under symmetry conditions"); of a measure that is no mean, it is by its standard
    error.
    """
    if drop.drop <= 0 or not math.isfinite(drop.error):
        return 0.0
    square = drop.drop**2
    return -weight * square / ((weight - 1) * drop.error**2 + square) / 2


def _difference(inputs: GateInput, name: str, measure: Measure, marks: Marks) -> Difference | None:
    return difference_on(marks, measure, inputs.outcomes["candidate"], inputs.outcomes[name])


def difference_on(marks: Marks, measure: Measure, candidate: Outcomes, baseline: Outcomes) -> Difference | None:
    """Compare two versions on the marked ones of the same G events, as far as both predictions are finite."""
    both = marks & np.isfinite(candidate.predicted).all(axis=1) & np.isfinite(baseline.predicted).all(axis=1)
    return measure.compare(candidate.where(both), baseline.where(both))


def _not_finite(inputs: GateInput) -> int:
    """Return on how many events the candidate alone has no finite score, or where measures judge too, no finite output;
    those without one for either do not count."""
    finite = _finite(inputs, "candidate", inputs.candidate)
    if len(finite) and not finite.any():
        return len(finite)
    return int(np.count_nonzero(~finite & _finite(inputs, "served", inputs.served))) if inputs.served is not None else 0


def _finite(inputs: GateInput, name: str, scores_G: Scores) -> Marks:
    finite, outcomes = np.isfinite(scores_G), inputs.outcomes.get(name)
    return finite if outcomes is None else finite & np.isfinite(outcomes.predicted).all(axis=1)


_RIVALS = {"served": "the served version", "best": "the best version served lately"}
_WORDS = {
    "new": "the served version on new events",
    "old": "the served version on old events",
    "best": "the best version served lately on old events",
}


def _drops(
    inputs: GateInput, served_G: Scores, settings: GateSettings, *, bounded: bool
) -> list[tuple[str, Drop, float]]:
    """Return each comparison that has events: its name, the drop, and the allowed drop."""
    comparisons = [
        ("new", served_G, inputs.new, settings.max_drop_new),
        ("old", served_G, inputs.old, settings.max_drop_old),
    ]
    if inputs.best is not None:
        comparisons.append(("best", inputs.best, inputs.old, settings.max_drop_old))
    return [
        (name, compare(inputs.candidate[both], baseline_G[both], bounded=bounded), limit)
        for name, baseline_G, marks, limit in comparisons
        if (both := marks & np.isfinite(baseline_G) & np.isfinite(inputs.candidate)).any()
    ]


def surpasses(inputs: GateInput, *, bounded: bool) -> bool:
    """Return whether a candidate is better on old events than the best before it, and not by chance."""
    best_G = inputs.best if inputs.best is not None else inputs.served
    if best_G is None:
        return True
    both = inputs.old & np.isfinite(best_G) & np.isfinite(inputs.candidate)
    if not both.any():
        return True
    return compare(inputs.candidate[both], best_G[both], bounded=bounded).certainly_better


def _classes(inputs: GateInput, served_G: Scores, *, bounded: bool) -> dict[str, float]:
    """Return the score and drop of each class, and of the worst class, for display only."""
    numbers: dict[str, float] = {}
    drops: list[Drop] = []
    if not inputs.classes:
        return numbers
    for name, marks in inputs.classes.items():
        drop = compare(inputs.candidate[marks], served_G[marks], bounded=bounded)
        drops.append(drop)
        numbers |= {f"class_{name}": drop.candidate, f"class_{name}_drop": drop.drop}
    worst = min(drop.candidate for drop in drops)
    return numbers | {"worst": worst, "worst_rival": min(drop.baseline for drop in drops)}


def _amount(drop: Drop, *, bounded: bool) -> str:
    shown = drop.drop + 0.0  # not -0
    what = f"{shown:.4f}" if bounded else f"{shown:.2%} of its error"
    return f"{what} (at most {drop.upper:.4f}, {drop.rows} events)"
