"""Learns how a version answers: from the newest events, as the model predicted them before it was trained on them.

Those are never held out, so that the gate judges calibrated answers on events that the calibration has not seen.
They have the natural share of each class, which the holdout set and class-balanced replay have not.

Legend: N events, C classes, P parameters, K points.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.learner.evaluate.measures import Floats, Outcomes, measure_of
from anabranch.learner.evaluate.outcomes import Predictions, log_probabilities
from anabranch.learner.model.answer_rule import AnswerRule, Calibration, CalibrationName
from anabranch.learner.model.answers import Answers
from anabranch.learner.settings.model import TaskSettings

FEWEST = 200
"""Events below which nothing is learned."""
_LEAST_OF_CLASS = 5
"""Events that two classes need at least."""
_PRIOR = 0.01
"""Precision of the prior of each parameter around that of no change: a class without an event keeps its bias."""
_LEAST_SCALE = 0.01
_STEPS, _HALVINGS, _CLOSE = 50, 30, 1e-9
_BINS = 50
"""Most points of an isotonic calibration."""
_CLOSEST = 1e-4
"""Log-odds between two points."""
_ROUNDING = 1e-13
"""Between values that are equal; shares of 10,000 events differ by 1e-8 at least."""


Recent = Sequence[Predictions]
"""How the newest events were predicted before training on them."""


class AnswerLearner:
    """Learns how each version of a learner answers. Used by the publisher's thread; any thread may read attributes."""

    def __init__(self, settings: TaskSettings | None = None, classes: int | None = None) -> None:
        """Take `[task]`, and how many classes one label has. Without settings versions answer as the model does."""
        self._classes = classes
        self._settings = None if settings is None or settings == TaskSettings() else settings
        self.rule: AnswerRule | None = None
        """From which the newest version answers."""

    @property
    def answers(self) -> Answers | None:
        """What calibrates the outputs that the newest version answers; None: nothing does."""
        rule = self.rule
        if self._settings is None or rule is None or not rule.calibration.rows:
            return None
        return Answers(rule, self._classes)

    def learn(self, recent: Recent) -> AnswerRule | None:
        """Return from which the next version answers; None where the settings leave that to the model."""
        if self._settings is None:
            self.rule = None
        else:
            self.rule = learned_rule(self._settings, *log_probabilities(recent), self.rule)
        return self.rule


def learned_rule(
    settings: TaskSettings, log_NC: NDArray[np.floating], label_N: NDArray[np.integer], before: AnswerRule | None = None
) -> AnswerRule:
    """Return how a version answers.

    Args:
        settings: `[task]`.
        log_NC: log-probabilities of N events `[N, C]`, of the model before it was trained on them; all are finite.
        label_N: their classes `[N]`.
        before: of the version before; what cannot be learned of too few events, as after a restart, is taken from it.
    """
    few, why = len(label_N) < FEWEST, ""
    if few:
        why = f"only {len(label_N):,} new events with a label are known, of {FEWEST} needed"
    elif np.count_nonzero(np.bincount(label_N) >= _LEAST_OF_CLASS) < 2:
        why = f"fewer than two classes have {_LEAST_OF_CLASS} of the newest {len(label_N):,} events"
    calibration = Calibration(settings.calibrate, why=why)
    if settings.calibrate != "none" and not why:
        calibration = _with_figures(_fit(settings.calibrate, log_NC, label_N), log_NC, label_N)
    elif before is not None and before.calibration.kind == settings.calibrate:
        calibration = before.calibration
    odds = None if settings.threshold is None else math.log(settings.threshold / (1 - settings.threshold))
    if (budget := settings.alert_budget) is not None:
        if not few:
            odds = threshold_of_budget(_odds(calibrated(calibration, log_NC)), budget)
        elif before is not None and before.alert_budget == budget:
            odds = before.odds
    return AnswerRule(calibration, settings.cost_matrix, odds, budget)


def calibrated(calibration: Calibration, log_NC: NDArray[np.floating]) -> Floats:
    """Return calibrated log-probabilities, float64 `[N, C]`, as `Answers` does in torch."""
    result: Floats = log_NC.astype(np.float64)
    if calibration.odds:
        odds_N, x, y = _odds(result), np.array(calibration.odds), np.array(calibration.calibrated)
        beyond_N = np.minimum(odds_N - x[0], 0) + np.maximum(odds_N - x[-1], 0)
        odds_N = np.interp(odds_N, x, y) + calibration.scale * beyond_N
        result = np.stack([np.zeros_like(odds_N), odds_N], axis=1)
    elif calibration.rows:
        result = calibration.scale * result + np.array(calibration.bias or [0.0])
    return _log_softmax(result)


