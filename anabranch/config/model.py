"""The settings of a pipeline as one model, composed of the sections that each package owns."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Field

from anabranch.config.lineage import LineageSettings
from anabranch.core.settings import Section, written
from anabranch.core.tracing.config import TracingSettings
from ingest.config import SchemaSettings, StreamSettings
from learner.config import (
    CheckpointSettings,
    DeviceSharingSettings,
    GateSettings,
    LearnerSettings,
    ModelSettings,
    VersionsSettings,
)
from learner.device_health.config import DeviceSettings
from learner.object_storage.config import StorageSettings
from learner.sections.mlflow_settings import MlflowSettings
from learner.sections.search import SearchSettings
from replay.config import ReplaySettings
from serving.config import ServingSettings


class Pipeline(Section):
    """All settings of `pipeline.toml`."""

    name: Annotated[
        str, written("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", 'letters, digits, ".", "_" and "-", such as "fraud-eu"')
    ]
    """Model name in URLs."""
    state_dir: Path = Path("var")
    """Versions, checkpoints, the disk tier and reports are below it; relative to the config's folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights. A secret in `state_dir` decides which events are held out, kept and sampled; with
    `learner.deterministic` it is made of the seed, which is then to be as secret."""
    stream: StreamSettings
    """Where events come from."""
    events: Annotated[SchemaSettings, Field(alias="schema")]
    """The fields of an event."""
    model: ModelSettings
    """The model to train and to serve."""
    learner: LearnerSettings = LearnerSettings()
    """The training loop."""
    replay: ReplaySettings = ReplaySettings()
    """The replay store."""
    versions: VersionsSettings = VersionsSettings()
    """What is published."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """What a restart resumes from."""
    storage: StorageSettings | None = None
    """The object store that has checkpoints and versions; absent: `state_dir` has them alone."""
    gate: GateSettings = GateSettings()
    """The held-out events."""
    serving: ServingSettings = ServingSettings()
    """Predictions over HTTP."""
    device_sharing: DeviceSharingSettings = DeviceSharingSettings()
    """How serving borrows the device from the learner."""
    device: DeviceSettings = DeviceSettings()
    """How the learner watches the health of its devices."""
    lineage: LineageSettings = LineageSettings()
    """How statements on the origin of versions are signed."""
    tracing: TracingSettings | None = None
    """Spans of requests, batches, steps and versions; absent: nothing is traced."""
    search: SearchSettings | None = None
    """Challengers with other settings, which train on the same events; absent: none."""
    mlflow: MlflowSettings | None = None
    """The registry of models that gets each version that served; absent: none."""


def alternatives(kind: Any) -> list[Any]:
    """Return the members of a union, or the one type, without annotations."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [inner for member in get_args(kind) for inner in alternatives(member)]
    return [kind]
