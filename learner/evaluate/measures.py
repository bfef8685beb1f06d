"""Measures of predictions: of held-out events, of a window of the stream, and of two versions on the same events.

A measure is a function of outcomes and of the weights of their events. Equal weights give its value; the counts of a
resample give one sample of the bootstrap; the counts of a sketch give its value on the whole stream. So each is written
once, without torch, and is pure.

| task | measures |
| --- | --- |
| two classes | average precision, ROC AUC, log loss, Brier score, ECE, recall at a precision or at an alert budget |
| more classes | balanced accuracy, macro F1, log loss, top-k accuracy, ECE |
| several labels | mean average precision |
| a number | MAE, RMSE, pinball loss |
| two classes or a number, in groups | also NDCG@k and MRR |

Legend: G events, K columns of an outcome, C classes, R resamples, E thresholds, U groups.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kind = Literal["two-classes", "classes", "labels", "number"]
"""What a prediction is, and so the columns of its outcome: see `Outcomes`."""

RESAMPLES = 200
_FEWEST_RESAMPLES = 40
_MOST_CELLS = 400_000
"""Events times resamples, and times classes where each event has several labels."""
_BINS = 15
"""Bins of equal width of the expected calibration error (Guo et al. 2017, "On calibration of modern neural
networks")."""
_Z_95 = 1.96
"""Standard errors of a two-sided 95 % interval."""
_SEED = 0x51ED270B
_ODDS_BINS = 4000
_MOST_ODDS = 20.0
"""Log-odds beyond it, of which chance has one in 500 million, count as it."""
_BIN_WIDTH = 2 * _MOST_ODDS / _ODDS_BINS
_LEAST = 1e-300
_NAME = re.compile("[a-z][a-z0-9_]*")
_TAKEN = ("now", "new", "old", "best", "served", "worst", "worst_group", "rows", "overall", "watch", "accuracy")
"""Names of other numbers of versions."""
_LONGEST = 200
"""Characters of an error of the user's in a sentence."""
_CONSTANT_DIGITS = 12
"""After the point: a constant has a calibration error of 0, which is not to be seen as 5e-18."""


@dataclass(frozen=True)
class Outcomes:
    """What measures need of the predictions of G events, and their labels. All values are finite.

    Attributes:
        kind: what was predicted.
        predicted: float `[G, K]`. Two classes: the log-odds of class 1. More: the most likely class, its probability,
            the log of the label's probability, and how many other classes are at least as likely as the label. Several
            labels: the log-odds of each class. A number: the number.
        label: `[G]`, or bool `[G, C]` for several labels.
        group: `[G]`, equal for the events of a group, 0 for an event without one; None without groups.
    """

    kind: Kind
    predicted: NDArray[np.floating[Any]]
    label: NDArray[Any]
    group: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.label)

    def where(self, marks_G: NDArray[Any] | slice) -> "Outcomes":
        """Return those of the marked events, or of these indices."""
        group = self.group if self.group is None else self.group[marks_G]
        return Outcomes(self.kind, self.predicted[marks_G], self.label[marks_G], group)

    @property
    def constant(self) -> bool:
        """Whether all events have the same prediction."""
        columns = self.predicted[:, :2] if self.kind == "classes" else self.predicted
        return len(columns) > 1 and bool((columns == columns[0]).all())


OfWeights = Callable[[Floats], Floats]
"""A measure of some outcomes: from the weights of the events `[R, G]` to values `[R]`, NaN where it is not defined."""


