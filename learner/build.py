"""Builds from the settings what each rank of a learner trains with."""

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.core.tracing.config import TracingSettings
from ingest.config import HoldOut, SchemaSettings, StreamSettings
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
from learner.device_health.sniff_test import SniffTest
from learner.device_health.start import start_watch
from learner.device_health.watch import HealthWatch
from learner.device_sharing.sharing import DeviceSharing, DeviceSharingSpec
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import DataParallelGroup, leaves_some_out
from learner.distributed.leader import Leader
from learner.distributed.process_group import devices_of_host
from learner.errors import ModelError
from learner.evaluation.event_time import EventTimePredictor
from learner.evaluation.scoring import Scorer
from learner.labels.label_join import JoinOptions
from learner.labels.opening import label_folder, open_join
from learner.late_labels import LateLabels
from learner.metrics import LearnerMetrics
from learner.model.adapter import check_trained
from learner.model.device import Precision, check_scaling, choose_precision, compute_deterministically
from learner.model.embedding import Embedding, Embeddings, TaskEmbedding
from learner.model.factory import (
    build_on_device,
    check_copies,
    check_model,
    check_task,
    check_training_pass,
    make_task,
    sample,
)
from learner.model.float8 import use_float8
from learner.model.rng import seed_rng
from learner.model.task import Embeds, Task
from learner.object_storage.bucket_storage import BucketStorage
from learner.object_storage.config import StorageSettings
from learner.object_storage.fleet import FleetWatch
from learner.object_storage.opening import FETCHED
from learner.publishing.canary import CanaryJudge
from learner.publishing.gatekeeper import QualityGate
from learner.publishing.origin import origin_of, settings_of_weights
from learner.publishing.publisher import Publisher
from learner.registration.registrar import Registrar
from learner.registration.registry import MlflowRegistry
from learner.search.latency import LatencyBound, ServedBatch
from learner.search.networks import NETWORK_TEACHING, NetworkSpec
from learner.search.trainer import SearchingTrainer
from learner.sections.mlflow_settings import MlflowSettings
from learner.sections.search import SearchSettings, arguments_of
from learner.state_dir.checkpoint import Checkpoint
from learner.state_dir.version import Versions, reference_to
from learner.strategies.base import Strategy
from learner.strategies.early_negatives import check_early
from learner.strategies.registry import STRATEGIES, build_strategy
from learner.strategies.teacher_loss import TeacherLoss, kept_outputs
from learner.stream.lag import LagPolicy
from learner.stream.partition_ledger import PartitionLedger
from learner.teacher.checks import check_distil
from learner.training.micro_batches import StepHooks
from learner.training.out_of_memory import oom_warning
from learner.training.trainer import Trainer
from learner.training.trial import try_steps
from replay.config import COMPARING, ReplaySettings

_SEARCH_ROWS = 2
_NOT_OF_TRAINER = ("output_shape", "stages", "parallel")


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
    storage: StorageSettings | None = None
    canary: float = 0.0
    """`serving.canary`."""
    tracing: TracingSettings | None = None
    """`[tracing]`; None: nothing is traced."""
    mlflow: MlflowSettings | None = None
    """`[mlflow]`; None: versions are not registered."""
    search: SearchSettings | None = None
    """`[search]`; None: there are no challengers."""
    served: ServedBatch | None = None
    """What serving allows for one run of the model; None: any time."""

    @property
    def settings_of_weights(self) -> dict[str, Any]:
        """The settings on which weights depend, by dotted key."""
        settings = settings_of_weights(self.stream, self.model, self.learner, self.replay, self.gate)
        return settings if self.search is None else {**settings, "search": self.search.model_dump(mode="json")}

    @property
    def complete(self) -> bool:
        """Whether checkpoints have the rows of slower tiers too: others may reuse the slots, or be on another host."""
        return self.storage is not None or self.checkpoints.keep_hourly > 0


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
    teaching: TeacherLoss | None = None
    """The teacher's part of the loss; None without a teacher."""

    @property
    def kept_outputs(self) -> dict[str, list[int] | None]:
        """The shapes of the outputs that a store keeps with each event, by column; None: it is not kept."""
        return kept_outputs(self.strategy, self.output_shape, taught=self.teaching is not None)

    stages: Sequence[str] = ()
    """`model.stages`."""
    parallel: Mapping[str, str] = field(default_factory=dict)
    """`model.parallel`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_OF_TRAINER}

    def group(self) -> DataParallelGroup:
        """Return the group of all ranks, which this process has joined, with the model's modules divided over them."""
        features = sample(self.schema, _SEARCH_ROWS, self.device)
        search = leaves_some_out(self.model, features)
        replicas = DataParallelGroup(self.settings, search=search, parallel=self.parallel)
        replicas.divide(self.model, self.stages, features, self.precision)
        return replicas