def threshold_of_budget(odds_N: Floats, budget: float) -> float:
    """Return log-odds at or above which at most that fraction of the events is, and as many as that allows."""
    ordered = np.sort(odds_N.astype(np.float32))
    below = ordered[len(ordered) - min(int(budget * len(ordered)), len(ordered) - 1) - 1]
    above = ordered[np.searchsorted(ordered, below, side="right") :]
    # Halfway to the next one, so that rounding in torch makes no difference.
    halfway = np.float32(below + (above[0] - below if len(above) else 1.0) / 2)
    return float(max(halfway, np.nextafter(below, np.float32(np.inf))))


def _fit(kind: CalibrationName, log_NC: NDArray[np.floating], label_N: NDArray[np.integer]) -> Calibration:
    logs_NC: Floats = log_NC.astype(np.float64)
    rows = len(label_N)
    if kind == "temperature":
        scale, _ = _affine(logs_NC, label_N, biased=False)
        return Calibration(kind, rows, scale=scale)
    scale, bias = _affine(logs_NC, label_N, biased=True)
    if kind == "platt":
        return Calibration(kind, rows, scale=scale, bias=bias)
    points, values = _isotonic(_odds(logs_NC), label_N == 1)
    return Calibration(kind, rows, scale=scale, odds=points.tolist(), calibrated=values.tolist())


def _affine(log_NC: Floats, label_N: NDArray[np.integer], *, biased: bool) -> tuple[float, list[float]]:
    """Return the scale and biases with the least log loss, by Newton's method: the loss is convex in them.

    A scale alone is temperature scaling (Guo et al. 2017, "On calibration of modern neural networks"); of two classes
    both are Platt scaling (Platt 1999, "Probabilistic outputs for support vector machines"), of more bias-corrected
    temperature scaling (Alexandari et al. 2020, "Maximum likelihood with bias-corrected calibration is hard-to-beat at
    label shift adaptation").
    """
    classes = log_NC.shape[1]
    start_P = np.append(1.0, np.zeros(classes if biased else 0))
    found_P = _least_loss(log_NC, label_N, start_P, np.ones(len(start_P), np.bool_))
    if found_P[0] < _LEAST_SCALE:  # the model ranks no better than chance: its order is kept all the same
        free_P = np.arange(len(start_P)) > 0
        start_P[0] = _LEAST_SCALE
        found_P = _least_loss(log_NC, label_N, start_P, free_P)
    return float(found_P[0]), found_P[1:].tolist()


def _least_loss(log_NC: Floats, label_N: NDArray[np.integer], start_P: Floats, free_P: NDArray[np.bool_]) -> Floats:
    has_NC = np.eye(log_NC.shape[1])[label_N]
    neutral_P = np.append(1.0, np.zeros(len(start_P) - 1))
    now_P = start_P

    def outputs(at_P: Floats) -> Floats:
        return _log_softmax(at_P[0] * log_NC + (at_P[1:] if len(at_P) > 1 else 0.0))

    def loss(at_P: Floats) -> float:
        prior = _PRIOR / 2 * float(((at_P - neutral_P) ** 2).sum())
        return prior - float(outputs(at_P)[np.arange(len(label_N)), label_N].sum())

    best = loss(now_P)
    for _ in range(_STEPS if free_P.any() else 0):
        probability_NC = np.exp(outputs(now_P))
        excess_NC = probability_NC - has_NC
        centred_NC = log_NC - (probability_NC * log_NC).sum(axis=1, keepdims=True)
        gradient_P = np.append((excess_NC * log_NC).sum(), excess_NC.sum(axis=0))[: len(now_P)]
        hessian_PP = np.zeros((len(now_P), len(now_P)))
        hessian_PP[0, 0] = (probability_NC * centred_NC * log_NC).sum()
        if len(now_P) > 1:
            hessian_PP[0, 1:] = hessian_PP[1:, 0] = (probability_NC * centred_NC).sum(axis=0)
            hessian_PP[1:, 1:] = np.diag(probability_NC.sum(axis=0)) - probability_NC.T @ probability_NC
        gradient_P = (gradient_P + _PRIOR * (now_P - neutral_P))[free_P]
        hessian_PP = (hessian_PP + _PRIOR * np.eye(len(now_P)))[free_P][:, free_P]
        step_P = np.zeros(len(now_P))
        step_P[free_P] = np.linalg.solve(hessian_PP, gradient_P)
        for _ in range(_HALVINGS):
            if (found := loss(now_P - step_P)) <= best:
                break
            step_P /= 2
        else:
            return now_P
        now_P = now_P - step_P
        if best - found < _CLOSE * len(label_N):
            return now_P
        best = found
    return now_P


