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
from typing_extensions import override

from anabranch.learner.model.device import Precision
from anabranch.learner.model.factory import forward, sample
from anabranch.learner.model.features.learned import is_of_features
from anabranch.learner.model.trained_set import load_trained, trained_state
from anabranch.learner.parallel.gradient_exchange import GradientExchange
from anabranch.learner.parallel.mesh import Mesh
from anabranch.learner.parallel.split.divided_weights import DividedWeights
from anabranch.learner.parallel.split.experts import ExpertWeights, mixtures
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.train.parallelism import Ranks
from anabranch.learner.train.setup import TrainingSetup

if TYPE_CHECKING:
    from anabranch.learner.parallel.fsdp import ShardedWeights

_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""The argument's name in this release of torch."""


_SEARCH_ROWS = 2


class DataParallelGroup(Ranks):
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
        super().__init__()
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
        self.steps_unaveraged = 0
        """Steps that ranks have taken since their weights were last averaged."""
        self._sharding = settings.sharding
        self._sharded: ShardedWeights | None = None
        if self._sharding == "fsdp" or self.mesh.size("tensor") > 1:
            from anabranch.learner.parallel import fsdp  # here, since it takes seconds

            self.weights = self._sharded = fsdp.ShardedWeights(
                self.mesh, settings.precision, parallel or {}, fsdp=self._sharding == "fsdp"
            )
        self._experts: ExpertWeights | None = None
        self._schedule, self._parallel = settings.pipeline_schedule, parallel or {}
        self._consolidate: Callable[[], None] | None = None
        self.exchange: GradientExchange = GradientExchange(settings, search=search)

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
            from anabranch.learner.parallel.split.pipeline import StagePipeline, divide

            group, divided = self.mesh.group("pipeline"), divide(model, stages, features, precision)
            device = next(iter(features.values())).device
            self.pipeline = StagePipeline(divided, group, self._schedule, device)
            self.weights = DividedWeights(self.weights, self.pipeline.modules_by_rank, group)

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
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
        self.exchange.register(self._trained)
        return self._trained

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        if self._sharded is not None:
            return self._sharded.no_sync()
        return contextlib.nullcontext() if self._trained is None else self._trained.no_sync()

    @override
    def average(self, tensors: Sequence[Tensor]) -> None:
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
                self.exchange.count_reduced(flat.nbytes, self.mesh.size(dimension))
            flat /= self.size
            parts = torch.split(flat, [tensor.numel() for tensor in same_kind])
            for tensor, part in zip(same_kind, parts, strict=True):
                tensor.detach().copy_(part.view_as(tensor))

    @override
    def average_gradients(self, leaves: Sequence[nn.Parameter]) -> None:
        if not self.splits_model or self._sharding == "fsdp" or self.size == 1:
            return
        trained = _with_gradients(leaves, self.mesh.group("rows") if self._search else None)
        alone = self._experts.own if self._experts is not None else ()
        self.average([leaf.grad for leaf in trained if leaf.grad is not None and id(leaf) not in alone])
        # The rows of all ranks that share experts have come to them.
        self._average([leaf.grad for leaf in trained if leaf.grad is not None and id(leaf) in alone], "data")

    @override
    def average_all(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= self.world

    @override
    def any(self, tensor: Tensor) -> Tensor:
        return _any(tensor, None)

    @override
    def most(self, number: int) -> int:
        largest = torch.tensor(number)  # on the CPU, so that nothing waits for the device
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def after_step(self) -> None:
        """Count a step, and average the weights every `learner.sync_every` steps."""
        if self._sync_every > 1:
            self.steps_unaveraged += 1
            if self.steps_unaveraged == self._sync_every:
                self.average_weights()

    def average_weights(self) -> None:
        """Average the weights and the floating-point buffers, if they have diverged."""
        if self.steps_unaveraged:
            assert self._model is not None
            self.average([value for value in trained_state(self._model).values() if value.is_floating_point()])
            self.steps_unaveraged = 0

    @override
    def shard(self, optimizer: Optimizer) -> Optimizer:
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


class FurtherModels(Ranks):
    """The ranks of a group for models besides its own, of which each rank has all weights.

    Their gradients are averaged after the last backward pass, as they are.
    """

    def __init__(self, group: DataParallelGroup) -> None:
        super().__init__()
        self.size, self.world = group.size, group.world
        self._group = group

    @override
    def average(self, tensors: Sequence[Tensor]) -> None:
        self._group.average(tensors)

    @override
    def average_gradients(self, leaves: Sequence[nn.Parameter]) -> None:
        if self.size > 1:
            trained = _with_gradients(leaves, self._group.mesh.group("rows"))
            self.average([leaf.grad for leaf in trained if leaf.grad is not None])

    @override
    def average_all(self, tensor: Tensor) -> None:
        self._group.average_all(tensor)

    @override
    def any(self, tensor: Tensor) -> Tensor:
        return self._group.any(tensor)

    @override
    def most(self, number: int) -> int:
        return self._group.most(number)


def _with_gradients(leaves: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> list[nn.Parameter]:
    """Return the weights that have a gradient on any rank of a group, with zeros where they have none on this one.

    None: all have one on some rank.
    """
    trained = [leaf for leaf in leaves if leaf.numel()]
    if group is not None and trained:
        has_some = torch.tensor([leaf.grad is not None for leaf in trained], device=trained[0].device)
        of_any = _any(has_some, group).tolist()
        trained = [leaf for leaf, any_has in zip(trained, of_any, strict=True) if any_has]
    for leaf in trained:
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
    return trained


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


def group_of(setup: TrainingSetup) -> DataParallelGroup:
    """Return the group of all ranks, which this process has joined, with the model's modules divided over them."""
    features = sample(setup.schema, _SEARCH_ROWS, setup.device)
    search = leaves_some_out(setup.model, features)
    replicas = DataParallelGroup(setup.settings, search=search, parallel=setup.parallel)
    replicas.divide(setup.model, setup.stages, features, setup.precision)
    return replicas
