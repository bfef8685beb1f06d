"""Publishes versions: weights are copied at a step boundary, everything else runs in the background."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client import Counter
from torch import Tensor

from anabranch.core.failures import out_of_memory
from anabranch.core.host_clock import HOST_CLOCK
from anabranch.core.job_thread import BackgroundWorker
from anabranch.core.shutdown import Deadline
from anabranch.core.tracing.spans import span
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import CopyMemoryError, VersionError
from anabranch.learner.evaluate.calibration import AnswerLearner, Recent
from anabranch.learner.evaluate.holdout import HoldoutRows, HoldoutSet
from anabranch.learner.extension import Extension, overriding
from anabranch.learner.settings.learner import VersionsSettings
from anabranch.learner.state_dir.folders import last_of_hours
from anabranch.learner.state_dir.origin import VersionOrigin
from anabranch.learner.status.report import SliceReport
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import NewlyTrained, PartitionProgress
from anabranch.learner.versions.format import VERSION_FORMAT, Manifest, ModelReference, Verdict, Versions
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.scores import VersionScoring

_MANIFEST_TIMES = 32
"""Quantiles of record times that a manifest has for its newly trained events."""

_WATCH_SECONDS = 1.0
_NO_VERSION = "no version could be made"
_NOT_MONITORED = "the served version is not monitored now"

log = logging.getLogger(__name__)


Progress = tuple[int, tuple[Position, ...], tuple[object, ...]]
"""Steps, the position of each partition, and the progress of extensions."""


@dataclass(frozen=True)
class Snapshot:
    """The data of a version, copied at one step boundary."""

    step: int
    weights: Mapping[str, Tensor]
    trained_through: Mapping[str, PartitionProgress]
    holdout: HoldoutRows
    accuracy_now: float | None
    newly_trained: RecordTimes
    """Record times of the newly trained events since the last snapshot."""
    seen_through: Mapping[str, int] | None = None
    """How far the stream was read, by `topic:partition`; None where no labels come late."""
    learned_from: Mapping[str, int] | None = None
    """The first offset that was read, by `topic:partition`."""
    erasures: int | None = None
    """The number of the last erasure that was applied to stored events."""
    found: Mapping[str, float] = field(default_factory=dict)
    """The settings that a search has found, by key."""
    parts: int = 0
    """Of a model that grows."""
    recent: Recent = ()
    """How the newest events were predicted before training on them, from which the version learns how to answer."""


class VersionPruning:
    """Keeps the newest versions, one of each hour, and those that a server or the gate needs. Used by one thread."""

    def __init__(
        self, versions: Versions, settings: VersionsSettings, needed: Sequence[Callable[[], set[int] | None]]
    ) -> None:
        """`needed` return versions that must not be deleted; None while that is unknown, and then none is."""
        self._versions = versions
        self._settings = settings
        self._needed = needed
        self._hours: dict[int, int] = {}
        """Hour since 1970 of each version beyond `keep`."""

    def prune(self) -> None:
        """Delete versions that are stale or beyond `keep` and `keep_hourly`, except those that a server needs."""
        numbers = self._versions.numbers()
        stale = self._versions.stale(numbers)
        older = [number for number in numbers if number not in stale][: -self._settings.keep]
        if not older and not stale:
            return
        each = [needed() for needed in self._needed]
        if None in each:
            return
        state = self._versions.state()
        kept = {state.serving, state.previous, state.pinned}.union(self._hourly(older), *filter(None, each))
        for number in [*stale, *older]:
            if number not in kept:
                self._versions.delete(number)

    def _hourly(self, numbers: list[int]) -> set[int]:
        """Return the last version of each of the newest `keep_hourly` hours; each manifest is read once."""
        hours, self._hours = self._hours, {}
        for number in numbers:
            with contextlib.suppress(VersionError):  # it cannot be served
                self._hours[number] = hours.get(number) or int(self._versions.manifest(number).time // 3600)
        return last_of_hours(self._hours, self._settings.keep_hourly, HOST_CLOCK.now())


class VersionWriter:
    """Writes the versions of one learner, each under a new number. Used by the publisher's thread."""

    def __init__(
        self,
        versions: Versions,
        reference: ModelReference,
        schema: Schema,
        generation: int,
        origin: VersionOrigin | None = None,
        undone: int = 0,
        while_appearing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Prepare to write.

        Args:
            versions: where to write.
            reference: of the model.
            schema: of the events.
            generation: of the learner.
            origin: what the versions are made with.
            undone: the last record of `undo.json` whose events none of the versions has seen.
            while_appearing: a version appears within it; where it raises, there is none.
        """
        self.versions = versions
        self._reference = reference
        self._schema = schema
        self._generation = generation
        self._origin = origin
        self._undone = undone
        self._while_appearing = while_appearing
        self.newest: int | None = max(versions.numbers(), default=None)
        """The newest version. Any thread may ask."""
        self._highest = max([versions.highest(), *(number or 0 for number in _numbers_in_state(versions))])

    def newest_manifest(self) -> Manifest | None:
        """Return the manifest of the newest version; None where there is none, or it is damaged."""
        try:
            return None if self.newest is None else self.versions.manifest(self.newest)
        except (VersionError, OSError):
            return None

    def is_of_model(self, manifest: Manifest) -> bool:
        """Return whether a version is of the model and the schema of this learner."""
        expected = self._schema.digest, self._reference, self.versions.base
        return (manifest.schema, manifest.model, manifest.base) == expected

    def manifest(self, snapshot: Snapshot, scoring: VersionScoring, measure: str, learned: NewlyTrained) -> Manifest:
        """Return the manifest of the next version; its number is not used again, also where it cannot be written."""
        now = {} if snapshot.accuracy_now is None else {"now": snapshot.accuracy_now}
        evaluation = scoring.evaluation
        scores = {**now, **evaluation.windows, **evaluation.measures}
        self._highest += 1
        return Manifest(
            number=self._highest,
            generation=self._generation,
            parent=self.newest,
            time=time.time(),
            step=snapshot.step,
            trained_through=dict(snapshot.trained_through),
            seen_through=None if snapshot.seen_through is None else dict(snapshot.seen_through),
            metrics={name: value for name, value in scores.items() if math.isfinite(value)},
            measure=measure,
            constant={name: value for name, value in evaluation.constant.items() if math.isfinite(value)},
            schema=self._schema.digest,
            encoders=self._schema.encoders,
            model=self._reference,
            parts=snapshot.parts,
            files={},
            base=self.versions.base,
            undone=self._undone,
            learned=learned,
            format=VERSION_FORMAT,
            origin=self._origin and msgspec.structs.replace(self._origin, found=dict(snapshot.found)),
            learned_from=None if snapshot.learned_from is None else dict(snapshot.learned_from),
            erasures=snapshot.erasures,
        )

    def write(self, weights: Mapping[str, Tensor], manifest: Manifest, verdict: Verdict) -> None:
        """Write a version, weights on the host, completely or not at all; raises OSError."""
        self.versions.write(weights, manifest, verdict, self._while_appearing)
        self.newest = manifest.number


class Publisher:
    """Judges and writes versions in a background thread, one at a time; one that falls due meanwhile is skipped.

    Every version is judged before it is published: a slow gate makes versions rarer.
    """

    def __init__(
        self,
        writer: VersionWriter,
        gate: QualityGate,
        settings: VersionsSettings,
        verdicts: Counter,
        check: Callable[[], object] = bool,
        extensions: Sequence[Extension] = (),
        answering: AnswerLearner | None = None,
    ) -> None:
        """`verdicts` counts versions by verdict, and `check` is called before each is scored and written. `extensions`
        learn of versions, or judge too. `answering` learns how versions answer; None: as the model does."""
        self._versions = writer.versions
        self._writer = writer
        self.scoring = VersionScoring(gate.scorer)
        self.gate = gate
        needed = [lambda: gate.needed, *overriding(extensions, "needed_versions")]
        self._pruning = VersionPruning(writer.versions, settings, needed)
        self._announce = overriding(extensions, "published")
        self._monitors = overriding(extensions, "monitor")
        self._verdicts = verdicts
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
        self.answering = answering or AnswerLearner()
        newest = writer.newest_manifest()
        if newest is not None and writer.is_of_model(newest):
            self.answering.rule = newest.rule
        self._check = check
        self._background = BackgroundWorker("publisher", check)
        self.verdict: str | None = None
        """Verdict of the newest version of this process."""
        self.slices: Mapping[str, SliceReport] = {}
        """That version by slice. Any thread may read it."""
        self._problem: str | None = None
        self.published = 0
        self.skipped = 0

    @property
    def number(self) -> int | None:
        """The newest version."""
        return self._writer.newest

    @property
    def problem(self) -> str | None:
        """One sentence when the last version could not be written, or this one takes too long. Any thread may ask."""
        return self._background.overdue(self._versions.location, self._every) or self._problem

    def publish_if_due(self, progress: Progress, capture: Callable[[], Snapshot], trained: int = 0) -> None:
        """Publish the snapshot of `capture` when a version is due and there is progress; called at a step boundary.

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
            return
        self._start(progress, capture, trained)

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
        newest = self._writer.newest_manifest()
        return {} if newest is None else newest.trained_through

    def skip_published(self, progress: Progress, trained_through: Mapping[str, PartitionProgress]) -> None:
        """Do not publish the progress of a checkpoint again if the newest version has its model and its progress."""
        newest = self._writer.newest_manifest()
        if newest is None or not self._writer.is_of_model(newest) or newest.step < progress[0]:
            return
        published = newest.trained_through
        if all(name in published and published[name].reaches(trained) for name, trained in trained_through.items()):
            self._progress = progress

    def publish_last(
        self, progress: Progress, capture: Callable[[], Snapshot], deadline: Deadline, trained: int = 0
    ) -> None:
        """Publish the progress since the last version, and wait until it is written; `trained` as above."""
        self._background.wait(deadline)
        if self._is_new(progress) and not self._background.busy and not self._has_few(trained):
            self._start(progress, capture, trained)
            self._background.wait(deadline)
        self._background.raise_bug()

    def _is_new(self, progress: Progress) -> bool:
        """Return whether there is progress: none before the first step, and none that was published."""
        return progress[0] > 0 and progress != self._progress

    def _start(self, progress: Progress, capture: Callable[[], Snapshot], trained: int) -> None:
        try:
            snapshot = capture()
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
        try:
            for monitor in (self.gate.monitor, *self._monitors):
                monitor(rows)
        except OSError as exc:
            log.error("a verdict in %s cannot be written: %s", self._versions.location, exc.strerror or exc)  # noqa: TRY400
        except (RuntimeError, MemoryError) as exc:
            self._report_memory(exc, _NOT_MONITORED)
        else:
            if self._problem is not None and self._problem.startswith(_NOT_MONITORED):
                self._problem = None

    def _publish_traced(self, snapshot: Snapshot) -> None:
        with span("publish", {"anabranch.step": snapshot.step}) as traced:
            self._publish(snapshot)
            traced.set_attribute("anabranch.version", self.number or 0)

    def _publish(self, snapshot: Snapshot) -> None:
        """Score, judge and write a version, whose weights come to the host first, and delete old versions.

        On a full disk, and for lack of memory, the version is skipped.
        """
        self._newly_trained.join(snapshot.newly_trained)
        try:
            # Page-locked memory goes back for the next copies: the gate keeps weights for long.
            weights = {n: each.clone() if each.is_pinned() else each.cpu() for n, each in snapshot.weights.items()}
            with span("gate") as traced:
                rule = self.answering.learn(snapshot.recent)
                found, holdout = self.scoring.score(weights, snapshot.holdout, rule)
                verdict = self.gate.judge(found, holdout)
                traced.set_attribute("anabranch.verdict", verdict.verdict)
        except (RuntimeError, MemoryError) as exc:
            self._report_memory(exc, _NO_VERSION)
            self._progress = None  # to try again, even without new progress
            return
        learned = NewlyTrained(self._newly_trained.rows, self._newly_trained.quantiles(_MANIFEST_TIMES).tolist())
        manifest = self._writer.manifest(snapshot, self.scoring, self.gate.choice.name, learned)
        manifest = msgspec.structs.replace(manifest, rule=found.rule)
        number = manifest.number
        self._check()  # scoring takes seconds, in which an undo may be ordered
        try:
            self._writer.write(weights, manifest, verdict)
        except OSError as exc:
            self._problem = f"version {number} could not be written to {self._versions.location}: {exc.strerror or exc}"
            log.error("%s", self._problem)  # noqa: TRY400 the sentence is complete
            with contextlib.suppress(OSError):
                self._versions.storage.clean()
            self._progress = None  # to try again, even without new progress
            return
        self._newly_trained = RecordTimes()
        self.gate.record_published(number, weights, found, holdout, verdict)
        self.verdict, self.slices = verdict.verdict, verdict.slices
        self.published += 1
        self._verdicts.labels(verdict.verdict).inc()
        for announce in self._announce:
            announce(number)
        try:
            self._pruning.prune()
        except (OSError, VersionError) as exc:
            self._problem = f"old versions in {self._versions.location} cannot be deleted: {exc}"
            log.error("%s", self._problem)  # noqa: TRY400 the sentence is complete
        else:
            self._problem = None


def _numbers_in_state(versions: Versions) -> tuple[int | None, ...]:
    """Return the version numbers in `state.json`, whose directories may be gone; none where it cannot be read."""
    try:
        state = versions.state()
    except (VersionError, OSError) as exc:
        log.warning("%s; numbers continue from those of the existing versions; restore the file, or remove it", exc)
        return ()
    return (state.serving, state.previous, state.pinned, *state.rolled_back)
