"""Canaries: a part of the fleet serves a new version first, and live labels decide whether all servers do.

`rollout.json` names the stable version, which all servers may serve, and while a comparison goes on the canary. Both
are scored on the labelled events that were held out since it began, and compared by the gate's test.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from anabranch.learner.errors import VersionError
from anabranch.learner.evaluate.holdout import YOUNG, HoldoutRows
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.object_storage.fleet import FleetRollout, FleetServer
from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.status.report import CanaryReport
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.scores import Baseline
from anabranch.learner.versions.verdict import GateInput, judge

if TYPE_CHECKING:
    from anabranch.learner.extensions.fleet.extension import FleetWatch

_RESTART = timedelta(minutes=2)
"""A server that is restarted is back within this time."""

_READ_AGAIN = timedelta(seconds=10)

_MOST_CRASHES = 1
_SETTLING_REPORTS = 12
"""Reports of a canary before its percentiles, which are of a minute, are those of its version with warm caches."""
_SLOW_REPORTS = 3
"""Reports in a row after that which show a canary slower than `serving.slo`, while no other server is."""

log = logging.getLogger(__name__)


def choose_canaries(servers: Sequence[FleetServer], fraction: float, slow: Collection[str] = ()) -> list[str]:
    """Return the ids of the canaries: that part of the servers, at least one and never all; the same for the same ids.

    Those in `slow` are the last to be chosen. None where there are fewer than two servers.
    """
    ids = sorted(
        (server.id for server in servers), key=lambda each: (each in slow, hashlib.sha256(each.encode()).digest())
    )
    count = max(1, round(fraction * len(ids)))
    return sorted(ids[: min(count, len(ids) - 1)]) if len(ids) > 1 else []


class CanaryServers:
    """Judges the canaries of one version by their reports. Used by one thread."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._since: dict[str, tuple[int, int]] = {}
        """The beat since which each canary has served the version, ready, and its crashes then."""
        self._slow: dict[str, tuple[int, int]] = {}
        """The beat of the last report of each canary, and how many in a row were slow."""

    def failure(
        self, servers: Sequence[FleetServer], canaries: Sequence[str], slow_before: Collection[str] = ()
    ) -> str | None:
        """Return why the version must not be served, as one sentence; None as long as nothing shows that.

        `slow_before`: servers that were slower than `serving.slo` with another version.
        """
        others = [each for each in servers if each.id not in canaries]
        for canary in (each for each in servers if each.id in canaries):
            if (refusal := canary.refused.get(self._version)) is not None:
                return f"server {canary.id} refused it: {refusal}"
            if (crashes := canary.crashes.get(self._version, 0)) > _MOST_CRASHES:
                return f"server {canary.id} has crashed {crashes} times while it loaded or served it"
            if canary.version == self._version and canary.model_problem is not None:
                return f"on server {canary.id} {canary.model_problem}"
            settled = self._reports(canary) > _SETTLING_REPORTS and canary.id not in slow_before
            if self._slow_reports(canary, others, settled=settled) >= _SLOW_REPORTS:
                return (
                    f"server {canary.id} answers with a p99 of {1000 * (canary.request_p99_seconds or 0):.1f} ms, "
                    "above serving.slo, and the other servers do not"
                )
        return None

    def have_served(self, servers: Sequence[FleetServer], canaries: Sequence[str]) -> bool:
        """Return whether a canary has served the version long enough for its crashes and its latency to show."""
        needed = _SETTLING_REPORTS + _SLOW_REPORTS
        return any(self._reports(each) >= needed for each in servers if each.id in canaries)

    def _reports(self, canary: FleetServer) -> int:
        """Return how many reports in a row say that a canary is ready with the version, without a crash."""
        if canary.version != self._version or not canary.ready:
            self._since.pop(canary.id, None)
            return 0
        crashes = canary.crashes.get(self._version, 0)
        beat, before = self._since.get(canary.id, (canary.beat, crashes))
        if crashes != before:
            beat = canary.beat
        self._since[canary.id] = beat, crashes
        return canary.beat - beat + 1

    def _slow_reports(self, canary: FleetServer, others: Sequence[FleetServer], *, settled: bool) -> int:
        beat, count = self._slow.get(canary.id, (-1, 0))
        if beat != canary.beat:
            count = count + 1 if settled and is_slow(canary) and not any(map(is_slow, others)) else 0
            self._slow[canary.id] = canary.beat, count
        return count


def is_slow(server: FleetServer) -> bool:
    """Return whether a server answers slower than `serving.slo`."""
    return server.request_p99_seconds is not None and server.request_p99_seconds > server.slo_seconds


