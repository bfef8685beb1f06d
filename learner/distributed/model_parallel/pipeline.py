"""Runs the stages of a pipeline, each on its rank, by the schedules of `torch.distributed.pipelining`.

Import this module only where `learner.mesh.pipeline` asks for it: that takes seconds.

Legend: M micro-batches, R rows of one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from typing_extensions import override

from learner.distributed.model_parallel.stages import Boundary, Stages
from learner.model.factory import forward
from learner.strategies.examples import Tensors
from learner.training.activation_checkpointing import OnCopiesOfBuffers
from learner.training.parallelism import PassCallbacks


class StagePipeline:
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

    def run(self, features: Sequence[Tensors], loss: Callable[[int, Tensor], Tensor], callbacks: PassCallbacks) -> None:
        """Add the gradient of a step to the weights of this rank.

        Args:
            features: of each micro-batch.
            loss: takes the index of a micro-batch and the model's output for it, and returns the loss to differentiate;
                called where the last stage is.
            callbacks: called in the passes.
        """
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

    def share(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks of the pipeline, in place."""
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
