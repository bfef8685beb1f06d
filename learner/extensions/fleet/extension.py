"""The fleet: servers on other hosts say which versions they need, and a part of them serves a new version first."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from anabranch.core.errors import AnabranchError
from anabranch.core.object_store.bucket import ReplacedError
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.learner.evaluate.holdout import HoldoutRows
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.fleet.canary import CanaryJudge
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.fleet import (
    REPORT_EVERY,
    SILENT,
    FleetReader,
    FleetRollout,
    FleetServer,
    RolloutFile,
    without_canaries,
)
from anabranch.learner.object_storage.head import HeadReader
from anabranch.learner.object_storage.opening import FETCHED
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.learner.versions.gate import QualityGate

log = logging.getLogger(__name__)

RolloutChange = Callable[[FleetRollout], FleetRollout]
"""Returns the new decisions, or the same; may be called again, after another process has changed them."""


class FleetWatch:
    """Reads the reports of servers every few seconds, and writes decisions, in a thread.

    No step and no version waits for the object store: other threads read what was read last.
    """

    def __init__(self, storage: StorageSettings, canaries: bool = True, *, check: Callable[[], object] = bool) -> None:
        """Prepare to watch; nothing is read before the thread is started.

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
        self.servers: Sequence[FleetServer] = ()
        """The servers that are alive. Any thread may ask."""
        self.is_read = False
        """Whether all has been read once. Any thread may ask."""
        self._away_since: float | None = None
        self._sentence: str | None = None
        self.thread = PeriodicThread("fleet-watch", self._run, REPORT_EVERY)

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
        head = self._head.contents
        return head.versions if head is not None else ()

    @property
    def silent(self) -> Collection[str]:
        """Servers that have been silent, and have not ended in order. Any thread may ask."""
        return self._reader.silent

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is not written yet. Any thread may ask."""
        return self._change is not None

    def needed_versions(self) -> set[int] | None:
        """Return the versions that a server or a decision needs; None while that is unknown. Any thread may ask."""
        if not self.is_read:
            return None
        rollout = self.rollout
        decided = {rollout.pinned, rollout.promoted, rollout.stable, rollout.canary}
        return {number for number in decided if number is not None}.union(*(each.needed for each in self.servers))

    def served(self, own: RegistryState) -> RegistryState:
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
            recent=[*own.recent, *([] if own.serving is None else [own.serving]), *served],
        )

    def decide(self, change: RolloutChange) -> None:
        """Change the decisions in the background; the one before must be written. Called by one thread."""
        assert self._change is None
        self._change = change
        self.thread.wake()

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

    def _run(self) -> float:
        try:
            self.poll()
            self._away_since = self._sentence = None
        except Exception as exc:  # what servers write must not end training, nor this thread
            if self._away_since is None:
                self._away_since = time.monotonic()
                is_away = isinstance(exc, OSError | AnabranchError)
                log.warning("the servers of the fleet cannot be read for now: %s", exc, exc_info=not is_away)
            self._sentence = f"the servers of the fleet cannot be read, so no version is deleted: {exc}"
        return REPORT_EVERY.total_seconds()


def _believed(server: FleetServer, versions: Collection[int]) -> FleetServer:
    """Return a report without a version that is newer than all that exist: no server can serve that."""
    is_possible = server.version is None or not versions or server.version <= max(versions)
    return server if is_possible else msgspec.structs.replace(server, version=None)


class FleetExtension(Extension):
    """Lets no version be deleted that a server needs, judges canaries, and reports the servers."""

    name: ClassVar[str] = "fleet"

    def __init__(self, watch: FleetWatch, canary: CanaryJudge | None) -> None:
        """`canary` judges versions that a part of the servers serve first; None: all serve each version."""
        self._watch = watch
        self._canary = canary

    @override
    def monitor(self, rows: HoldoutRows) -> None:
        if self._canary is not None:
            self._canary.update(rows)

    @override
    def needed_versions(self) -> set[int] | None:
        return self._watch.needed_versions()

    @override
    def state(self) -> Any:
        return None if self._canary is None else self._canary.state()

    @override
    def restore(self, state: Any) -> None:
        if self._canary is not None:
            self._canary.restore(state)

    @property
    @override
    def problems(self) -> Sequence[str]:
        canary = None if self._canary is None else self._canary.problem
        return [each for each in (canary, self._watch.problem) if each is not None]

    @override
    def report(self) -> Mapping[str, Any]:
        servers = {each.id: each.version for each in self._watch.servers}
        return {"servers": servers, "canary": None if self._canary is None else self._canary.report}


def fleet_extension(
    watch: FleetWatch,
    gate: QualityGate,
    versions: Versions,
    spec: PipelineSettings,
    storage: StorageSettings,
    metrics: LearnerMetrics,
) -> FleetExtension:
    """Return the extension of a fleet that is watched, with a judge of canaries where `serving.canary` asks for them.

    A canary is read from the object store where this host, a fresh one, lacks it.
    """
    if not spec.serving.canary:
        return FleetExtension(watch, None)
    fetched = versions.path.parent / FETCHED / "compared"
    judge = CanaryJudge(
        watch,
        versions,
        spec.gate,
        gate,
        spec.serving.canary,
        count=lambda outcome: metrics.canary_verdicts.labels(outcome).inc(),
        stored=Versions(versions.path, BucketStorage(storage.bucket, "versions", fetched)),
    )
    return FleetExtension(watch, judge)
