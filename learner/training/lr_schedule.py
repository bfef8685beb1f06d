"""The learning rate of a stream, which has no end to decay towards: warm-up, then constant, and again on drift."""

from collections.abc import Sequence
from typing import Any

from learner.config import ScheduleSettings


class Schedule:
    """What the learning rate of the config is multiplied by. A function of the steps and drifts told, of no clock."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self._since = 0
        self._rates: list[float] | None = None
        self._factor = 1.0
        self.scale = 1.0
        """What the rate is multiplied by beside that, such as for a while after a drift; not kept in a checkpoint."""

    def rate(self, step: int) -> float:
        """Return the factor for a step; the first step is 0.

        A warm-up rises evenly, and ends with the factor 1 at its last step.
        """
        warm = self._settings.warmup_steps
        return self.scale * (min(1.0, (step - self._since + 1) / warm) if warm else 1.0)

    def apply(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Set the learning rates of an optimizer's groups, which are those of the config at the first call."""
        if self._rates is None:
            self._rates = [group["lr"] for group in groups]
        factor = self.rate(step)
        if factor != self._factor:
            self._factor = factor
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def on_drift(self, step: int) -> None:
        """Hear that the stream has changed before this step: warm up again, if so set."""
        if self._settings.restart == "drift":
            self._since = step

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep, as JSON values."""
        return {"since": self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept; after one without a schedule it has long been warm."""
        self._since = int(state.get("since", -self._settings.warmup_steps))
