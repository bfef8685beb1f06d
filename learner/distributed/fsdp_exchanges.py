"""The exchanges between ranks in a pass through sharded modules, so that a pass that raised can be repeated.

All ranks gather the same modules and reduce the same gradients in the same order. When the model raises on one rank,
the others wait for its next exchange. It runs the pass again from the beginning, on other events: first without the
exchanges that it has had already, then with the remaining ones. The result is wrong on all ranks, which undo the step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


class Exchanges:
    """Counts the exchanges of a pass."""

    def __init__(self) -> None:
        self._done = 0
        self._skipped = 0
        self._reduced: list[FSDPModule] = []
        """Modules whose gradients the pass has reduced; with copies of the weights, those have added theirs."""
        self._repeated = False

    def begin(self) -> None:
        """Begin a pass."""
        if self._repeated:
            for module in self._reduced:
                module.set_requires_all_reduce(True, recurse=False)
                for group in _groups_of(module._get_fsdp_state()):
                    group._partial_reduce_output = None
        self._done = self._skipped = 0
        self._repeated = False
        self._reduced.clear()

    def repeat(self) -> None:
        """Begin the pass again."""
        self._skipped, self._repeated = self._done, True
        for module in self._reduced:
            module.set_requires_all_reduce(False, recurse=False)

    def add_reduced(self, module: FSDPModule) -> None:
        """Record that the gradients of a module are reduced."""
        self._reduced.append(module)

    def is_due(self) -> bool:
        """Count the next exchange, and return whether other ranks wait for it."""
        if self._skipped:
            self._skipped -= 1
            return False
        self._done += 1
        return True


class AllGather(DefaultAllGather):
    """Gathers the weights of a module."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather, or repeat this rank's shard for each rank: weights of the right size and of ordinary values."""
        if self._exchanges.is_due():
            return super().__call__(output_tensor, input_tensor, group, async_op)
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())  # the input is a part of the output
        return None


class ReduceScatter(DefaultReduceScatter):
    """Averages the gradients of a module."""

    def __init__(self, exchanges: Exchanges, module: FSDPModule) -> None:
        self._exchanges = exchanges
        self._module = module

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        """Average, or return zeros."""
        if self._exchanges.is_due():
            self._exchanges.add_reduced(self._module)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        output_tensor.zero_()
        return dist.Work()


def reset(model: FSDPModule) -> None:
    """Make the modules of a model as they are between two passes, after a pass that raised."""
    if hasattr(model, "reset_iter_state"):  # torch 2.13 and later
        model.reset_iter_state()
        return
    root: Any = model._get_fsdp_state()
    shared, groups = root._comm_ctx, list[Any]()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        groups += _groups_of(state)
    for group in groups:
        pending = group._all_gather_result
        if pending is not None and pending.all_gather_work is not None:
            pending.all_gather_work.wait()
    if root._device.type == "cuda":
        torch.cuda.synchronize(root._device)
    for group in groups:
        for name in (
            *("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"),
            "_partial_reduce_output",
        ):
            setattr(group, name, None)
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    shared.all_gather_state = None
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
    else:
        shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a module's state."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [*filter(None, [state._fsdp_param_group] if several is None else several)]
