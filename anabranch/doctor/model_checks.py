"""What the probe tries with torch: what a learner builds and may refuse before its first step, by its own code."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError, Failure, failure_of
from anabranch.doctor.model_process import Asked, ProbeFinding, Size, Step
from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from learner.build import build_embedding_source
from learner.config import LearnerSettings, ModelSettings
from learner.distributed.process_group import RankAssignment, device_of
from learner.errors import CheckpointError
from learner.model.adapter import check_trained
from learner.model.base_file import base_digest
from learner.model.device import (
    Precision,
    UnusedDevice,
    check_scaling,
    choose_device,
    choose_precision,
    driver_fault,
)
from learner.model.embedding import Embedding, Embeddings
from learner.model.factory import (
    build_on_device,
    check_copies,
    check_model,
    check_task,
    check_training_pass,
    make_task,
)
from learner.model.float8 import use_float8
from learner.model.rng import seed_rng
from learner.model.task import Task
from learner.model.trained_set import base_state, trained_state
from learner.resume import check_base, check_columns
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from learner.state_dir.lock import is_held
from learner.strategies.examples import output_fields
from learner.strategies.registry import build_strategy
from learner.strategies.teacher_loss import kept_outputs
from learner.teacher.checks import check_distil
from learner.training.activation_checkpointing import checkpoint_activations
from learner.training.optimizers import build_optimizer
from learner.training.trainer import Trainer
from learner.training.trial import try_steps
from replay.build import check_policies
from replay.config import ReplaySettings
from replay.row_layout import Fields

_ROOM = 2
"""Sizes of the model that have to be free on a device for a trial there."""
_FULL = Precision("fp32", None)


def try_device(learner: LearnerSettings, send: Callable[[ProbeFinding], None]) -> torch.device:
    """Send what is wrong with the device and replicas; return the learner's device."""
    device, ranks = torch.device("cpu"), learner.replicas
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
            check_scaling(precision, learner)
            device = device_of(RankAssignment(0, ranks, Path()), learner)
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


class TriedModel(NamedTuple):
    """What a trial found out, as far as it came."""

    columns: Fields
    """The fields that the store keeps of an event."""
    elements: int
    """Number of the parameters that are trained, and of the elements of buffers; 0 where it cannot be built."""
    base_bytes: int = 0
    """Size of the frozen weights."""


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
    columns, folder, kind = schema.payload(), Path(asked.folder), "model.output"
    elements = base_bytes = 0
    send(Step(f"building {settings.factory}"))
    try:
        # In the learner's order: frozen weights that the factory samples are then the learner's.
        seed_rng(asked.seed, python=learner.mesh is not None)
        task = make_task(settings.task, folder)
        kind = "model.factory"
        model = build_on_device(settings, folder, torch.device("cpu"), schema)
        (size, elements), (base_bytes, _) = map(_size_of, (trained_state(model), base_state(model)))
        send(Size(size, base_bytes))
        model.to(device := _device_of_trial(asked, device, size + base_bytes))
        precision = _precision(learner, device)
        model = use_float8(model, device) if precision.name == "fp8" else model
        send(Step("running the model on three events of zeros"))
        kind = "model.embedding"
        embedding = _embedding_of(model, settings, learner, replay, task, schema)
        kind = "model.output"
        shape = check_model(model, task, schema, device)
        check_task(task, shape, schema.label, device)
        kind = "model.embedding"
        dim = None if embedding is None else embedding.captured().shape[1]
        kind = "model.strategy"
        strategy = build_strategy(learner.strategy, settings, task)
        strategy.extend(model, settings, schema, device)
        if settings.adapter is not None:
            check_trained(model, settings.adapter, learner.strategy.name, learns_gradient=strategy.learns_gradient)
        kind = "model.output"
        if strategy.learns_gradient:
            check_training_pass(model, task, schema, device, precision)
        check_copies(model, schema, device)
        if settings.teacher is not None:
            check_distil(task, settings.task, shape, device)
        kept = kept_outputs(strategy, shape, taught=settings.teacher is not None)
        columns |= output_fields(kept)
        kind = "replay.policy"
        if strategy.replays:
            check_policies(replay, schema, dim)
        kind = "model.optimizer"
        build_optimizer(learner.optimizer, model.parameters())
        kind = "model.checkpointing"
        checkpoint_activations(model, learner.activation_checkpointing)
        kind = "model.factory"
        plain = learner.model_copy(update={"compile": False, "activation_checkpointing": False})
        send(Step("taking steps on a copy of the model"))
        names = [feature.name for feature in schema.features]
        try_steps(
            model,
            task,
            partial(build_strategy, learner.strategy, settings, task),
            schema,
            plain,
            device,
            precision,
            partial(build_embedding_source, settings, learner.strategy, replay, task=task, features=names),
        )
        kind = "model.strategy"
        # From here on not on the device, whose memory a running learner may use.
        trainer = Trainer(model.cpu(), task, strategy, schema, plain, torch.device("cpu"), _FULL, embedding)
        send(Step("restoring the newest checkpoint"))
        kind = "checkpoint.misfit"
        _try_restore(Path(asked.state_dir), schema.digest, trainer, kept, learner.strategy.name)
    except SettingsError as exc:
        if device.type != "cpu" and failure_of(exc) is Failure.MEMORY:
            raise
        send(ProbeFinding(kind, f"{exc}."))
    else:
        send(ProbeFinding("", f"{settings.factory} has {_parameters(model)}, and its output fits the {settings.task}."))
        if base := base_state(model):
            send(ProbeFinding("", _split(trained_state(model), base)))
    return TriedModel(columns, elements, base_bytes)


