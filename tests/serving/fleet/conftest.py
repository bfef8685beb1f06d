"""Fixtures of fleets: a learner that writes versions into an object store, and hosts that follow it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from learner.object_storage.config import StorageSettings
from learner.object_storage.rollout import FleetRollout
from learner.object_storage.servers import FleetServer
from learner.state_dir.version import RegistryState, Versions
from serving.fleet.follower import VersionFollower
from serving.fleet.member import FleetMember
from tests.support.object_versions import VersionUploader


@dataclass
class Learning:
    """The learner of a fleet."""

    storage: StorageSettings
    publisher: Any
    uploader: VersionUploader

    def publish(self, *numbers: int, **changes: Any) -> None:
        """Publish versions, all at once."""
        for number in numbers:
            self.publisher.publish(number, **changes)
        self.uploader.upload(*numbers)


@dataclass
class Host:
    """A host that follows, without threads."""

    versions: Versions
    follower: VersionFollower
    member: FleetMember
    rollout: list[FleetRollout | None] = field(default_factory=lambda: [FleetRollout()])
    now: list[float] = field(default_factory=lambda: [0.0])

    def complete(self) -> list[int]:
        """The versions whose weights are here."""
        return [n for n in self.versions.numbers() if "model.safetensors" in self.versions.folder(n).files()]

    def judged(self) -> list[int]:
        """The versions that may be served."""
        return [n for n in self.versions.numbers() if self.versions.verdict(n) is not None]

    def follow(self) -> None:
        """Copy all versions that are due."""
        while self.follower.poll():
            pass


@pytest.fixture
def storage(tmp_path: Path) -> StorageSettings:
    """An object store in memory."""
    return StorageSettings(url=f"memory://{tmp_path.name}/state")


@pytest.fixture
def learning(storage: StorageSettings, deploy_in: Callable[[str, Path], Any], tmp_path: Path) -> Learning:
    """A learner that has not published yet."""
    publisher = deploy_in("number", tmp_path / "learner")
    return Learning(storage, publisher, VersionUploader(storage.bucket, publisher.versions))


@pytest.fixture
def hosts(storage: StorageSettings, tmp_path: Path) -> Callable[..., Host]:
    """Make a host: `hosts("a")`."""

    def make(name: str) -> Host:
        versions, rollout, now = Versions(tmp_path / name / "var" / "versions"), [FleetRollout()], [0.0]
        errors: list[BaseException] = []
        follower = VersionFollower(storage, versions, name, lambda: rollout[0], errors.append, lambda: now[0])

        def report(state: RegistryState) -> FleetServer:
            return FleetServer(
                id=name, beat=0, time=0.0, address="", ready=True, version=state.serving, previous=state.previous
            )

        member = FleetMember(storage, versions, name, report, errors.append)
        return Host(versions, follower, member, rollout, now)

    return make


@pytest.fixture
def followed(storage: StorageSettings, deploy_in: Callable[[str, Path], Any], tmp_path: Path) -> Callable[[str], Any]:
    """Make the deployment of a server that follows the object store: `served(followed("a"))`."""

    def make(name: str) -> Any:
        publisher = deploy_in("number", tmp_path / name)
        return dataclasses.replace(publisher, deployment=dataclasses.replace(publisher.deployment, storage=storage))

    return make
