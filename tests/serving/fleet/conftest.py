"""Fixtures of fleets: a learner that writes versions into an object store, and hosts that follow it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from anabranch.learner.object_storage.fleet import FleetRollout, FleetServer
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import Versions
from anabranch.serving.fleet.follower import VersionFollower
from anabranch.serving.fleet.member import FleetMember
from tests.support.object_versions import VersionUploader


@dataclass
class Learning:
    """The learner of a fleet."""

    storage: StorageSettings
    publisher: Any
    uploader: VersionUploader

    def publish(self, *numbers, **changes):
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

    def complete(self):
        """The versions whose weights are here."""
        return [n for n in self.versions.numbers() if "model.safetensors" in self.versions.folder(n).files()]

    def judged(self):
        """The versions that may be served."""
        return [n for n in self.versions.numbers() if self.versions.verdict(n) is not None]

    def follow(self):
        """Copy all versions that are due."""
        while self.follower.poll():
            pass


@pytest.fixture
def storage(tmp_path):
    """An object store in memory."""
    return StorageSettings(url=f"memory://{tmp_path.name}/state")


@pytest.fixture
def learning(storage, deploy_in, tmp_path):
    """A learner that has not published yet."""
    publisher = deploy_in("number", tmp_path / "learner")
    return Learning(storage, publisher, VersionUploader(storage.bucket, publisher.versions))


@pytest.fixture
def hosts(storage, tmp_path):
    """Make a host: `hosts("a")`."""

    def make(name):
        versions, rollout, now = Versions(tmp_path / name / "var" / "versions"), [FleetRollout()], [0.0]
        errors: list[BaseException] = []
        follower = VersionFollower(storage, versions, name, lambda: rollout[0], errors.append, lambda: now[0])

        def report(state):
            return FleetServer(
                id=name, beat=0, time=0.0, address="", ready=True, version=state.serving, previous=state.previous
            )

        member = FleetMember(storage, versions, name, report, errors.append)
        return Host(versions, follower, member, rollout, now)

    return make


@pytest.fixture
def followed(storage, deploy_in, tmp_path):
    """Make the deployment of a server that follows the object store: `served(followed("a"))`."""

    def make(name):
        publisher = deploy_in("number", tmp_path / name)
        return dataclasses.replace(publisher, deployment=dataclasses.replace(publisher.deployment, storage=storage))

    return make
