"""The settings of a pipeline as one model: those that a learner reads, and those of serving and of commands."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.serving.settings import ServingSettings


class Pipeline(PipelineSettings):
    """All settings of `pipeline.toml`."""

    serving: ServingSettings = ServingSettings()
    """Predictions over HTTP."""


def alternatives(kind: Any) -> list[Any]:
    """Return the members of a union, or the one type, without annotations."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [inner for member in get_args(kind) for inner in alternatives(member)]
    return [kind]
