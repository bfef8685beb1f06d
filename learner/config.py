"""The sections `[model]`, `[learner]`, `[versions]`, `[checkpoints]`, `[gate]` and `[device_sharing]` of
`pipeline.toml`. Imports no torch."""

import math
import re
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import DeviceNames, Section, uuids_in
from anabranch.core.stream_secret import StreamSecret
from ingest.config import HoldOut
from learner.sections.adapter import AdapterSettings
from learner.sections.mesh import MeshSettings
from learner.sections.teacher import IMPORT_STRING, Factory, TeacherSettings

WITHOUT_REPLAY = frozenset({"none", "ewc", "lwf", "slda", "ncm", "experts", "progressive"})
"""The strategies that replay no old events, as their classes say too: here without torch, for a config's checks."""
TASK_NAMES = ("classification", "multilabel", "regression", "token-classification")
"""The tasks that come with the learner."""
_LEARNER_MEMORY = 0.7
"""Training keeps six copies of the weights and activations; a server keeps three, and activations of small batches."""
CONTEXTS_MEMORY = 0.05
"""Fraction of a device's memory for CUDA's contexts and libraries, which torch's allocator does not count."""


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError('write "HOST:PORT", such as "127.0.0.1:8001"')
    return value


def _task(value: str) -> str:
    if value not in TASK_NAMES and not re.fullmatch(IMPORT_STRING, value):
        raise ValueError(f'it is neither {" nor ".join(TASK_NAMES)} nor an import string such as "my_model:MyTask"')
    return value


class ModelSettings(Section):
    """The model to train and to serve."""

    factory: Factory
    """Import string of a callable that returns an `nn.Module`; the config's folder is on the path, last."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory. A factory with a parameter `config_folder` also gets the config's folder."""
    task: Annotated[str, AfterValidator(_task)] = "classification"
    """The meaning of the model's output: logits `[B, classes]` for `classification` and `multilabel`,
    `[B, length, classes]` for `token-classification`, one number per event for `regression`, or a custom task, by
    import string like the factory."""
    embedding: str = ""
    """Name of the submodule whose output is the embedding of an event, such as `body.2`; the last but one is best. For
    `replay.sampling` and `replay.admission` that compare events, and requests with `return_embedding`. Empty: none."""
    stages: list[str] = []
    """Names of the modules at which the stages of a pipeline begin, such as `body.4`, without the first. As many stages
    as ranks of `learner.mesh.pipeline`, or with `interleaved` a multiple; of no effect where that is 1."""
    parallel: dict[str, Literal["column", "row", "expert"]] = {}
    """How the ranks along `learner.mesh.tensor` split modules, by name or pattern, such as
    `{"*.up" = "column", "*.down" = "row"}`: each rank computes some of the outputs of a `column` module, and a `row`
    module after it takes them as its inputs. Along `learner.mesh.expert` they divide the experts of an `expert` module,
    a `MixtureOfExperts`."""
    channels_last: bool = False
    """Whether 4-D weights and features are stored with their channels last, in which convolutions run faster on GPUs
    with half precision. Versions and checkpoints do not depend on it."""
    adapter: AdapterSettings | None = None
    """What trains of a pretrained model; absent: all that the factory has not frozen."""
    teacher: TeacherSettings | None = None
    """The model whose outputs the trained model learns from besides labels; absent: none. Serving needs none."""


