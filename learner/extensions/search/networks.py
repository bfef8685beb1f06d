"""Challengers with their own network: built with other arguments of the factory, and taught by the model.

Legend: B events.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import ModelError
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.factory import build_on_device, check_distil, check_model, eval_mode, forward, sample
from anabranch.learner.settings.pipeline import PipelineSettings, ServedSettings
from anabranch.learner.strategies.teacher_loss import TeacherLoss
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_runner import StepRunner

_PASSES = 15
"""Passes of each module with a number of rows, the first of which are not counted."""
_UNCOUNTED = 3
_TOLERANCE = 1.1
"""How much longer than the model's a pass may take that counts as equally long: clocks and other processes differ."""


class LatencyBound:
    """Compares passes of one row, and of the largest batch of serving, with the time that serving has for them.

    Measured on the learner's device in float32: where serving has another one, the bound is an estimate. A network that
    is about as fast as the model is never too slow, since the model is served.
    """

    def __init__(self, served: ServedSettings, schema: Schema, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take `clock`, which returns seconds."""
        self._served, self._schema, self._clock = served, schema, clock

    def exceeded(
        self, model: nn.Module, other: nn.Module, device: torch.device, before_pass: Callable[[], object]
    ) -> str | None:
        """Return a sentence where `other` is too slow, and slower than the model; None if it is not.

        `before_pass` is called before each pass, outside of the measured time.
        """
        within = (self._served.slo - self._served.max_delay).total_seconds()
        for rows in sorted({1, self._served.max_batch}):
            usual, its = self._medians((model, other), rows, device, before_pass)
            if its > max(within, _TOLERANCE * usual):
                return (
                    f"a pass of {rows} rows takes {its * 1e3:.3g} ms, and the model's {usual * 1e3:.3g} ms; "
                    f"serving.slo less serving.max_delay is {within * 1e3:.3g} ms"
                )
        return None

    def _medians(
        self, modules: tuple[nn.Module, nn.Module], rows: int, device: torch.device, before_pass: Callable[[], object]
    ) -> tuple[float, float]:
        """Return the median seconds of a pass of each module, which take turns."""
        features = sample(self._schema, rows, device)
        seconds: tuple[list[float], list[float]] = ([], [])
        with torch.no_grad(), eval_mode(modules[0]), eval_mode(modules[1]):
            for _ in range(_PASSES):
                for module, spent in zip(modules, seconds, strict=True):
                    before_pass()
                    _wait(device)
                    begin = self._clock()
                    forward(module, features)
                    _wait(device)
                    spent.append(self._clock() - begin)
        return statistics.median(seconds[0][_UNCOUNTED:]), statistics.median(seconds[1][_UNCOUNTED:])


def _wait(device: torch.device) -> None:
    """Wait for the work of the device: only then is it measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


NETWORK_TEACHING = 0.5, 2.0
"""Weight of the model's output against the label, and temperature: the defaults of `[model.teacher]`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworkSpec:
    """How networks with other arguments of the factory are built, taught and judged by their latency.

    Attributes:
        args: `model.args`.
        build: builds the network of other arguments on the device; raises ModelError where it does not fit the task.
        teaching: the teacher's part of the loss, where the model is the teacher.
        latency: decides which networks are too slow; None: none is.
    """

    args: Mapping[str, Any]
    build: Callable[[Mapping[str, Any]], nn.Module]
    teaching: TeacherLoss
    latency: LatencyBound | None = None


def taught(events: Examples, model: nn.Module, runner: StepRunner) -> Examples:
    """Return events with the outputs of the model, in evaluation mode, as those of a teacher."""
    outputs = []
    with runner.snapshots.taken() as before, eval_mode(model), torch.no_grad(), runner.autocast():
        for part in runner.parts(events):
            outputs.append(runner.forward(part.features).float())
        before.restore_buffers()
    labelled_B = torch.ones(len(events), dtype=torch.bool, device=events.weight_B.device)
    return replace(events, teacher_B=torch.cat(outputs), taught_B=events.weight_B, labelled_B=labelled_B)


def network_spec(spec: PipelineSettings, setup: TrainingSetup) -> NetworkSpec:
    """Return how challengers with other arguments of the factory are built, taught and timed.

    Raises:
        ModelError: the task has no loss by which a model learns from another one.
    """
    schema, device, model = setup.schema, setup.device, spec.model

    def build(args: Mapping[str, Any]) -> nn.Module:
        settings = model.model_copy(update={"args": dict(args)})
        network = build_on_device(settings, spec.folder, device, schema, setup.precision.name)
        if (shape := check_model(network, setup.task, schema, device)) != setup.output_shape:
            raise ModelError(f"the output for an event is {list(shape)}, and the model's {list(setup.output_shape)}")
        return network

    if not callable(getattr(setup.task, "distil", None)):
        raise ModelError(
            f'search.space has arguments of model.factory, and model.task = "{model.task}" has no method distil, with '
            "which their networks learn from the model; write it, or take those keys out of search.space"
        )
    distils = check_distil(setup.task, model.task, setup.output_shape, device)
    teaching = TeacherLoss(distils, *NETWORK_TEACHING)
    return NetworkSpec(model.args, build, teaching, LatencyBound(spec.serving, schema))
