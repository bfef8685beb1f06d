"""Rollout commands for a fleet: a command at one server is written for all of them, under compare-and-swap."""

from collections.abc import Sequence
from datetime import timedelta

from anabranch.core.errors import AnabranchError
from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import BucketAwayError, ReplacedError
from anabranch.learner.object_storage.fleet import FleetRollout, RolloutFile
from anabranch.learner.object_storage.head import BucketHead, HeadReader
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.serving.errors import ConflictError, UnavailableError
from anabranch.serving.fleet.version_cache import WITHHELD, VersionCache

_PATIENCE = timedelta(seconds=10)
"""How long a command waits for a version that is copied."""


class FleetCommand:
    """One rollout command, from the state of the fleet that it was given for to its result."""

    def __init__(self, rollout: RolloutFile, numbers: Sequence[int]) -> None:
        """Take the decisions of the fleet as they were read, and the versions that there are, ascending."""
        self._file = rollout
        self.numbers = numbers

    @property
    def rollout(self) -> FleetRollout:
        """The decisions of the fleet before the command."""
        return self._file.contents

    def commit(self, after: RegistryState) -> None:
        """Make the result that of all servers.

        Raises:
            ConflictError: another command was given meanwhile.
            UnavailableError: the object store cannot be reached. Where it does not answer whether it has written the
                result, and cannot be asked either, the servers may apply it nevertheless.
        """
        result = self.rollout.changed_to(after, self.numbers)
        try:
            self._replace(result)
        except ReplacedError as exc:
            raise ConflictError("another rollout command was given at the same time; send this one again") from exc
        except BucketAwayError as exc:
            raise _unavailable(exc) from exc

    def _replace(self, result: FleetRollout) -> None:
        """Write the result; where the reply was lost, read whether it was written."""
        try:
            self._file.replace(result)
        except BucketAwayError:
            self._file.poll()
            if self.rollout != result:
                raise


class FleetCommands:
    """Begins rollout commands for the servers of a fleet. Any thread may use it."""

    def __init__(self, storage: StorageSettings, versions: Versions, server: str) -> None:
        """Prepare to begin commands at the server with this id."""
        self._storage = storage
        self._versions = versions
        self._server = server

    def begin(self, number: int, *, served: bool) -> FleetCommand:
        """Read the state of the fleet; copy the version to this host first if it is to be served.

        Raises:
            ConflictError: the version cannot be copied.
            UnavailableError: the object store cannot be reached, or this host copies another version.
        """
        quick = self._storage.quick_bucket
        reader, rollout = HeadReader(quick), RolloutFile(quick)
        try:
            reader.poll()
            rollout.poll()
            versions = reader.contents.versions if reader.contents is not None else {}
            if served and reader.contents is not None and number in versions:
                self._copy(number, reader.contents, rollout.contents)
        except BucketAwayError as exc:
            raise _unavailable(exc) from exc
        except TimeoutError as exc:
            raise UnavailableError(f"the rollout command was not applied, since {exc}; send it again") from exc
        except (OSError, AnabranchError, DamagedError) as exc:
            raise ConflictError(f"version {number} cannot be copied to this server: {exc}") from exc
        return FleetCommand(rollout, sorted(versions))

    def _copy(self, number: int, head: BucketHead, rollout: FleetRollout) -> None:
        """Copy a version; where this server may not serve it yet, no server of this host does before the command."""
        cache, generation = VersionCache(self._storage.bucket, self._versions), head.versions[number]
        with cache.locked(_PATIENCE):
            if number not in cache.numbers():
                cache.add(number, generation)
            if not cache.is_complete(number):
                cache.complete(number, generation, head.bases)
            verdict = cache.read_verdict(number, generation)
            if verdict is not None:
                cache.judge(number, verdict if rollout.allows(number, self._server) else WITHHELD)


def _unavailable(exc: BucketAwayError) -> UnavailableError:
    return UnavailableError(
        f"rollout commands are for all servers, and are refused while the object store cannot be reached: {exc}"
    )