class OptimizerSettings(BaseModel):
    """An optimizer of torch by name, with its own keyword arguments."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal["adamw", "adam", "sgd", "adafactor", "adagrad", "rmsprop"] = "adamw"
    """Name of the optimizer; further keys are its keyword arguments."""
    lr: Annotated[float, Field(gt=0, lt=math.inf)] = 1e-3
    """Learning rate."""


class StrategySettings(BaseModel):
    """A strategy by its name alone, or a table of the name and its arguments, such as
    `{name = "der++", alpha = 0.1, beta = 0.5}`; docs/guides/strategies.md has them."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Literal[
        "none",
        "er",
        "er-ace",
        "der",
        "der++",
        "mir",
        "agem",
        "ewc",
        "lwf",
        "slda",
        "ncm",
        "experts",
        "progressive",
    ] = "er"
    """The method against forgetting, such as `er` for experience replay, or `none`; further keys are its arguments."""

    @property
    def replays(self) -> bool:
        """Whether there is a store that old events are sampled from."""
        return self.name not in WITHOUT_REPLAY

    @property
    def keeps_output(self) -> bool:
        """Whether the store keeps the model's output with each event."""
        return self.name in {"der", "der++"}


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class DriftSettings(Section):
    """The response when the error on new events rises because the stream has changed."""

    actions: tuple[Literal["mark", "raise-lr", "raise-replay", "checkpoint"], ...] = ("mark",)
    """`mark` counts and logs drift, as every other action does too; `raise-lr` and `raise-replay` raise the learning
    rate and the replay ratio for a while; `checkpoint` starts a checkpoint before that. Empty: no drift detection."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.002
    """Probability of detecting drift in a window without any; a smaller one detects less drift, and later."""
    lr_factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Factor of `raise-lr` on the learning rate; it falls back linearly over `steps`."""
    replay_factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Factor of `raise-replay` on the replay ratio; it falls back linearly over `steps`."""
    steps: Annotated[int, Field(ge=1)] = 500
    """Steps until both factors are back at 1."""


class ScheduleSettings(Section):
    """How the learning rate changes over a stream without an end."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly to `learner.optimizer.lr`; then it is constant."""
    restart: Literal["never", "drift"] = "never"
    """When to warm up again: `drift` when the stream has changed."""

    @model_validator(mode="after")
    def _restart_needs_warmup(self) -> Self:
        if self.restart == "drift" and not self.warmup_steps:
            raise ValueError('restart = "drift" has nothing to do again; set warmup_steps')
        return self


class ProfileSettings(Section):
    """A window of steps to trace, once."""

    start: Annotated[int, Field(ge=0)]
    """Number of steps before the window, over the life of the pipeline."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of steps to trace."""


