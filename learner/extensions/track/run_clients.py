"""The trackers that have curves alone, by their own clients, each of which only this module imports."""

import contextlib
import os
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from anabranch.core.extras import needs
from anabranch.learner.extensions.track.process import Opening, Point
from anabranch.learner.settings.track import TrackerKind, TrackSettings

_LONGEST_ERROR = 500


class TrackerClient:
    """A run of a tracker, in a separate process. Its methods may take long, raise anything, and be repeated."""

    longest_answers: ClassVar[int | None] = None
    """Bytes of memory that answers of its server may take; None: no answers of a server are read here."""

    def log(self, points: list[Point]) -> None:
        """Add points to the curves; the run is made before the first."""
        raise NotImplementedError

    def finish(self, points: list[Point]) -> None:
        """Add the last points, and end the run."""
        if points:
            self.log(points)
        self.end()

    def end(self) -> None:
        """End the run; does nothing where it was not made."""
        raise NotImplementedError

    @staticmethod
    def settings_of(opening: Opening) -> TrackSettings:
        """Return the section."""
        return TrackSettings.model_validate(opening.settings)


class TensorboardClient(TrackerClient):
    """Event files below the folder, one folder a run."""

    def __init__(self, opening: Opening) -> None:
        """Import the package, without TensorFlow and torch."""
        with needs_tracker("tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event, self._summary, self._open = Event, Summary, EventFileWriter
        self._folder = Path(opening.run.folder) / opening.run.name
        self._writer: Any = None

    @override
    def log(self, points: list[Point]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self._folder))
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            event = self._event(step=point.step, wall_time=point.time, summary=self._summary(value=values))
            self._writer.add_event(event)
        self._writer.flush()

    @override
    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbClient(TrackerClient):
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in the folder."""

    def __init__(self, opening: Opening) -> None:
        """Import the package."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no request to others than its server
        with needs_tracker("wandb"):
            import wandb
        self._wandb = wandb
        self._opening = opening
        self._run: Any = None

    @override
    def log(self, points: list[Point]) -> None:
        if self._run is None:
            run, url = self._opening.run, self.settings_of(self._opening).url
            Path(run.folder).mkdir(parents=True, exist_ok=True)
            # The other numbers and files would be those of this process, not of the learner.
            settings = self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                **({"base_url": url} if url else {}),
            )
            self._run = self._wandb.init(
                project=run.project,
                id=run.name,
                name=run.name,
                config=run.facts,
                dir=run.folder,
                resume="allow",
                settings=settings,
            )
        for point in points:
            self._run.log({**point.values, "time": point.time}, step=point.step)

    @override
    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


class TrackioClient(TrackerClient):
    """A run of Trackio: a database in the folder, a server, or a Space of Hugging Face such as "ada/curves"."""

    def __init__(self, opening: Opening) -> None:
        """Import the package."""
        os.environ.setdefault("TRACKIO_DIR", opening.run.folder)  # it is read by the import
        with needs_tracker("trackio"):
            import trackio
        self._trackio = trackio
        self._opening = opening
        self._run: Any = None

    @override
    def log(self, points: list[Point]) -> None:
        if self._run is None:
            run, url = self._opening.run, self.settings_of(self._opening).url
            self._run = self._trackio.init(
                project=run.project,
                name=run.name,
                config=run.facts,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                server_url=url if "://" in url else None,
                space_id=url if url and "://" not in url else None,
            )
        for point in points:
            self._run.log(point.values, step=point.step)

    @override
    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


def needs_tracker(kind: TrackerKind) -> contextlib.AbstractContextManager[None]:
    """Let the block import the package of a kind; raises SettingsError."""
    package = "mlflow-skinny" if kind == "mlflow" else kind
    return needs(f'[track] kind = "{kind}"', package, kind, "take the section out")


def brief(exc: Exception) -> str:
    """Return the sentence of an error of a tracker, on one line."""
    return " ".join(str(exc)[:_LONGEST_ERROR].split()) or type(exc).__name__
