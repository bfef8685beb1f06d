"""Which versions can be on the canaries, or be the stable one."""

import contextlib

from learner.errors import VersionError
from learner.evaluation.holdout import HoldoutRows
from learner.object_storage.fleet import FleetWatch
from learner.publishing.baseline import Baseline
from learner.publishing.gatekeeper import QualityGate
from learner.state_dir.version import Verdict, Versions


class CanaryVersions:
    """The versions of this host and of the object store, with the decisions on them. Used by the publisher's thread."""

    def __init__(self, fleet: FleetWatch, versions: Versions, gate: QualityGate, stored: Versions | None) -> None:
        """`stored`: versions in the object store, of which a fresh host lacks some."""
        self._fleet = fleet
        self._versions = versions
        self._gate = gate
        self._stored = stored

    @property
    def highest(self) -> int:
        """The newest version of this host; 0 without one."""
        return max(self._versions.numbers(), default=0)

    def newest(self, above: int) -> int | None:
        """Return the newest version above a number that servers can copy, and that the gate has not failed."""
        numbers = self._versions.numbers()
        passed_over = self._versions.stale(numbers) | {*self._fleet.rollout.rolled_back}
        for number in reversed(numbers):
            if number <= above:
                return None
            if number not in self._fleet.versions or number in passed_over:
                continue
            with contextlib.suppress(VersionError):
                verdict = self._versions.verdict(number)
                if verdict is not None and verdict.verdict != "fail":
                    return number
        return None

    def newest_served(self) -> int | None:
        """Return the newest version that a server serves, and that has not failed."""
        served = {each.version for each in self._fleet.servers}
        numbers = [number for number in self._fleet.versions if number in served]
        return max((number for number in numbers if not self.is_withdrawn(number)), default=None)

    def before(self, stable: int) -> int | None:
        """Return the version to return to from the stable one: one that servers serve, or served before, if any."""
        served = {number for each in self._fleet.servers for number in (each.version, each.previous)}
        older = [each for each in self._fleet.versions if each < stable and not self.is_withdrawn(each)]
        return max((number for number in older if number in served), default=None) or max(older, default=None)

    def failure(self, number: int) -> str | None:
        """Return why the verdict of a version is `fail`; None where it is not, or not on this host."""
        with contextlib.suppress(VersionError):
            verdict = self._versions.verdict(number)
            return "; ".join(verdict.reasons) if verdict is not None and verdict.verdict == "fail" else None
        return None

    def is_withdrawn(self, number: int) -> bool:
        """Return whether a person or monitoring has withdrawn a version."""
        rollout = self._fleet.rollout
        return number in rollout.rolled_back or (self.failure(number) is not None and number != rollout.promoted)

    def read(self, number: int, rows: HoldoutRows) -> Baseline | None:
        """Read a version here, or else from the object store; None where it is another model's.

        Raises:
            OSError: it cannot be read for now.
            VersionError: it is damaged, or gone.
        """
        try:
            return self._gate.read(number, rows)
        except (OSError, VersionError):
            if self._stored is None:
                raise
        return self._gate.read(number, rows, self._stored)

    def fail(self, number: int, verdict: Verdict) -> None:
        """Write a verdict where this host has the version: a fresh host may have fetched it not; raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._versions.write_verdict(number, verdict)
