"""The model and its device: what a learner builds and may refuse before its first step, by the learner's own code."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import Failure, failure_of
from anabranch.core.preflight import Finding, ok, problem, warning
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.outcomes import TaskMeasures
from anabranch.learner.evaluate.slices import Slices
from anabranch.learner.loop.resume import try_newest
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import (
    Precision,
    UnusedDevice,
    check_scaling,
    choose_device,
    choose_precision,
    device_of_rank,
    driver_fault,
)
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import output_fields
from anabranch.learner.model.float8 import Float8
from anabranch.learner.model.trained_set import base_state, trained_state
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.lock import is_locked
from anabranch.learner.train.build import Stage, build_task_and_model, complete_setup
from anabranch.learner.train.converters import Recomputation
from anabranch.learner.train.optimizers import build_optimizer
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.build import check_policies

_DRIVER = "Update NVIDIA's driver, or build the image with TORCH_INDEX; docs/deploy/gpu.md says which."
_ROOM = 2
"""Sizes of the model that have to be free on a device for a trial there."""
_FULL = Precision("fp32", None)
_KINDS: Mapping[Stage, str] = {"task": "model.output", "steps": "model.factory"}
"""The kind of a finding at a stage, where it is not `model.` and the stage."""
FIXES = {
    "model.factory": "Fix the function that model.factory names, or model.args.",
    "model.output": "Fix the model's forward, model.task or [schema].",
    "model.strategy": "Fix learner.strategy.",
    "model.optimizer": "Fix learner.optimizer.",
    "model.embedding": "Set model.embedding to the name of a module that forward calls.",
    "model.checkpointing": "Fix learner.activation_checkpointing.",
    "gate.measures": "Fix gate.measures, or the measures of model.task.",
    "gate.slices": "Fix gate.slices.",
    "replay.policy": "Fix replay.admission or replay.sampling.",
    "checkpoint.misfit": "Put the settings of the checkpoint back, or move the checkpoints away to start again.",
    "device.precision": 'Set learner.precision = "auto".',
    "learner.replicas": "Fix learner.replicas, or the setting that it conflicts with.",
}
"""What to do about a problem, by its kind."""
_STEPS: Mapping[Stage, str] = {
    "factory": "building {}",
    "embedding": "running the model on three events of zeros",
    "steps": "taking steps on a copy of the model",
}


def try_device(pipeline: PipelineSettings, send: Callable[[Finding], None]) -> torch.device:
    """Send what is wrong with the device and replicas; return the learner's device."""
    learner, device = pipeline.learner, torch.device("cpu")
    chosen = choose("learner.device", learner.device, send)
    if chosen is None:
        return device
    device = chosen
    kind = "device.precision"
    try:
        precision = choose_precision(learner.precision, device)
        send(ok(f"The learner computes on {device} in {precision.name}."))
        kind = "learner.replicas"
        if learner.replicas > 1:
            check_scaling(precision, learner)
            device = device_of_rank(0, learner)
    except (SettingsError, DependencyError) as exc:
        send(problem(kind, f"{exc}.", FIXES[kind]))
    return device


def choose(key: str, devices: str, send: Callable[[Finding], None]) -> torch.device | None:
    """Return the device that a setting names, and send what is wrong with it; None where there is none.

    Nothing is allocated on it: a CUDA context takes half a gigabyte, which a running pipeline may need.
    """
    try:
        device = choose_device(devices, key)
    except (SettingsError, DependencyError) as exc:
        if driver_fault():
            send(problem("device.driver", f"{exc}.", _DRIVER))
        else:
            fix = f'Set {key} = "auto", or install a torch that has the device.'
            send(problem("device.missing", f"{exc}.", fix))
        return None
    if fault := UnusedDevice.of(key, devices, device).problem:
        send(problem("device.driver", f"{fault}.", _DRIVER))
    return device


class TriedModel(NamedTuple):
    """What a trial found out, as far as it came."""

    columns: Mapping[str, tuple[Any, tuple[int, ...]]]
    """The fields that the store keeps of an event."""
    elements: int = 0
    """Number of the parameters that are trained, and of the elements of buffers; 0 where it cannot be built."""
    bytes: int = 0
    """Size of the weights that are trained, and of buffers."""
    base_bytes: int = 0
    """Size of the frozen weights."""


