"""FSDP: each rank keeps a shard of every weight, gradient and moment, and gathers a module only while it runs.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel"; torch's `fully_shard`. Import this
module only where `learner.sharding` asks for it: that takes seconds.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from anabranch.core.errors import SettingsError
from learner.distributed.fsdp_exchanges import AllGather, Exchanges, ReduceScatter, reset
from learner.distributed.mesh import Mesh
from learner.model.device import choose_precision
from learner.training.activation_checkpointing import sequences

_GRADIENT_BYTES = 4
_WHOLE_GRADIENTS = 8
"""Whole gradients are kept between micro-batches if they take at most this fraction of the memory: 1/8."""


class ShardedWeights:
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
        self._exchanges = Exchanges()
        self.expected = 0
        """Forward passes of the next step, if rank 0 has sent it; 0: ranks have to agree on it."""

    def split(self, model: nn.Module, output: Callable[[], Tensor]) -> None:
        """Broadcast the weights of rank 0, and let each rank keep its shard.

        Raises:
            SettingsError: the model has a parameter that cannot be split, or `model.parallel` does not fit it.
        """
        for value in model.state_dict().values():
            dist.broadcast(value, 0)
        device = next(model.parameters()).device
        if self._mesh.size("tensor") > 1:
            from learner.distributed.model_parallel.tensor import split_modules  # here, since it takes seconds

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
                module.set_custom_all_gather(AllGather(self._exchanges))
                module.set_custom_reduce_scatter(ReduceScatter(self._exchanges, module))
        fits = weights * _GRADIENT_BYTES * _WHOLE_GRADIENTS <= _memory(device)
        self._keeps_gradients = self.largest(int(not fits)) == 0

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which gradients accumulate on this rank, whole, where memory allows."""
        return self._accumulating() if self._keeps_gradients else contextlib.nullcontext()

    def num_forwards(self, n: int) -> int:
        """Return the largest `n` of all ranks: each forward pass gathers shards from all of them."""
        expected, self.expected = self.expected, 0
        return expected or self.largest(n)

    def largest(self, n: int) -> int:
        """Return the largest `n` of all ranks."""
        largest = torch.tensor(n)  # on the CPU, so that nothing waits for the device
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def begin_pass(self) -> None:
        """Count the exchanges of the modules from now on."""
        self._exchanges.begin()

    def repeat_pass(self) -> None:
        """Reset the modules, and leave out the exchanges that other ranks have had with this one."""
        if self._model is not None:
            reset(self._model)
            self._exchanges.repeat()

    def local_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the shards of this rank."""
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        """Return this rank's shard of a weight's gradient, summed over the tensor group where its ranks have parts."""
        gradient = weight.grad
        if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
            return gradient.redistribute(placements=weight.placements).to_local()
        return gradient

    def counts(self, weight: nn.Parameter) -> bool:
        """Return whether this rank's index is 0 along each dimension in which ranks have the same shard."""
        split = set[str]()
        if isinstance(weight, DTensor):
            names = weight.device_mesh.mesh_dim_names or ()
            split = {
                name for name, placement in zip(names, weight.placements, strict=True) if not placement.is_replicate()
            }
        return not any(self._mesh.coordinate(name) for name in {"copy", "shard", "tensor"} - split)

    def norm(self, norm: Tensor) -> Tensor:
        """Return the root of the sum of the squared norms of all ranks with parts of the same weights, or copies."""
        squares = norm.square()
        dist.all_reduce(squares, group=self._mesh.group("data", "tensor"))
        return squares.sqrt()

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

    def shard_like(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of tensors that every rank has in full, or has sharded before."""
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