@dataclass(frozen=True)
class Measure:
    """One measure.

    Attributes:
        name: as users write it.
        higher: whether higher is better.
        relative: whether a difference is a fraction of the value, since the value has no upper bound.
        of: returns the measure of some outcomes.
        influence: returns the derivatives of the value by the weight of each event, `[G]`, at weights `[G]`; None: it
            has none.
        grouped: whether it is one of ranking in groups.
    """

    name: str
    higher: bool
    relative: bool
    of: Callable[[Outcomes], OfWeights]
    influence: Callable[[Outcomes, Floats], Floats] | None = None
    grouped: bool = False
    own: "OwnFunction | None" = None
    """What the user's task gave it; it takes no weights but counts."""

    def value(self, outcomes: Outcomes, weights_G: NDArray[Any] | None = None) -> float:
        """Return the value on the events; NaN where it is not defined, as without an event of either class."""
        if not len(outcomes) or (self.grouped and outcomes.group is None):
            return math.nan
        weights = np.ones(len(outcomes)) if weights_G is None else weights_G.astype(np.float64)
        return float(self.of(outcomes)(weights[None])[0])

    def constant(self, outcomes: Outcomes, weights_G: NDArray[Any] | None = None) -> float:
        """Return the value that one prediction for all events has at best; NaN where it is not defined.

        It is the shares of the classes, and of numbers the mean for RMSE, the quantile for pinball loss, and else the
        median. For a measure of the user's it is not necessarily the best.
        """
        if not len(outcomes):
            return math.nan
        return round(self.value(_constant(self.name, outcomes, weights_G), weights_G), _CONSTANT_DIGITS)

    def estimate(self, outcomes: Outcomes) -> "Estimate | None":
        """Return the value with its 95 % interval; None where it is not defined.

        The interval of ROC AUC is DeLong's, that of smooth measures of the infinitesimal jackknife, for which see
        `compare`, that of others of the bootstrap, which samples whole groups.
        """
        most = None if self.own is None else _FEWEST_RESAMPLES
        return self._estimate(outcomes, None, lambda: resamples(outcomes)[:most], len(outcomes))

    def estimate_of_counts(self, outcomes: Outcomes, counts_G: Floats, certainty: float) -> "Estimate | None":
        """Return the value with its 95 % interval where each outcome stands for a count of events.

        `certainty`: how many events without fading say as much as one of the counts, 1 or more. None for a measure of
        the user's, which takes no fractions of events.
        """
        if self.own is not None:
            return None

        def samples() -> Floats:
            rng, count = np.random.default_rng(_SEED), _resamples_of(len(counts_G))
            return rng.gamma(counts_G * certainty, size=(count, len(counts_G))) / certainty

        return self._estimate(outcomes, counts_G, samples, round(counts_G.sum()), certainty)

    def _estimate(
        self,
        outcomes: Outcomes,
        weights_G: Floats | None,
        resample: Callable[[], Floats],
        rows: int,
        certainty: float = 1.0,
    ) -> "Estimate | None":
        value = self.value(outcomes, weights_G)
        if not math.isfinite(value):
            return None
        constant = self.constant(outcomes, weights_G)
        error: float | None = None
        if self.name == "roc_auc" and outcomes.group is None and weights_G is None:
            error = math.sqrt(delong([outcomes])[0, 0])
        elif self.influence is not None:
            weights_G = np.ones(len(outcomes)) if weights_G is None else weights_G
            error = _error(self.influence(outcomes, weights_G) * np.sqrt(weights_G / certainty), outcomes)
        if error is not None:
            low, high = value - _Z_95 * error, value + _Z_95 * error
            return Estimate(value, max(0.0, low), high if self.relative else min(1.0, high), rows, constant)
        samples = self.of(outcomes)(resample())
        samples = samples[np.isfinite(samples)]
        low, high = np.quantile(samples, (0.025, 0.975)) if len(samples) else (value, value)
        return Estimate(value, min(value, float(low)), max(value, float(high)), rows, constant)

    def compare(self, candidate: Outcomes, baseline: Outcomes) -> "Difference | None":
        """Compare two versions on the same G events; None where the measure of one is not defined.

        The standard error is that of the paired difference: of ROC AUC by DeLong, of smooth measures by the
        infinitesimal jackknife (Efron 1982, "The jackknife, the bootstrap and other resampling plans"), of others by a
        bootstrap that samples the same events, or groups, for both.
        """
        values = self.value(candidate), self.value(baseline)
        if not all(map(math.isfinite, values)):
            return None
        sign = 1.0 if self.higher else -1.0
        unit = abs(values[1]) if self.relative and values[1] else 1.0
        if self.name == "roc_auc" and candidate.group is None:
            covariance = delong([candidate, baseline])
            error = math.sqrt(max(0.0, covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]))
        elif self.influence is not None:
            equal_G = np.ones(len(candidate))
            error = _error(self.influence(baseline, equal_G) - self.influence(candidate, equal_G), candidate)
        else:
            weights_RG = resamples(candidate)
            samples = self.of(baseline)(weights_RG) - self.of(candidate)(weights_RG)
            samples = samples[np.isfinite(samples)]
            error = float(samples.std(ddof=1)) if len(samples) > 1 else math.inf
        return Difference(*values, sign * (values[1] - values[0]) / unit, error / unit, len(candidate))


OwnFunction = Callable[[NDArray[Any], NDArray[Any]], float]
"""A measure of the user's: see `TaskMeasure`."""


def own_measure(name: str, function: OwnFunction, *, higher: bool, relative: bool) -> Measure:
    """Return a measure that a function of the user's computes; its value is NaN where the function raises.

    Raises:
        ValueError: the name is taken, or is none.
    """
    taken = {*_FIXED, *_WITH_NUMBER, *_TAKEN}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _stem(name) in taken:
        raise ValueError(f"{name!r} is no name for a measure, or it is taken; write another of a-z, 0-9 and _")

    def of(outcomes: Outcomes) -> OfWeights:
        answer_G, label_G = _answers(outcomes), outcomes.label

        def value(weights_G: Floats) -> float:
            at = np.repeat(np.arange(len(label_G)), weights_G.astype(np.int64))
            try:
                return float(function(answer_G[at], label_G[at]))
            except Exception:  # noqa: BLE001 the user's own code may raise anything; `fault_of` says what
                return math.nan

        return lambda weights_RG: np.array([value(weights_G) for weights_G in weights_RG])

    return Measure(name, higher, relative, of, own=function)


