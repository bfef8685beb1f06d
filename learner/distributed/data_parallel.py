"""Data-parallel training on N ranks over torch.distributed: gloo between CPUs, nccl between CUDA devices."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from learner.config import LearnerSettings
from learner.model.factory import forward
from learner.training.parallelism import Weights, WholeWeights

if TYPE_CHECKING:
    from learner.distributed.fsdp import ShardedWeights

_POWERSGD_RANK = 2
_POWERSGD_START = 10
"""Steps that average full gradients before PowerSGD begins to compress them."""
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""The argument's name in this release of torch."""


class DataParallelGroup:
    """The ranks of a process group that this process has joined. All ranks make the same calls in the same order."""

    def __init__(self, settings: LearnerSettings, *, search: bool = False) -> None:
        """Take `search`: whether some parameters get no gradient, so that each step has to search for them."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._comm_hook = settings.comm_hook
        self._sync_every = settings.sync_every
        self._search = search
        self._model: nn.Module | None = None
        self._trained: DistributedDataParallel | None = None
        self._steps_since_average = 0
        self._sharding = settings.sharding
        self.weights: Weights = WholeWeights()
        self._sharded: ShardedWeights | None = None
        if self._sharding == "fsdp":
            from learner.distributed import fsdp  # here, since it takes seconds

            self.weights = self._sharded = fsdp.ShardedWeights(settings.precision)
        self._consolidate: Callable[[], None] | None = None
        self._powersgd: Any = None

    @property
    def weights_diverged(self) -> bool:
        """Whether ranks have taken steps since their weights were last averaged."""
        return self._steps_since_average > 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast the weights of rank 0 unless they are sharded, and return the module to run in training."""
        self._model = model
        if self.weights.sharded:
            return model
        if self._sync_every > 1:
            for value in model.state_dict().values():
                dist.broadcast(value, 0)
            return model
        # Running statistics stay per rank: a second forward pass in a step must not change them.
        buffers: dict[str, Any] = {_SYNC_BUFFERS: False}
        # No static_graph: it saves no measurable time, and fails when the first step has several micro-batches.
        self._trained = DistributedDataParallel(
            model,
            **buffers,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._search,
        )
        self._compress(self._trained)
        return self._trained

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which gradients accumulate on this rank alone."""
        if self._sharded is not None:
            return self._sharded.no_sync()
        return contextlib.nullcontext() if self._trained is None else self._trained.no_sync()

    def expect_forwards(self, n: int) -> None:
        """Set how many forward passes each rank runs in the next step, where weights are sharded; 0: not known."""
        if self._sharded is not None:
            self._sharded.expected = n

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, in place."""
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            same_kind = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == (dtype, device)]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same_kind])
            dist.all_reduce(flat)
            flat /= self.size
            parts = torch.split(flat, [tensor.numel() for tensor in same_kind])
            for tensor, part in zip(same_kind, parts, strict=True):
                tensor.detach().copy_(part.view_as(tensor))

    def any(self, tensor: Tensor) -> Tensor:
        """Return where a bool tensor is true on any rank."""
        marks = tensor.to(torch.uint8)
        dist.all_reduce(marks, dist.ReduceOp.MAX)
        return marks.bool()

    def reset_comm_state(self) -> None:
        """Clear PowerSGD's error feedback and its factors."""
        if self._powersgd is not None:
            for memory in (self._powersgd.error_dict, self._powersgd.p_memory_dict, self._powersgd.q_memory_dict):
                memory.clear()

    def after_step(self) -> None:
        """Count a step, and average the weights every `learner.sync_every` steps."""
        if self._sync_every > 1:
            self._steps_since_average += 1
            if self._steps_since_average == self._sync_every:
                self.average_weights()

    def average_weights(self) -> None:
        """Average the weights and the floating-point buffers, if they have diverged."""
        if self._steps_since_average:
            assert self._model is not None
            self.average([value for value in self._model.state_dict().values() if value.is_floating_point()])
            self._steps_since_average = 0

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer of the same class that keeps the state of this rank's part, or `optimizer` itself."""
        if self._sharding != "zero1":
            return optimizer
        # Imported here since it takes seconds.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = type(optimizer)
        known = inspect.signature(kind).parameters
        arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        sharded = ZeroRedundancyOptimizer(weights, kind, **arguments)
        self._consolidate = lambda: sharded.consolidate_state_dict(to=0)
        return sharded

    def gather(self) -> None:
        """Average diverged weights, and collect the sharded optimizer state on rank 0, for a checkpoint."""
        self.average_weights()
        if self._consolidate is not None:
            self._consolidate()

    def _compress(self, trained: DistributedDataParallel) -> None:
        if self._comm_hook == "none":
            return
        # Imported here since it takes seconds.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self._comm_hook == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(None, _POWERSGD_RANK, _POWERSGD_START)
            trained.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        else:
            hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[self._comm_hook]
            trained.register_comm_hook(None, hook)


def leaves_some_out(model: nn.Module, features: Mapping[str, Tensor]) -> bool:
    """Return whether a backward pass from the model's output leaves parameters without a gradient."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    was_training = model.training
    output = forward(model.train(), features)
    output.sum().backward()  # type: ignore[no-untyped-call]
    has_none = any(parameter.grad is None for parameter in model.parameters() if parameter.requires_grad)
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)
    model.train(was_training)
    return has_none
