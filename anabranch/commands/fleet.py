"""The servers of a fleet, through the object store of `[storage]`: what they serve, and rollout commands for all."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.text import Text

from anabranch.commands.versions import Which
from anabranch.config.loader import Config
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.core.object_store.bucket import Bucket, ReplacedError
from learner.object_storage.config import StorageSettings
from learner.object_storage.head import HeadReader
from learner.object_storage.rollout import FleetRollout, RolloutFile
from learner.object_storage.servers import SILENT, FleetServer, read_servers
from learner.state_dir.version import RegistryState
from serving.errors import RequestError
from serving.reporting.report import read_report
from serving.rollout.commands import COMMANDS


@dataclass(frozen=True)
class Fleet:
    """The servers that have reported and not stopped, and the decisions for all of them."""

    servers: list[FleetServer] = field(default_factory=list)
    rollout: FleetRollout = field(default_factory=FleetRollout)
    problem: str | None = None
    """One sentence when the object store cannot be read."""
    now: float = 0.0
    """When they were read, by this host's clock."""

    def is_silent(self, server: FleetServer) -> bool:
        """Return whether a server has reported nothing for long, as far as the clocks of both hosts agree."""
        return self.now - server.time >= SILENT.total_seconds()

    def by_version(self) -> dict[int | None, int]:
        """Return how many servers that are not silent serve each version, the newest first."""
        versions = [server.version for server in self.servers if not self.is_silent(server)]
        return {each: versions.count(each) for each in sorted(set(versions), key=lambda number: -(number or 0))}

    def lines(self) -> list[tuple[str, Text]]:
        """Return it for a screen: names and what there is to say of them."""
        if self.problem is not None:
            return [("fleet", Text(self.problem, style="yellow"))]
        counts = [
            f"{count} with version {version}" if version is not None else f"{count} without a version"
            for version, count in self.by_version().items()
        ]
        servers = "servers: " + ", ".join(counts) if counts else "no server"
        return [("fleet", Text(servers)), *((server.id, self._line(server)) for server in self.servers)]

    def _line(self, server: FleetServer) -> Text:
        role = " (canary)" if server.id in self.rollout.canaries else ""
        version = "no version" if server.version is None else f"version {server.version}{role}"
        if self.is_silent(server):
            return Text(f"{version}, silent for {self.now - server.time:,.0f} s", style="yellow")
        if server.problems:
            return Text(f"{version}, problems: {server.problems}", style="yellow")
        return Text(f"{version}, {server.requests_per_second:,.1f} requests/s" if server.ready else "not ready")

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        servers = [{**msgspec.to_builtins(each), "silent": self.is_silent(each)} for each in self.servers]
        return {"servers": servers, "rollout": msgspec.to_builtins(self.rollout), "problem": self.problem}


def read_fleet(config: Config) -> Fleet | None:
    """Read the fleet of a pipeline; None without `[storage]`."""
    if config.pipeline.storage is None:
        return None
    try:
        bucket = config.pipeline.storage.quick_bucket
        rollout = RolloutFile(bucket)
        rollout.poll()
        return Fleet(read_servers(bucket), rollout.contents, now=time.time())
    except (OSError, AnabranchError) as exc:
        return Fleet(problem=f"the servers of the fleet cannot be read: {exc}", now=time.time())


def commands_fleet(config: Config) -> StorageSettings | None:
    """Return the object store that rollout commands go to, where no server of this host takes them; None without."""
    follows = config.pipeline.serving.versions_from == "storage"
    return config.pipeline.storage if follows or read_report(config.state_dir) is None else None


def apply_to_fleet(storage: StorageSettings, action: str, which: Which | None) -> tuple[RegistryState, int]:
    """Apply a rollout command for all servers, and return its result and how many servers there are.

    Raises:
        SettingsError: there is no such version, or the command cannot be applied.
        DependencyError: the object store cannot be reached.
    """
    bucket = storage.quick_bucket
    with away_is_dependency("rollout commands are for all servers, and the object store cannot be reached"):
        while True:
            try:
                return _apply_once(bucket, action, which)
            except ReplacedError:  # by another command, or by the learner
                continue


def _apply_once(bucket: Bucket, action: str, which: Which | None) -> tuple[RegistryState, int]:
    reader, file = HeadReader(bucket), RolloutFile(bucket)
    reader.poll()
    file.poll()
    numbers = sorted(reader.head.versions) if reader.head is not None else []
    servers = read_servers(bucket)
    served = max((each.version for each in servers if each.version is not None), default=None)
    before = file.contents.applied_to(RegistryState(serving=served))
    number = _number(which if which is not None or action != "unpin" else before.pinned, numbers, served)
    try:
        after = COMMANDS[action](before, number, numbers)
    except RequestError as exc:
        raise SettingsError(str(exc)) from exc
    file.replace(file.contents.changed_to(after, numbers))
    return after, len(servers)


def _number(which: Which | None, numbers: list[int], served: int | None) -> int:
    named = {"latest": max(numbers, default=None), "served": served}
    number = named.get(which) if isinstance(which, str) else which
    if number is None:
        raise SettingsError(
            "there is no such version: name one by its number, since no server of this host says which one is meant"
        )
    return number
