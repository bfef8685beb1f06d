"""The hold of a gate: the time in which versions fail in a row, so that an earlier one stays served."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Start:
    """The start of a hold.

    Attributes:
        began: when the first version failed, by the monotonic clock, which measures durations.
        since: the same in seconds since 1970, for display only.
        served: the version that is served meanwhile.
    """

    began: float
    since: float
    served: int | None


class Hold:
    """Whether versions fail in a row, and since when. Used by one thread; others may read attributes."""

    def __init__(self, max_hold: timedelta) -> None:
        self._max_seconds = max_hold.total_seconds()
        self._start: _Start | None = None
        self._restored: _Start | None = None
        """The hold of the restored checkpoint."""
        self.reasons: Sequence[str] = ()
        """Why the last version failed."""

    @property
    def since(self) -> float | None:
        """When the first version failed, in seconds since 1970; None without a hold."""
        start = self._start
        return start.since if start is not None else None

    @property
    def is_over(self) -> bool:
        """Whether versions have failed for longer than `gate.max_hold`."""
        start = self._start
        return start is not None and time.monotonic() - start.began >= self._max_seconds

    @property
    def problem(self) -> str | None:
        """One sentence when versions have failed for longer than `gate.max_hold`."""
        start = self._start
        if start is None or not self.is_over:
            return None
        when = datetime.fromtimestamp(start.since, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        why = self.reasons[0] if self.reasons else "the reason is unknown"
        return f"no version has passed the gate since {when}: {why}; promote one, or check the events since then"

    def start(self, served: int | None, reasons: Sequence[str]) -> None:
        """Start or continue the hold after a version failed."""
        if self._start is None:
            self._start = _Start(time.monotonic(), time.time(), served)
            log.warning("a version failed the gate: %s", "; ".join(reasons))
        self._start = replace(self._start, served=served)
        self.reasons = reasons

    def resume(self, served: int) -> None:
        """Continue the hold of the restored checkpoint if the same version is served."""
        if self._restored is not None and self._restored.served == served:
            self._start = self._restored

    def end(self) -> None:
        """End the hold, since a version may be served."""
        self._start, self.reasons = None, ()

    def state(self) -> dict[str, Any]:
        """Return the hold for a checkpoint. Any thread may call this."""
        start = self._start
        return {} if start is None else {"held_seconds": time.monotonic() - start.began, "served": start.served}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the hold of a checkpoint, before anything is judged; time without a learner does not count."""
        if "held_seconds" in state:
            seconds = float(state["held_seconds"])
            self._restored = _Start(time.monotonic() - seconds, time.time() - seconds, state["served"])
