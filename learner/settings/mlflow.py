"""The section `[mlflow]` of `pipeline.toml`. Imports nothing of MLflow."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from anabranch.core.settings import Section, written


class MlflowSettings(Section):
    """Registers each version that served in MLflow; absent: none is. Needs the extra `mlflow`."""

    tracking_uri: Annotated[str, Field(min_length=1)]
    """The MLflow server, such as "http://mlflow:5000"; credentials come from the variables `MLFLOW_TRACKING_*`."""
    registered_model: str = ""
    """Name of the registered model; by default that of the pipeline."""
    experiment: str = ""
    """Experiment of the runs, one for each version; by default the name of the pipeline."""
    alias: Annotated[str, written(r"(?!v\d+$)[A-Za-z0-9_-]{1,255}", 'letters, digits, "_" and "-"; not "v1"')] = (
        "served"
    )
    """Alias of the registered model that is moved to the served version."""
    source: str = ""
    """URL of a version with `{number}` in it; by default in `[storage]`, else host and path of `state_dir`."""

    @model_validator(mode="after")
    def _urls_are_usable(self) -> Self:
        if "@" in urlsplit(self.tracking_uri).netloc:  # it is in logs, and its value is not in this sentence
            raise ValueError(
                "tracking_uri: contains credentials; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if self.source and "{number}" not in self.source:
            raise ValueError('source: write "{number}" where the number of the version belongs')
        return self