def fault_of(measure: Measure, outcomes: Outcomes) -> str | None:
    """Return in one sentence why a measure of the user's has no finite value on the events; None where it has one."""
    assert measure.own is not None
    try:
        value = float(measure.own(_answers(outcomes).copy(), outcomes.label.copy()))
    except Exception as exc:  # noqa: BLE001 the user's own code may raise anything
        what = f"raised {type(exc).__name__}: {' '.join(str(exc).split())[:_LONGEST]}"
    else:
        if math.isfinite(value):
            return None
        what = f"returned {value}"
    return f'the measure "{measure.name}" of model.task {what}, on {len(outcomes)} events'


def _answers(outcomes: Outcomes) -> NDArray[Any]:
    """Return what a measure of the user's gets of the predictions: see `TaskMeasure`."""
    if outcomes.kind == "classes":
        return outcomes.predicted[:, 0].astype(np.int64)
    predicted = outcomes.predicted if outcomes.kind == "labels" else outcomes.predicted[:, 0]
    return predicted.astype(np.float64) if outcomes.kind == "number" else probability_of(predicted)


@dataclass(frozen=True)
class Estimate:
    """A value on `rows` events, with the limits of its two-sided 95 % interval."""

    value: float
    low: float
    high: float
    rows: int
    constant: float
    """What one prediction for all events has at best, on the same events."""


@dataclass(frozen=True)
class Difference:
    """How much worse a candidate is than a baseline on the same `rows` events, and the standard error of that."""

    candidate: float
    baseline: float
    drop: float
    error: float
    rows: int

    @property
    def upper(self) -> float:
        """Upper one-sided 95 % limit of the drop."""
        return self.drop + 1.645 * self.error


def resamples(outcomes: Outcomes) -> Floats:
    """Return how often each of G events is in each of R resamples, `[R, G]`; the same for the same G and groups.

    Of many events there are fewer resamples. Whole groups are sampled, since the events of a group depend on each other
    (Field & Welsh 2007, "Bootstrapping clustered data").
    """
    unit_G = None if outcomes.group is None else np.unique(_group_of_each(outcomes.group), return_inverse=True)[1]
    units = len(outcomes) if unit_G is None else int(unit_G.max(initial=-1)) + 1
    cells = outcomes.predicted.size if outcomes.kind == "labels" else len(outcomes)
    counts_RU = _resamples(units, _resamples_of(cells))
    return counts_RU if unit_G is None else counts_RU[:, unit_G]


