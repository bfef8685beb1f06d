"""Canaries: a part of the fleet serves a new version first, and live labels decide whether all servers do.

`rollout.json` names the stable version, which all servers may serve, and while a comparison goes on the canary. Both
are scored on the labelled events that were held out since it began, and compared by the gate's test.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from learner.config import GateSettings
from learner.errors import VersionError
from learner.evaluation.holdout import YOUNG, HoldoutRows
from learner.evaluation.scoring import Scorer
from learner.object_storage.fleet import FleetWatch
from learner.object_storage.rollout import FleetRollout
from learner.publishing.canary_comparison import Comparison
from learner.publishing.canary_servers import MOST_CRASHES, choose_canaries, is_slow
from learner.publishing.canary_versions import CanaryVersions
from learner.publishing.gatekeeper import QualityGate
from learner.state_dir.report import CanaryReport
from learner.state_dir.version import Verdict, Versions

_RESTART = timedelta(minutes=2)
"""A server that is restarted is back within this time."""

_READ_AGAIN = timedelta(seconds=10)

log = logging.getLogger(__name__)


class CanaryJudge:
    """Decides which versions the fleet may serve. Used by the publisher's thread; others may read `report`."""

    def __init__(
        self,
        fleet: FleetWatch,
        versions: Versions,
        settings: GateSettings,
        scorer: Scorer,
        gate: QualityGate,
        fraction: float,
        count: Callable[[str], object],
        stored: Versions | None = None,
    ) -> None:
        """Prepare to decide.

        Args:
            fleet: the servers.
            versions: of this learner.
            settings: of the gate.
            scorer: scores versions.
            gate: follows what is rejected.
            fraction: `serving.canary`.
            count: counts an outcome: `promoted`, `rejected` or `undecided`.
            stored: versions in the object store, of which a fresh host lacks some.
        """
        self._fleet = fleet
        self._versions = CanaryVersions(fleet, versions, gate, stored)
        self._settings = settings
        self._scorer = scorer
        self._gate = gate
        self._fraction = fraction
        self._count = count
        self._least = min(settings.min_rows, max(1, settings.holdout_rows // YOUNG))
        self._comparison: Comparison | None = None
        self._restored: Mapping[str, Any] = {}
        """The comparison of the restored checkpoint."""
        self._rejected_at = 0
        """The newest version when a canary was rejected: those until then are not tried."""
        self._slow: set[str] = set()
        """Servers that were slower than `serving.slo` when they served another version than the canary."""
        self._read_at = 0.0
        """When versions that cannot be read are read again."""
        self._alone_since: float | None = None
        """Since when there has been one server."""
        self._last: str | None = None
        self._failed: str | None = None
        """The problem from the rejection of a canary until another one is promoted."""
        self._waits: str | None = None
        """The problem while nothing can be decided."""

    @property
    def problem(self) -> str | None:
        """One sentence while nothing can be decided, or since a canary failed. Any thread may ask."""
        return self._waits or self._failed

    @property
    def report(self) -> CanaryReport | None:
        """The comparison that goes on; None before the first server. Any thread may ask."""
        rollout, comparison = self._fleet.rollout, self._comparison
        if rollout.stable is None:
            return None
        return CanaryReport(
            stable=rollout.stable,
            version=rollout.canary,
            servers=rollout.canaries,
            rows=0 if comparison is None else comparison.rows,
            required_rows=self._least,
            last=self._last,
        )

    def state(self) -> dict[str, Any]:
        """Return the comparison for a checkpoint. Any thread may call this."""
        comparison = self._comparison
        return dict(self._restored) if comparison is None else comparison.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the comparison of a checkpoint, before anything is judged."""
        self._restored = state

    def update(self, rows: HoldoutRows) -> None:
        """Begin a comparison, or decide the one that goes on, if it can be; the decision is written in the background.

        Raises OSError when a verdict cannot be read or written.
        """
        fleet, rollout, comparison = self._fleet, self._fleet.rollout, self._comparison
        if not fleet.is_read or fleet.is_deciding:
            return
        unread, self._waits = self._waits if time.monotonic() < self._read_at else None, None
        is_other = comparison is not None and (comparison.number, comparison.stable_number) != (
            rollout.canary,
            rollout.stable,
        )
        if is_other or rollout.pinned is not None:  # a rollout command has decided
            self._comparison = None
        if rollout.pinned is not None:
            self._restored = {}
            return
        others = [each for each in fleet.servers if each.version != rollout.canary]
        self._slow = (self._slow - {each.id for each in others}) | {each.id for each in others if is_slow(each)}
        canaries = choose_canaries(fleet.servers, self._fraction, self._slow)
        self._alone_since = self._alone_since if len(fleet.servers) == 1 else None
        if len(fleet.servers) == 1:
            self._allow_all_if_alone(rollout)
        elif not canaries:
            return
        elif rollout.stable is None:
            self._begin_with_stable()
        elif self._versions.is_withdrawn(rollout.stable):
            self._return_from(rollout.stable)
        elif rollout.canary is None:
            self._choose(rollout.stable, canaries)
        elif self._comparison is None and unread is not None:
            self._waits = unread
        else:
            self._decide(rollout.canary, rollout.stable, rows, canaries)

    def _allow_all_if_alone(self, rollout: FleetRollout) -> None:
        """Let the only server take every version, but not a canary that is undecided, unless another one is just
        restarted."""
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        if rollout.stable is not None and now - self._alone_since >= _RESTART.total_seconds():
            self._comparison = None
            undecided = set() if rollout.canary is None else {rollout.canary}
            self._fleet.decide(
                lambda each: msgspec.structs.replace(self._without_canary(each, *undecided), stable=None)
            )

    def _begin_with_stable(self) -> None:
        """Make the newest version that a server serves the stable one."""
        stable = self._versions.newest_served()
        if stable is not None:
            self._fleet.decide(
                lambda now: msgspec.structs.replace(now, stable=stable) if now.stable is None else now,
            )

    def _return_from(self, stable: int) -> None:
        """Make the version before the stable one, which has failed, the stable one."""
        before = self._versions.before(stable)
        if before is None:
            self._waits = (
                f"version {stable}, which all servers may serve, was rejected, and there is no version before it to "
                f"compare canaries with; promote one by hand"
            )
            return
        log.warning("canary: version %d was rejected, and version %d is the stable one again", stable, before)
        self._fleet.decide(lambda now: msgspec.structs.replace(now, stable=before) if now.stable == stable else now)

    def _choose(self, stable: int, canaries: list[str]) -> None:
        number = self._versions.newest(max(stable, self._rejected_at))
        if number is not None:
            log.info("version %d is served by the canaries first: %s", number, ", ".join(canaries))
            self._fleet.decide(
                lambda now: (
                    msgspec.structs.replace(now, canary=number, canaries=canaries)
                    if (now.stable, now.canary) == (stable, None) and number not in now.rolled_back
                    else now
                )
            )

    def _decide(self, number: int, stable: int, rows: HoldoutRows, canaries: list[str]) -> None:
        comparison = self._comparison = self._comparison or self._begin(number, stable, rows)
        if comparison is None:
            return
        servers, chosen = self._fleet.servers, self._fleet.rollout.canaries
        failure = comparison.servers.failure(servers, chosen, self._slow) or self._versions.failure(number)
        is_lost = not {server.id for server in servers} & {*chosen}
        if is_lost and {*chosen} & {*self._fleet.silent}:
            comparison.losses += 1
            if comparison.losses > MOST_CRASHES:
                failure = f"all its canaries ended {comparison.losses} times without a last report"
        if failure is not None:
            self._reject(number, Verdict("fail", [failure]), comparison)
        elif is_lost:
            self._fleet.decide(
                lambda now: msgspec.structs.replace(now, canaries=canaries) if now.canary == number else now
            )
        else:
            self._compare(comparison, rows, has_served=comparison.servers.have_served(servers, chosen))

    def _compare(self, comparison: Comparison, rows: HoldoutRows, *, has_served: bool) -> None:
        """Promote a version that is not worse and that a canary has served, or reject one that is worse."""
        verdict = comparison.verdict(rows, self._scorer, self._settings)
        is_over = comparison.seconds >= self._settings.max_hold.total_seconds()
        if verdict.verdict == "fail":
            self._reject(comparison.number, verdict, comparison)
        elif verdict.verdict == "pass" and has_served:
            self._promote(comparison.number, "; ".join(verdict.reasons) or "it is not worse on new events")
        elif is_over and has_served and self._settings.on_hold == "serve":
            why = 'nothing was decided within gate.max_hold, and gate.on_hold is "serve"'
            self._promote(comparison.number, why)
        elif is_over:
            reasons = [*verdict.reasons, *([] if has_served else ["no canary has served it for a minute"])]
            self._wait(comparison, "; ".join(reasons), for_events=comparison.lacks_events and has_served)

    def _begin(self, number: int, stable: int, rows: HoldoutRows) -> Comparison | None:
        """Read both versions; None where that is not possible, which is no reason to promote the canary."""
        self._read_at = time.monotonic() + _READ_AGAIN.total_seconds()
        try:
            canary = self._versions.read(number, rows)
        except OSError as exc:
            self._waits = f"version {number} on the canaries cannot be read for now, and nothing is decided: {exc}"
            return None
        except VersionError as exc:
            self._reject(number, Verdict("fail", [f"the learner cannot read it: {exc}"]), None)
            return None
        if canary is None:
            self._pass_over(number, "it is another model's than the learner's")
            return None
        try:
            baseline = self._versions.read(stable, rows)
        except (OSError, VersionError) as exc:
            self._waits = (
                f"version {stable}, with which the canaries' version {number} is compared, cannot be read: {exc}; "
                "if it stays so, promote one by hand"
            )
            return None
        comparison = Comparison(canary, stable, baseline, self._least)
        comparison.resume(self._restored)
        self._restored = {}
        return comparison

    def _without_canary(self, now: FleetRollout, *failed: int) -> FleetRollout:
        """Return the decisions without the canaries' version if it is one of `failed`, which are not served again.

        Deleted versions are left out of `rolled_back`.
        """
        oldest = min(self._fleet.versions, default=0)
        kept = {number for number in now.rolled_back if number >= oldest}
        ends = now.canary in failed
        return msgspec.structs.replace(
            now,
            rolled_back=sorted({*kept, *failed}),
            canary=None if ends else now.canary,
            canaries=[] if ends else now.canaries,
        )

    def _promote(self, number: int, why: str) -> None:
        log.info("canary: version %d is promoted: %s", number, why)
        self._comparison = self._failed = None
        self._last = f"version {number} was promoted: {why}"
        self._count("promoted")
        self._fleet.decide(
            lambda now: (
                msgspec.structs.replace(now, stable=number, canary=None, canaries=[]) if now.canary == number else now
            )
        )

    def _wait(self, comparison: Comparison, why: str, *, for_events: bool) -> None:
        """Try a newer version instead of one that is undecided, except while only events are missing."""
        number, stable = comparison.number, comparison.stable_number
        if not for_events and self._versions.newest(number) is not None:
            self._pass_over(number, f"nothing was decided within gate.max_hold: {why}")
        else:
            self._waits = (
                f"version {number} is still undecided on the canaries after gate.max_hold: {why}; the other servers "
                f"serve version {stable}; wait, or promote or reject it"
            )

    def _pass_over(self, number: int, why: str) -> None:
        """Take the canaries' version out of the fleet without failing it, so that a newer one can be tried."""
        log.warning("canary: version %d is passed over: %s", number, why)
        self._comparison = None
        self._last = self._failed = f"version {number} was passed over on the canaries: {why}; a newer one is tried"
        self._count("undecided")
        self._fleet.decide(lambda now: self._without_canary(now, number))

    def _reject(self, number: int, verdict: Verdict, comparison: Comparison | None) -> None:
        """Fail the version everywhere; later candidates are compared with the stable one.

        The decision of the fleet withdraws it also where this host does not have it, or cannot write its verdict.
        """
        why = "; ".join(verdict.reasons)
        log.warning("canary: version %d is rejected: %s", number, why)
        self._comparison, self._rejected_at = None, self._versions.highest
        self._last = f"version {number} was rejected: {why}"
        self._failed = (
            f"version {number} was rejected on the canaries: {why}; the other servers serve version "
            f"{self._fleet.rollout.stable}, and the next version that passes the gate is tried"
        )
        self._count("rejected")
        if comparison is not None and comparison.stable is not None:
            self._gate.return_to(comparison.stable, verdict.reasons)
        self._fleet.decide(lambda now: self._without_canary(now, number))
        self._versions.fail(number, verdict)
