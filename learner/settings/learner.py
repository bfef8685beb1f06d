"""The sections for how a learner trains, publishes, saves and shares its devices. Imports no torch."""

import math
from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import DeviceNames, Section, uuids_in
from anabranch.core.stream_secret import StreamSecret
from anabranch.core.users_code import NamedClass
from anabranch.ingest.settings.stream import HoldOut
from anabranch.learner.settings.strategies import StrategySettings

_LEARNER_MEMORY = 0.7
"""Training keeps six copies of the weights and activations; a server keeps three, and activations of small batches."""
CONTEXTS_MEMORY = 0.05
"""Fraction of a device's memory for CUDA's contexts and libraries, which torch's allocator does not count."""
RANK_TIMEOUT = timedelta(minutes=10)
"""Timeout of all process groups: many times what the leader ever takes between two headers."""


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError('write "HOST:PORT", such as "127.0.0.1:8001"')
    return value


OPTIMIZER = NamedClass(
    "learner.optimizer",
    ("adamw", "adam", "sgd", "adafactor", "adagrad", "rmsprop"),
    "anabranch.optimizers",
    "torch.optim:Optimizer",
)


def optimizer_needs_whole(name: str) -> bool:
    """Return whether an optimizer works on whole weights, and not on each number alone.

    A class of the user says so by an attribute `needs_whole = True`.
    """
    return name == "adafactor" if name in OPTIMIZER.names else bool(getattr(OPTIMIZER.find(name), "needs_whole", False))


class OptimizerSettings(BaseModel):
    """An optimizer of torch by name, with its own keyword arguments."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Annotated[str, OPTIMIZER] = "adamw"
    """Name of the optimizer; further keys are its keyword arguments. `torch.optim:RAdam` is
    another class by import string."""
    lr: Annotated[float, Field(gt=0, lt=math.inf)] = 1e-3
    """Learning rate."""


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class DriftSettings(Section):
    """The response when the error on new events rises because the stream has changed, and what is drift of inputs."""

    actions: tuple[Literal["mark", "raise-lr", "raise-replay", "checkpoint"], ...] = ("mark",)
    """`mark` counts and logs drift, as all actions do; `raise-lr` and `raise-replay` raise the learning rate and the
    replay ratio for a while; `checkpoint` starts a checkpoint before that. Empty: no drift detection."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.002
    """Probability of detecting drift in a window without any; a smaller one detects less drift, and later."""
    lr_factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Factor of `raise-lr` on the learning rate; it falls back linearly over `steps`."""
    replay_factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Factor of `raise-replay` on the replay ratio; it falls back linearly over `steps`."""
    steps: Annotated[int, Field(ge=1)] = 500
    """Steps until both factors are back at 1."""
    inputs: bool = True
    """Whether features and predictions of new events, and features of requests, are compared with those before."""
    psi: Annotated[float, Field(gt=0, le=10)] = 0.2
    """A smaller population stability index is no drift of a feature or of predictions."""
    ignored: tuple[str, ...] = ()
    """Features that are not compared, such as the day of the week."""


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
    """Number of steps before the window, over the life of the pipeline; it begins and ends between two rounds."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of steps to trace."""