def pooled(value_K: Floats, weight_K: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the rising values with the least weighted squared distance from those, `[K]`, and the block of each.

    Pool adjacent violators (Ayer et al. 1955, "An empirical distribution function for sampling with incomplete
    information"); equal values are one block.
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(value_K.tolist(), weight_K.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] >= mean - _ROUNDING:
            other, other_weight, other_count = blocks.pop()
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total, count = total + other_weight, count + other_count
        blocks.append((mean, total, count))
    block_K = np.repeat(np.arange(len(blocks)), [count for _, _, count in blocks])
    return np.array([mean for mean, _, _ in blocks])[block_K], block_K


def _isotonic(odds_N: Floats, positive_N: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return rising log-odds and the calibrated ones there, both `[K]`.

    Isotonic regression (Zadrozny & Elkan 2002, "Transforming classifier scores into accurate multiclass probability
    estimates") of equally large parts of the events, so that there are at most `_BINS` points. Each point is the middle
    of what the regression makes equal, and between two points the line rises: events keep their order.
    """
    begins = np.unique(np.sort(odds_N)[:: -(-len(odds_N) // _BINS)])  # equal odds are in one part
    part_N = np.searchsorted(begins, odds_N, side="right") - 1
    size_K = np.bincount(part_N).astype(np.float64)
    middle_K = np.bincount(part_N, odds_N) / size_K
    hits_K = np.bincount(part_N, positive_N)
    _, block_K = pooled(hits_K / size_K, size_K)
    near_K = np.append(0, np.cumsum((np.diff(block_K) > 0) & (np.diff(middle_K) > _CLOSEST)))
    size, hits = np.bincount(near_K, size_K), np.bincount(near_K, hits_K)
    middle, share = np.bincount(near_K, middle_K * size_K) / size, hits / size
    # Only the first and the last can be 0 or 1, which would be infinite log-odds.
    after, before = (share[1], share[-2]) if len(share) > 1 else (1.0, 0.0)
    share[0] = max(share[0], min(0.5 / (size[0] + 1), after / 2))
    share[-1] = min(share[-1], max(1 - 0.5 / (size[-1] + 1), (1 + before) / 2))
    return middle, np.log(share) - np.log1p(-share)


def _with_figures(calibration: Calibration, log_NC: NDArray[np.floating], label_N: NDArray[np.integer]) -> Calibration:
    both: Sequence[tuple[str, Floats]] = (
        ("_before", log_NC.astype(np.float64)),
        ("", calibrated(calibration, log_NC)),
    )
    figures = {f"{name}{when}": value for when, logs in both for name, value in _figures(logs, label_N).items()}
    return msgspec.structs.replace(calibration, figures=figures)


def _figures(log_NC: Floats, label_N: NDArray[np.integer]) -> dict[str, float]:
    classes, rows = log_NC.shape[1], np.arange(len(label_N))
    if classes == 2:
        outcomes = Outcomes("two-classes", _odds(log_NC)[:, None], label_N)
    else:
        best_N = log_NC.argmax(axis=1)
        columns = best_N, np.exp(log_NC[rows, best_N]), log_NC[rows, label_N], np.zeros(len(rows))
        outcomes = Outcomes("classes", np.stack(columns, axis=1), label_N)
    return {name: measure_of(name, outcomes.kind).value(outcomes) for name in ("log_loss", "ece")}


def _odds(log_NC: NDArray[np.floating]) -> Floats:
    result: Floats = log_NC[:, 1].astype(np.float64) - log_NC[:, 0]
    return result


def _log_softmax(log_NC: Floats) -> Floats:
    shifted_NC = log_NC - log_NC.max(axis=1, keepdims=True)
    result: Floats = shifted_NC - np.log(np.exp(shifted_NC).sum(axis=1, keepdims=True))
    return result
