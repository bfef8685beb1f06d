"""Sends curves, and versions that serve, to a tracker, from a thread: no step and no request waits for it."""

import logging
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

from typing_extensions import override

from anabranch.core.backoff import Backoff
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.core.shutdown import Deadline
from anabranch.learner.errors import TrackerError
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.track.curves import Curves, Tracked
from anabranch.learner.extensions.track.process import TrackedRun, Tracker
from anabranch.learner.extensions.track.registrar import Registrar
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.track import TrackSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.versions.format import RegistryState, Versions

_POLL_EVERY = timedelta(seconds=1)
_FIRST_BACKOFF, _LONGEST_BACKOFF = timedelta(seconds=1), timedelta(minutes=5)
_LONGEST_END = timedelta(seconds=1)
_LONGEST_FINISH = timedelta(seconds=5)

log = logging.getLogger(__name__)


class TrackExtension(Extension):
    """Lets each of `tracked` find and send what is new, in a thread; what fails is tried again after a back-off."""

    name: ClassVar[str] = "track"

    def __init__(
        self, tracker: Tracker, tracked: Sequence[Tracked], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Send nothing before `thread` is started; `clock` times retries."""
        self._tracker = tracker
        self._tracked = tracked
        self._clock = clock
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        self._retry_at = 0.0
        self._warning: str | None = None
        self.thread = PeriodicThread("track", self._run, _LONGEST_END, ended=self._ended)

    @property
    @override
    def warning(self) -> str | None:
        return self._warning or next((each.problem for each in self._tracked if each.problem is not None), None)

    @override
    def finish(self, deadline: Deadline) -> None:
        """Send the last point, unless the tracker is away or busy: the end does not wait for it."""
        self.thread.stop()
        if self.thread.alive or self._warning is not None:
            return
        longest = min(_LONGEST_FINISH, timedelta(seconds=deadline.left / 2))
        try:
            for each in self._tracked:
                each.finish(longest)
        except TrackerError as exc:
            log.warning("%s", exc)

    @override
    def close(self) -> None:
        self.thread.stopping = True
        self._tracker.close()
        self.thread.stop()  # a request that hangs does not delay the end

    def poll(self) -> None:
        """Add what is new to what waits, and send what is due. Used by the thread, or by a test."""
        for each in self._tracked:
            each.watch()
        if self._clock() < self._retry_at:
            return
        try:
            for each in self._tracked:
                each.send(lambda: self.thread.stopping)
        except TrackerError as exc:
            if self.thread.stopping:
                return
            self._retry_at = self._clock() + self._backoff.next()
            if self._warning is None:
                log.warning("%s; it is tried again", exc)
            self._warning = str(exc)
        else:
            self._backoff.reset()
            self._warning = None

    def _run(self) -> float:
        self.poll()
        return _POLL_EVERY.total_seconds()

    def _ended(self, exc: BaseException) -> None:
        log.error("nothing is sent to the tracker any more", exc_info=exc)
        self._warning = f"nothing is sent to the tracker of [track] any more, after a bug: {exc}"


def open_track(
    spec: PipelineSettings,
    settings: TrackSettings,
    generation: int,
    versions: Versions,
    served: Callable[[RegistryState], RegistryState],
    metrics: LearnerMetrics,
) -> TrackExtension:
    """Return the extension, whose thread runs.

    Args:
        spec: all settings of the pipeline.
        settings: `[track]`.
        generation: of this start of the learner.
        versions: those of the pipeline.
        served: adds to `state.json` what servers on other hosts serve and have decided.
        metrics: count the versions that are registered.
    """
    folder = spec.state_dir / "track" if settings.folder is None else spec.folder / settings.folder
    facts = {
        "pipeline": spec.name,
        "generation": generation,
        "model_factory": spec.model.factory,
        "strategy": spec.learner.strategy.name,
        "optimizer": spec.learner.optimizer.name,
        "lr": spec.learner.optimizer.lr,
        "batch_size": spec.learner.batch_size,
        "replay_ratio": spec.learner.replay_ratio,
        "seed": spec.seed,
    }
    run = TrackedRun(
        project=settings.project or spec.name,
        name=f"generation-{generation}-{uuid.uuid4().hex[:8]}",
        facts={name: str(value) for name, value in facts.items()},
        folder=str(folder.resolve()),
    )
    url = f"anabranch://{spec.name}.{socket.gethostname()}{versions.path.parent.resolve()}"
    url = url if spec.storage is None else spec.storage.url.rstrip("/")
    tracker = Tracker(settings, run, spec.name, settings.source or f"{url}/versions/{{number}}")
    tracked: list[Tracked] = [Curves(tracker, spec.state_dir, generation, settings.every)]
    if settings.kind == "mlflow":
        count = metrics.mlflow_versions
        registrar = Registrar(tracker, versions, spec.name, served, lambda outcome: count.labels(outcome).inc())
        metrics.mlflow_waiting.set_function(lambda: registrar.waiting)
        tracked.append(registrar)
    extension = TrackExtension(tracker, tracked)
    extension.thread.start()
    return extension
