"""The servers of a fleet, through the object store of `[storage]`: what they serve, and rollout commands for all."""

from rich.text import Text

from anabranch.commands.versions.show import Which
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.core.object_store.bucket import Bucket, ReplacedError
from anabranch.learner.object_storage.fleet import FleetServer, RolloutFile, read_servers
from anabranch.learner.object_storage.head import HeadReader
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import RegistryState
from anabranch.serving.errors import RequestError
from anabranch.serving.fleet.overview import Fleet, read_fleet
from anabranch.serving.reporting.report import read_report
from anabranch.serving.rollout.commands import COMMANDS


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
    numbers = sorted(reader.contents.versions) if reader.contents is not None else []
    servers = read_servers(bucket)
    served = max((each.version for each in servers if each.version is not None), default=None)
    before = file.contents.applied_to(RegistryState(serving=served))
    if action == "unpin" and before.pinned is None:
        raise SettingsError("no version is pinned for all servers, so that there is none to unpin")
    number = _number(before.pinned if action == "unpin" else which, numbers, served)
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
            "no server says which version is meant: name one by its number, as in `anabranch versions serve 7`"
        )
    return number
