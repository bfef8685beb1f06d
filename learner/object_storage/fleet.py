"""The fleet of servers as the learner sees it: their reports, and the decisions for all of them."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Self

import msgspec

from anabranch.core.errors import AnabranchError
from anabranch.core.object_store.bucket import ReplacedError
from learner.object_storage.config import StorageSettings
from learner.object_storage.head import HeadReader
from learner.object_storage.rollout import FleetRollout, RolloutFile, without_canaries
from learner.object_storage.servers import REPORT_EVERY, SILENT, FleetReader, FleetServer
from learner.state_dir.version import RegistryState

log = logging.getLogger(__name__)

RolloutChange = Callable[[FleetRollout], FleetRollout]
"""Returns the new decisions, or the same; may be called again, after another process has changed them."""


class FleetWatch:
    """Reads the reports of servers every few seconds, and writes decisions; a context manager around its thread.

    No step and no version waits for the object store: other threads read what was read last.
    """

    def __init__(self, storage: StorageSettings, canaries: bool = True, *, check: Callable[[], object] = bool) -> None:
        """Prepare to watch; entering the context starts the thread.

        Args:
            storage: the object store.
            canaries: whether the learner judges them; else every server may serve every version.
            check: raises once another learner has the lease: this one decides nothing any more.
        """
        self._canaries = canaries
        self._check = check
        bucket = storage.quick_bucket
        self._reader = FleetReader(bucket)
        self._file = RolloutFile(bucket)
        self._head = HeadReader(bucket)
        self._change: RolloutChange | None = None
        self._wake = threading.Event()
        self._stopping = False
        self.servers: Sequence[FleetServer] = ()
        """The servers that are alive. Any thread may ask."""
        self.is_read = False
        """Whether all has been read once. Any thread may ask."""
        self._away_since: float | None = None
        self._sentence: str | None = None
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join(REPORT_EVERY.total_seconds())

    @property
    def problem(self) -> str | None:
        """One sentence when the fleet could not be read for long. Any thread may ask."""
        since, sentence = self._away_since, self._sentence
        is_long = since is not None and time.monotonic() - since >= SILENT.total_seconds()
        return sentence if is_long else None

    @property
    def rollout(self) -> FleetRollout:
        """The decisions that were read or written last. Any thread may ask."""
        return self._file.contents

    @property
    def versions(self) -> Collection[int]:
        """The versions that servers can copy, as read last. Any thread may ask."""
        head = self._head.head
        return head.versions if head is not None else ()

    @property
    def silent(self) -> Collection[str]:
        """Servers that have been silent, and have not ended in order. Any thread may ask."""
        return self._reader.silent

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is not written yet. Any thread may ask."""
        return self._change is not None

    @property
    def needed(self) -> set[int] | None:
        """The versions that a server or a decision needs, and that must not be deleted; None while that is unknown."""
        if not self.is_read:
            return None
        rollout = self.rollout
        decided = {rollout.pinned, rollout.promoted, rollout.stable, rollout.canary}
        return {number for number in decided if number is not None}.union(*(each.needed for each in self.servers))

    def state(self, own: RegistryState) -> RegistryState:
        """Return what the servers serve, as one state: of all decisions, with what a server of this host has decided.

        Any thread may call this.
        """
        rollout = self.rollout
        rolled_back = {*rollout.rolled_back, *own.rolled_back}
        served = [each.version for each in self.servers if each.version is not None]
        return msgspec.structs.replace(
            own,
            serving=max((number for number in served if number not in rolled_back), default=own.serving),
            pinned=own.pinned if rollout.pinned is None else rollout.pinned,
            promoted=own.promoted if rollout.promoted is None else rollout.promoted,
            rolled_back=sorted(rolled_back),
        )

    def decide(self, change: RolloutChange) -> None:
        """Change the decisions in the background; the one before must be written. Called by one thread."""
        assert self._change is None
        self._change = change
        self._wake.set()

    def poll(self) -> None:
        """Write the decision that is due, and read all reports. Used by the thread, or by a test.

        Raises:
            OSError: the object store cannot be reached.
            AnabranchError: `rollout.json` cannot be used, or another learner has the lease.
        """
        while (change := self._change) is not None:
            self._file.poll()
            if self._replace(change(self.rollout)):
                self._change = None
        self._file.poll()
        if not self._canaries and self.rollout.stable is not None:  # left by a learner that judged canaries
            self._replace(without_canaries(self.rollout))
        servers = self._reader.read()
        self._head.poll()  # after the reports: none of them has a version that is newer than the head's
        self.servers = [_believed(server, self.versions) for server in servers]
        self.is_read = True

    def _replace(self, after: FleetRollout) -> bool:
        """Write decisions that differ; return False when a rollout command was written meanwhile."""
        try:
            if after != self.rollout:
                self._check()
                self._file.replace(after)
        except ReplacedError:
            return False
        return True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.poll()
                self._away_since = self._sentence = None
            except Exception as exc:  # what servers write must not end training, nor this thread
                if self._away_since is None:
                    self._away_since = time.monotonic()
                    is_away = isinstance(exc, OSError | AnabranchError)
                    log.warning("the servers of the fleet cannot be read for now: %s", exc, exc_info=not is_away)
                self._sentence = f"the servers of the fleet cannot be read, so no version is deleted: {exc}"
            self._wake.wait(REPORT_EVERY.total_seconds())
            self._wake.clear()


def _believed(server: FleetServer, versions: Collection[int]) -> FleetServer:
    """Return a report without a version that is newer than all that exist: no server can serve that."""
    is_possible = server.version is None or not versions or server.version <= max(versions)
    return server if is_possible else msgspec.structs.replace(server, version=None)