class LearnerSettings(Section):
    """The training loop."""

    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """New events per step and replica."""
    max_delay: PositiveDuration = timedelta(milliseconds=50)
    """How long a step waits for a full batch of new events before it takes a smaller one."""
    replay_ratio: Annotated[float, Field(ge=0, le=1000)] | Literal["auto"] = 1.0
    """Replayed events per new one; `auto` replays up to one per new event where that measurably reduces forgetting."""
    old_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """For `auto`: the weight of old events against new ones; 0: no replay, 1: the ratio with the least forgetting."""
    micro_batch_size: Annotated[int, Field(ge=2)] | None = None
    """Largest number of events in one pass of the model, new and replayed. A larger step is split, with the gradient of
    all parts together, so that it fits the device. Absent: a step is one pass."""
    strategy: Annotated[StrategySettings, BeforeValidator(_named)] = StrategySettings()
    """The method against forgetting."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its arguments."""
    schedule: ScheduleSettings = ScheduleSettings()
    """How the learning rate changes."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it; `inf` leaves them as they are."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Arithmetic of the forward pass; `auto` is bf16 on CUDA devices that have it, else fp16 there, else fp32. `tf32`:
    float32, with inputs of matrix products and convolutions rounded to 10 bits of mantissa. `fp8`: bf16, with linear
    layers in 8 bits; needs the extra `fp8`. `tf32`, `fp16` and `fp8` need a CUDA device."""
    activation_checkpointing: bool | list[str] = False
    """Names of modules that keep only their inputs, and recompute activations for the gradient: less memory for a third
    more time. `true`: the members of the model's outermost `nn.Sequential`."""
    compile: bool = False
    """Whether to compile the model with torch; where that fails, it runs uncompiled, with a warning."""
    graphs: bool = False
    """On a CUDA device: whether to launch the forward and backward pass of a step as one CUDA graph, where its size has
    come before; a pass that cannot be recorded runs as it is, with a warning."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes on this host that train the model together, each on its own CUDA device, or all on the CPU. Under
    `torchrun` its `--nproc-per-node` counts instead."""
    mesh: MeshSettings | None = None
    """How the replicas, or torchrun's ranks, are arranged; absent: each trains on different events."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of the passes of a pipeline: with `gpipe` a rank runs all forward passes first; with `1f1b` it keeps fewer
    activations; with `interleaved` it has several stages, and waits less."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd", "int8", "topk"] = "none"
    """How replicas compress the gradients that they exchange: `bf16` and `fp16` halve them, `powersgd` sends factors
    of them, `int8` sends a quarter, `topk` those of the largest magnitude. The last three send later what they left
    out."""
    topk_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Fraction of the gradient that each replica sends in a step; for `comm_hook = "topk"`."""
    sync_every: Annotated[int, Field(ge=1)] = 1
    """Steps after which replicas average their weights, training separately until then; 1: they average gradients."""
    sharding: Literal["none", "zero1", "fsdp"] = "none"
    """State to shard over replicas: `zero1` the optimizer's, `fsdp` also the weights and gradients."""
    device: DeviceNames = "auto"
    """Device to train on; `auto` takes CUDA, else Apple's MPS, else the CPU. A GPU or an instance of MIG may be
    given by its UUID; with `replicas` above 1, write a UUID for each, with commas between."""
    drift: DriftSettings = DriftSettings()
    """The response when the stream changes."""
    deterministic: bool = False
    """Whether the same stream gives the same weights bit for bit on one machine, also after restarts. Batches are then
    full and take one event of each partition in turn, and torch uses one thread."""
    profile: ProfileSettings | None = None
    """A window of steps to trace, into `traces` below `state_dir`; absent: none."""
    standby: bool = False
    """Whether `anabranch up` keeps a second process with all imports done, which takes over when the learner dies."""
    stop_timeout: PositiveDuration = timedelta(seconds=30)
    """Time in which the learner stops after SIGTERM, including its last checkpoint and version."""
    status: Annotated[str, AfterValidator(_host_and_port)] = "127.0.0.1:8001"
    """Address of the learner's `/metrics` and `/healthz`; off loopback `serving.tokens.read` is required."""

    @model_validator(mode="after")
    def _drift_restart_needs_actions(self) -> Self:
        if self.schedule.restart == "drift" and not self.drift.actions:
            raise ValueError(
                'schedule.restart = "drift", but drift.actions is empty, so that none is detected; add "mark"'
            )
        return self

    @model_validator(mode="after")
    def _topk_has_its_hook(self) -> Self:
        if self.topk_fraction != type(self).model_fields["topk_fraction"].default and self.comm_hook != "topk":
            raise ValueError(
                f'topk_fraction = {self.topk_fraction} needs comm_hook = "topk", but it is "{self.comm_hook}"; '
                "take topk_fraction out"
            )
        return self

    @model_validator(mode="after")
    def _each_replica_has_a_device(self) -> Self:
        uuids = uuids_in(self.device)
        if not uuids:
            return self
        if self.replicas > 1 and any(uuid.startswith("MIG-") for uuid in uuids):
            raise ValueError(
                f'device = "{self.device}" is an instance of MIG, over which NCCL does not work; set replicas to 1, or '
                "take GPUs that are not split"
            )
        if len(set(uuids)) != self.replicas:
            raise ValueError(f"device names {len(set(uuids))} devices, but replicas = {self.replicas}: one for each")
        return self


class VersionsSettings(Section):
    """How often versions are published, and how many are kept."""

    publish_every: PositiveDuration = timedelta(seconds=1)
    """Time between versions; one that falls due while another is being written is skipped and counted."""
    min_events: Annotated[int, Field(ge=0)] = 0
    """Events to train on, at least, between two versions. A version after few events shows in its predictions what
    their labels were."""
    keep: Annotated[int, Field(ge=2)] = 20
    """Newest versions to keep."""
    keep_hourly: Annotated[int, Field(ge=0)] = 24
    """Number of hours; the last version of each is kept too, beyond `keep`."""