def _embedding_of(
    model: nn.Module,
    settings: ModelSettings,
    learner: LearnerSettings,
    replay: ReplaySettings,
    task: Task,
    schema: Schema,
) -> Embeddings | None:
    """Return the embeddings that strategy or store need; raise SettingsError where the named module has none."""
    if settings.embedding:
        Embedding(model, settings.embedding)  # as serving does, whether or not the learner compares events
    names = [feature.name for feature in schema.features]
    return build_embedding_source(settings, learner.strategy, replay, model, task, names)


def _precision(learner: LearnerSettings, device: torch.device) -> Precision:
    """Return the learner's precision; float32 where the device refuses it, which is a finding of the device."""
    try:
        return choose_precision(learner.precision, device)
    except SettingsError:
        return _FULL


def _try_restore(
    state_dir: Path, digest: str, trainer: Trainer, kept: Mapping[str, list[int] | None], strategy: str
) -> None:
    """Raise SettingsError where the newest checkpoint is not of this model, optimizer or strategy, or of another
    release.

    One of another schema, or with a file that cannot be read, is a finding of the check of checkpoints.
    """
    checkpoints = Checkpoints(state_dir / "checkpoints", digest, 0)
    checkpoints.base = base_digest(trainer.model)
    try:
        manifest = checkpoints.latest()
        if manifest is None or manifest.begins or manifest.schema != digest:
            return
        checkpoint = Checkpoint(manifest.step, *checkpoints.open(manifest))
    except (CheckpointError, OSError):
        return
    checkpoints.check(manifest)
    check_base(checkpoints, manifest.number, checkpoint)
    if trainer.strategy.replays and "replay" in checkpoint.tensors:
        check_columns(manifest.number, checkpoint, kept, strategy)
    with contextlib.suppress(
        OSError, DamagedError
    ):  # a learner has just replaced it, or it is the check of checkpoints
        trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])


def _size_of(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the bytes and the elements of tensors."""
    return sum(each.nbytes for each in state.values()), sum(each.numel() for each in state.values())


def _parameters(model: nn.Module) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters" + ("" if trained == total else f", of which {trained:,} are trained")


def _split(trained: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> str:
    """Return what of a model trains, and what versions and the base take on the disk."""
    parameters = sum(each.numel() for each in trained.values())
    version, frozen = (sum(each.nbytes for each in part.values()) for part in (trained, base))
    return (
        f"{parameters:,} numbers of it are trained: a version takes {version / 1e3:,.1f} kB, and the frozen base "
        f"{frozen / 1e3:,.1f} kB, once."
    )
