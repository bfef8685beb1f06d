"""The section `[track]` of `pipeline.toml`. Imports no tracker."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section, written

TrackerKind = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Also the extra, and the module to import."""


class TrackSettings(Section):
    """Sends the learner's curves to a tracker, one run a start; absent: none are. Needs the extra of its `kind`."""

    kind: TrackerKind
    """The tracker that gets the curves. "mlflow" also registers each version that served."""
    every: PositiveDuration = timedelta(seconds=10)
    """Between two points of a curve; there is none without a new step."""
    project: str = ""
    """The project of the runs, in MLflow their experiment, in "tensorboard" none; by default the pipeline's name."""
    url: str = ""
    """The server, such as "http://mlflow:5000"; required by "mlflow". By default "wandb" takes its cloud, and "trackio"
    the folder. Credentials come from the tracker's own variables."""
    folder: Path | None = None
    """Where the files of "tensorboard", "wandb" and "trackio" are, relative to the config's folder; by default
    `track` in `state_dir`."""
    registered_model: str = ""
    """Name of MLflow's registered model; by default that of the pipeline."""
    alias: Annotated[str, written(r"(?!v\d+$)[A-Za-z0-9_-]{1,255}", 'letters, digits, "_" and "-"; not "v1"')] = (
        "served"
    )
    """Alias of the registered model that is moved to the served version."""
    source: str = ""
    """URL of a version with `{number}` in it; by default in `[storage]`, else host and path of `state_dir`."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        if "@" in urlsplit(self.url).netloc or "write_token=" in self.url:  # in logs; its value is not in this sentence
            raise ValueError(
                "url: contains credentials; set the variables of the tracker, such as MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD"
            )
        if self.source and "{number}" not in self.source:
            raise ValueError('source: write "{number}" where the number of the version belongs')
        if self.kind == "mlflow" and not self.url:
            raise ValueError('url: kind = "mlflow" needs the address of its server, such as "http://mlflow:5000"')
        others = {"tensorboard": {"project", "url"}, "mlflow": {"folder"}}.get(self.kind, set())
        if self.kind != "mlflow":
            others = others | {"registered_model", "alias", "source"}
        if surplus := sorted(others & self.model_fields_set):
            raise ValueError(f'{surplus[0]}: kind = "{self.kind}" has no use for it; take it out')
        return self
