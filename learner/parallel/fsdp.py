"""FSDP: each rank keeps a shard of every weight, gradient and moment, and gathers a module only while it runs.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel"; torch's `fully_shard`. Import this
module only where `learner.sharding` asks for it: that takes seconds.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.users_code import in_one_line
from anabranch.learner.errors import ModelError
from anabranch.learner.model.device import choose_precision
from anabranch.learner.parallel.mesh import Mesh
from anabranch.learner.train.converters import sequences
from anabranch.learner.train.parallelism import Weights

PATIENCE = timedelta(seconds=30)
"""How much later than one rank the others of its tensor group may raise: they compute the same, until they wait."""
_GRADIENT_BYTES = 4
_WHOLE_GRADIENTS = 8
"""Whole gradients are kept between micro-batches if they take at most this fraction of the memory: 1/8."""
_newer: Any = dist
"""Torch 2.13 has other names for two exchanges."""
_all_gather = _newer.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = _newer.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class ShardedWeights(Weights):
    """Weights of which each rank has parts: along the dimension `tensor`, along `data` (FSDP), or both.

    Along `data` they are split along their first dimension, as evenly as possible.
    """

    sharded = True

    def __init__(
        self, mesh: Mesh, precision: str = "fp32", parallel: Mapping[str, str] | None = None, *, fsdp: bool = True
    ) -> None:
        """Take the mesh of all ranks.

        Args:
            mesh: of all ranks.
            precision: `learner.precision`, in which FSDP gathers and runs a module.
            parallel: `model.parallel`.
            fsdp: whether weights are sharded along `data`.
        """
        self._mesh = mesh
        self._precision = precision
        self._parallel = parallel or {}
        self._fsdp = fsdp
        self._model: FSDPModule | None = None
        self._keeps_gradients = False
        self._exchanges = _Exchanges()
        self._raised = 0
        """How often all ranks of the tensor group have raised."""

    @override
    def split(self, model: nn.Module, output: Callable[[], Tensor]) -> None:
        """Broadcast the weights of rank 0, and let each rank keep its shard.

        Raises:
            SettingsError: the model has a parameter that cannot be split, or `model.parallel` does not fit it.
        """
        for value in model.state_dict().values():
            dist.broadcast(value, 0)
        device = next(model.parameters()).device
        if self._mesh.size("tensor") > 1:
            from anabranch.learner.parallel.split.tensor import split_modules  # here, since it takes seconds

            split_modules(model, self._parallel, self._mesh.device_mesh(device.type)["tensor"], output)
        if self._fsdp and (self._mesh.size("data") > 1 or not self._mesh.splits_model):
            self._shard(model, device)

    def _shard(self, model: nn.Module, device: torch.device) -> None:
        """Shard the weights along `data`."""
        names = [name for name in ("copy", "shard") if self._mesh.size(name) > 1] or ["shard"]
        mesh = self._mesh.device_mesh(device.type)[tuple(names)]
        weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        dtype = choose_precision(self._precision, device).dtype
        # Gathered in half precision, weights need no copy: autocast keeps one of each, whole, for the backward pass.
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        try:
            if dtype is not None:
                for module in _in_full_precision(model, device):
                    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
            for module in [*_units(model), model]:
                if not isinstance(module, FSDPModule):
                    fully_shard(module, mesh=mesh, mp_policy=policy)
        except (ValueError, NotImplementedError, RuntimeError) as exc:
            raise SettingsError(
                f'learner.sharding = "fsdp" cannot split the model; write "zero1": {" ".join(str(exc).split())}'
            ) from exc
        assert isinstance(model, FSDPModule)
        self._model = model
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_AllGather(self._exchanges))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_ReduceScatter(self._exchanges, module))  # type: ignore[arg-type]
        fits = torch.tensor(int(weights * _GRADIENT_BYTES * _WHOLE_GRADIENTS <= _memory(device)))
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        self._keeps_gradients = bool(fits)

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which gradients accumulate on this rank, whole, where memory allows."""
        return self._accumulating() if self._keeps_gradients else contextlib.nullcontext()

    @override
    def begin_pass(self) -> None:
        if self._exchanges.begin() and self._model is not None:
            self._model.set_requires_all_reduce(True)
            self._model.reset_iter_state()  # what the copies of a shard have added up

    @override
    def begin_again(self, error: Exception) -> None:
        self._wait_for_tensor_group(error)
        if self._model is None:
            return
        if not hasattr(self._model, "reset_iter_state"):  # torch 2.13 and later
            raise error
        self._model.reset_iter_state()
        self._exchanges.begin_again()

    def _wait_for_tensor_group(self, error: Exception) -> None:
        """Wait for the ranks of the tensor group to raise too, by the store: a collective would not end without them.

        Raises:
            ModelError: one of them has not raised in time.
        """
        if self._mesh.size("tensor") == 1:
            return
        self._raised += 1
        store, ranks = _get_default_store(), dist.get_process_group_ranks(self._mesh.group("tensor"))
        store.set(f"raised/{self._raised}/{self._mesh.rank}", "")
        try:
            store.wait([f"raised/{self._raised}/{rank}" for rank in ranks], PATIENCE)
        except RuntimeError:
            raise ModelError(
                f"model.parallel: the model raises on rank {self._mesh.rank}, and not on all ranks of its tensor "
                "group: between a column and a row module each has other numbers, and a module there must "
                f"not raise because of them: {in_one_line(error)}"
            ) from None

    @override
    def local_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    @override
    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        gradient = weight.grad
        if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
            return gradient.redistribute(placements=weight.placements).to_local()
        return gradient

    @override
    def counts(self, weight: nn.Parameter) -> bool:
        split = set[str]()
        if isinstance(weight, DTensor):
            names = weight.device_mesh.mesh_dim_names or ()
            split = {
                name for name, placement in zip(names, weight.placements, strict=True) if not placement.is_replicate()
            }
        return not any(self._mesh.coordinate(name) for name in {"copy", "shard", "tensor"} - split)

    @override
    def norm(self, norm: Tensor) -> Tensor:
        squares = norm.square()
        dist.all_reduce(squares, group=self._mesh.group("data", "tensor"))
        return squares.sqrt()

    @override
    def full_tensors(
        self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, each gathered from all ranks when it is due, in the order of the names.

        Sorted, since every rank has to gather in the same sequence, and ranks may have restored tensors in different
        ones.
        """
        for name, value in sorted(tensors.items()):
            weight = (like or {}).get(name, value)
            if isinstance(weight, DTensor) and value.shape == weight.to_local().shape and value is not weight:
                shape, stride = weight.shape, weight.stride()
                value = DTensor.from_local(
                    value, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
                )
            yield name, value.full_tensor() if isinstance(value, DTensor) else value.detach()

    @override
    def shard_like(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _shard_of(value, like.get(name)) for name, value in tensors.items()}

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        # Weights are resharded even so: a pass can only be repeated if all modules are sharded when it begins.
        assert self._model is not None
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)


class _Exchanges:
    """Counts the exchanges of a pass through sharded modules, so that a pass that raised can be run again.

    All ranks gather the same modules and reduce the same gradients in the same order. When the model raises on one
    rank, the others wait for its next exchange. It runs the pass again from the beginning, on other events: first
    without the exchanges that it has had already, then with the remaining ones. All ranks undo the step.
    """

    def __init__(self) -> None:
        self._done = self._left_out = 0
        self._repeated = False
        self.reduced: list[FSDPModule] = []
        """Modules whose gradients the pass has reduced; with copies of the weights, those have added theirs."""

    def begin(self) -> bool:
        """Begin a pass; return whether the one before was repeated."""
        repeated, self._repeated = self._repeated, False
        self._done = self._left_out = 0
        self.reduced.clear()
        return repeated

    def begin_again(self) -> None:
        """Begin the pass again."""
        self._left_out, self._repeated = self._done, True
        for module in self.reduced:
            module.set_requires_all_reduce(False, recurse=False)

    def is_due(self) -> bool:
        """Count the next exchange, and return whether other ranks wait for it."""
        if self._left_out:
            self._left_out -= 1
            return False
        self._done += 1
        return True


class _Allocates:
    """What torch asks of an exchange that it is given."""

    def __init__(self, exchanges: _Exchanges) -> None:
        self._exchanges = exchanges

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an exchange."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    """Gathers the weights of a module."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather, or repeat this rank's shard for each rank: weights of the right size and of ordinary values."""
        if self._exchanges.is_due():
            work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())  # the input is a part of the output
        return None