def _resamples_of(cells: int) -> int:
    return max(_FEWEST_RESAMPLES, min(RESAMPLES, _MOST_CELLS // max(1, cells)))


def _error(influence_G: Floats, outcomes: Outcomes) -> float:
    """Return a standard error from the influence of each event; the events of a group depend on each other."""
    if outcomes.group is not None:
        unit_G = np.unique(_group_of_each(outcomes.group), return_inverse=True)[1]
        influence_G = np.bincount(unit_G, influence_G).astype(np.float64)
    return math.sqrt(float((influence_G**2).sum()))


@lru_cache(maxsize=2)  # those of the holdout set and of a full window, which are asked for again and again
def _resamples(units: int, count: int) -> Floats:
    rng = np.random.default_rng(_SEED)
    sampled = rng.integers(units, size=(count, units)) + np.arange(count)[:, None] * units
    counts_RU = np.bincount(sampled.ravel(), minlength=count * units).reshape(count, units).astype(np.float64)
    counts_RU.setflags(write=False)
    return counts_RU


def _group_of_each(group_G: NDArray[Any]) -> NDArray[Any]:
    """Return the groups, where events without one are each one group."""
    return np.where(group_G == 0, np.arange(1, len(group_G) + 1, dtype=group_G.dtype), group_G)


def _constant(name: str, outcomes: Outcomes, weights_G: NDArray[Any] | None) -> Outcomes:
    """Return the outcomes of the one prediction that has the best value of a measure; see `Measure.constant`."""
    label_G, rows = outcomes.label, len(outcomes)
    weights_G = np.ones(rows) if weights_G is None else weights_G.astype(np.float64)
    if outcomes.kind == "number":
        percent = float(name.removeprefix("pinball_")) if name.startswith("pinball_") else 50.0
        label_G = label_G.astype(np.float64)
        number = label_G.mean() if name == "rmse" else np.percentile(label_G, percent)
        predicted = np.full((rows, 1), number)
    elif outcomes.kind == "classes":
        _, class_G = np.unique(label_G, return_inverse=True)
        part = np.bincount(class_G, weights_G) / weights_G.sum()
        most = int(part.argmax())
        above = np.argsort(np.argsort(-part, kind="stable"))
        answer = label_G[np.flatnonzero(class_G == most)[0]]
        columns = np.full(rows, answer), np.full(rows, part[most]), np.log(part)[class_G], above[class_G]
        predicted = np.stack(columns, axis=1)
    else:
        of_one = label_G == 1 if outcomes.kind == "two-classes" else label_G
        part = weights_G @ of_one.reshape(rows, -1) / weights_G.sum()
        odds = np.log(np.maximum(part, _LEAST)) - np.log(np.maximum(1 - part, _LEAST))
        predicted = np.broadcast_to(odds, (rows, len(odds)))
    return Outcomes(outcomes.kind, predicted, label_G, outcomes.group)


# --- two classes ---


def _curve(score_G: NDArray[Any], positive_G: NDArray[Any]) -> Callable[[Floats], tuple[Floats, Floats]]:
    """Return what gives, for weights, the weight of the positives and of all at or above each of E thresholds.

    Events with the same score are above the same thresholds.
    """
    order = np.argsort(-score_G, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(score_G[order])), len(order) - 1)
    positive = positive_G[order].astype(np.float64)

    def cumulative(weights_RG: Floats) -> tuple[Floats, Floats]:
        ordered = weights_RG[:, order]
        return np.cumsum(ordered * positive, axis=1)[:, ends], np.cumsum(ordered, axis=1)[:, ends]

    return cumulative


def _average_precision(score_G: NDArray[Any], positive_G: NDArray[Any]) -> OfWeights:
    """The sum over thresholds of the precision times the rise of the recall, without interpolation."""
    curve = _curve(score_G, positive_G)

    def of(weights_RG: Floats) -> Floats:
        hits_RE, all_RE = curve(weights_RG)
        precision_RE = hits_RE / np.maximum(all_RE, _LEAST)
        return _ratio((precision_RE * np.diff(hits_RE, axis=1, prepend=0.0)).sum(axis=1), hits_RE[:, -1])

    return of


def _influence_on_average_precision(outcomes: Outcomes, weights_G: Floats) -> Floats:
    """The derivatives of average precision: an event counts in the precision at all thresholds that it is above."""
    score_G, positive_G = outcomes.predicted[:, 0], (outcomes.label == 1).astype(np.float64)
    hits, above = (each[0] for each in _curve(score_G, positive_G)(weights_G[None]))
    rises, total = np.diff(hits, prepend=0.0), hits[-1]
    # The events with the lowest scores are above the last threshold alone.
    gains, losses = (np.cumsum(each[::-1])[::-1] for each in (rises / above, hits * rises / above**2))
    thresholds = np.unique(-score_G, return_inverse=True)[1]
    precision, value = (hits / above)[thresholds], float((hits / above * rises).sum()) / total
    influence: Floats = (positive_G * (gains[thresholds] + precision - value) - losses[thresholds]) / total
    return influence


def _roc_auc(outcomes: Outcomes) -> OfWeights:
    """The probability that a positive event has a higher score than a negative one; ties count half."""
    curve = _curve(outcomes.predicted[:, 0], outcomes.label == 1)

    def of(weights_RG: Floats) -> Floats:
        hits_RE, all_RE = curve(weights_RG)
        false_RE = all_RE - hits_RE
        hits, false = (np.diff(each, axis=1, prepend=0.0) for each in (hits_RE, false_RE))
        below_RE = false_RE[:, -1:] - false_RE + false / 2
        return _ratio((hits * below_RE).sum(axis=1), hits_RE[:, -1] * false_RE[:, -1])

    return of


def delong(versions: Sequence[Outcomes]) -> Floats:
    """Return the covariance of the ROC AUC of V versions on the same events, float64 `[V, V]`; infinite where a class
    has fewer than two events.

    DeLong, DeLong & Clarke-Pearson 1988, "Comparing the areas under two or more correlated receiver operating
    characteristic curves", by midranks as in Sun & Xu 2014.
    """
    positive_G = versions[0].label == 1
    positives, negatives = int(positive_G.sum()), int((~positive_G).sum())
    if min(positives, negatives) < 2:
        return np.full((len(versions), len(versions)), np.inf)
    above, below = [], []
    for each in versions:
        score_G = each.predicted[:, 0]
        rank_G, own = _midranks(score_G), np.empty(len(score_G))
        own[positive_G], own[~positive_G] = _midranks(score_G[positive_G]), _midranks(score_G[~positive_G])
        above.append((rank_G - own)[positive_G] / negatives)
        below.append((rank_G - own)[~positive_G] / positives)
    covariance: Floats = np.cov(above).reshape(len(versions), -1) / positives
    return covariance + np.cov(below).reshape(len(versions), -1) / negatives


def _midranks(score_G: NDArray[Any]) -> Floats:
    """Return the rank of each score from 1 on, the mean of the ranks of equal ones."""
    _, inverse, counts = np.unique(score_G, return_inverse=True, return_counts=True)
    result: Floats = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return result


def _recall_at_precision(percent: float) -> Callable[[Outcomes], OfWeights]:
    """The highest recall of the thresholds with that precision at least; 0 where no threshold has it."""

    def of_outcomes(outcomes: Outcomes) -> OfWeights:
        curve = _curve(outcomes.predicted[:, 0], outcomes.label == 1)

        def of(weights_RG: Floats) -> Floats:
            hits_RE, all_RE = curve(weights_RG)
            reached_RE = hits_RE >= percent / 100 * all_RE - 1e-9
            return _ratio(np.where(reached_RE, hits_RE, 0.0).max(axis=1), hits_RE[:, -1])

        return of

    return of_outcomes


def _recall_at_budget(percent: float) -> Callable[[Outcomes], OfWeights]:
    """The recall where that part of the events with the highest scores is reported; of ties as many as fit."""

    def of_outcomes(outcomes: Outcomes) -> OfWeights:
        curve = _curve(outcomes.predicted[:, 0], outcomes.label == 1)

        def of(weights_RG: Floats) -> Floats:
            hits_RE, all_RE = curve(weights_RG)
            budget_R = percent / 100 * all_RE[:, -1]
            at_R = np.minimum((all_RE < budget_R[:, None]).sum(axis=1), all_RE.shape[1] - 1)
            rows = np.arange(len(at_R))
            hits, reported = hits_RE[rows, at_R], all_RE[rows, at_R]
            before = at_R > 0
            hits_0, reported_0 = (np.where(before, each[rows, at_R - 1], 0.0) for each in (hits_RE, all_RE))
            part = _ratio(budget_R - reported_0, reported - reported_0)
            return _ratio(hits_0 + np.nan_to_num(part) * (hits - hits_0), hits_RE[:, -1])

        return of

    return of_outcomes


def _log_losses(outcomes: Outcomes) -> Floats:
    """The log loss of each event."""
    if outcomes.kind == "classes":
        return -outcomes.predicted[:, 2].astype(np.float64)
    odds_G = outcomes.predicted[:, 0].astype(np.float64)
    result: Floats = np.logaddexp(0.0, np.where(outcomes.label == 1, -odds_G, odds_G))
    return result


def _squares(outcomes: Outcomes) -> Floats:
    """The squared error of the probability of each event."""
    result: Floats = (probability_of(outcomes.predicted[:, 0]) - (outcomes.label == 1)) ** 2
    return result


def _calibration_error(outcomes: Outcomes) -> OfWeights:
    """The mean distance of probability and frequency over bins of the probability, weighted by their events.

    Of two classes the probability is that of class 1, of more that of the most likely one.
    """
    if outcomes.kind == "classes":
        probability_G = outcomes.predicted[:, 1].astype(np.float64)
        hit_G = outcomes.predicted[:, 0] == outcomes.label
    else:
        probability_G, hit_G = probability_of(outcomes.predicted[:, 0]), outcomes.label == 1
    bin_G = np.minimum((probability_G * _BINS).astype(np.int64), _BINS - 1)
    distance_GN = (bin_G[:, None] == np.arange(_BINS)) * (hit_G - probability_G)[:, None]
    return lambda weights_RG: _ratio(np.abs(weights_RG @ distance_GN).sum(axis=1), weights_RG.sum(axis=1))


def probability_of(odds: NDArray[Any]) -> Floats:
    """Return the probability of log-odds, float64 of the same shape."""
    result: Floats = np.exp(-np.logaddexp(0.0, -odds.astype(np.float64)))
    return result


# --- classes, several labels, numbers ---


def _by_class(class_G: NDArray[Any], classes: NDArray[Any]) -> Callable[[Floats], Floats]:
    """Return what gives, for weights `[R, G]`, the weight of the events of each of `classes`, `[R, C]`."""
    order = np.argsort(class_G, kind="stable")
    begin = np.searchsorted(class_G[order], classes, side="left")
    end = np.searchsorted(class_G[order], classes, side="right")

    def of(weights_RG: Floats) -> Floats:
        total = np.zeros((len(weights_RG), len(order) + 1))
        np.cumsum(weights_RG[:, order], axis=1, out=total[:, 1:])
        return total[:, end] - total[:, begin]

    return of


def _balanced_accuracy(outcomes: Outcomes) -> OfWeights:
    """The mean over the classes of the part of their events that is predicted right."""
    classes, right_G = np.unique(outcomes.label), outcomes.predicted[:, 0] == outcomes.label
    by_class = _by_class(outcomes.label, classes)
    return lambda weights_RG: _mean_of_known(_ratio(by_class(weights_RG * right_G), by_class(weights_RG)))


def _macro_f1(outcomes: Outcomes) -> OfWeights:
    """The mean of F1 over the classes that some event has or is predicted to have."""
    predicted_G, label_G = outcomes.predicted[:, 0].astype(np.int64), outcomes.label.astype(np.int64)
    classes, right_G = np.unique(np.concatenate([predicted_G, label_G])), predicted_G == label_G
    by_label, by_predicted = _by_class(label_G, classes), _by_class(predicted_G, classes)

    def of(weights_RG: Floats) -> Floats:
        either = by_label(weights_RG) + by_predicted(weights_RG)
        return _mean_of_known(_ratio(2 * by_label(weights_RG * right_G), either))

    return of


def _top(count: float) -> Callable[[Outcomes], OfWeights]:
    """The part of the events whose label is among the `count` most likely classes; ties count as less likely."""
    return lambda outcomes: _mean((outcomes.predicted[:, 3] < count).astype(np.float64))


def _mean_average_precision(outcomes: Outcomes) -> OfWeights:
    """The mean of the average precision over the classes that some event has."""
    has = np.flatnonzero(outcomes.label.any(axis=0))
    each = [_average_precision(outcomes.predicted[:, index], outcomes.label[:, index]) for index in has.tolist()]
    if not each:
        return lambda weights_RG: np.full(len(weights_RG), np.nan)
    return lambda weights_RG: _mean_of_known(np.stack([of(weights_RG) for of in each], axis=1))


def _errors(outcomes: Outcomes) -> Floats:
    """Label less prediction."""
    result: Floats = outcomes.label.astype(np.float64) - outcomes.predicted[:, 0].astype(np.float64)
    return result


def _rmse(outcomes: Outcomes) -> OfWeights:
    mean = _mean(_errors(outcomes) ** 2)
    return lambda weights_RG: np.sqrt(mean(weights_RG))


def _pinball(percent: float) -> Callable[[Outcomes], OfWeights]:
    """The mean loss by which a quantile is learned (Koenker & Bassett 1978, "Regression quantiles")."""

    def of_outcomes(outcomes: Outcomes) -> OfWeights:
        error_G = _errors(outcomes)
        return _mean(np.maximum(percent / 100 * error_G, (percent / 100 - 1) * error_G))

    return of_outcomes


# --- ranking in groups ---


def _ndcg(count: float) -> Callable[[Outcomes], OfWeights]:
    """The mean over groups of NDCG@k, with the label as gain (Järvelin & Kekäläinen 2002, "Cumulated gain-based
    evaluation of IR techniques"); ties have the mean of their discounts. Groups of one event, or without a gain, do not
    count."""

    def of_outcomes(outcomes: Outcomes) -> OfWeights:
        first_U, unit_G, size_U = _groups(outcomes)
        score_G, gain_G = outcomes.predicted[:, 0], np.maximum(outcomes.label.astype(np.float64), 0.0)
        order, best = np.lexsort((-score_G, unit_G)), np.lexsort((-gain_G, unit_G))
        unit, score = unit_G[order], score_G[order]
        tie = np.append(0, np.cumsum((np.diff(unit) != 0) | (np.diff(score) != 0)))
        shared = np.bincount(tie, _discounts(unit, count)) / np.bincount(tie)
        gained_U = np.bincount(unit, gain_G[order] * shared[tie], len(first_U))
        ideal_U = np.bincount(unit_G[best], gain_G[best] * _discounts(unit_G[best], count), len(first_U))
        return _mean_of_groups(first_U, _ratio(gained_U, ideal_U), (size_U > 1) & (ideal_U > 0))

    return of_outcomes


def _mrr(outcomes: Outcomes) -> OfWeights:
    """The mean over groups of 1 by the rank of the first event with a positive label, the last one of ties. Groups of
    one event, or without a positive one, do not count."""
    first_U, unit_G, size_U = _groups(outcomes)
    score_G, positive_G = outcomes.predicted[:, 0].astype(np.float64), outcomes.label > 0
    best_U = np.full(len(first_U), -np.inf)
    np.maximum.at(best_U, unit_G[positive_G], score_G[positive_G])
    above_U = np.bincount(unit_G, ~positive_G & (score_G >= best_U[unit_G]), len(first_U))
    return _mean_of_groups(first_U, 1 / (1 + above_U), (size_U > 1) & np.isfinite(best_U))


def _groups(outcomes: Outcomes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the first event of each group `[U]`, the group of each event `[G]`, and how many events each has."""
    assert outcomes.group is not None
    group_G = _group_of_each(outcomes.group)
    _, first_U, unit_G, size_U = np.unique(group_G, return_index=True, return_inverse=True, return_counts=True)
    return first_U, unit_G, size_U


def _discounts(unit_G: NDArray[np.int64], count: float) -> Floats:
    """Return the discounts of events that are ordered by group, and in it by rank."""
    rank_G = np.arange(len(unit_G)) - np.searchsorted(unit_G, unit_G)
    return np.where(rank_G < count, 1 / np.log2(rank_G + 2.0), 0.0)


def _mean_of_groups(first_U: NDArray[np.int64], value_U: Floats, counts_U: NDArray[np.bool_]) -> OfWeights:
    mean, first = _mean(value_U[counts_U]), first_U[counts_U]
    return lambda weights_RG: mean(weights_RG[:, first])


def _centred(value_G: Floats, weights_G: Floats) -> Floats:
    """Return the derivatives of a mean by the weights."""
    result: Floats = (value_G - np.average(value_G, weights=weights_G)) / weights_G.sum()
    return result


def _mean(value_G: Floats) -> OfWeights:
    return lambda weights_RG: _ratio(weights_RG @ value_G, weights_RG.sum(axis=1))


def _ratio(above: NDArray[Any], below: NDArray[Any]) -> Floats:
    """Return the ratio, NaN where the denominator is not above 0."""
    result: Floats = np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
    return result


def _mean_of_known(value_RC: Floats) -> Floats:
    known_RC = ~np.isnan(value_RC)
    return _ratio(np.where(known_RC, value_RC, 0.0).sum(axis=1), known_RC.sum(axis=1).astype(np.float64))


# --- by name ---

_FIXED: Mapping[str, Callable[[Outcomes], OfWeights]] = {
    "average_precision": lambda outcomes: _average_precision(outcomes.predicted[:, 0], outcomes.label == 1),
    "roc_auc": _roc_auc,
    "log_loss": lambda outcomes: _mean(_log_losses(outcomes)),
    "brier": lambda outcomes: _mean(_squares(outcomes)),
    "ece": _calibration_error,
    "balanced_accuracy": _balanced_accuracy,
    "macro_f1": _macro_f1,
    "mean_average_precision": _mean_average_precision,
    "mae": lambda outcomes: _mean(np.abs(_errors(outcomes))),
    "rmse": _rmse,
    "mrr": _mrr,
}
_INFLUENCE: Mapping[str, Callable[[Outcomes, Floats], Floats]] = {
    "average_precision": _influence_on_average_precision,
    "log_loss": lambda outcomes, weights_G: _centred(_log_losses(outcomes), weights_G),
    "brier": lambda outcomes, weights_G: _centred(_squares(outcomes), weights_G),
    "mae": lambda outcomes, weights_G: _centred(np.abs(_errors(outcomes)), weights_G),
}
_WITH_NUMBER: Mapping[str, Callable[[float], Callable[[Outcomes], OfWeights]]] = {
    "recall_at_precision": _recall_at_precision,
    "recall_at_budget": _recall_at_budget,
    "top": _top,
    "pinball": _pinball,
    "ndcg": _ndcg,
}
_OF_KIND: Mapping[Kind, Sequence[str]] = {
    "two-classes": (
        "average_precision",
        "roc_auc",
        "log_loss",
        "brier",
        "ece",
        "recall_at_precision_90",
        "recall_at_budget_1",
    ),
    "classes": ("balanced_accuracy", "macro_f1", "log_loss", "top_5", "ece"),
    "labels": ("mean_average_precision",),
    "number": ("mae", "rmse", "pinball_90"),
}
_IN_GROUPS = ("ndcg_10", "mrr")
_LOWER = {"log_loss", "brier", "ece", "mae", "rmse", "pinball"}
_UNBOUNDED = {"log_loss", "mae", "rmse", "pinball"}
_NUMBERED = re.compile(r"(?P<stem>[a-z_]+)_(?P<number>\d+(\.\d+)?)")


def measures_of(kind: Kind, *, groups: bool = False) -> tuple[str, ...]:
    """Return the names of the measures that are computed for this kind of prediction unless others are named."""
    ranked = groups and kind in {"two-classes", "number"}
    return (*_OF_KIND[kind], *(_IN_GROUPS if ranked else ()))


def measure_of(name: str, kind: Kind, *, groups: bool = False, others: Iterable[str] = ()) -> Measure:
    """Return the measure with this name for this kind of prediction; `others` are known too.

    The number at the end of a name is of the user's choice: percent of precision, of the events, or a quantile; or how
    many classes or events count.

    Raises:
        ValueError: there is no such measure, or it is of another kind.
    """
    known = {_stem(each): each for each in measures_of(kind, groups=groups)}
    stem = _stem(name)
    if stem not in known or (name != stem) != (stem in _WITH_NUMBER):
        raise ValueError(f'"{name}" is no measure of this task, which has {", ".join([*known.values(), *others])}')
    if stem in _FIXED:
        of = _FIXED[stem]
    else:
        number = float(name[len(stem) + 1 :])
        if not 0 < number < (math.inf if stem in {"top", "ndcg"} else 100):
            raise ValueError(f'the number of the measure "{name}" is not between 0 and 100')
        of = _WITH_NUMBER[stem](number)
    influence = _INFLUENCE.get(stem)
    return Measure(name, stem not in _LOWER, stem in _UNBOUNDED, of, influence, known[stem] in _IN_GROUPS)


def _stem(name: str) -> str:
    found = _NUMBERED.fullmatch(name)
    return found["stem"] if found and found["stem"] in _WITH_NUMBER else name


# --- of a stream ---


def _finite(outcomes: Outcomes) -> Outcomes:
    """Return those of which all values are finite."""
    finite_B = np.isfinite(outcomes.predicted).all(axis=1)
    return outcomes if finite_B.all() else outcomes.where(finite_B)


class Window:
    """The outcomes of the newest events, exact. Used by one thread."""

    def __init__(self, kind: Kind, columns: int, label: tuple[int, ...], rows: int) -> None:
        """`columns`: K. `label`: shape of an event's label. `rows`: how many events are kept."""
        self._kind, self._rows = kind, rows
        self._predicted = np.zeros((rows, columns), np.float32)
        dtype = {"number": np.float32, "labels": np.bool_}.get(kind, np.int64)
        self._label: NDArray[Any] = np.zeros((rows, *label), dtype)
        self._group = np.zeros(rows, np.uint64)
        self._next = 0
        """Events so far."""

    def __len__(self) -> int:
        return min(self._next, self._rows)

    def add(self, new: Outcomes) -> None:
        """Add events in the order in which they came; those with a value that is not finite are left out."""
        new = _finite(new).where(slice(-self._rows, None))
        at = (self._next + np.arange(len(new))) % self._rows
        self._predicted[at], self._label[at] = new.predicted, new.label
        self._group[at] = 0 if new.group is None else new.group
        self._next += len(new)

    @property
    def outcomes(self) -> Outcomes:
        """The events that are kept, the oldest first."""
        first = self._next % self._rows if self._next > self._rows else 0
        in_order = (np.roll(each[: len(self)], -first, axis=0) for each in (self._predicted, self._label, self._group))
        predicted, label, group = in_order
        return Outcomes(self._kind, predicted, label, group if group.any() else None)


class FadedCounts:
    """Counts of two classes by their log-odds, in bins, where an event counts half after `half_life` more.

    Takes the same memory for any stream. What follows from it is within 0.001 of the exact value. Events that come in
    one call fade as if they had come one by one. Used by one thread.
    """

    def __init__(self, half_life: float) -> None:
        """`half_life`: in events; infinite for a count of all."""
        self._fading = 0.5 ** (1 / half_life)
        self._weights = np.ones(1)
        """Of events by how many came later, as far as they were needed."""
        self._counts = np.zeros((2, _ODDS_BINS))
        self._squares = 0.0
        """The sum of the squared weights of all events."""

    def add(self, new: Outcomes) -> None:
        """Add events in the order in which they came; those with a value that is not finite are left out."""
        if not (count := len(new := _finite(new))):
            return
        odds_B = np.clip(new.predicted[:, 0].astype(np.float64), -_MOST_ODDS, _MOST_ODDS)
        bin_B = np.minimum(((odds_B + _MOST_ODDS) / _BIN_WIDTH).astype(np.int64), _ODDS_BINS - 1)
        if len(self._weights) < count:
            self._weights = self._fading ** np.arange(count)
        weight_B = self._weights[count - 1 :: -1]
        at = bin_B + _ODDS_BINS * (new.label == 1)
        faded = self._fading**count
        self._counts *= faded
        self._counts += np.bincount(at, weight_B, 2 * _ODDS_BINS).reshape(2, -1)
        self._squares = self._squares * faded**2 + float((weight_B**2).sum())

    def estimate(self, measure: Measure) -> Estimate | None:
        """Return a measure of two classes with its 95 % interval; None where it is not defined."""
        label, bins = np.nonzero(self._counts)
        if not len(label):
            return None
        counts = self._counts[label, bins]
        odds = (bins + 0.5) * _BIN_WIDTH - _MOST_ODDS
        certainty = max(1.0, float(counts.sum()) / self._squares)
        return measure.estimate_of_counts(Outcomes("two-classes", odds[:, None], label), counts, certainty)

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        label, bins = np.nonzero(self._counts)
        counts = self._counts[label, bins].tolist()
        return {"at": [label.tolist(), bins.tolist()], "counts": counts, "squares": self._squares}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._counts[:] = 0.0
        label, bins = state["at"]
        self._counts[label, bins] = state["counts"]
        self._squares = state["squares"]
