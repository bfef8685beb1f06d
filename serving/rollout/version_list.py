"""The newest versions, and the status of each."""

from typing import Literal

import msgspec

from anabranch.learner.errors import VersionError
from anabranch.learner.versions.format import Manifest, Verdict
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.rollout.hot_swap import VersionSwapper

NEWEST = 20
"""Versions that are listed."""

VersionStatus = Literal["served", "pinned", "swapped", "rolled back", "refused", "superseded", "waiting", "unknown"]


class VersionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One version."""

    number: int
    time: float | None = None
    step: int | None = None
    metrics: dict[str, float] = {}
    constant: dict[str, float] = {}
    """What one answer for all held-out events has, by the names of metrics."""
    verdict: str | None = None
    fate: VersionStatus
    """Served now, or pinned; swapped in before and replaced since; rolled back, or left out by a rollback; refused;
    superseded by a newer version before its turn; waiting for its turn or its verdict; unknown if it is older than this
    process."""
    reason: str | None = None
    """Why it was refused, or the reasons of the gate."""


class VersionList:
    """Reads the versions directory; a manifest never changes, so each is read once. Used by one thread at a time."""

    def __init__(self, deployment: Deployment, swap: VersionSwapper, started: float) -> None:
        self._versions = deployment.versions
        self._swap = swap
        self._started = started
        self._manifests: dict[int, Manifest | str] = {}

    def newest(self) -> list[VersionLine]:
        """Return the newest versions, the newest first."""
        numbers = self._versions.numbers()[-NEWEST:]
        known = self._manifests
        manifests = {number: known[number] if number in known else self._manifest(number) for number in numbers}
        self._manifests = {number: manifest for number, manifest in manifests.items() if manifest is not None}
        swapped, refused = set(self._swap.recently_served.copy()), self._swap.refused
        served = self._swap.current.number if self._swap.current else None
        lines = (self._line(number, served, swapped, refused) for number in reversed(self._manifests))
        return [line for line in lines if line is not None]

    def _line(self, number: int, served: int | None, swapped: set[int], refused: dict[int, str]) -> VersionLine | None:
        manifest = self._manifests[number]
        if isinstance(manifest, str):
            return VersionLine(number=number, fate="refused", reason=manifest)
        try:
            verdict = self._versions.verdict(number)
        except VersionError as exc:
            return VersionLine(number=number, fate="refused", reason=str(exc))
        except OSError as exc:
            return VersionLine(number=number, fate="unknown", reason=f"its verdict cannot be read for now: {exc}")
        fate, reason = self._fate(manifest, verdict, served, swapped), refused.get(number)
        if fate not in ("served", "pinned", "rolled back") and number not in swapped and reason is not None:
            fate = "refused"
        return VersionLine(
            number=number,
            time=manifest.time,
            step=manifest.step,
            metrics=manifest.metrics,
            constant=manifest.constant,
            verdict=verdict.verdict if verdict else None,
            fate=fate,
            reason=reason or (", ".join(verdict.reasons) if verdict else None) or None,
        )

    def _fate(
        self, manifest: Manifest, verdict: Verdict | None, served: int | None, swapped: set[int]
    ) -> VersionStatus:
        if manifest.number == served:
            return "pinned" if self._swap.state.pinned == served else "served"
        if manifest.number in self._swap.state.rolled_back:
            return "rolled back"
        if manifest.number in swapped:
            return "swapped"
        if verdict is not None and verdict.verdict == "fail":
            return "refused"
        if served is None or manifest.number > served:
            return "waiting"
        return "superseded" if manifest.time >= self._started else "unknown"

    def _manifest(self, number: int) -> Manifest | str | None:
        """Return a manifest, the reason why it cannot be used, or None if it cannot be read for now."""
        try:
            return self._versions.manifest(number)
        except VersionError as exc:
            return str(exc)
        except OSError:
            return None
