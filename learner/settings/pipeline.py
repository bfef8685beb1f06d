"""The settings that a learner reads, composed in one object that is passed once. Imports no torch.

`anabranch.config.pipeline.Pipeline` is a subclass with the sections and keys that other processes read.
"""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, SecretStr, model_validator

from anabranch.core.durations import Duration, PositiveDuration
from anabranch.core.settings import Section, written
from anabranch.core.tracing.settings import TracingSettings
from anabranch.ingest.settings.labels import TopicName
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.settings.learner import (
    CheckpointSettings,
    DeviceSettings,
    DeviceSharingSettings,
    GateSettings,
    LearnerSettings,
    VersionsSettings,
)
from anabranch.learner.settings.model import ModelSettings, TaskSettings
from anabranch.learner.settings.search import SearchSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.settings.track import TrackSettings
from anabranch.replay.settings import ReplaySettings


class Tokens(Section):
    """Bearer tokens; both are required off loopback. On loopback, an empty one is not asked for."""

    read: SecretStr = SecretStr("")
    """For predictions, status and metrics."""
    admin: SecretStr = SecretStr("")
    """For rollout commands, and everything that `read` is for."""

    @property
    def values(self) -> tuple[str, str]:
        """The tokens `read` and `admin`."""
        return self.read.get_secret_value(), self.admin.get_secret_value()


class AnswersSettings(Section):
    """Predictions through Kafka: events of topics in, an answer to each out. Needs the extra `fast`."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Topics to answer, at the brokers and in the format of `[stream]`."""
    output: TopicName
    """Topic of the answers, one for each message, with its key."""
    delivery: Literal["exactly-once", "at-least-once"] = "exactly-once"
    """`exactly-once` writes answers in transactions: who reads committed records sees one answer to each message. After
    a crash, `at-least-once` may answer messages twice."""
    group_id: str | None = None
    """Consumer group whose members divide the partitions; by default `anabranch-`, the name, and `-answers`."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a partition begins for which the group has no offset yet."""
    max_in_flight: Annotated[int, Field(ge=1)] = 8192
    """Messages that may be read and not answered yet; at that bound reading pauses."""

    def group_of(self, name: str) -> str:
        """Return the consumer group for a pipeline of this name."""
        return self.group_id or f"anabranch-{name}-answers"

    @model_validator(mode="after")
    def _answers_are_no_events(self) -> Self:
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("topics names a topic twice")
        if self.output in self.topics:
            raise ValueError(f'output = "{self.output}" is one of topics: answers would be answered again')
        return self


class ServedSettings(Section):
    """The keys of `[serving]` that a learner reads too: it shares the device, and measures what was served."""

    max_batch: Annotated[int, Field(ge=1, le=65536)] = 64
    """Rows that one run of the model may process together."""
    max_delay: Duration = timedelta(milliseconds=2)
    """How long a request may wait for others to share its batch."""
    slo: PositiveDuration = timedelta(milliseconds=20)
    """Time within which 99 of 100 requests should be answered; the learner reduces its micro-batches to keep it."""
    timeout: PositiveDuration = timedelta(seconds=10)
    """Longest time that a request may take before it is answered 504."""
    canary: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the fleet, at least one server, that tries a new version until live labels show that it is not worse;
    0: all serve it at once. Needs `[storage]`, in the learner's config too."""
    tokens: Tokens = Tokens()
    """Bearer tokens."""
    stream: AnswersSettings | None = None
    """Predictions through Kafka; absent: none."""


class PipelineSettings(Section):
    """All settings of `pipeline.toml` that a learner reads."""

    name: Annotated[
        str, written("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", 'letters, digits, ".", "_" and "-", such as "fraud-eu"')
    ]
    """Model name in URLs."""
    state_dir: Path = Path("var")
    """Versions, checkpoints, the disk tier and reports are below it; relative to the config's folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights. With `learner.deterministic` also of the secret by which events are held out, kept
    and sampled: keep it secret too."""
    stream: StreamSettings
    """Where events come from."""
    events: Annotated[SchemaSettings, Field(alias="schema")]
    """The fields of an event."""
    model: ModelSettings
    """The model to train and to serve."""
    task: TaskSettings = TaskSettings()
    """What versions answer."""
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
    serving: ServedSettings = ServedSettings()
    """Predictions over HTTP."""
    device_sharing: DeviceSharingSettings = DeviceSharingSettings()
    """How serving borrows the device from the learner."""
    device: DeviceSettings = DeviceSettings()
    """How the learner watches the health of its devices."""
    tracing: TracingSettings | None = None
    """Spans of requests, batches, steps and versions; absent: nothing is traced."""
    search: SearchSettings | None = None
    """Challengers with other settings, which train on the same events; absent: none."""
    track: TrackSettings | None = None
    """The tracker of experiments that gets the learner's curves; absent: none."""

    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """The config's folder, last on the Python path: the model factory may be there."""
        return self._folder

    def below(self, folder: Path) -> Self:
        """Return the settings with what is relative to the config's folder below it."""
        stream = self.stream.resolved(self.name, folder)
        paths = {"state_dir": folder / self.state_dir, "stream": stream, "events": self.events.below(folder)}
        found = self.model_copy(update=paths)
        found._folder = folder
        return found

    @property
    def measured_answers(self) -> AnswersSettings | None:
        """The answers that the learner reads back, since labels of their events come later; None: it reads none."""
        answers = self.serving.stream
        if not self.gate.live or self.stream.labels is None or answers is None:
            return None
        return answers if set(answers.topics) & set(self.stream.topics) else None

    def with_changes(self, **sections: object) -> Self:
        """Return the settings with other sections, which are valid already."""
        assert sections.keys() <= type(self).model_fields.keys(), sections.keys()  # pydantic would add any name
        return self.model_copy(update=sections)

    @property
    def complete(self) -> bool:
        """Whether checkpoints have the rows of slower tiers too: others may reuse the slots, or be on another host."""
        return self.storage is not None or self.checkpoints.keep_hourly > 0
