"""What the probe tries with torch: what a learner builds and may refuse before its first step, by its own code."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError, Failure, failure_of
from anabranch.doctor.model_process import Asked, ProbeFinding, Size, Step
from ingest.config import SchemaSettings, StreamSettings
from ingest.events.schema import Schema
from learner.build import build_embedding_source
from learner.config import LearnerSettings, ModelSettings
from learner.distributed.process_group import RankAssignment, device_of
from learner.distributed.rendezvous import connect_hosts
from learner.errors import CheckpointError
from learner.model.device import (
    Precision,
    UnusedDevice,
    check_scaling,
    choose_device,
    choose_precision,
    driver_fault,
)
from learner.model.embedding import Embedding
from learner.model.factory import build_on_device, check_model, check_task, check_training_pass, make_task
from learner.model.float8 import use_float8
from learner.resume import check_columns
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from learner.state_dir.lock import is_held
from learner.strategies.examples import output_field
from learner.strategies.registry import build_strategy
from learner.training.activation_checkpointing import checkpoint_activations
from learner.training.optimizers import build_optimizer
from learner.training.trainer import Trainer
from replay.build import check_policies
from replay.config import ReplaySettings
from replay.row_layout import Fields

_ROOM = 2
"""Sizes of the model that have to be free on a device for a trial there."""
_FULL = Precision("fp32", None)
_NOWHERE = StreamSettings(bootstrap_servers="localhost:9092", topics=("none",))
"""A placeholder: nothing is read from it."""


def try_device(learner: LearnerSettings, send: Callable[[ProbeFinding], None]) -> torch.device:
    """Send what is wrong with the device, replicas and hosts; return the learner's device."""
    device, ranks = torch.device("cpu"), learner.replicas * learner.hosts
    chosen = choose("learner.device", learner.device, send)
    if chosen is None:
        return device
    device = chosen
    kind = "device.precision"
    try:
        precision = choose_precision(learner.precision, device)
        send(ProbeFinding("", f"The learner computes on {device} in {precision.name}."))
        kind = "learner.replicas"
        if ranks > 1:
            check_scaling(precision, learner.sharding, learner.sync_every)
            device = device_of(RankAssignment(0, ranks, Path()), learner)
        kind = "learner.hosts"
        if learner.hosts > 1:
            _check_interface(learner)
    except (SettingsError, DependencyError) as exc:
        send(ProbeFinding(kind, f"{exc}."))
    return device


def choose(key: str, devices: str, send: Callable[[ProbeFinding], None]) -> torch.device | None:
    """Return the device that a setting names, and send what is wrong with it; None where there is none.

    Nothing is allocated on it: a CUDA context takes half a gigabyte, which a running pipeline may need.
    """
    try:
        device = choose_device(devices, key)
    except (SettingsError, DependencyError) as exc:
        send(ProbeFinding("device.driver" if driver_fault() else "device.missing", f"{exc}.", key))
        return None
    if problem := UnusedDevice.of(key, devices, device).problem:
        send(ProbeFinding("device.driver", f"{problem}."))
    return device


def _check_interface(learner: LearnerSettings) -> None:
    """Find the interface as host 1 does, which opens no listener."""
    other = learner.model_copy(update={"host_rank": 1})
    with connect_hosts(other, _NOWHERE, {}):
        pass


class TriedModel(NamedTuple):
    """What a trial found out, as far as it came."""

    columns: Fields
    """The fields that the store keeps of an event."""
    elements: int
    """Number of the model's parameters, and of the elements of its buffers; 0 where it cannot be built."""


def try_model(asked: Asked, device: torch.device, send: Callable[[Step | ProbeFinding | Size], None]) -> TriedModel:
    """Build the model and the parts that train it, and restore the newest checkpoint.

    It runs on `device` only where that leaves room for a running pipeline, or where the user asks for it; else on the
    CPU.
    """
    try:
        return _try_model(asked, device, send)
    except (RuntimeError, SettingsError) as exc:
        if device.type == "cpu" or failure_of(exc) is not Failure.MEMORY:
            raise
        send(ProbeFinding("device.busy", f"{device} has too little free memory to try the model: {_first_line(exc)}."))
        return _try_model(asked, torch.device("cpu"), send)


def _device_of_trial(asked: Asked, device: torch.device, model_bytes: int) -> torch.device:
    if device.type != "cuda" or asked.on_device:
        return device
    if is_held(Path(asked.state_dir)):
        return torch.device("cpu")  # even to ask for free memory takes a context
    return device if torch.cuda.mem_get_info(device)[0] >= _ROOM * model_bytes else torch.device("cpu")


