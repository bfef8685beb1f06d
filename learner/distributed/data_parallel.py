"""Data-parallel training on N ranks over torch.distributed: gloo between CPUs, nccl between CUDA devices."""

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from learner.config import LearnerSettings
from learner.distributed.gradient_exchange import GradientExchange
from learner.distributed.mesh import Mesh
from learner.distributed.model_parallel.divided_weights import DividedWeights
from learner.distributed.model_parallel.experts import ExpertWeights, mixtures
from learner.distributed.model_parallel.stages import divide
from learner.errors import ModelError
from learner.model.device import Precision
from learner.model.factory import forward, in_one_line
from learner.model.features.learned import is_of_features
from learner.model.trained_set import load_trained, trained_state
from learner.training.parallelism import PipelineRanks, Weights, WholeWeights

if TYPE_CHECKING:
    from learner.distributed.fsdp import ShardedWeights

_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""The argument's name in this release of torch."""
PATIENCE = timedelta(seconds=30)
"""How much later than one rank the others of its tensor group may raise: they compute the same, until they wait."""
_POLL_SECONDS = 0.01


class DataParallelGroup:
    """The ranks of a process group that this process has joined. All ranks make the same calls in the same order."""

    def __init__(
        self, settings: LearnerSettings, *, search: bool = False, parallel: Mapping[str, str] | None = None
    ) -> None:
        """Join the groups of the mesh.

        Args:
            settings: `learner`.
            search: whether some parameters get no gradient, so that each step has to search for them.
            parallel: `model.parallel`.
        """
        self.mesh = Mesh(settings, dist.get_rank(), dist.get_world_size())
        self.size, self.world = self.mesh.rows, self.mesh.ranks
        self.splits_model = self.mesh.splits_model
        # Now, since all ranks have to make a group together, and only some send results over that of the rows.
        for dimensions in (("rows",), ("data", "tensor")):
            self.mesh.group(*dimensions)
        self._sync_every = settings.sync_every
        self._search = search
        self._model: nn.Module | None = None
        self._trained: DistributedDataParallel | None = None
        self._steps_since_average = 0
        self._sharding = settings.sharding
        self.weights: Weights = WholeWeights()
        self._sharded: ShardedWeights | None = None
        if self._sharding == "fsdp" or self.mesh.size("tensor") > 1:
            from learner.distributed import fsdp  # here, since it takes seconds

            self.weights = self._sharded = fsdp.ShardedWeights(
                self.mesh, settings.precision, parallel or {}, fsdp=self._sharding == "fsdp"
            )
        self.pipeline: PipelineRanks | None = None
        self._experts: ExpertWeights | None = None
        self._schedule, self._parallel = settings.pipeline_schedule, parallel or {}
        self._consolidate: Callable[[], None] | None = None
        self._exchange = GradientExchange(settings, search=search)
        self._raised = 0
        """How often all ranks of the tensor group have raised."""

    def divide(
        self, model: nn.Module, stages: Sequence[str], features: Mapping[str, Tensor], precision: Precision
    ) -> None:
        """Divide the modules of a model, stages and experts, over the ranks, before its weights are split.

        Args:
            model: on its device.
            stages: `model.stages`.
            features: of a few events.
            precision: of training.

        Raises:
            SettingsError: the model has no such stages or experts.
        """
        if (ranks := self.mesh.size("expert")) > 1:
            layers = mixtures(model, self._parallel, ranks, features)
            self.weights = self._experts = ExpertWeights(self.weights, layers, self.mesh.group("expert"))
        if self.mesh.size("pipeline") > 1:
            # Imported here since it takes seconds.
            from learner.distributed.model_parallel.pipeline import StagePipeline

            group, divided = self.mesh.group("pipeline"), divide(model, stages, features, precision)
            device = next(iter(features.values())).device
            self.pipeline = StagePipeline(divided, group, self._schedule, device)
            self.weights = DividedWeights(self.weights, self.pipeline.modules_by_rank, group)

    @property
    def weights_diverged(self) -> bool:
        """Whether ranks have taken steps since their weights were last averaged."""
        return self._steps_since_average > 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast the weights of rank 0 unless they are sharded, and return the module to run in training."""
        self._model = model
        if self.weights.sharded:
            return model
        if self._sync_every > 1 or self.splits_model:
            for value in model.state_dict().values():
                dist.broadcast(value, 0)
            return model
        # Running statistics stay per rank: a second forward pass in a step must not change them.
        buffers: dict[str, Any] = {_SYNC_BUFFERS: False}
        # All ranks have the same ones, partly on the host.
        learned = [name for name in model.state_dict() if is_of_features(name)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, learned
        )
        # No static_graph: it saves no measurable time, and fails when the first step has several micro-batches.
        self._trained = DistributedDataParallel(
            model,
            **buffers,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._search,
        )
        self._exchange.register(self._trained)
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
        if self._experts is not None:
            self._experts.expected = n

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the row groups, in place."""
        self._average(tensors, "rows")

    def _average(self, tensors: Sequence[Tensor], dimension: str) -> None:
        """Divide the sum of tensors over a dimension of the mesh by the number of row groups, in place."""
        if self.size == 1:
            return
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            same_kind = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == (dtype, device)]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same_kind])
            if self.mesh.size(dimension) > 1:
                dist.all_reduce(flat, group=self.mesh.group(dimension))
                self._exchange.count_reduced(flat.nbytes, self.mesh.size(dimension))
            flat /= self.size
            parts = torch.split(flat, [tensor.numel() for tensor in same_kind])
            for tensor, part in zip(same_kind, parts, strict=True):
                tensor.detach().copy_(part.view_as(tensor))

    def average_gradients(self, leaves: Sequence[nn.Parameter]) -> None:
        """Average the gradients over the row groups, where ranks split the model and its weights are not sharded."""
        if not self.splits_model or self._sharding == "fsdp" or self.size == 1:
            return
        trained = [leaf for leaf in leaves if leaf.numel()]
        if self._search:
            has_some = torch.tensor([leaf.grad is not None for leaf in trained], device=trained[0].device)
            of_any = _any(has_some, self.mesh.group("rows")).tolist()
            trained = [leaf for leaf, any_has in zip(trained, of_any, strict=True) if any_has]
        for leaf in trained:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        alone = self._experts.own if self._experts is not None else ()
        self.average([leaf.grad for leaf in trained if leaf.grad is not None and id(leaf) not in alone])
        # The rows of all ranks that share experts have come to them.
        self._average([leaf.grad for leaf in trained if leaf.grad is not None and id(leaf) in alone], "data")

    def average_all(self, tensor: Tensor) -> None:
        """Average a tensor over all ranks, in place."""
        dist.all_reduce(tensor)
        tensor /= self.world

    def any(self, tensor: Tensor) -> Tensor:
        """Return where a bool tensor is true on any of all ranks."""
        return _any(tensor, None)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank has sent to average gradients and other tensors; None: it does not count them."""
        return None if self.weights.sharded else self._exchange.sent_bytes

    def count_gradients(self) -> None:
        """Count the gradients of one backward pass, unless hooks count them."""
        if self._trained is not None:
            self._exchange.count_gradients()

    def reset_comm_state(self) -> None:
        """Clear the error feedback of `learner.comm_hook`, and the factors of PowerSGD."""
        self._exchange.reset()

    def raise_together(self, error: Exception) -> None:
        """Wait for the ranks of the tensor group to raise too, by the store: a collective would not end without them.

        Raises:
            ModelError: one of them has not raised in time.
        """
        if self.mesh.size("tensor") == 1:
            return
        self._raised += 1
        store, ranks = _get_default_store(), dist.get_process_group_ranks(self.mesh.group("tensor"))
        store.set(f"raised/{self._raised}/{self.mesh.rank}", "")
        keys, end = [f"raised/{self._raised}/{rank}" for rank in ranks], time.monotonic() + PATIENCE.total_seconds()
        while not store.check(keys):
            if time.monotonic() > end:
                raise ModelError(
                    f"model.parallel: the model raises on rank {self.mesh.rank}, and not on all ranks of its tensor "
                    "group: between a column and a row module each has other numbers, and a module there must "
                    f"not raise because of them: {in_one_line(error)}"
                )
            time.sleep(_POLL_SECONDS)
        store.delete_key(f"raised/{self._raised - 1}/{self.mesh.rank}")

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
            self.average([value for value in trained_state(self._model).values() if value.is_floating_point()])
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


def _any(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return where a bool tensor is true on any rank of a group; None: of all."""
    marks = tensor.to(torch.uint8)
    dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
    return marks.bool()


def leaves_some_out(model: nn.Module, features: Mapping[str, Tensor]) -> bool:
    """Return whether a backward pass from the model's output leaves parameters without a gradient."""
    before = {name: value.clone() for name, value in trained_state(model).items()}
    was_training = model.training
    output = forward(model.train(), features)
    output.sum().backward()  # type: ignore[no-untyped-call]
    has_none = any(parameter.grad is None for parameter in model.parameters() if parameter.requires_grad)
    model.zero_grad(set_to_none=True)
    load_trained(model, before)
    model.train(was_training)
    return has_none
