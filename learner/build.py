"""Builds from the settings what each rank of a learner trains with."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from learner.device_health.config import DeviceSettings
from learner.device_health.sniff_test import SniffTest, time_product
from learner.device_health.start import start_watch
from learner.device_health.watch import HealthWatch
from learner.device_sharing.sharing import DeviceSharing, DeviceSharingSpec
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import DataParallelGroup, leaves_some_out
from learner.distributed.leader import Leader
from learner.distributed.process_group import devices_of_host
from learner.evaluation.scoring import Scorer
from learner.metrics import LearnerMetrics
from learner.model.device import Precision, check_scaling, choose_precision, compute_deterministically
from learner.model.embedding import Embedding, Embeddings, TaskEmbedding
from learner.model.factory import build_on_device, check_model, check_task, check_training_pass, make_task, sample
from learner.model.float8 import use_float8
from learner.model.task import Embeds, Task
from learner.publishing.gatekeeper import QualityGate
from learner.publishing.publisher import Publisher
from learner.state_dir.version import Versions, reference_to
from learner.strategies.base import Strategy
from learner.strategies.registry import build_strategy
from learner.training.out_of_memory import oom_warning
from learner.training.passes import StepHooks
from learner.training.trainer import Trainer
from replay.config import COMPARING, ReplaySettings

_SEARCH_ROWS = 2


@dataclass(frozen=True)
class LearnerSpec:
    """The sections of the settings that a learner uses, and its folders."""

    name: str
    """Name of the pipeline, with which its keys in Redis begin."""
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
    """The config's folder, last on the Python path: the model factory may be there."""
    state_dir: Path
    read_token: str
    """Required by `/metrics`, unless it is empty."""
    device_sharing: DeviceSharingSpec
    admin_token: str = ""
    """Accepted by `/metrics` in place of the read token; empty where this process is not given it."""
    device: DeviceSettings = field(default_factory=DeviceSettings)


@dataclass(frozen=True)
class TrainingSetup:
    """The objects that every rank trains with."""

    schema: Schema
    task: Task
    model: nn.Module
    embedding: Embeddings | None
    precision: Precision
    device: torch.device
    strategy: Strategy
    settings: LearnerSettings
    output_shape: tuple[int, ...]
    """Shape of the model's output for one event."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "output_shape"}

    @property
    def leaves_some_out(self) -> bool:
        """Whether some weights get no gradient in a step."""
        return leaves_some_out(self.model, sample(self.schema, _SEARCH_ROWS, self.device))


def build_training_setup(deployment: LearnerSpec, device: torch.device, rank: int = 0) -> TrainingSetup:
    """Build and check the training setup of a rank; each rank has other random numbers from then on."""
    schema = Schema(deployment.events)
    if deployment.learner.deterministic:
        compute_deterministically()
    precision = choose_precision(deployment.learner.precision, device)
    precision.configure()
    torch.manual_seed(deployment.seed + rank)
    task = make_task(deployment.model.task, deployment.folder)
    model = build_on_device(deployment.model, deployment.folder, device)
    if precision.name == "fp8":
        model = use_float8(model, device)
    embedding = build_embedding_source(
        settings=deployment.model,
        strategy=deployment.learner.strategy,
        replay=deployment.replay,
        model=model,
        task=task,
        features=[feature.name for feature in schema.features],
    )
    output_shape = check_model(model, task, schema, device)
    check_task(task, output_shape, schema.label, device)
    strategy = build_strategy(deployment.learner.strategy, deployment.model, task)
    if strategy.learns_gradient:
        check_training_pass(model, task, schema, device, precision)
    return TrainingSetup(
        schema=schema,
        task=task,
        model=model,
        embedding=embedding,
        precision=precision,
        device=device,
        strategy=strategy,
        settings=deployment.learner,
        output_shape=output_shape,
    )


def build_embedding_source(
    settings: ModelSettings,
    strategy: StrategySettings,
    replay: ReplaySettings,
    model: nn.Module,
    task: Task,
    features: Sequence[str],
) -> Embeddings | None:
    """Return the source of embeddings if a strategy or policy needs them: a module of the model, or else the task.

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
        embedding.capture_next()
    return embedding


def build_trainer(
    setup: TrainingSetup, channel: Channel | None, hooks: StepHooks | None = None, rows: int | None = None
) -> Trainer:
    """Return the trainer, of all ranks if there are others.

    `rows`: size to which micro-batches were reduced before this start, after memory ran out.
    """
    if channel is None:
        return Trainer(**setup.arguments, hooks=hooks)
    check_scaling(setup.precision, setup.settings.sharding, setup.settings.sync_every)
    replicas = DataParallelGroup(setup.settings, search=setup.leaves_some_out)
    warning = oom_warning(setup.device, rows) if rows is not None else None
    return Leader(channel, replicas, **setup.arguments, hooks=hooks, warning=warning)


def build_publisher(
    deployment: LearnerSpec,
    setup: TrainingSetup,
    generation: int,
    metrics: LearnerMetrics,
    check: Callable[[], None],
    before_chunk: Callable[[], object],
) -> Publisher:
    """Return the publisher with its quality gate, which copies the model.

    Args:
        deployment: all settings.
        setup: has the model, before it is split among ranks.
        generation: of this learner.
        metrics: of versions.
        check: called before each version is scored and written.
        before_chunk: called before each chunk of scoring; waits while requests need the device.
    """
    versions = Versions(deployment.state_dir / "versions")
    versions.clean()
    reference = reference_to(deployment.model)
    scorer = Scorer(setup.model, setup.task, setup.schema, setup.device, setup.precision, before_chunk)
    gate = QualityGate(versions, deployment.gate, scorer, reference)
    settings = deployment.versions
    return Publisher(*(versions, settings, reference, setup.schema, scorer, gate, generation, metrics, check))


@contextlib.contextmanager
def watch_health(
    deployment: LearnerSpec,
    trainer: Trainer,
    sharing: DeviceSharing | None,
    request_checkpoint: Callable[[], object],
    metrics: LearnerMetrics,
    ranks: int,
) -> Iterator[HealthWatch | None]:
    """Watch the devices of the ranks of this host while the block runs; yield None where none can be watched."""

    def measure() -> Mapping[str, float]:
        if sharing is not None:  # the sniff test yields as a micro-batch does
            sharing.yield_to_serving(0)
            sharing.pause()
        if isinstance(trainer, Leader):
            return trainer.sniff()
        return {str(trainer.device): time_product(trainer.device)}

    devices = [trainer.device] if ranks == 1 else devices_of_host(trainer.device, deployment.learner)
    sniff = SniffTest(measure, deployment.device.sniff_deviation)
    watch = start_watch(deployment.device, devices, request_checkpoint, metrics.device, ranks=ranks, sniff=sniff)
    try:
        yield watch
    finally:
        if watch is not None:
            watch.close()
