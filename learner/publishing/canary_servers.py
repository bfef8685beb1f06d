"""Which servers of a fleet are canaries, and what shows at a canary that its version is not to be served. Pure."""

import hashlib
from collections.abc import Collection, Sequence

from learner.object_storage.servers import FleetServer

MOST_CRASHES = 1
_SETTLING_REPORTS = 12
"""Reports of a canary before its percentiles, which are of a minute, are those of its version with warm caches."""
_SLOW_REPORTS = 3
"""Reports in a row after that which show a canary slower than `serving.slo`, while no other server is."""


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
            if (crashes := canary.crashes.get(self._version, 0)) > MOST_CRASHES:
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
