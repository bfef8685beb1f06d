"""The servers of a fleet, through the object store of `[storage]`: what they serve, and rollout commands for all."""

from rich.text import Text

from anabranch.commands.versions import Which
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.core.object_store.bucket import Bucket, ReplacedError
from learner.object_storage.config import StorageSettings
from learner.object_storage.head import HeadReader
from learner.object_storage.rollout import RolloutFile
from learner.object_storage.servers import FleetServer, read_servers
from learner.state_dir.version import RegistryState
from serving.errors import RequestError
from serving.fleet.overview import Fleet, read_fleet
from serving.reporting.report import read_report
from serving.rollout.commands import COMMANDS


def fleet_of(config: Config) -> Fleet | None:
    """Read the fleet of a pipeline; None without `[storage]`."""
    return None if config.pipeline.storage is None else read_fleet(config.pipeline.storage)


def fleet_lines(fleet: Fleet) -> list[tuple[str, Text]]:
    """Return a fleet for a screen: names and what there is to say of them."""
    if fleet.problem is not None:
        return [("fleet", Text(fleet.problem, style="yellow"))]
    counts = [
        f"{count} with version {version}" if version is not None else f"{count} without a version"
        for version, count in fleet.by_version().items()
    ]
    servers = "servers: " + ", ".join(counts) if counts else "no server"
    return [("fleet", Text(servers)), *((server.id, _line(fleet, server)) for server in fleet.servers)]


def _line(fleet: Fleet, server: FleetServer) -> Text:
    role = " (canary)" if server.id in fleet.rollout.canaries else ""
    version = "no version" if server.version is None else f"version {server.version}{role}"
    if fleet.is_silent(server):
        return Text(f"{version}, silent for {fleet.now - server.time:,.0f} s", style="yellow")
    if server.problems:
        return Text(f"{version}, problems: {server.problems}", style="yellow")
    return Text(f"{version}, {server.requests_per_second:,.1f} requests/s" if server.ready else "not ready")


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
