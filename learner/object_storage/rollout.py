"""Which versions the servers of a fleet may serve: `rollout.json`, replaced under compare-and-swap.

Rollout commands at any server write it, and the learner where it judges canaries. Every server follows it. What a
server serves, and served before, is its own.
"""

from collections.abc import Collection

import msgspec

from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.object_store.bucket import Bucket
from learner.errors import StorageError
from learner.object_storage.servers import is_server_id
from learner.state_dir.version import RegistryState

ROLLOUT = "rollout.json"
_MOST_BYTES = 1_000_000


class FleetRollout(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `rollout.json`."""

    pinned: int | None = None
    promoted: int | None = None
    rolled_back: list[int] = []
    """As in `RegistryState`, for all servers."""
    stable: int | None = None
    """With `serving.canary`, the newest version that every server may serve; None: any version."""
    canary: int | None = None
    """The newer version that the canaries serve while it is judged."""
    canaries: list[str] = []
    """Ids of the servers that serve it."""

    def allows(self, number: int, server: str) -> bool:
        """Return whether a server may take a version as far as canaries are concerned."""
        return (
            self.stable is None
            or number <= self.stable
            or number in (self.pinned, self.promoted)
            or (number == self.canary and server in self.canaries)
        )

    def applied_to(self, own: RegistryState) -> RegistryState:
        """Return the state of one server with the decisions of the fleet."""
        return msgspec.structs.replace(
            own, pinned=self.pinned, promoted=self.promoted, rolled_back=sorted(self.rolled_back)
        )

    def changed_to(self, state: RegistryState, numbers: Collection[int]) -> "FleetRollout":
        """Return the decisions after a rollout command; deleted versions are left out of `rolled_back`.

        A promoted version is one that every server may serve, and ends the comparison with a canary; so is one that was
        promoted before if all from it to the stable version are rolled back now.
        """
        promoted, rolled_back = state.promoted, set(state.rolled_back)
        promotes = promoted is not None and (
            promoted != self.promoted
            or (
                self.stable is not None
                and self.stable > promoted
                and rolled_back.issuperset(number for number in numbers if promoted < number <= self.stable)
            )
        )
        ends = promotes or self.canary in rolled_back
        return msgspec.structs.replace(
            self,
            pinned=state.pinned,
            promoted=state.promoted,
            rolled_back=sorted(rolled_back & set(numbers)),
            stable=promoted if promotes and self.stable is not None else self.stable,
            canary=None if ends else self.canary,
            canaries=[] if ends else self.canaries,
        )


def without_canaries(rollout: FleetRollout) -> FleetRollout:
    """Return the decisions of a fleet in which every server may serve every version."""
    return msgspec.structs.replace(rollout, stable=None, canary=None, canaries=[])


class RolloutFile:
    """Reads and replaces `rollout.json`. Used by one thread at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._tag: str | None = None
        self._damage: StorageError | None = None
        """Why the object of this tag cannot be used."""
        self.contents = FleetRollout()
        """What was read or written last; the defaults where there is none yet."""

    def poll(self) -> bool:
        """Read the object if it has changed, and return whether it has.

        Raises:
            BucketAwayError: the object store cannot be reached.
            StorageError: the object cannot be used.
        """
        try:
            found = self._bucket.read_changed(ROLLOUT, self._tag, _MOST_BYTES)
        except DamagedError as exc:
            raise StorageError(str(exc)) from exc
        except FileNotFoundError:
            changed = self._tag is not None
            self.contents, self._tag, self._damage = FleetRollout(), None, None
            return changed
        if found is not None:
            content, self._tag = found
            self._damage = self._decode(content)
        if self._damage is not None:
            raise self._damage
        return found is not None

    def _decode(self, content: bytes) -> StorageError | None:
        """Take the contents over, or return why they cannot be used."""
        try:
            with damage_is(StorageError, f"{self._bucket.url}/{ROLLOUT} cannot be used"):
                found = decoded(content, FleetRollout)
        except StorageError as exc:
            return exc
        canaries = [name for name in found.canaries if is_server_id(name)]
        self.contents = msgspec.structs.replace(found, canaries=canaries)
        return None

    def replace(self, contents: FleetRollout) -> None:
        """Replace what was read last.

        Raises:
            ReplacedError: another process has replaced it since.
            BucketAwayError: the object store cannot be reached; the change may appear later.
        """
        content = msgspec.json.encode(contents)
        if self._tag is None:
            self._tag = self._bucket.create(ROLLOUT, content)
        else:
            self._tag = self._bucket.replace(ROLLOUT, content, self._tag)
        self.contents = contents
