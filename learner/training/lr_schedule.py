"""Learning-rate schedule for a stream without an end: warm-up, then constant, and a new warm-up on drift."""

from collections.abc import Sequence
from typing import Any

from learner.config import ScheduleSettings


class Schedule:
    """The factor for the configured learning rate. It depends on steps and drifts alone, not on time."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self._since = 0
        self._rates: list[float] | None = None
        self._factor = 1.0
        self.scale = 1.0
        """A further factor, such as for some steps after a drift; not kept in a checkpoint."""

    def rate(self, step: int) -> float:
        """Return the factor for a step; the first step is 0.

        A warm-up rises evenly, and ends with the factor 1 at its last step.
        """
        warm = self._settings.warmup_steps
        return self.scale * (min(1.0, (step - self._since + 1) / warm) if warm else 1.0)

    def apply(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Set the learning rates of an optimizer's groups, which have the configured rates at the first call."""
        if self._rates is None:
            self._rates = [group["lr"] for group in groups]
        factor = self.rate(step)
        if factor != self._factor:
            self._factor = factor
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def on_drift(self, step: int) -> None:
        """Restart the warm-up at `step` if `learner.schedule.restart` is "drift"."""
        if self._settings.restart == "drift":
            self._since = step

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"since": self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._since = int(state["since"])
