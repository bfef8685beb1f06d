"""Divides a model into stages, each a sequence of its modules, and runs each on its rank, by schedules of torch.

Import this module only where `learner.mesh.pipeline` asks for it: that takes seconds.

Legend: M micro-batches, R rows of one.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.model.device import Precision
from anabranch.learner.model.examples import Tensors
from anabranch.learner.model.factory import forward, run_on
from anabranch.learner.train.converters import OnCopiesOfBuffers
from anabranch.learner.train.parallelism import PassCallbacks, PipelineStages
from anabranch.learner.train.step_snapshot import Snapshots

_WAY_OUT = "write the model as modules that run one after the other, each on the output of the one before alone"


class Boundary(NamedTuple):
    """The output of a stage for one event."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stages:
    """The stages of a model.

    Attributes:
        units: the modules of each stage, in the order in which they run.
        outputs: what each stage returns; the last one's is the model's output.
    """

    units: list[list[nn.Module]]
    outputs: list[Boundary]


def divide(model: nn.Module, names: Sequence[str], features: Mapping[str, Tensor], precision: Precision) -> Stages:
    """Divide a model into stages; it is run once in evaluation mode to see that its modules are a sequence.

    Args:
        model: on its device.
        names: of the modules at which a stage begins, except the first.
        features: of a few events.
        precision: of training, which decides the dtype between stages.

    Raises:
        SettingsError: there is no such module, or the modules do not run one after the other.
    """
    units = dict(_units("", model, {name[:end] for name in names for end in _prefixes(name)}))
    for name in names:
        if name not in units:
            raise SettingsError(f'model.stages: the model has no module "{name}", but {", ".join(filter(None, units))}')
    begins = [list(units).index(name) for name in names]
    if any(one >= other for one, other in itertools.pairwise([0, *begins])):
        raise SettingsError(
            f"model.stages = {list(names)}: name modules in the order in which they run, the model's first left out"
        )
    outputs = _run(model, units, features, precision)
    ends = [*begins, len(units)]
    modules = list(units.values())
    stages = [modules[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    _refuse_shared(stages, model)
    return Stages(stages, [outputs[end - 1] for end in ends])


def _prefixes(name: str) -> Iterator[int]:
    """Yield the lengths of the names of the modules that contain a module; 0 is the model."""
    yield 0
    yield from (index for index, letter in enumerate(name) if letter == ".")


def _units(name: str, module: nn.Module, expanded: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that stages are made of: those that run and in which none of the named modules is."""
    if name not in expanded and not isinstance(module, nn.ModuleList):
        yield name, module
        return
    for child, value in module.named_children():
        yield from _units(f"{name}.{child}" if name else child, value, expanded)


class _Trace:
    """What the modules of a sequence took and returned in one pass."""

    def __init__(self, units: Mapping[str, nn.Module], features: Mapping[str, Tensor]) -> None:
        self.names = list(units)
        self.calls: list[str] = []
        self.outputs: list[Any] = []
        self.broken: str | None = None
        """The first module that took something else than the output of the module before."""
        self._features = features
        self._version = 0
        self._hooks = [hook for name, unit in units.items() for hook in self._hooked(name, unit)]

    def close(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def _hooked(self, name: str, unit: nn.Module) -> Iterator[RemovableHandle]:
        yield unit.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
        yield unit.register_forward_hook(partial(self._after, name))

    def _before(self, name: str, _unit: nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self.outputs:
            follows = len(positional) == 1 and not named and positional[0] is self.outputs[-1]
            follows = follows and positional[0]._version == self._version
        elif len(self._features) == 1:
            follows = not named and len(positional) == 1 and positional[0] is next(iter(self._features.values()))
        else:
            follows = not positional and named.keys() == self._features.keys()
            follows = follows and all(value is self._features[key] for key, value in named.items())
        if not follows:
            self.broken = self.broken or name

    def _after(self, name: str, _unit: nn.Module, _given: Any, output: Any) -> None:
        self.calls.append(name)
        self.outputs.append(output)
        self._version = output._version if isinstance(output, Tensor) else 0


def _run(
    model: nn.Module, units: Mapping[str, nn.Module], features: Mapping[str, Tensor], precision: Precision
) -> list[Boundary]:
    """Run the model, and return the output of each of its units."""
    trace, was_training = _Trace(units, features), model.training
    first = next(iter(features.values()))
    device, rows = first.device, len(first)
    try:
        with Snapshots(model, device).taken() as before, torch.no_grad(), precision.autocast(device):
            output = run_on(model.eval(), features)
            before.restore()
    finally:
        model.train(was_training)
        trace.close()
    if trace.calls != trace.names:
        raise SettingsError(
            f"model.stages: the model runs {', '.join(trace.calls) or 'none of its modules'}, which is not "
            f"{', '.join(trace.names)} once and in this order; {_WAY_OUT}"
        )
    if trace.broken is not None:
        raise SettingsError(
            f'model.stages: the module "{trace.broken}" takes something else than the module before it returns; '
            f"{_WAY_OUT}"
        )
    if output is not trace.outputs[-1]:
        raise SettingsError(
            f'model.stages: the model returns something else than its last module, "{trace.names[-1]}"; {_WAY_OUT}'
        )
    for name, value in zip(trace.names, trace.outputs, strict=True):
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != rows:
            raise SettingsError(f'model.stages: the module "{name}" returns no tensor with one row per event')
    return [Boundary(tuple(value.shape[1:]), value.dtype) for value in trace.outputs]


def _refuse_shared(stages: Sequence[Sequence[nn.Module]], model: nn.Module) -> None:
    """Raise SettingsError where two stages share a tensor."""
    names = {id(value): name for name, value in itertools.chain(model.named_parameters(), model.named_buffers())}
    owner: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for unit in stage:
            for value in itertools.chain(unit.parameters(), unit.buffers()):
                if owner.setdefault(id(value), index) != index:
                    raise SettingsError(
                        f"model.stages: the stages {owner[id(value)]} and {index} share {names[id(value)]}; begin no "
                        "stage between the modules that use it"
                    )


class StagePipeline(PipelineStages):
    """The stages of this rank, and their exchange with those of the other ranks of the pipeline.

    Called by every rank of a pipeline, with the same number of micro-batches of the same size.
    """

    def __init__(self, stages: Stages, group: dist.ProcessGroup, schedule: str, device: torch.device) -> None:
        """Take the ranks of this pipeline, and `learner.pipeline_schedule`; stage `i` is on rank `i % N`."""
        self.ranks, self.rank = group.size(), group.rank()
        self.output_shape, self.output_dtype = stages.outputs[-1]
        self.group = group
        self._schedule = schedule
        self._device = device
        self._own = [
            _StageModule(index, units, stages.outputs[index - 1] if index else None, stages.outputs[index])
            for index, units in enumerate(stages.units)
            if index % self.ranks == self.rank
        ]
        self.modules_by_rank = [
            [unit for units in stages.units[rank :: self.ranks] for unit in units] for rank in range(self.ranks)
        ]
        self._num_stages = len(stages.units)
        self._built: tuple[tuple[int, int], Any] | None = None
        self._loss: Callable[[Tensor, Tensor], Tensor] = _no_loss

    def num_micro_batches(self, n: int) -> int:
        """Return how many micro-batches the schedule runs where a step has `n`: the others are of weight 0."""
        if self._schedule == "gpipe":
            return n
        if self._schedule == "1f1b":
            return max(n, self._num_stages)
        return -(-n // self.ranks) * self.ranks

    @override
    def run(self, features: Sequence[Tensors], loss: Callable[[int, Tensor], Tensor], callbacks: PassCallbacks) -> None:
        rows = max(_rows(each) for each in features)
        m = self.num_micro_batches(len(features))
        real = [_rows(each) for each in features]
        for stage in self._own:
            stage.begin([_padded(each, rows) for each in features], rows, callbacks)

        def padded_loss(output: Tensor, index: Tensor) -> Tensor:
            i = int(index)
            if i >= len(features):
                return output.sum() * 0
            return loss(i, output[: real[i]])

        self._loss = padded_loss
        indices = torch.arange(m)
        schedule = self._built_for(m, rows)
        schedule.step(*([indices] if self.rank == 0 else []), target=indices, return_outputs=False)
        self._loss = _no_loss

    @override
    def share(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def _built_for(self, m: int, rows: int) -> Any:
        """Return a schedule of torch, whose number and size of micro-batches are fixed."""
        if self._built is None or self._built[0] != (m, rows):
            self._built = None  # its buffers are freed before others are allocated
            stages: list[Any] = [
                _stage_of(module, self._num_stages, rows, self.group, self._device) for module in self._own
            ]

            def loss(output: Tensor, index: Tensor) -> Tensor:
                return self._loss(output, index)

            if self._schedule == "interleaved":
                schedule: Any = ScheduleInterleaved1F1B(stages, m, loss, scale_grads=False)
            else:
                kind = ScheduleGPipe if self._schedule == "gpipe" else Schedule1F1B
                schedule = kind(stages[0], m, loss, scale_grads=False)
            self._built = (m, rows), schedule
        return self._built[1]


class _StageModule(nn.Module):
    """The units of a stage, as torch runs them."""

    def __init__(self, index: int, units: Sequence[nn.Module], given: Boundary | None, output: Boundary) -> None:
        super().__init__()
        self.index = index
        self.units = nn.ModuleList(units)
        self.given, self.output = given, output
        self.micro_batch = 0
        """Index of the micro-batch that runs."""
        self._features: Sequence[Tensors] = ()
        self._rows = 0
        self._callbacks: PassCallbacks | None = None

    def begin(self, features: Sequence[Tensors], rows: int, callbacks: PassCallbacks) -> None:
        """Take the features of a step's micro-batches of `rows` events."""
        self._features, self._rows, self._callbacks = features, rows, callbacks

    def forward(self, x: Tensor) -> Tensor:
        """Run the units on the output of the stage before, or on features; after an error, return zeros."""
        callbacks = self._callbacks
        assert callbacks is not None
        if not callbacks.raised():
            try:
                if self.micro_batch < len(self._features):
                    callbacks.before_pass()
                    return self._run(x, callbacks)
                # Not restored in place: backward passes of other micro-batches still need their values.
                with OnCopiesOfBuffers(self.units):
                    return self._run(x, callbacks)
            except Exception as exc:  # the user's own code may raise anything
                if not callbacks.recorded(exc, self._rows):
                    raise
        zeros = torch.zeros(self._rows, *self.output.shape, dtype=self.output.dtype, device=x.device)
        return zeros + x.sum() * 0 if x.requires_grad else zeros.requires_grad_()

    def failed(self, error: Exception) -> bool:
        """Record an error of the backward pass; return whether the step goes on without its gradients."""
        assert self._callbacks is not None
        return self._callbacks.recorded(error, self._rows)

    def _run(self, x: Tensor, callbacks: PassCallbacks) -> Tensor:
        first, *others = self.units
        with callbacks.autocast():
            if self.given is None:
                index = min(self.micro_batch, len(self._features) - 1)
                x = forward(first, self._features[index])
            else:
                x = first(x)
            for unit in others:
                x = unit(x)
        return x


class _TorchStage(PipelineStage):
    """A stage of torch that sets which micro-batch its module runs, and completes a backward pass that raises."""

    submod: _StageModule

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    @override
    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        except Exception as exc:  # the user's own code may raise anything
            if not self.submod.failed(exc):
                raise
        return tuple(
            torch.zeros_like(each) if each.requires_grad else None for each in bwd_kwargs["input_values"]
        ), None


def _stage_of(
    module: _StageModule, num_stages: int, rows: int, group: dist.ProcessGroup, device: torch.device
) -> _TorchStage:
    given = torch.zeros(1, dtype=torch.int64) if module.given is None else _example(module.given, rows)
    output = _example(module.output, rows)
    return _TorchStage(module, module.index, num_stages, device, given, output, group=group)


def _example(boundary: Boundary, rows: int) -> Tensor:
    """Return a tensor of no memory from which torch takes shape and dtype."""
    example = torch.empty(rows, *boundary.shape, dtype=boundary.dtype, device="meta")
    return example.requires_grad_(boundary.dtype.is_floating_point)


def _rows(features: Tensors) -> int:
    return len(next(iter(features.values())))


def _padded(features: Tensors, rows: int) -> Tensors:
    """Return features with so many rows, of which the last are copies."""
    missing = rows - _rows(features)
    if not missing:
        return features
    return {name: torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for name, value in features.items()}


def _no_loss(_output: Any, _index: Any) -> Tensor:
    raise AssertionError("no step runs")
