"""Applies the rule of a version's answers: in serving, in exports, and where versions are scored.

Legend: B events, C classes, K points of a calibration.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.learner.errors import ModelError
from anabranch.learner.model.answer_rule import AnswerRule

LEAST = math.log(torch.finfo(torch.float32).tiny)
"""The least log-probability: so that logits say the same as the float32 probabilities that serving has."""


class Answers(nn.Module):
    """A rule with its numbers as buffers. Immutable but for its device."""

    def __init__(self, rule: AnswerRule, classes: int | None) -> None:
        """Take the rule, and the number of classes that one label has; None: it has none.

        Raises:
            ModelError: the rule is not one of so many classes.
        """
        super().__init__()
        if classes is None or (misfit := rule.misfit(classes)) is not None:
            raise ModelError(misfit if classes else "it has a rule of its answers, and the task has no classes")
        calibration = rule.calibration
        self._is_affine = bool(calibration.bias) or calibration.scale != 1
        self._is_piecewise = bool(calibration.odds)
        self._odds = rule.odds
        self.scale: Tensor
        self.bias: Tensor
        self.costs: Tensor
        self.register_buffer("scale", torch.tensor(calibration.scale))
        self.register_buffer("bias", torch.tensor(calibration.bias or [0.0] * classes))
        self.register_buffer("costs", torch.tensor(rule.costs))
        self._register_points(calibration.odds, calibration.calibrated, calibration.scale)

    def _register_points(self, odds: list[float], calibrated: list[float], slope: float) -> None:
        """Register the points, and for each part of the line one of its points and its slope, `[K + 1]`."""
        self.points: Tensor
        self.anchors: Tensor
        self.values: Tensor
        self.slopes: Tensor
        x, y = torch.tensor(odds, dtype=torch.float64), torch.tensor(calibrated, dtype=torch.float64)
        ends = torch.tensor([slope], dtype=torch.float64)
        self.register_buffer("points", x.float())
        self.register_buffer("anchors", torch.cat([x[:1], x]).float())
        self.register_buffer("values", torch.cat([y[:1], y]).float())
        self.register_buffer("slopes", torch.cat([ends, y.diff() / x.diff(), ends]).float())

    def forward(self, output_BC: Tensor) -> Tensor:
        """Return calibrated log-probabilities, float32 `[B, C]`, of logits or log-probabilities; NaN stays."""
        log_BC = output_BC.float().log_softmax(dim=1).clamp_min(LEAST)
        if self._is_piecewise:
            odds_B = log_BC[:, 1] - log_BC[:, 0]
            part_B = (odds_B[:, None] >= self.points).sum(dim=1)
            odds_B = self.values[part_B] + self.slopes[part_B] * (odds_B - self.anchors[part_B])
            log_BC = torch.stack([torch.zeros_like(odds_B), odds_B], dim=1)
        elif self._is_affine:
            log_BC = self.scale * log_BC + self.bias
        return log_BC.log_softmax(dim=1)

    def answer(self, predictions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the predictions of `Classification` with its probabilities calibrated, and the decided class."""
        log_BC = self(predictions["probabilities"].clamp_min(torch.finfo(torch.float32).tiny).log())
        changes = self._is_piecewise or self._is_affine
        probability_BC = log_BC.exp() if changes else predictions["probabilities"]
        if self._odds is not None:
            prediction_B = (log_BC[:, 1] - log_BC[:, 0] >= self._odds).long()
        elif self.costs.numel():
            prediction_B = (probability_BC @ self.costs).argmin(dim=1)
        else:
            prediction_B = log_BC.argmax(dim=1)
        return {**predictions, "prediction": prediction_B, "probabilities": probability_BC}

    def answer_arrays(self, predictions: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Do the same with arrays on the host, on which other predictions stay as they are."""
        with torch.inference_mode():
            given = {name: torch.from_numpy(predictions[name]) for name in ("prediction", "probabilities")}
            return {**predictions, **{name: value.numpy() for name, value in self.answer(given).items()}}
