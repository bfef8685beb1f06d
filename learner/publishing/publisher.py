"""Publishes versions: weights are copied at a step boundary, everything else runs in the background."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping

import msgspec
from torch import Tensor

from anabranch.core.failures import out_of_memory
from anabranch.core.tracing.spans import span
from ingest.events.schema import Schema
from learner.config import VersionsSettings
from learner.errors import CopyMemoryError, VersionError
from learner.evaluation.holdout import HoldoutRows, HoldoutSet
from learner.evaluation.scoring import Scorer
from learner.metrics import LearnerMetrics
from learner.model.growing.parts import parts_in
from learner.object_storage.fleet import FleetWatch
from learner.publishing.canary import CanaryJudge
from learner.publishing.gatekeeper import QualityGate
from learner.publishing.pruning import VersionPruning, numbers_in_state
from learner.publishing.snapshot import Progress, Snapshot
from learner.publishing.version_scoring import VersionScoring
from learner.runtime.background_worker import BackgroundWorker
from learner.runtime.shutdown import Deadline
from learner.state_dir.origin import ResumedFrom, VersionOrigin
from learner.state_dir.trained_through import NewlyTrained, PartitionProgress
from learner.state_dir.version import VERSION_FORMAT, Manifest, ModelReference, Versions
from learner.stream.record_times import RecordTimes

_MANIFEST_TIMES = 32
"""Quantiles of record times that a manifest has for its newly trained events."""

_WATCH_SECONDS = 1.0
_NO_VERSION = "no version could be made"
_NOT_MONITORED = "the served version is not monitored now"

log = logging.getLogger(__name__)


class Publisher:
    """Judges and writes versions in a background thread, one at a time; one that falls due meanwhile is skipped.

    Every version is judged before it is published: a slow gate makes versions rarer.
    """

    def __init__(
        self,
        versions: Versions,
        settings: VersionsSettings,
        reference: ModelReference,
        schema: Schema,
        scorer: Scorer,
        gate: QualityGate,
        generation: int,
        metrics: LearnerMetrics,
        check: Callable[[], object] = bool,
        fleet: FleetWatch | None = None,
        canary: CanaryJudge | None = None,
        origin: VersionOrigin | None = None,
        undone: int = 0,
        while_appearing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Take the learner's generation, and `check`, which is called before each version is scored and written.

        `fleet` and `canary` are of the servers on other hosts; None without them. `origin` is what the versions are
        made with; `undone` the last record of `undo.json` whose events none of them has seen. A version appears within
        `while_appearing`; where it raises, there is none.
        """
        self._versions = versions
        self._reference = reference
        self._schema = schema
        self.scoring = VersionScoring(scorer, schema)
        self.gate = gate
        self._fleet = fleet
        self._pruning = VersionPruning(versions, settings, gate, fleet)
        self.canary = canary
        self._generation = generation
        self._metrics = metrics
        self._every = settings.publish_every.total_seconds()
        self._min_events = settings.min_events
        self._trained: int | None = None
        """Events that were trained on when the last version was made, or at the start."""
        self.due = 0.0
        """When the next version may be published, by `time.monotonic`."""
        self.watch_due = 0.0
        """When the served version is monitored next, by `time.monotonic`."""
        self._watching = False
        self._progress: Progress | None = None
        self._newly_trained = RecordTimes()
        self._check = check
        self._background = BackgroundWorker("publisher", check)
        self._origin, self._undone, self._while_appearing = origin, undone, while_appearing
        self.number: int | None = max(versions.numbers(), default=None)
        """The newest version."""
        self.verdict: str | None = None
        """Verdict of the newest version of this process."""
        self._highest = max([versions.highest(), *(n or 0 for n in numbers_in_state(versions))])
        self._problem: str | None = None
        self.published = 0
        self.skipped = 0

    @property
    def problem(self) -> str | None:
        """One sentence when the last version could not be written, or this one takes too long. Any thread may ask."""
        return self._background.overdue(self._versions.location, self._every) or self._problem

    @property
    def servers(self) -> dict[str, int | None]:
        """The version of each server of the fleet that is alive, by its id. Any thread may ask."""
        return {} if self._fleet is None else {each.id: each.version for each in self._fleet.servers}

    def set_resumed_from(self, checkpoint: ResumedFrom | None) -> None:
        """Record the checkpoint that the learner resumes from in the versions to come."""
        if self._origin is not None:
            self._origin = msgspec.structs.replace(self._origin, resumed_from=checkpoint)

    def publish_if_due(self, progress: Progress, take: Callable[[], Snapshot], trained: int = 0) -> None:
        """Publish the snapshot of `take` when a version is due and there is progress; called at a step boundary.

        Before `due` this does nothing, so that the caller need not compute the progress. `trained`: events that were
        trained on over the life of the pipeline.
        """
        now = time.monotonic()
        if now < self.due or self._has_few(trained):
            return
        busy = self._background.busy
        if not self._is_new(progress) or (busy and self._watching):
            return
        self.due = now + self._every
        if busy or now < self.scoring.rested_at:
            self.skipped += 1
            self._metrics.publish_skipped.inc()
            return
        self._start(progress, take, trained)

    def _has_few(self, trained: int) -> bool:
        """Return whether too few events were trained on since the last version."""
        if self._trained is None:
            self._trained = trained if self.number is not None else 0
        return trained - self._trained < self._min_events

    def watch(self, holdout: HoldoutSet) -> None:
        """Score the served version on the holdout set, unless the thread is busy; called once `watch_due` has passed.

        An exception of the thread's work before is a bug, and raised here.
        """
        self._background.raise_bug()
        if not self._background.busy:
            self.watch_due = time.monotonic() + _WATCH_SECONDS
            rows = holdout.held
            self._watching = True
            self._background.start(lambda: self._watch(rows))

    def published_through(self) -> Mapping[str, PartitionProgress]:
        """Return how far the newest version is trained, by `topic:partition`; empty when its manifest is damaged."""
        if self.number is None:
            return {}
        try:
            return self._versions.manifest(self.number).trained_through
        except (VersionError, OSError):
            return {}

    def skip_published(self, progress: Progress, trained_through: Mapping[str, PartitionProgress]) -> None:
        """Do not publish the progress of a checkpoint again if the newest version has its model and its progress."""
        if self._has_published(progress[0], trained_through):
            self._progress = progress

    def _has_published(self, step: int, trained_through: Mapping[str, PartitionProgress]) -> bool:
        if self.number is None:
            return False
        try:
            newest = self._versions.manifest(self.number)
        except (VersionError, OSError):
            return False
        expected = self._schema.digest, self._reference, self._versions.base
        if (newest.schema, newest.model, newest.base) != expected or newest.step < step:
            return False
        published = newest.trained_through
        return all(name in published and published[name].reaches(trained) for name, trained in trained_through.items())

    def publish_last(
        self, progress: Progress, take: Callable[[], Snapshot], deadline: Deadline, trained: int = 0
    ) -> None:
        """Publish the progress since the last version, and wait until it is written; `trained` as above."""
        self._background.wait(deadline)
        if self._is_new(progress) and not self._background.busy and not self._has_few(trained):
            self._start(progress, take, trained)
            self._background.wait(deadline)
        self._background.raise_bug()

    def _is_new(self, progress: Progress) -> bool:
        """Return whether there is progress: none before the first step, and none that was published."""
        return progress[0] > 0 and progress != self._progress

    def _start(self, progress: Progress, take: Callable[[], Snapshot], trained: int) -> None:
        try:
            snapshot = take()
        except CopyMemoryError as exc:
            self._report_memory(exc, _NO_VERSION)
            return
        self._progress, self._trained = progress, trained
        self._watching = False
        self._background.start(lambda: self._publish_traced(snapshot))

    def _report_memory(self, exc: Exception, what: str) -> None:
        """Report that there is no memory now; the next attempt follows when it is due. Other errors are raised."""
        if not out_of_memory(exc):
            raise exc
        self._problem = f"{what}, for lack of memory: {' '.join(str(exc).split())}"
        log.error("%s", self._problem)

    def _watch(self, rows: HoldoutRows) -> None:
        before = self.gate.withdrawn
        try:
            self.gate.monitor(rows)
            if self.canary is not None:
                self.canary.update(rows)
        except OSError as exc:
            log.error("a verdict in %s cannot be written: %s", self._versions.location, exc.strerror or exc)  # noqa: TRY400
        except (RuntimeError, MemoryError) as exc:
            self._report_memory(exc, _NOT_MONITORED)
        else:
            if self._problem is not None and self._problem.startswith(_NOT_MONITORED):
                self._problem = None
        self._metrics.withdrawn.inc(self.gate.withdrawn - before)

    def _publish_traced(self, snapshot: Snapshot) -> None:
        with span("publish", {"anabranch.step": snapshot.step}) as traced:
            self._publish(snapshot)
            traced.set("anabranch.version", self.number or 0)

    def _publish(self, snapshot: Snapshot) -> None:
        """Score, judge and write a version, whose weights come to the host first, and delete old versions.

        On a full disk, and for lack of memory, the version is skipped.
        """
        self._newly_trained.join(snapshot.newly_trained)
        try:
            # Page-locked memory goes back for the next copies: the gate keeps weights for long.
            weights = {n: each.clone() if each.is_pinned() else each.cpu() for n, each in snapshot.weights.items()}
            with span("gate") as traced:
                scores_G, holdout = self.scoring.score(weights, snapshot.holdout)
                verdict = self.gate.judge(scores_G, holdout)
                traced.set("anabranch.verdict", verdict.verdict)
        except (RuntimeError, MemoryError) as exc:
            self._report_memory(exc, _NO_VERSION)
            self._progress = None  # to try again, even without new progress
            return
        number = self._highest = self._highest + 1  # a number that failed is not used again
        manifest = self._manifest(number, snapshot, weights)
        self._check()  # scoring takes seconds, in which an undo may be ordered
        try:
            self._versions.write(weights, manifest, verdict, self._while_appearing)
        except OSError as exc:
            self._problem = f"version {number} could not be written to {self._versions.location}: {exc.strerror or exc}"
            log.error("%s", self._problem)  # noqa: TRY400 the sentence is complete
            with contextlib.suppress(OSError):
                self._versions.clean()
            self._progress = None  # to try again, even without new progress
            return
        self._newly_trained = RecordTimes()
        self.gate.record_published(number, weights, scores_G, holdout, verdict)
        self.number, self.verdict = number, verdict.verdict
        self.published += 1
        self._metrics.published.inc()
        self._metrics.gate_verdicts.labels(verdict.verdict).inc()
        try:
            self._pruning.prune()
        except (OSError, VersionError) as exc:
            self._problem = f"old versions in {self._versions.location} cannot be deleted: {exc}"
            log.error("%s", self._problem)  # noqa: TRY400 the sentence is complete
        else:
            self._problem = None

    def _manifest(self, number: int, snapshot: Snapshot, weights: Mapping[str, Tensor]) -> Manifest:
        metrics = ({} if snapshot.accuracy_now is None else {"now": snapshot.accuracy_now}) | dict(
            self.scoring.evaluation.windows
        )
        return Manifest(
            number=number,
            generation=self._generation,
            parent=self.number,
            time=time.time(),
            step=snapshot.step,
            trained_through=dict(snapshot.trained_through),
            seen_through=None if snapshot.seen_through is None else dict(snapshot.seen_through),
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            schema=self._schema.digest,
            encoders=self._schema.encoders,
            model=self._reference,
            parts=parts_in(weights),
            files={},
            base=self._versions.base,
            undone=self._undone,
            learned=NewlyTrained(self._newly_trained.rows, self._newly_trained.quantiles(_MANIFEST_TIMES).tolist()),
            format=VERSION_FORMAT,
            origin=self._origin and msgspec.structs.replace(self._origin, found=dict(snapshot.found)),
            learned_from=None if snapshot.learned_from is None else dict(snapshot.learned_from),
            erasures=snapshot.erasures,
        )
