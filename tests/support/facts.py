"""The facts that the rules on settings read, of a pipeline with some sections."""

from pathlib import Path
from typing import Any

from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.settings.compatibility import facts
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.pipeline import PipelineSettings

_EVENTS = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}


def facts_of(**sections):
    """Return the facts of a pipeline with these sections, by their names, and the defaults of all others."""
    whole: dict[str, Any] = {
        "name": "test",
        "state_dir": Path("var"),
        "stream": StreamSettings(topics=("events",)),
        "schema": SchemaSettings.model_validate(_EVENTS),
        "model": ModelSettings(factory="my_model:build"),
    }
    return facts(PipelineSettings.model_validate(whole | sections))
