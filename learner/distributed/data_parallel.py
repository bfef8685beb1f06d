"""N ranks, over torch.distributed: gloo between CPUs, nccl between CUDA devices."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from learner.config import LearnerSettings
from learner.model.factory import forward
from learner.training.parallelism import Weights, WholeWeights

_POWERSGD_RANK = 2
_POWERSGD_START = 10
"""Steps that average whole gradients before PowerSGD begins to compress them."""
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""What this torch calls the argument."""


class Replicas:
    """This process' part in a group that it has joined. All ranks call everything alike, in the same order."""

    def __init__(self, settings: LearnerSettings, *, search: bool = False) -> None:
        """Take `search`: whether some parameters get no gradient, so that each step has to look for those."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._comm_hook = settings.comm_hook
        self._sync_every = settings.sync_every
        self._search = search
        self._model: nn.Module | None = None
        self._trained: DistributedDataParallel | None = None
        self._steps_apart = 0
        self._sharding = settings.sharding
        self.weights: Weights = WholeWeights()
        if self._sharding == "fsdp":
            # Takes seconds to import, which only those pay who ask for it.
            from learner.distributed.fsdp import ShardedWeights

            self.weights = ShardedWeights()
        self._consolidate: Callable[[], None] | None = None
        self._powersgd: Any = None

    @property
    def apart_now(self) -> bool:
        """Whether the ranks have stepped since their weights were last the same."""
        return self._steps_apart > 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Give all ranks the weights of rank 0, if they are whole, and return the module to run in training."""
        self._model = model
        if self.weights.sharded:
            return model
        if self._sync_every > 1:
            for value in model.state_dict().values():
                dist.broadcast(value, 0)
            return model
        # Statistics of a layer stay those of its rank: a second forward pass in a step must not move them.
        apart: dict[str, Any] = {_SYNC_BUFFERS: False}
        # No static_graph: it saves no measurable time, and fails where the first step has more than one micro-batch.
        self._trained = DistributedDataParallel(
            model,
            **apart,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._search,
        )
        self._compress(self._trained)
        return self._trained

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Within, gradients add up on this rank alone."""
        return contextlib.nullcontext() if self._trained is None else self._trained.no_sync()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, in place."""
        for dtype, device in dict.fromkeys((each.dtype, each.device) for each in tensors):
            alike = [each for each in tensors if (each.dtype, each.device) == (dtype, device)]
            flat = torch.cat([each.detach().reshape(-1) for each in alike])
            dist.all_reduce(flat)
            flat /= self.size
            for each, part in zip(alike, torch.split(flat, [each.numel() for each in alike]), strict=True):
                each.detach().copy_(part.view_as(each))

    def any(self, tensor: Tensor) -> Tensor:
        """Return where a bool tensor is true on any rank."""
        found = tensor.to(torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.bool()

    def start_afresh(self) -> None:
        """Forget what PowerSGD owes to later gradients, and what it guesses them by."""
        if self._powersgd is not None:
            for carried in (self._powersgd.error_dict, self._powersgd.p_memory_dict, self._powersgd.q_memory_dict):
                carried.clear()

    def stepped(self) -> None:
        """Note that a step is done: with `learner.sync_every` the weights are averaged when it is time."""
        if self._sync_every > 1:
            self._steps_apart += 1
            if self._steps_apart == self._sync_every:
                self.unite()

    def unite(self) -> None:
        """Average the weights, and the buffers that are floating point, if ranks have stepped apart."""
        if self._steps_apart:
            assert self._model is not None
            self.average([each for each in self._model.state_dict().values() if each.is_floating_point()])
            self._steps_apart = 0

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer of the same kind that has the state of a part of the weights, or the given."""
        if self._sharding != "zero1":
            return optimizer
        # Likewise.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = type(optimizer)
        known = inspect.signature(kind).parameters
        arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        sharded = ZeroRedundancyOptimizer(weights, kind, **arguments)
        self._consolidate = lambda: sharded.consolidate_state_dict(to=0)
        return sharded

    def gather(self) -> None:
        """Bring what ranks hold apart together on rank 0, for a checkpoint or a version."""
        self.unite()
        if self._consolidate is not None:
            self._consolidate()

    def _compress(self, trained: DistributedDataParallel) -> None:
        if self._comm_hook == "none":
            return
        # Likewise.
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
    found = any(each.grad is None for each in model.parameters() if each.requires_grad)
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)
    model.train(was_training)
    return found
