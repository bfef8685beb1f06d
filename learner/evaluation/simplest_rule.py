"""The rule that a model has to beat: always the most frequent class so far, or for regression the mean so far.

It is scored as the model is, on each event before that is counted. With 0.6 % of fraud it is right 99.4 % of the time:
an accuracy says nothing without it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.evaluation.adwin import Adwin
from learner.evaluation.winsorizing import Winsorizer, winsorized


class SimplestRule:
    """Of labels that are one class or one number; without any score for others. Used by one thread."""

    def __init__(self, *, bounded: bool) -> None:
        """`bounded`: whether labels are classes."""
        self._classes = bounded
        self._window = Adwin(bounded=bounded)
        self._counts = np.zeros(0, np.int64)
        self._guess = 0
        """The class with the most events."""
        self._winsorizer = Winsorizer()
        self._mean = 0.0
        self._seen = 0
        self._rows, self._total = 0, 0.0

    def add(self, label_B: NDArray[Any]) -> None:
        """Score the rule on B new labels, and count them."""
        is_class = label_B.dtype.kind in "iu"
        if label_B.ndim != 1 or not len(label_B) or is_class != self._classes:
            return
        score = self._score_class(label_B) if is_class else self._score_number(label_B)
        if self._seen:
            self._window.add(score, len(label_B))
            self._rows += len(label_B)
            self._total += self._window.added
        self._seen += len(label_B)

    def _score_class(self, label_B: NDArray[Any]) -> float:
        right = float(np.count_nonzero(label_B == self._guess))
        if (most := int(label_B.max())) >= len(self._counts):
            self._counts = np.append(self._counts, np.zeros(most + 1 - len(self._counts), np.int64))
        np.add.at(self._counts, label_B, 1)
        candidates = np.append(label_B, self._guess)
        self._guess = int(candidates[np.argmax(self._counts[candidates])])
        return right

    def _score_number(self, label_B: NDArray[Any]) -> float:
        error = float(np.abs(label_B.astype(np.float64) - self._mean).sum())
        mean = self._winsorizer.add(float(label_B.mean(dtype=np.float64)))
        self._mean += (mean - self._mean) * len(label_B) / (self._seen + len(label_B))
        return -error

    @property
    def windows(self) -> dict[str, float]:
        """Its mean score on the newest events, and on all; empty before there is one."""
        if self._window.mean is None:
            return {}
        return {"now": self._window.mean, "overall": self._total / self._rows}

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        there = np.flatnonzero(self._counts)
        return {
            "window": self._window.state(),
            "counts": [there.tolist(), self._counts[there].tolist()],
            "guess": self._guess,
            "recent": self._winsorizer.state(),
            "mean": self._mean,
            "seen": self._seen,
            "rows": self._rows,
            "total": self._total,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._window.restore(state["window"])
        there, counts = state["counts"]
        self._counts = np.zeros(max(there, default=-1) + 1, np.int64)
        self._counts[there] = counts
        self._winsorizer.restore(state["recent"])
        self._guess, self._mean, self._seen = state["guess"], state["mean"], state["seen"]
        self._rows, self._total = state["rows"], state["total"]


def score_of_constant(label_G: NDArray[Any]) -> float | None:
    """Return the mean score of the one answer that fits G labels best; None where they are no classes nor numbers."""
    if label_G.ndim != 1 or not len(label_G):
        return None
    if label_G.dtype.kind in "iu":
        return float(np.unique(label_G, return_counts=True)[1].max()) / len(label_G)
    label = label_G.astype(np.float64)
    return -float(winsorized(np.abs(label - np.median(label))).mean())