class _ReduceScatter(_Allocates):
    """Averages the gradients of a module."""

    def __init__(self, exchanges: _Exchanges, module: FSDPModule) -> None:
        super().__init__(exchanges)
        self._module = module

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Average, or return zeros."""
        if self._exchanges.is_due():
            self._exchanges.reduced.append(self._module)
            work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            return work
        output_tensor.zero_()
        return dist.Work()


def _shard_of(value: Tensor, like: Tensor | None) -> Tensor:
    if isinstance(value, DTensor) or not isinstance(like, DTensor) or like.shape != value.shape:
        return value
    device = torch.device(like.device_mesh.device_type)
    return distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)


def _memory(device: torch.device) -> int:
    """Return the bytes of memory that a rank may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()


def _in_full_precision(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Return the modules that do not run with weights in half precision and running statistics or inputs in full."""
    kinds: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase,)
    if device.type == "cpu":
        kinds += (nn.LayerNorm, nn.GroupNorm)  # autocast runs these in full precision on CUDA alone
    return [each for each in model.modules() if isinstance(each, kinds) and next(each.parameters(), None) is not None]


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: the members of the model's outermost sequences.

    Tied parameters have to be in one unit: a model that has any is gathered as one.
    """
    ids = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(ids)) < len(ids):
        return []
    children = [child for sequence in sequences(model, nn.Sequential | nn.ModuleList) for child in sequence.children()]
    return [child for child in children if next(child.parameters(), None) is not None]