def _first_line(exc: BaseException) -> str:
    return str(exc).splitlines()[0].rstrip(".")


def _try_model(asked: Asked, device: torch.device, send: Callable[[Step | ProbeFinding | Size], None]) -> TriedModel:
    schema = Schema(SchemaSettings.model_validate_json(asked.events))
    settings = ModelSettings.model_validate_json(asked.model)
    learner = LearnerSettings.model_validate_json(asked.learner)
    replay = ReplaySettings.model_validate_json(asked.replay)
    columns, folder, kind, elements = schema.payload(), Path(asked.folder), "model.factory", 0
    send(Step(f"building {settings.factory}"))
    try:
        model = build_on_device(settings, folder, torch.device("cpu"))
        size, elements = _size_of(model)
        send(Size(size))
        model.to(device := _device_of_trial(asked, device, size))
        precision = _precision(learner, device)
        if precision.name == "fp8":
            model = use_float8(model, device)
        send(Step("running the model on three events of zeros"))
        kind = "model.output"
        task = make_task(settings.task, folder)
        kind = "model.embedding"
        if settings.embedding:
            Embedding(model, settings.embedding)  # as serving does, whether or not the learner compares events
        embedding = build_embedding_source(
            settings, learner.strategy, replay, model, task, [feature.name for feature in schema.features]
        )
        kind = "model.output"
        shape = check_model(model, task, schema, device)
        check_task(task, shape, schema.label, device)
        kind = "model.embedding"
        dim = None if embedding is None else embedding.captured().shape[1]
        kind = "model.strategy"
        strategy = build_strategy(learner.strategy, settings, task)
        if strategy.learns_gradient:
            kind = "model.output"
            check_training_pass(model, task, schema, device, precision)
        if strategy.keeps_output:
            columns |= output_field(shape)
        kind = "replay.policy"
        if strategy.replays:
            check_policies(replay, schema, dim)
        kind = "model.optimizer"
        build_optimizer(learner.optimizer, model.parameters())
        kind = "model.checkpointing"
        checkpoint_activations(model, learner.activation_checkpointing)
        kind = "model.strategy"
        # From here on not on the device, whose memory a running learner may use.
        plain = learner.model_copy(update={"compile": False, "activation_checkpointing": False})
        trainer = Trainer(model.cpu(), task, strategy, schema, plain, torch.device("cpu"), _FULL, embedding)
        send(Step("restoring the newest checkpoint"))
        kind = "checkpoint.misfit"
        checkpoints = Checkpoints(Path(asked.state_dir) / "checkpoints", schema.digest, 0)
        _try_restore(
            checkpoints, schema.digest, trainer, list(shape) if strategy.keeps_output else None, learner.strategy.name
        )
    except SettingsError as exc:
        if device.type != "cpu" and failure_of(exc) is Failure.MEMORY:
            raise
        send(ProbeFinding(kind, f"{exc}."))
    else:
        send(
            ProbeFinding(
                "",
                f"{settings.factory} has {_parameters(model):,} parameters, and its output fits the {settings.task}.",
            )
        )
    return TriedModel(columns, elements)


def _precision(learner: LearnerSettings, device: torch.device) -> Precision:
    """Return the learner's precision; float32 where the device refuses it, which is a finding of the device."""
    try:
        return choose_precision(learner.precision, device)
    except SettingsError:
        return _FULL


def _try_restore(
    checkpoints: Checkpoints, digest: str, trainer: Trainer, output: list[int] | None, strategy: str
) -> None:
    """Raise SettingsError where the newest checkpoint is not of this model, optimizer or strategy, or of another
    release.

    One of another schema, or with a file that cannot be read, is a finding of the check of checkpoints.
    """
    try:
        manifest = checkpoints.latest()
        if manifest is None or manifest.begins or manifest.schema != digest:
            return
        checkpoint = Checkpoint(manifest.step, *checkpoints.open(manifest))
    except (CheckpointError, OSError):
        return
    checkpoints.check(manifest)
    if trainer.strategy.replays and "replay" in checkpoint.tensors:
        check_columns(manifest.number, checkpoint, output, strategy)
    with contextlib.suppress(
        OSError, DamagedError
    ):  # a learner has just replaced it, or it is the check of checkpoints
        trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])


def _size_of(model: nn.Module) -> tuple[int, int]:
    """Return the bytes and the elements of a model's parameters and buffers."""
    tensors = list(model.state_dict().values())
    return sum(each.numel() * each.element_size() for each in tensors), sum(each.numel() for each in tensors)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
