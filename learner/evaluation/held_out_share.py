"""Whether about as many events are held out as the settings say."""

import time
from collections.abc import Callable, Mapping

_SECONDS = 60.0
_FAR = 3.0
"""Times more, or less, than expected."""
_FEWEST = 50
"""Fewer expected events may be off by that much by chance."""


class HeldOutShare:
    """Measures the share of each minute. `update` is called by one thread; any thread may read `warning`."""

    def __init__(self, fraction: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Take `gate.holdout_fraction`."""
        self._fraction = fraction
        self._clock = clock
        self._begin: tuple[float, int, int] | None = None
        self.warning: str | None = None
        """One sentence where the last minute's share was far from the fraction."""

    def update(self, outcomes: Mapping[str, int]) -> None:
        """Take how many events had each outcome until now."""
        held_out = outcomes.get("held_out", 0)
        now = self._clock(), held_out, held_out + outcomes.get("trained", 0)
        if self._begin is None:
            self._begin = now
        if now[0] - self._begin[0] < _SECONDS:
            return
        held_out, events = (after - before for after, before in zip(now[1:], self._begin[1:], strict=True))
        self._begin, expected = now, self._fraction * events
        is_far = held_out > _FAR * max(expected, _FEWEST) or (expected >= _FEWEST and held_out < expected / _FAR)
        self.warning = (
            f"{held_out / events:.2%} of the labelled events of a minute were held out, and gate.holdout_fraction is "
            f"{self._fraction:.2%}: few keys or groups send most events, or somebody sends many under one that is held "
            "out; check the keys in the topic"
            if is_far
            else None
        )
