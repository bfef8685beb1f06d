"""Test-then-train: scores of new events, predicted before training on them.

Each step's predictions are those of a model that has not seen the events (Gama et al. 2013, "On evaluating stream
learning algorithms").
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from learner.evaluation.adwin import Adwin
from learner.model.task import Task


@dataclass(frozen=True)
class Scored:
    """New events of a step before training on them: how many, and the sums of their scores and losses."""

    rows: int
    score: float
    loss: float

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(self.rows + other.rows, self.score + other.score, self.loss + other.loss)


NOT_SCORED = Scored(0, 0.0, 0.0)
"""No events."""


def scored(task: Task, outputs_B: NDArray[np.float32], label_B: NDArray[np.generic]) -> Scored:
    """Score predictions that were made when B events came by the labels that came later.

    Args:
        task: the meaning of the outputs.
        outputs_B: of the model, float32 `[B, ...]`.
        label_B: as in the schema's column.
    """
    output, label = torch.from_numpy(outputs_B), torch.from_numpy(label_B)
    with torch.no_grad():
        score, loss = task.score(output, label).sum(), task.loss(output, label).sum()
    return Scored(len(label_B), score.item(), loss.item())


class Prequential:
    """Mean score and loss, over windows without a change and since the beginning of the stream."""

    def __init__(self, *, bounded: bool = True) -> None:
        self._score = Adwin(bounded=bounded)
        self._loss = Adwin(bounded=False)
        self._rows, self._scored, self._total, self._total_loss = 0, 0, 0.0, 0.0

    def add(self, scored: Scored) -> None:
        """Add a step's new events; a score that is not finite is ignored."""
        if math.isfinite(scored.score):
            self._score.add(scored.score, scored.rows)
            self._scored += scored.rows
            self._total += self._score.added
        # A strategy may leave out events that make the task's own loss of a step infinite.
        loss = scored.loss if math.isfinite(scored.loss) else (self._loss.mean or 0.0) * scored.rows
        self._loss.add(loss, scored.rows)
        self._rows += scored.rows
        self._total_loss += self._loss.added

    @property
    def mean(self) -> float | None:
        """Mean score over the window, or None before the first event."""
        return self._score.mean

    @property
    def loss(self) -> float | None:
        """Mean loss over its own window, or None before the first event."""
        return self._loss.mean

    @property
    def window(self) -> int:
        """Events in the score's window."""
        return int(self._score.weight)

    @property
    def overall(self) -> float | None:
        """Mean score since the beginning of the stream, restarts included; None before the first event."""
        return self._total / self._scored if self._scored else None

    @property
    def overall_loss(self) -> float | None:
        """Mean loss since the beginning of the stream; None before the first event."""
        return self._total_loss / self._rows if self._rows else None

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "score": self._score.state(),
            "loss": self._loss.state(),
            "rows": self._rows,
            "scored": self._scored,
            "total": self._total,
            "total_loss": self._total_loss,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the windows of a checkpoint."""
        self._score.restore(state["score"])
        self._loss.restore(state["loss"])
        self._rows, self._total, self._total_loss = state["rows"], state["total"], state["total_loss"]
        self._scored = state["scored"]
