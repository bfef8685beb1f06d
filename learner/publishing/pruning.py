"""Deletes versions that nobody needs any more."""

import contextlib
import logging

from anabranch.core.host_clock import HOST_CLOCK
from learner.config import VersionsSettings
from learner.errors import VersionError
from learner.object_storage.fleet import FleetWatch
from learner.publishing.gatekeeper import QualityGate
from learner.state_dir.manifest_directory import last_of_hours
from learner.state_dir.version import Versions

log = logging.getLogger(__name__)


class VersionPruning:
    """Keeps the newest versions, one of each hour, and those that a server or the gate needs. Used by one thread."""

    def __init__(
        self, versions: Versions, settings: VersionsSettings, gate: QualityGate, fleet: FleetWatch | None
    ) -> None:
        """Take the settings `keep` and `keep_hourly`; `fleet`: the servers on other hosts; None without them."""
        self._versions = versions
        self._settings = settings
        self._gate = gate
        self._fleet = fleet
        self._hours: dict[int, int] = {}
        """Hour since 1970 of each version beyond `keep`."""

    def prune(self) -> None:
        """Delete versions that are stale or beyond `keep` and `keep_hourly`, except those that a server needs."""
        numbers = self._versions.numbers()
        stale = self._versions.stale(numbers)
        older = [number for number in numbers if number not in stale][: -self._settings.keep]
        if not older and not stale:
            return
        of_fleet = set() if self._fleet is None else self._fleet.needed
        if of_fleet is None:
            return
        state = self._versions.state()
        needed = {state.serving, state.previous, state.pinned} | self._gate.needed | self._hourly(older) | of_fleet
        for number in [*stale, *older]:
            if number not in needed:
                self._versions.delete(number)

    def _hourly(self, numbers: list[int]) -> set[int]:
        """Return the last version of each of the newest `keep_hourly` hours; each manifest is read once."""
        hours, self._hours = self._hours, {}
        for number in numbers:
            with contextlib.suppress(VersionError):  # it cannot be served
                self._hours[number] = hours.get(number) or int(self._versions.manifest(number).time // 3600)
        return last_of_hours(self._hours, self._settings.keep_hourly, HOST_CLOCK.now())


def numbers_in_state(versions: Versions) -> tuple[int | None, ...]:
    """Return the version numbers in `state.json`, whose directories may be gone; none where it cannot be read."""
    try:
        state = versions.state()
    except (VersionError, OSError) as exc:
        log.warning("%s; numbers continue from those of the existing versions; restore the file, or remove it", exc)
        return ()
    return (state.serving, state.previous, state.pinned, *state.rolled_back)