def build_training_setup(deployment: LearnerSpec, device: torch.device, group: int = 0) -> TrainingSetup:
    """Build and check the training setup of a rank; each row group has other random numbers from then on."""
    schema = Schema(deployment.events, deployment.stream.labels)
    if deployment.learner.deterministic:
        compute_deterministically()
    precision = choose_precision(deployment.learner.precision, device)
    precision.configure()
    seed_rng(deployment.seed + group, python=deployment.learner.mesh is not None)
    task = make_task(deployment.model.task, deployment.folder)
    model = build_on_device(deployment.model, deployment.folder, device, schema)
    if precision.name == "fp8":
        model = use_float8(model, device)
    embedding_of = functools.partial(
        build_embedding_source,
        deployment.model,
        deployment.learner.strategy,
        deployment.replay,
        task=task,
        features=[feature.name for feature in schema.features],
    )
    embedding = embedding_of(model)
    output_shape = check_model(model, task, schema, device)
    check_task(task, output_shape, schema.label, device)
    strategy = build_strategy(deployment.learner.strategy, deployment.model, task)
    strategy.extend(model, deployment.model, schema, device)
    if (adapter := deployment.model.adapter) is not None:
        name = deployment.learner.strategy.name
        check_trained(model, adapter, name, learns_gradient=strategy.learns_gradient)
    if strategy.learns_gradient:
        check_training_pass(model, task, schema, device, precision)
    check_copies(model, schema, device)
    if deployment.learner.mesh is None and deployment.learner.sharding != "fsdp":  # the whole model may not fit twice
        try_steps(
            model,
            task,
            functools.partial(build_strategy, deployment.learner.strategy, deployment.model, task),
            schema,
            deployment.learner,
            device,
            precision,
            embedding_of,
        )
    teaching: TeacherLoss | None = None
    if (teacher := deployment.model.teacher) is not None:
        distils = check_distil(task, deployment.model.task, output_shape, device)
        teaching = TeacherLoss(distils, teacher.weight, teacher.temperature)
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
        teaching=teaching,
        stages=deployment.model.stages,
        parallel=deployment.model.parallel,
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
    if not (STRATEGIES[strategy.name].embeds or (strategy.replays and compared)):
        return None
    if settings.embedding:
        embedding = Embedding(model, settings.embedding)
    elif isinstance(task, Embeds):
        embedding = TaskEmbedding(model, task, features)
    if embedding is not None:
        embedding.capture_next()
    return embedding


def build_trainer(
    setup: TrainingSetup,
    channel: Channel | None,
    hooks: StepHooks | None = None,
    rows: int | None = None,
    deployment: LearnerSpec | None = None,
) -> Trainer:
    """Return the trainer, of all ranks if there are others.

    `rows`: size to which micro-batches were reduced before this start, after memory ran out. `deployment`: whose
    `[search]` is carried out, if it has one.
    """
    if channel is None and deployment is not None and deployment.search is not None:
        make_strategy = functools.partial(build_strategy, setup.settings.strategy, deployment.model, setup.task)
        networks = network_spec(deployment, setup) if arguments_of(deployment.search.space) else None
        search = deployment.search, deployment.seed, deployment.state_dir, make_strategy, networks
        return SearchingTrainer(*search, **setup.arguments, hooks=hooks)
    if channel is None:
        return Trainer(**setup.arguments, hooks=hooks)
    check_scaling(setup.precision, setup.settings)
    replicas = setup.group()
    warning = oom_warning(setup.device, rows) if rows is not None else None
    return Leader(channel, replicas, **setup.arguments, hooks=hooks, warning=warning)


def network_spec(deployment: LearnerSpec, setup: TrainingSetup) -> NetworkSpec:
    """Return how challengers with other arguments of the factory are built, taught and timed.

    Raises:
        ModelError: the task has no loss by which a model learns from another one.
    """
    schema, device, model = setup.schema, setup.device, deployment.model

    def build(args: Mapping[str, Any]) -> nn.Module:
        network = build_on_device(model.model_copy(update={"args": dict(args)}), deployment.folder, device, schema)
        if setup.precision.name == "fp8":
            network = use_float8(network, device)
        if (shape := check_model(network, setup.task, schema, device)) != setup.output_shape:
            raise ModelError(f"the output for an event is {list(shape)}, and the model's {list(setup.output_shape)}")
        return network

    if not callable(getattr(setup.task, "distil", None)):
        raise ModelError(
            f'search.space has arguments of model.factory, and model.task = "{model.task}" has no method distil, with '
            "which their networks learn from the model; write it, or take those keys out of search.space"
        )
    distils = check_distil(setup.task, model.task, setup.output_shape, device)
    latency = None if deployment.served is None else LatencyBound(deployment.served, schema)
    return NetworkSpec(model.args, build, TeacherLoss(distils, *NETWORK_TEACHING), latency)


