"""Publishes versions: a snapshot at a step boundary, everything else in the background."""

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingest.messages import Position
from ingest.schema import Schema
from learner.background import Background
from learner.config import ModelSettings, VersionsSettings
from learner.deadline import Deadline
from learner.errors import VersionError
from learner.evaluation import Evaluation, evaluate, newcomers, score_each
from learner.guard import GuardRows
from learner.metrics import LearnerMetrics
from learner.record_times import RecordTimes
from learner.retention import Retention
from learner.task import Task
from learner.trained import Learned, Trained
from learner.version import Manifest, ModelReference, Verdict, Versions

_LEARNED_TIMES = 32
"""So many record times stand for all the events that a version is the first to have learned."""

_SCORING_SHARE = 50
"""Scoring may take one part in so many of the time; versions in between have no scores, but for the last of a burst."""

Progress = tuple[int, tuple[Position, ...]]
"""Steps, and the position of each partition."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """All that a version is made from, copied at one step boundary."""

    step: int
    weights: Mapping[str, Tensor]
    trained_through: Mapping[str, Trained]
    guard: GuardRows
    accuracy_now: float | None
    learned: RecordTimes
    """Of the events that were learned for the first time since the last snapshot."""


class Publisher:
    """Writes versions in a thread of its own, one at a time; one that falls due meanwhile is skipped and counted.

    Until the gate exists every version's verdict is `abstain`: served, and marked as not judged.
    """

    def __init__(
        self,
        versions: Versions,
        settings: VersionsSettings,
        model_settings: ModelSettings,
        schema: Schema,
        model: nn.Module,
        task: Task,
        device: torch.device,
        epoch: int,
        metrics: LearnerMetrics,
    ) -> None:
        self._versions = versions
        self._settings = settings
        self._reference = ModelReference(model_settings.factory, dict(model_settings.args), model_settings.task)
        self._schema = schema
        self._scored_model = copy.deepcopy(model).eval()
        self._task = task
        self._device = device
        self._epoch = epoch
        self._metrics = metrics
        self._every = settings.publish_every.total_seconds()
        self._due = 0.0
        self._progress: Progress | None = None
        self._scored_at, self._scoring_seconds = 0.0, 0.0
        self._unscored: Snapshot | None = None
        self._learned = RecordTimes()
        self._background = Background("publisher")
        self.number: int | None = max(versions.numbers(), default=None)
        """The newest version."""
        self._highest = max(versions.highest(), *(n or 0 for n in _remembered(versions)))
        self._scored_guard: GuardRows | None = None
        self.evaluation = Evaluation()
        """Of the newest version that was scored on the guard set."""
        self.retention = Retention()
        """What the versions before it could do, and how they did on events that came after them."""
        self.ill: str | None = None
        """One sentence when the last version could not be written."""
        self.published = 0
        self.skipped = 0

    def publish_if_due(self, progress: Progress, take: Callable[[], Snapshot]) -> None:
        """Publish what `take` returns when a version is due and there is progress; called at every step boundary."""
        self._background.raise_bug()
        now = time.monotonic()
        if now < self._due:
            return
        busy = self._background.busy
        if not self._is_new(progress):
            if (unscored := self._unscored) is not None and not busy:
                self._background.start(lambda: self._score(unscored, final=True))
            return
        self._due = now + self._every
        if busy:
            self.skipped += 1
            self._metrics.publish_skipped.inc()
            return
        self._start(progress, take(), final=False)

    def published_through(self) -> Mapping[str, Trained]:
        """Return how far the newest version has learned, by `topic:partition`; a torn manifest says nothing."""
        if self.number is None:
            return {}
        try:
            return self._versions.manifest(self.number).trained_through
        except VersionError:
            return {}

    def go_on_from(self, progress: Progress) -> None:
        """Publish nothing of what was published before a restart, as long as any version is there."""
        if self.number is not None:
            self._progress = progress

    def publish_last(self, progress: Progress, take: Callable[[], Snapshot], deadline: Deadline) -> None:
        """Publish what was learned since the last version, and wait until it is written."""
        self._background.wait(deadline)
        if self._is_new(progress) and not self._background.busy:
            self._start(progress, take(), final=True)
            self._background.wait(deadline)
        self._background.raise_bug()

    def _is_new(self, progress: Progress) -> bool:
        """Whether there is something to publish: nothing before the first step, and nothing twice."""
        return progress[0] > 0 and progress != self._progress

    def _start(self, progress: Progress, snapshot: Snapshot, *, final: bool) -> None:
        self._progress = progress
        self._background.start(lambda: self._publish(snapshot, final=final))

    def _publish(self, snapshot: Snapshot, *, final: bool) -> None:
        """Score, write, and delete what is old. A full or read-only disk costs this version, never the training."""
        scores = self._score(snapshot, final=final)
        number = self._highest = self._highest + 1  # a number that failed is not used again
        now = {} if snapshot.accuracy_now is None else {"now": snapshot.accuracy_now}
        self._learned.join(snapshot.learned)
        manifest = Manifest(
            number=number,
            epoch=self._epoch,
            parent=self.number,
            time=time.time(),
            step=snapshot.step,
            trained_through=dict(snapshot.trained_through),
            metrics=now | dict(scores),
            schema=self._schema.digest,
            encoders={
                name: feature.encode.model_dump(mode="json")
                for name, feature in self._schema.settings.features.items()
                if feature.encode is not None
            },
            model=self._reference,
            files={},
            learned=Learned(self._learned.rows, self._learned.quantiles(_LEARNED_TIMES).tolist()),
        )
        try:
            self._versions.write({name: tensor.cpu() for name, tensor in snapshot.weights.items()}, manifest, _VERDICT)
        except OSError as exc:
            self.ill = f"version {number} could not be written to {self._versions.path}: {exc.strerror or exc}"
            log.error("%s", self.ill)  # noqa: TRY400 the sentence says all
            self._versions.clean()
            return
        self._learned = RecordTimes()
        self.number = number
        self.published += 1
        self._metrics.published.inc()
        self._metrics.gate_verdicts.labels(_VERDICT.verdict).inc()
        try:
            self._prune()
        except (OSError, VersionError) as exc:
            self.ill = f"old versions in {self._versions.path} cannot be deleted: {exc}"
            log.error("%s", self.ill)  # noqa: TRY400 the sentence says all
        else:
            self.ill = None

    def _score(self, snapshot: Snapshot, *, final: bool) -> Mapping[str, float]:
        """Score a version on the guard set, and the one that was scored before it on what has come since."""
        begin = time.monotonic()
        if not final and begin - self._scored_at < _SCORING_SHARE * self._scoring_seconds:
            self._unscored = snapshot
            return {}
        self._unscored = None
        self._score_near_future(snapshot.guard)
        self._scored_model.load_state_dict(dict(snapshot.weights))
        found = evaluate(self._scored_model, self._task, self._schema, snapshot.guard, self._device)
        self._scored_at, self._scoring_seconds = begin, time.monotonic() - begin
        self._scored_guard = snapshot.guard
        if found.windows:
            self.evaluation = found
            self.retention = self.retention.followed_by(found)
        return found.windows

    def _score_near_future(self, guard: GuardRows) -> None:
        """Score the model that is still there, of an earlier version, on held-out events that came after it."""
        if self._scored_guard is None:
            return
        fresh = newcomers(guard, self._scored_guard)
        if fresh and len(fresh["label"]):
            total = float(score_each(self._scored_model, self._task, self._schema, fresh, self._device).sum())
            if math.isfinite(total):
                self.retention = self.retention.with_near(len(fresh["label"]), total)

    def _prune(self) -> None:
        """Delete what is beyond `keep` and `keep_hourly`, never what serving needs."""
        numbers = self._versions.numbers()
        older = numbers[: -self._settings.keep]
        if not older:
            return
        state = self._versions.state()
        needed = {state.serving, state.previous, state.pinned} | self._hourly(older)
        for number in older:
            if number not in needed:
                self._versions.delete(number)

    def _hourly(self, numbers: list[int]) -> set[int]:
        """Return the last version of each of the newest `keep_hourly` hours among `numbers`."""
        last: dict[int, int] = {}
        for number in numbers:
            last[int(self._versions.manifest(number).time // 3600)] = number
        return {last[hour] for hour in sorted(last)[len(last) - self._settings.keep_hourly :]}


_VERDICT = Verdict("abstain", ["there is no gate yet: this version was not judged"])


def _remembered(versions: Versions) -> tuple[int | None, ...]:
    """Numbers that were given before, also when their directories are gone."""
    state = versions.state()
    return (state.serving, state.previous, state.pinned, *state.rolled_back)
