"""Deletes checkpoints that nobody needs any more."""

import contextlib
from collections.abc import Sequence

from anabranch.core.host_clock import HOST_CLOCK
from learner.errors import CheckpointError
from learner.state_dir.checkpoint import Checkpoints
from learner.state_dir.manifest_directory import last_of_hours

_PARTS_WITH_ROWS = ("replay", "labels")
"""Keys of the state of parts whose rows may be in a tier, named by `file`."""


class CheckpointPruning:
    """Keeps the newest checkpoints, and the last one of each hour. Used by one thread."""

    def __init__(self, checkpoints: Checkpoints, keep: int, hours: int = 0) -> None:
        """Take the settings `keep` and `keep_hourly`."""
        self._checkpoints = checkpoints
        self._keep, self._keep_hourly = keep, hours
        self._hours: dict[int, int | None] = {}
        """The hour of each checkpoint beyond the newest, as `_hour_of` returns it: each is read once."""

    def prune(self) -> int | None:
        """Delete all but the newest checkpoints, and the last one of each of the newest hours before.

        Of those, one whose rows are in a tier alone is deleted too: the tier reuses their slots. Returns the oldest of
        the newest.
        """
        by_age = self._checkpoints.by_age()
        recent = self._recent(by_age)
        older = [number for number in by_age if number not in recent]
        hourly = self._hourly(older)
        for number in older:
            if number not in hourly:
                self._checkpoints.delete(number)
                self._checkpoints.refused.discard(number)
        return min(recent, default=None)

    def recent(self) -> set[int]:
        """Return the newest checkpoints, whose slots a tier may not reuse.

        Those that `Checkpoints.newest` refused do not count: there are `keep` others.
        """
        return self._recent(self._checkpoints.by_age())

    def _recent(self, by_age: Sequence[int]) -> set[int]:
        recent, kept = set[int](), 0
        for number in reversed(by_age):
            if kept < self._keep:
                recent.add(number)
            kept += number not in self._checkpoints.refused
        return recent

    def names_slots(self, number: int) -> bool:
        """Return whether a checkpoint needs slots of a tier: not one beyond the newest that has the rows."""
        return number in self.recent() or self._hour_of(number) is None

    def _hourly(self, numbers: Sequence[int]) -> set[int]:
        """Return the last complete checkpoint of each of the newest hours; `numbers` are by age."""
        before, hours = self._hours, self._keep_hourly
        self._hours = {}
        for number in numbers if hours else ():
            with contextlib.suppress(CheckpointError):  # nothing can return to it
                self._hours[number] = before[number] if number in before else self._hour_of(number)
        known = {number: hour for number, hour in self._hours.items() if hour is not None}
        return last_of_hours(known, hours, HOST_CLOCK.now())

    def _hour_of(self, number: int) -> int | None:
        """Return the hour since 1970 in which a checkpoint was written; None where a tier alone has its rows."""
        manifest = self._checkpoints.manifest(number)
        state = self._checkpoints.state(manifest)
        parts = [state[name] for name in _PARTS_WITH_ROWS if name in state]
        named = any(part.get("file") is not None and part.get("row_bytes") is None for part in parts)
        return None if named else int(manifest.time // 3600)
