"""The format of what a version does to its probabilities before they are answered, and how it decides a class.

Of a model of one class out of C. Imports no torch: `answers.py` applies a rule, `evaluate/calibration.py` learns it.
"""

import itertools
import math
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:
    from anabranch.learner.model.answers import Answers

_LONGEST = msgspec.Meta(max_length=4096)
Numbers = Annotated[list[float], _LONGEST]
CalibrationName = Literal["none", "temperature", "platt", "isotonic"]


class Calibration(msgspec.Struct, frozen=True):
    """A monotone change of log-probabilities; without `rows` it changes nothing."""

    kind: CalibrationName = "none"
    """What the settings ask for."""
    rows: int = 0
    """Newest events that it was learned on, before training on them; 0: it is not learned."""
    why: str = ""
    """Why it is not learned; empty where it is."""
    scale: float = 1.0
    """Log-probabilities are multiplied by it, which is the inverse of a temperature."""
    bias: Numbers = []
    """Added to those of each class; none: nothing is."""
    odds: Numbers = []
    """Of two classes: rising log-odds of class 1, between which calibrated ones are interpolated linearly. Beyond the
    first and the last, they follow with the slope of `scale`. None: there is no interpolation."""
    calibrated: Numbers = []
    """The calibrated log-odds there, which rise too."""
    figures: dict[str, float] = {}
    """Log loss and ECE on these events, without and with it; it was learned on them, so that others have more."""


class AnswerRule(msgspec.Struct, frozen=True):
    """From which probabilities a version answers, and which class it decides for."""

    calibration: Calibration = Calibration()
    costs: Annotated[list[Numbers], _LONGEST] = []
    """`costs[label][decision]`: the class with the least expected cost is decided. None: there are no costs."""
    odds: float | None = None
    """Of two classes: the log-odds from which class 1 is decided; None: no threshold."""
    alert_budget: float | None = None
    """The fraction of the events above `odds` when it was learned; None: it is not learned."""

    @property
    def changes(self) -> bool:
        """Whether answers are others than those of the model alone."""
        return bool(self.calibration.rows or self.costs or self.odds is not None)

    def applied(self, classes: int | None) -> "Answers | None":
        """Return what applies it to predictions, None where it changes nothing.

        Raises:
            ModelError: it is not one of so many classes.
        """
        from anabranch.learner.model.answers import Answers

        return Answers(self, classes) if self.changes else None

    @property
    def facts(self) -> dict[str, str]:
        """What replies say of it."""
        facts: dict[str, str] = {"calibration": self.calibration.kind} if self.calibration.rows else {}
        return facts if self.odds is None else {**facts, "threshold": f"{probability_of(self.odds):.6g}"}

    @property
    def sentence(self) -> str:
        """What it does, for people."""
        calibration = self.calibration
        if calibration.rows:
            said = f"probabilities calibrated by {calibration.kind} on {calibration.rows:,} events"
        elif calibration.kind != "none":
            said = f"probabilities not calibrated: {calibration.why}"
        else:
            said = "probabilities of the model"
        if self.costs:
            return f"{said}; the class of the least expected cost"
        if self.odds is None:
            return f"{said}; the most likely class" + ("" if self.alert_budget is None else ", for too few events")
        budget = "" if self.alert_budget is None else f", for {self.alert_budget:.3g} of the events"
        return f"{said}; class 1 from {probability_of(self.odds):.4g} on{budget}"

    def misfit(self, classes: int) -> str | None:
        """Return why it is not of a model of that many classes, as one sentence; None where it is."""
        each = self.calibration
        two = bool(each.odds) or self.odds is not None
        rising = all(a < b for line in (each.odds, each.calibrated) for a, b in itertools.pairwise(line))
        fits = len(each.bias) in (0, classes) and (classes == 2 or not two) and len(each.odds) == len(each.calibrated)
        square = not self.costs or [len(row) for row in self.costs] == [classes] * classes
        if fits and rising and square and each.scale > 0:
            return None
        return f"the rule of its answers is not one of {classes} classes"


def probability_of(odds: float) -> float:
    """Return the probability of log-odds."""
    return 1 / (1 + math.exp(-odds)) if odds >= 0 else math.exp(odds) / (1 + math.exp(odds))