class Comparison:
    """A canary, the stable version, and the events that were held out before it began. Used by one thread."""

    def __init__(self, canary: Baseline, stable_number: int, stable: Baseline | None, least: int) -> None:
        """Begin now.

        Args:
            canary: the version on the canaries, read now.
            stable_number: number of the stable version.
            stable: the stable version; None where it is another model's, so that nothing can be compared.
            least: events of the first comparison.
        """
        self.number, self.stable_number = canary.number, stable_number
        self.canary, self.stable = canary, stable
        self.servers = CanaryServers(canary.number)
        self.rows = 0
        """Events that it was compared on last."""
        self._least = self._next_at = least
        """With how many events they are compared next: one comparison after each event would fail by chance."""
        self._decided: Verdict | None = None
        """Of the last comparison."""
        self.losses = 0
        """How often all canaries ended without a last report."""
        self._before = canary.held_out
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """For how long it goes on; time without a learner does not count."""
        return time.monotonic() - self._began

    @property
    def lacks_events(self) -> bool:
        """Whether too few events came for one comparison, as of the last call of `verdict`."""
        return self.stable is not None and self._decided is None

    def verdict(self, rows: HoldoutRows, scorer: Scorer, settings: GateSettings) -> Verdict:
        """Compare both on the events that came since it began; `pass` where nothing can be compared."""
        if self.stable is None:
            return Verdict("pass", [f"version {self.stable_number} is another model's and cannot be compared with it"])
        fresh = ~np.isin(rows.columns["hash"].astype(np.uint64), self._before) if len(rows) else np.empty(0, np.bool_)
        self.rows = count = int(np.count_nonzero(fresh))
        if count < self._next_at:
            return self._decided or Verdict(
                "inconclusive", [f"{count} of {self._next_at} events were held out since it began"]
            )
        columns = {name: column[fresh] for name, column in rows.columns.items()}
        canary_G, stable_G = (each.scores(scorer, columns) for each in (self.canary, self.stable))
        marks = np.ones(count, np.bool_)
        inputs = GateInput(canary_G, stable_G, None, marks, ~marks, {})
        self._next_at = count + max(1, count // 2)
        settings = settings.model_copy(update={"min_rows": self._least})
        self._decided = judge(inputs, settings, bounded=scorer.bounded)
        return self._decided

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on. Any thread may call this."""
        return {
            "canary": self.number,
            "stable": self.stable_number,
            "seconds": self.seconds,
            "before": self._before.tobytes().hex(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on as in a checkpoint if it has this comparison."""
        if (state.get("canary"), state.get("stable")) == (self.number, self.stable_number):
            self._began = time.monotonic() - float(state["seconds"])
            self._before = np.frombuffer(bytes.fromhex(state["before"]), np.uint64)


class CanaryVersions:
    """The versions of this host and of the object store, with the decisions on them. Used by the publisher's thread."""

    def __init__(self, fleet: "FleetWatch", versions: Versions, gate: QualityGate, stored: Versions | None) -> None:
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


class CanaryJudge:
    """Decides which versions the fleet may serve. Used by the publisher's thread; others may read `report`."""

    def __init__(
        self,
        fleet: "FleetWatch",
        versions: Versions,
        settings: GateSettings,
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
            gate: follows what is rejected.
            fraction: `serving.canary`.
            count: counts an outcome: `promoted`, `rejected` or `undecided`.
            stored: versions in the object store, of which a fresh host lacks some.
        """
        self._fleet = fleet
        self._versions = CanaryVersions(fleet, versions, gate, stored)
        self._settings = settings
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
            self._decide_if(lambda now: now.stable is None, stable=stable)

    def _return_from(self, stable: int) -> None:
        """Make the version before the stable one, which has failed, the stable one."""
        before = self._versions.before(stable)
        if before is None:
            self._waits = (
                f"version {stable}, which all servers may serve, was rejected, and there is no version before it to "
                f"compare canaries with; serve one by hand"
            )
            return
        log.warning("canary: version %d was rejected, and version %d is the stable one again", stable, before)
        self._decide_if(lambda now: now.stable == stable, stable=before)

    def _choose(self, stable: int, canaries: list[str]) -> None:
        number = self._versions.newest(max(stable, self._rejected_at))
        if number is not None:
            log.info("version %d is served by the canaries first: %s", number, ", ".join(canaries))
            self._decide_if(
                lambda now: (now.stable, now.canary) == (stable, None) and number not in now.rolled_back,
                canary=number,
                canaries=canaries,
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
            if comparison.losses > _MOST_CRASHES:
                failure = f"all its canaries ended {comparison.losses} times without a last report"
        if failure is not None:
            self._reject(number, Verdict("fail", [failure]), comparison)
        elif is_lost:
            self._decide_if(lambda now: now.canary == number, canaries=canaries)
        else:
            self._compare(comparison, rows, has_served=comparison.servers.have_served(servers, chosen))

    def _compare(self, comparison: Comparison, rows: HoldoutRows, *, has_served: bool) -> None:
        """Promote a version that is not worse and that a canary has served, or reject one that is worse."""
        verdict = comparison.verdict(rows, self._gate.scorer, self._settings)
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
                "if it stays so, serve one by hand"
            )
            return None
        comparison = Comparison(canary, stable, baseline, self._least)
        comparison.resume(self._restored)
        self._restored = {}
        return comparison

    def _decide_if(self, holds: Callable[[FleetRollout], bool], **changes: Any) -> None:
        """Change the decisions if they are still those that were judged, and no rollout command has changed them."""
        self._fleet.decide(lambda now: msgspec.structs.replace(now, **changes) if holds(now) else now)

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
        self._decide_if(lambda now: now.canary == number, stable=number, canary=None, canaries=[])

    def _wait(self, comparison: Comparison, why: str, *, for_events: bool) -> None:
        """Try a newer version instead of one that is undecided, except while only events are missing."""
        number, stable = comparison.number, comparison.stable_number
        if not for_events and self._versions.newest(number) is not None:
            self._pass_over(number, f"nothing was decided within gate.max_hold: {why}")
        else:
            self._waits = (
                f"version {number} is still undecided on the canaries after gate.max_hold: {why}; the other servers "
                f"serve version {stable}; wait, or serve or reject it"
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
