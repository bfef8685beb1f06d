"""What a learner is given, and what each of its ranks trains with."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingest.config import SchemaSettings, StreamSettings
from ingest.events.schema import Schema
from learner.config import (
    CheckpointSettings,
    GateSettings,
    LearnerSettings,
    ModelSettings,
    StrategySettings,
    VersionsSettings,
)
from learner.device_sharing.sharing import DeviceSharingSpec
from learner.distributed.data_parallel import leaves_some_out
from learner.model.device import Precision, choose_precision, compute_deterministically
from learner.model.embedding import Embedding, Embeddings, TaskEmbedding
from learner.model.factory import build_model, check_model, check_task, make_task, sample
from learner.model.task import Embeds, Task
from learner.strategies.base import Strategy
from learner.strategies.registry import build_strategy
from replay.config import COMPARING, ReplaySettings

_SEARCH_ROWS = 2


@dataclass(frozen=True)
class LearnerSpec:
    """The sections that the learner takes its settings from, and where things lie."""

    name: str
    """The pipeline's, which its keys in Redis begin with."""
    stream: StreamSettings
    events: SchemaSettings
    model: ModelSettings
    learner: LearnerSettings
    replay: ReplaySettings
    versions: VersionsSettings
    checkpoints: CheckpointSettings
    gate: GateSettings
    seed: int
    folder: Path
    """Where the model factory may lie: on the Python path, last."""
    state_dir: Path
    read_token: str
    """Wanted by `/metrics`, unless it is empty."""
    device_sharing: DeviceSharingSpec


@dataclass(frozen=True)
class TrainingSetup:
    """What every rank trains with."""

    schema: Schema
    task: Task
    model: nn.Module
    embedding: Embeddings | None
    precision: Precision
    device: torch.device
    strategy: Strategy
    settings: LearnerSettings
    output_shape: tuple[int, ...]
    """Of the model's output for one event."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of a trainer."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "output_shape"}

    @property
    def leaves_some_out(self) -> bool:
        """Whether some weights get no gradient."""
        return leaves_some_out(self.model, sample(self.schema, _SEARCH_ROWS, self.device))


def build_training_setup(deployment: LearnerSpec, device: torch.device, rank: int = 0) -> TrainingSetup:
    """Build and check what a rank trains with; ranks sample other random numbers from then on."""
    schema = Schema(deployment.events)
    if deployment.learner.deterministic:
        compute_deterministically()
    precision = choose_precision(deployment.learner.precision, device)
    torch.manual_seed(deployment.seed + rank)
    task = make_task(deployment.model.task, deployment.folder)
    model = build_model(deployment.model.factory, deployment.model.args, deployment.folder).to(device)
    embedding = build_embedding_source(
        *(deployment.model, deployment.learner.strategy, deployment.replay),
        *(model, task, [feature.name for feature in schema.features]),
    )
    output_shape = check_model(model, task, schema, device)
    check_task(task, output_shape, schema.label, device)
    strategy = build_strategy(deployment.learner.strategy, deployment.model, task)
    return TrainingSetup(
        *(schema, task, model, embedding, precision, device, strategy, deployment.learner), output_shape=output_shape
    )


def build_embedding_source(
    settings: ModelSettings,
    strategy: StrategySettings,
    replay: ReplaySettings,
    model: nn.Module,
    task: Task,
    features: Sequence[str],
) -> Embeddings | None:
    """Listen to the module that `model.embedding` names, else ask the task, where a strategy or policy wants it.

    Raises:
        ModelError: the model has no such module.
    """
    compared = {replay.admission, replay.sampling} & COMPARING
    embedding: Embeddings | None = None
    if not (strategy.embeds or (strategy.replays and compared)):
        return None
    if settings.embedding:
        embedding = Embedding(model, settings.embedding)
    elif isinstance(task, Embeds):
        embedding = TaskEmbedding(model, task, features)
    if embedding is not None:
        embedding.listen()
    return embedding