class ModelTrial:
    """Builds the model and what trains it by the learner's own stages, and restores the newest checkpoint."""

    def __init__(self, pipeline: PipelineSettings, send: Callable[[Finding | str], None], *, on_device: bool) -> None:
        """Keep what to try.

        Args:
            pipeline: the settings.
            send: receives each finding; and a string that says what is tried next, which may crash or hang.
            on_device: whether the model is tried on the learner's device, whoever uses that.
        """
        self._pipeline = pipeline
        self._send = send
        self._on_device = on_device
        self._kind = ""
        """Of a finding, where something is refused now."""
        self._model = nn.Module()

    def run(self, device: torch.device) -> TriedModel:
        """Try all on `device` where that leaves room for a running pipeline, or where the user asks for it; else on the
        CPU."""
        try:
            return self._run(device)
        except (RuntimeError, SettingsError) as exc:
            if device.type == "cpu" or failure_of(exc) is not Failure.MEMORY:
                raise
            why = str(exc).splitlines()[0].rstrip(".")
            fix = "Stop what uses the device, or run doctor without --device."
            self._send(warning("device.busy", f"{device} has too little free memory to try the model: {why}.", fix))
            return self._run(torch.device("cpu"))

    def _run(self, device: torch.device) -> TriedModel:
        pipeline, schema = self._pipeline, Schema(self._pipeline.events)
        found, cpu = TriedModel(schema.payload()), torch.device("cpu")
        try:
            task, self._model = build_task_and_model(pipeline, schema, cpu, begin=self._begin)
            (size, elements), (base_bytes, _) = map(_size_of, (trained_state(self._model), base_state(self._model)))
            found = found._replace(elements=elements, bytes=size, base_bytes=base_bytes)
            self._model.to(device := self.device_of_trial(device, size + base_bytes))
            precision = _precision(pipeline.learner.precision, device)
            if precision.name == "fp8":
                self._model = Float8().convert(self._model, ModelContext(device, schema))
            self._kind = "model.embedding"
            if pipeline.model.embedding:
                Embedding(self._model, pipeline.model.embedding)  # as serving does, whatever the learner compares
            setup = complete_setup(self._plain, schema, task, self._model, device, precision, self._begin)
            self._model = setup.model
            found = found._replace(columns={**schema.payload(), **output_fields(setup.kept_outputs)})
            self._kind = "gate.measures"
            TaskMeasures.of(task, schema, () if pipeline.gate.measures == "auto" else pipeline.gate.measures)
            self._kind = "gate.slices"
            Slices(pipeline.gate.slices, schema)
            self._kind = "replay.policy"
            if setup.strategy.kind.replays:
                dim = None if setup.embedding is None else setup.embedding.captured().shape[1]
                check_policies(pipeline.replay, schema, dim)
            self._kind = "model.strategy"
            # From here on not on the device, whose memory a running learner may use.
            self._model.cpu()
            trainer = Trainer(replace(setup, device=cpu, precision=_FULL, loss_wrappers=()))
            self._send("restoring the newest checkpoint")
            self._kind = "checkpoint.misfit"
            try_newest(pipeline.state_dir, pipeline.stream, setup, trainer.restore)
        except SettingsError as exc:
            if device.type != "cpu" and failure_of(exc) is Failure.MEMORY:
                raise
            self._send(problem(self._kind, f"{exc}.", FIXES[self._kind]))
        else:
            parameters, kind = _parameters(self._model), pipeline.model.task
            self._send(ok(f"{pipeline.model.factory} has {parameters}, and its output fits the {kind}."))
            if base := base_state(self._model):
                self._send(ok(_split(trained_state(self._model), base)))
        return found

    @property
    def _plain(self) -> PipelineSettings:
        """The settings of one process without the compiler, whose modules recompute activations since `_begin`."""
        alone = {"compile": False, "activation_checkpointing": False, "mesh": None, "sharding": "none"}
        return self._pipeline.with_changes(learner=self._pipeline.learner.model_copy(update=alone))

    def device_of_trial(self, device: torch.device, model_bytes: int) -> torch.device:
        """Return the learner's device, or the CPU where the model might not leave a running pipeline enough memory."""
        if device.type != "cuda" or self._on_device:
            return device
        if is_locked(self._pipeline.state_dir):
            return torch.device("cpu")  # even to ask for free memory takes a context
        return device if torch.cuda.mem_get_info(device)[0] >= _ROOM * model_bytes else torch.device("cpu")

    def _begin(self, stage: Stage) -> None:
        """Send what the learner's code does next, once all is tried that it does later."""
        if stage == "steps":
            self._kind = "model.optimizer"
            build_optimizer(self._pipeline.learner.optimizer, self._model.parameters())
            self._kind = "model.checkpointing"
            context = ModelContext(torch.device("cpu"))
            Recomputation(self._pipeline.learner.activation_checkpointing).convert(self._model, context)
        self._kind = _KINDS.get(stage, f"model.{stage}")
        if stage in _STEPS:
            self._send(_STEPS[stage].format(self._pipeline.model.factory))


def _precision(name: str, device: torch.device) -> Precision:
    """Return the learner's precision; float32 where the device refuses it, which is a finding of the device."""
    try:
        return choose_precision(name, device)
    except SettingsError:
        return _FULL


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
