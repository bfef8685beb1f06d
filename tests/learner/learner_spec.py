"""The sections of the settings of a learner, for tests that build it themselves."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from ingest.config import SchemaSettings, StreamSettings
from learner.build import LearnerSpec
from learner.config import (
    CheckpointSettings,
    DeviceSharingSettings,
    GateSettings,
    LearnerSettings,
    ModelSettings,
    VersionsSettings,
)
from learner.device_sharing.sharing import DeviceSharingSpec
from replay.config import ReplaySettings


def learner_spec(folder: Path, events: SchemaSettings, model: ModelSettings, **changes: Any) -> LearnerSpec:
    """Return the defaults, with `changes` of sections that are named as the fields are; `folder` has the state too."""
    sections: dict[str, Any] = {
        "name": "test",
        "stream": StreamSettings(topics=("events",)),
        "events": events,
        "model": model,
        "learner": LearnerSettings(),
        "replay": ReplaySettings(),
        "versions": VersionsSettings(),
        "checkpoints": CheckpointSettings(),
        "gate": GateSettings(),
        "seed": 0,
        "folder": folder,
        "state_dir": folder,
        "read_token": "",
        "device_sharing": DeviceSharingSpec(DeviceSharingSettings(), timedelta(milliseconds=20), timedelta(seconds=10)),
    }
    return LearnerSpec(**sections | changes)