def build_publisher(
    deployment: LearnerSpec,
    versions: Versions,
    setup: TrainingSetup,
    generation: int,
    metrics: LearnerMetrics,
    check: Callable[[], None],
    before_chunk: Callable[[], object],
    fleet: FleetWatch | None = None,
    undone: int = 0,
    while_appearing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Publisher:
    """Return the publisher with its quality gate, which copies the model.

    Args:
        deployment: all settings.
        versions: those that were published.
        setup: has the model, before it is split among ranks.
        generation: of this learner.
        metrics: of versions.
        check: called before each version is scored and written.
        before_chunk: called before each chunk of scoring; waits while requests need the device.
        fleet: the servers on other hosts; None without an object store.
        undone, while_appearing: of `Publisher`.
    """
    versions.clean()
    reference = reference_to(deployment.model)
    scorer = Scorer(setup.model, setup.task, setup.schema, setup.device, setup.precision, before_chunk)
    gate = QualityGate(versions, deployment.gate, scorer, reference, fleet)
    canary: CanaryJudge | None = None
    if fleet is not None and deployment.canary:
        canary = CanaryJudge(
            *(fleet, versions, deployment.gate, scorer, gate, deployment.canary),
            count=lambda outcome: metrics.canary_verdicts.labels(outcome).inc(),
            stored=_versions_in(deployment.storage, versions.path),
        )
    return Publisher(
        *(versions, deployment.versions, reference, setup.schema, scorer, gate, generation, metrics, check),
        *(fleet, canary),
        origin_of(deployment.settings_of_weights, deployment.model, deployment.seed, setup.device),
        undone,
        while_appearing,
    )


def build_registrar(
    deployment: LearnerSpec, versions: Versions, metrics: LearnerMetrics, fleet: FleetWatch | None
) -> Registrar | None:
    """Return what registers the versions that serve, here and on the servers of `fleet`; None without `[mlflow]`."""
    settings, storage = deployment.mlflow, deployment.storage
    if settings is None:
        return None
    folder = f"anabranch://{deployment.name}.{socket.gethostname()}{deployment.state_dir.resolve()}"
    source = settings.source or f"{folder if storage is None else storage.url.rstrip('/')}/versions/{{number}}"
    registrar = Registrar(
        MlflowRegistry(settings, deployment.name, source),
        versions,
        deployment.name,
        state=(lambda own: own) if fleet is None else fleet.state,
        serving=lambda: [] if fleet is None else [each.version for each in fleet.servers if each.version is not None],
        count=lambda outcome: metrics.mlflow_versions.labels(outcome).inc(),
    )
    metrics.mlflow_waiting.set_function(lambda: registrar.waiting)
    return registrar


def _versions_in(storage: StorageSettings | None, path: Path) -> Versions | None:
    """Return the versions of an object store, to read them."""
    return (
        None
        if storage is None
        else Versions(path, BucketStorage(storage.bucket, "versions", path.parent / FETCHED / "compared"))
    )


def build_late_labels(
    deployment: LearnerSpec,
    setup: TrainingSetup,
    trainer: Trainer,
    lag: LagPolicy,
    found: tuple[int, Checkpoint] | None,
    *,
    hold_out: HoldOut,
    first: bool,
    ranks: int,
) -> LateLabels | None:
    """Return the join of events and late labels with the events of a checkpoint; None without `[stream.labels]`.

    Args:
        deployment: all settings.
        setup: has the schema, the task and the model.
        trainer: its model predicts the events that come.
        lag: what happens to events while the learner is behind.
        found: the checkpoint that the learner resumes from, with its number.
        hold_out: which events are held out.
        first: whether no checkpoint names an event of the join.
        ranks: how many train together.
    """
    settings = deployment.stream.labels
    if settings is None:
        check_nothing_waits(found)
        return None
    complete = deployment.complete
    options = JoinOptions(settings.wait, int(settings.bytes), take_back=settings.take_back, complete=complete)
    if settings.early != "none" or settings.take_back:
        check_early(setup.task, setup.schema.label, setup.strategy, deployment.learner.strategy.name)
    folder = label_folder(deployment.state_dir)
    join = open_join(options, setup.schema, setup.output_shape, folder, found, first=first)
    predictor = EventTimePredictor(
        *(setup.model, setup.task, setup.schema, setup.device, setup.precision, setup.output_shape),
        before_chunk=trainer.staging.before_chunk,
    )
    return LateLabels(
        *(join, settings, hold_out, predictor, lag),
        join_column=setup.schema.join_column,
        step_size=deployment.learner.batch_size * ranks,
        max_delay=deployment.learner.max_delay,
    )


def check_nothing_waits(found: tuple[int, Checkpoint] | None) -> None:
    """Raise SettingsError where a checkpoint has events that wait for labels, and none come any more."""
    accounts = [] if found is None else [PartitionLedger.from_state(state) for state in found[1].state["ledger"]]
    waiting = sum(account.waiting for account in accounts)
    if found is not None and waiting:
        raise SettingsError(
            f"checkpoint {found[0]} has {waiting} events that wait for their labels, and there is no [stream.labels]; "
            "put it back, or move the checkpoints away to start again"
        )


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
        return trainer.sniff()

    devices = [trainer.device] if ranks == 1 else devices_of_host(trainer.device, deployment.learner)
    sniff = SniffTest(measure, deployment.device.sniff_deviation)
    watch = start_watch(deployment.device, devices, request_checkpoint, metrics.device, ranks=ranks, sniff=sniff)
    try:
        yield watch
    finally:
        if watch is not None:
            watch.close()
