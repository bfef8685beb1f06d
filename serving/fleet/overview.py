"""The servers of a fleet, as the command line and the dashboard show them."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from anabranch.core.errors import AnabranchError
from anabranch.learner.object_storage.fleet import (
    REPORT_EVERY,
    SILENT,
    FleetRollout,
    FleetServer,
    RolloutFile,
    read_servers,
)
from anabranch.learner.settings.storage import StorageSettings


@dataclass(frozen=True)
class Fleet:
    """The servers that have reported and not stopped, and the decisions for all of them."""

    servers: list[FleetServer] = field(default_factory=list)
    rollout: FleetRollout = field(default_factory=FleetRollout)
    problem: str | None = None
    """One sentence when the object store cannot be read."""
    now: float = 0.0
    """When their reading began, by this host's clock."""

    def is_silent(self, server: FleetServer) -> bool:
        """Return whether a server has reported nothing for long, as far as the clocks of both hosts agree."""
        return self.now - server.time >= SILENT.total_seconds()

    def by_version(self) -> dict[int | None, int]:
        """Return how many servers that are not silent serve each version, the newest first."""
        versions = [server.version for server in self.servers if not self.is_silent(server)]
        return {each: versions.count(each) for each in sorted(set(versions), key=lambda number: -(number or 0))}

    def document(self, *, reasons: bool = True) -> dict[str, Any]:
        """Return it as JSON values; without `reasons`, servers do not list the versions that they refused."""
        reports = self.servers if reasons else [msgspec.structs.replace(each, refused={}) for each in self.servers]
        servers = [{**msgspec.to_builtins(each), "silent": self.is_silent(each)} for each in reports]
        return {"servers": servers, "rollout": msgspec.to_builtins(self.rollout), "problem": self.problem}


def read_fleet(storage: StorageSettings) -> Fleet:
    """Read the fleet of a pipeline; one that cannot be read has a problem."""
    now = time.time()  # not later: reading many reports takes long, and they are not silent for that
    try:
        bucket = storage.quick_bucket
        rollout = RolloutFile(bucket)
        rollout.poll()
        return Fleet(read_servers(bucket), rollout.contents, now=now)
    except (OSError, AnabranchError) as exc:
        return Fleet(problem=f"the servers of the fleet cannot be read: {exc}", now=now)


class RecentFleet:
    """The fleet as it was read last. While somebody asks, it is read every few seconds, in the background."""

    def __init__(self, storage: StorageSettings) -> None:
        self._storage = storage
        self._newest: Fleet | None = None
        self._due = float("-inf")
        self._reading = threading.Lock()

    def newest(self) -> Fleet | None:
        """Return what was read last, None before the first time, without waiting for the object store.

        Any thread may call this.
        """
        if time.monotonic() >= self._due and self._reading.acquire(blocking=False):
            threading.Thread(target=self._read, name="fleet-overview", daemon=True).start()
        return self._newest

    def _read(self) -> None:
        try:
            self._newest = read_fleet(self._storage)
        finally:
            self._due = time.monotonic() + REPORT_EVERY.total_seconds()
            self._reading.release()
