"""Measures forgetting: of versions by their best scores on the holdout set, and of a step by scores of old events, the
input of `replay_ratio = "auto"`.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from anabranch.learner.evaluate.scoring import Evaluation

_BETTER = 0.02
"""A score is a new best, which resets the lowest, only when it is better by this much; less is noise. For errors, whose
scores are below 0, relative to the best."""
_SMOOTHED = 20
"""Versions over which the score of a class is averaged: the best of thousands of noisy ones is noise."""
_NEAR_ROWS = 500
"""Newest events of the near future that count."""


class Peak(msgspec.Struct, frozen=True, array_like=True):
    """The best score, up to noise, and the lowest score since."""

    best: float
    lowest: float

    def followed_by(self, score: float) -> "Peak":
        """Return the peak after one more score.

        The best follows in whole steps: one that crept up would never be surpassed by a model that learns slowly.
        """
        noise = _BETTER * (abs(self.best) if self.best < 0 else 1.0)
        if score > self.best + noise:
            return Peak(score, score)
        return Peak(self.best, min(self.lowest, score))


class ForgettingState(msgspec.Struct, frozen=True):
    """Immutable, so that one thread may follow the versions while others read; each step returns the next one.

    Attributes:
        old: of the window `old`; its lowest since the best shows the stability gap (De Lange et al. 2023, "Continual
            evaluation for lifelong learning: identifying the stability gap"), which the end of a task hides.
        classes: best score ever of each class, averaged over some versions; of `old` where there are no classes.
        smooth: of each class how many versions were averaged, and the average.
        forgetting: mean over the classes of their best ever less their score now (Chaudhry et al. 2018, "Riemannian
            walk for incremental learning"); None before the first version.
        near: how many events of the near future were scored at a time, and the sum of their scores.
    """

    old: Peak | None = None
    classes: Mapping[str, float] = {}
    smooth: Mapping[str, tuple[int, float]] = {}
    forgetting: float | None = None
    near: tuple[tuple[int, float], ...] = ()

    def followed_by(self, evaluation: Evaluation) -> "ForgettingState":
        """Return the state after a version that was scored."""
        if "old" not in evaluation.windows:
            return self
        score = evaluation.windows["old"]
        now = evaluation.classes or {"old": score}
        smooth = {**self.smooth, **{name: _averaged(self.smooth.get(name), value) for name, value in now.items()}}
        best = {**self.classes, **{name: max(self.classes.get(name, -math.inf), smooth[name][1]) for name in now}}
        return replace(
            self,
            old=Peak(score, score) if self.old is None else self.old.followed_by(score),
            classes=best,
            smooth=smooth,
            forgetting=sum(best[name] - value for name, value in now.items()) / len(now),
        )

    def with_near(self, rows: int, score: float) -> "ForgettingState":
        """Return the state after events of the near future, scored by a version from before them."""
        near = (*self.near, (rows, score))
        while sum(count for count, _ in near[1:]) >= _NEAR_ROWS:
            near = near[1:]
        return replace(self, near=near)

    @property
    def windows(self) -> dict[str, float]:
        """`near_future` and `old_lowest`, as far as they are known."""
        windows: dict[str, float] = {}
        if self.near:
            windows["near_future"] = sum(score for _, score in self.near) / sum(rows for rows, _ in self.near)
        if self.old is not None:
            windows["old_lowest"] = self.old.lowest
        return windows

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state


def _averaged(before: tuple[int, float] | None, score: float) -> tuple[int, float]:
    """Return an average after one more score; the first `_SMOOTHED` scores have equal weight."""
    count, mean = before or (0, 0.0)
    count = min(count + 1, _SMOOTHED)
    return count, mean + (score - mean) / count


def retention_of(state: Mapping[str, Any]) -> ForgettingState:
    """Restore the state of a checkpoint."""
    return msgspec.convert(state, ForgettingState)