class MeshSettings(Section):
    """How ranks are arranged to train one model: their number is the product of the dimensions."""

    data: Annotated[int, Field(ge=1)] = 1
    """Ranks that train on different events, each on `learner.batch_size` new ones a step."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the modules of `model.parallel` and get the same events. They are on one host."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Ranks that each run some of the model's layers, one after the other."""
    expert: Annotated[int, Field(ge=1)] = 1
    """Ranks that each have some of the model's experts, and train on different events too."""
    shard: Annotated[int, Field(ge=2)] | None = None
    """With `learner.sharding = "fsdp"`: ranks of `data` that shard the weights together; others have copies. Absent:
    the ranks of a host if there are several, else all."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.pipeline * self.expert

    @model_validator(mode="after")
    def _shards_divide_the_data(self) -> Self:
        if self.shard is not None and self.data % self.shard:
            raise ValueError(f"shard = {self.shard} does not divide data = {self.data}; take a divisor of it")
        return self


class LearnerSettings(Section):
    """The training loop."""

    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """New events per step and replica."""
    max_delay: PositiveDuration = timedelta(milliseconds=50)
    """How long a step waits for a full batch of new events before it takes a smaller one."""
    round: PositiveDuration = timedelta(milliseconds=20)
    """How long steps take that are taken as one round, where their full batches wait already: what is done once a round
    is not done once a step. A version or checkpoint that is due waits for the end of the round."""
    replay_ratio: Annotated[float, Field(ge=0, le=1000)] | Literal["auto"] = 1.0
    """Replayed events per new one; `auto` replays up to one per new event where that measurably reduces forgetting."""
    old_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """For `auto`: the weight of old events against new ones; 0: no replay, 1: least forgetting."""
    micro_batch_size: Annotated[int, Field(ge=2)] | None = None
    """Largest number of events in one pass of the model, new and replayed. A larger step is split; its gradient is that
    of the whole. Absent: a step is one pass."""
    strategy: Annotated[StrategySettings, BeforeValidator(_named)] = StrategySettings()
    """The method against forgetting."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its arguments."""
    schedule: ScheduleSettings = ScheduleSettings()
    """How the learning rate changes."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it; `inf` leaves them as they are."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Arithmetic of the forward pass; `auto` is bf16 on CUDA devices that have it, else fp16 there, else fp32. `tf32`
    rounds inputs of matrix products and convolutions to 10 bits of mantissa; `fp8` is bf16 with linear layers in 8 bits
    (extra `fp8`). `tf32`, `fp16` and `fp8` need a CUDA device."""
    activation_checkpointing: bool | list[str] = False
    """Names of modules that keep only their inputs, and recompute activations for the gradient: less memory for a third
    more time. `true`: the members of the model's outermost `nn.Sequential`."""
    compile: bool | Literal["auto"] = False
    """Whether to compile the model with torch; where that fails, it runs uncompiled, with a warning. `auto`, without
    replicas on a CPU: trials at start, of a second, choose threads and channels last instead."""
    graphs: bool | Literal["auto"] = "auto"
    """On a CUDA device: whether a step is one launch, a CUDA graph. `auto`: where a trial at start finds that it learns
    the same; `true`: the learner ends where it does not."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes on this host that train the model together, each on its own CUDA device, or all on the CPU. Under
    `torchrun` its `--nproc-per-node` counts instead."""
    mesh: MeshSettings | None = None
    """How the replicas, or torchrun's ranks, are arranged; absent: each trains on different events."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of the passes of a pipeline: with `gpipe` a rank runs all forward passes first; with `1f1b` it keeps fewer
    activations; with `interleaved` it has several stages, and waits less."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd", "int8", "topk"] = "none"
    """How replicas compress gradients: `bf16` and `fp16` halve them, `powersgd` sends factors, `int8` a quarter, `topk`
    those of the largest magnitude. The last three send later what they left out."""
    topk_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Fraction of the gradient that each replica sends in a step; for `comm_hook = "topk"`."""
    sync_every: Annotated[int, Field(ge=1)] = 1
    """Steps after which replicas average their weights, training separately until then; 1: they average gradients."""
    sharding: Literal["none", "zero1", "fsdp"] = "none"
    """State to shard over replicas: `zero1` the optimizer's, `fsdp` also the weights and gradients."""
    device: DeviceNames = "auto"
    """Device to train on; `auto` takes CUDA, else Apple's MPS, else the CPU. A UUID names a GPU or an instance of MIG;
    with `replicas` above 1, write one for each, with commas between."""
    drift: DriftSettings = DriftSettings()
    """The response when the stream changes."""
    deterministic: bool = False
    """Whether the same stream gives the same weights bit for bit on one machine, also after restarts. Batches are then
    full, with one event of each partition in turn, and torch uses one thread."""
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
    """Least number of events between two versions. A version after few events reveals their labels by its
    predictions."""
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
    """Number of hours; the last checkpoint of each is kept too, so that `anabranch undo` can return to it. Above 0,
    checkpoints also have the stored events of `replay.disk` and `replay.redis`, as with `[storage]`."""


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
    measures: Literal["auto"] | dict[str, Annotated[float, Field(ge=0)]] = "auto"
    """Measures by which versions are judged as well, and how much worse than the served version one may be: `{log_loss
    = 0.02}`; a fraction for `log_loss`, `mae`, `rmse` and `pinball_90`. `"auto"`: with two classes of which under 20 %
    of the newest labels are class 1, `average_precision` by `max_drop_new`; else none."""
    live: bool = True
    """With `[stream.labels]` and `[serving.stream]`: whether the learner reads the answers back, measures each
    version by what it has served, and withdraws one that is worse."""
    slices: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Features with one number or category: a version that is worse than the served one where a feature has one value,
    or is in one quarter, fails. What is allowed is `max_drop_old`, and of each measure its drop. A feature has at most
    22 slices."""
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
    """`inference-first`: training waits while requests need the device. `fraction`: the same, but training gets at
    least `fraction` of the time. `exclusive`: neither waits, since each has its own device or cores."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Smallest fraction of the time for training with `policy = "fraction"`, while it has work."""
    yield_at: Literal["micro-batch", "layer"] = "micro-batch"
    """Where training yields: before each micro-batch, or also between the model's layers within it."""
    memory: Annotated[float, Field(ge=0.05, le=0.9)] | None = None
    """On a CUDA device: fraction of its memory for each process of the learner; serving's processes divide the rest,
    less 5 % for CUDA's contexts. Absent: 0.7, or no bound with `policy = "exclusive"`."""
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


class DeviceSettings(Section):
    """How the learner watches the health of its NVIDIA devices."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto` watches where there is an NVIDIA device and the extra `gpu`; `on` refuses to start without them."""
    every: PositiveDuration = timedelta(seconds=1)
    """Time between two readings of a device."""
    timeout: PositiveDuration = timedelta(seconds=10)
    """How long a device may answer no query before that is a problem."""
    window: PositiveDuration = timedelta(minutes=10)
    """The time over which errors of a device are counted."""
    corrected_errors: Annotated[int, Field(ge=1)] = 10
    """Corrected memory errors in `window` that are an early warning."""
    pcie_replays: Annotated[int, Field(ge=1)] = 80
    """Replays of PCIe packets in `window` that are an early warning; NVIDIA's own limit is 8 a minute."""
    nvlink_errors: Annotated[int, Field(ge=1)] = 10
    """Replays and recoveries of NVLink in `window` that are an early warning."""
    temperature_margin: Annotated[float, Field(ge=0, le=50)] = 8.0
    """Degrees Celsius below the temperature at which the device slows down, from which a rise is an early warning."""
    sniff_every: PositiveDuration = timedelta(minutes=10)
    """Time between two sniff tests, which time the same matrix product on each device."""
    sniff_deviation: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How much slower than usual, as a fraction, a device may be in the sniff test before it is named."""