class CheckpointSettings(Section):
    """How often to save the state that a restart resumes from."""

    every: PositiveDuration = timedelta(seconds=30)
    """Time between checkpoints; after a crash, at most this much training is repeated."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Newest checkpoints to keep."""
    keep_hourly: Annotated[int, Field(ge=0)] = 0
    """Number of hours; the last checkpoint of each is kept too, beyond `keep`, so that `anabranch undo` can go back to
    it. Above 0, checkpoints also have the stored events of `replay.disk` and `replay.redis`, as with `[storage]`."""


class GateSettings(Section):
    """The holdout set, and how versions are judged on it."""

    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Fraction of the labelled events to hold out: they are never trained on or replayed."""
    holdout_rows: Annotated[int, Field(ge=1)] = 2000
    """Held-out events to keep: a quarter are the youngest, the others are divided fairly among the classes."""
    max_drop_new: Annotated[float, Field(ge=0)] = 0.02
    """How much worse than the served version a version may be on the youngest held-out events: in accuracy, or as a
    fraction of the error."""
    max_drop_old: Annotated[float, Field(ge=0)] = 0.02
    """The same for older held-out events; the best version served within `max_hold` is compared too."""
    min_rows: Annotated[int, Field(ge=1)] = 1000
    """Held-out events that a verdict requires; with fewer a version is served, marked `inconclusive`."""
    max_hold: PositiveDuration = timedelta(minutes=10)
    """How long versions may fail in a row before `on_hold` applies."""
    on_hold: Literal["alert", "serve"] = "alert"
    """The action then: `alert` continues and reports a problem; `serve` serves the next version anyway, and compares
    later ones with it."""

    def hold_out(self, secret: StreamSecret) -> HoldOut:
        """Return which events of a pipeline are held out, independently of which are kept for replay."""
        return HoldOut(fraction=self.holdout_fraction, seed=secret.number("holdout"))


class DeviceSharingSettings(Section):
    """How serving and the learner share a device."""

    policy: Literal["inference-first", "fraction", "exclusive"] = "inference-first"
    """With `inference-first`, training waits while requests need the device. `fraction` is the same, but training gets
    at least `fraction` of the time. With `exclusive` neither waits, since each has its own device or cores."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Smallest fraction of the time for training with `policy = "fraction"`, while it has work."""
    yield_at: Literal["micro-batch", "layer"] = "micro-batch"
    """Where training yields: before each micro-batch, or also between the model's layers within it."""
    memory: Annotated[float, Field(ge=0.05, le=0.9)] | None = None
    """On a CUDA device: fraction of its memory that each process of the learner may take; serving's processes divide
    the rest, less 5 % for CUDA's contexts. Absent: 0.7, or no bound for either with `policy = "exclusive"`."""
    stream_priority: bool = True
    """On a CUDA device: whether serving's stream has the highest priority; between processes it counts under MPS."""
    mps_percentage: Annotated[int, Field(ge=1, le=100)] | None = None
    """On a CUDA device under MPS: the largest percentage of its threads for training; absent: all."""
    sms: Annotated[int, Field(ge=1)] | None = None
    """On a CUDA device: number of multiprocessors for steps, by a green context; absent: all."""

    @property
    def least(self) -> float:
        """The smallest fraction of the time for training."""
        return self.fraction if self.policy == "fraction" else 0.0

    @property
    def learner_memory(self) -> float | None:
        """Fraction of a CUDA device's memory for each process of the learner; None: no bound."""
        return _LEARNER_MEMORY if self.memory is None and self.policy != "exclusive" else self.memory

    def server_memory(self, workers: int) -> float | None:
        """Fraction of a CUDA device's memory for each of `workers` processes of serving; None: no bound."""
        if self.policy == "exclusive":
            return None
        return (1 - CONTEXTS_MEMORY - (self.learner_memory or 0.0)) / workers
