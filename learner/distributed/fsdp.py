"""FSDP: each rank keeps a shard of every weight, gradient and moment, and gathers a module only while it runs.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel"; torch's `fully_shard`. Import this
module only where `learner.sharding` asks for it: that takes seconds.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from anabranch.core.errors import SettingsError
from learner.training.activation_checkpointing import sequences


class ShardedWeights:
    """Weights split along their first dimension, as evenly as possible."""

    sharded = True

    def split(self, model: nn.Module) -> None:
        """Broadcast the weights of rank 0, and let each rank keep its shard.

        Raises:
            SettingsError: the model has a parameter that cannot be split.
        """
        for value in model.state_dict().values():
            dist.broadcast(value, 0)
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        try:
            for module in [*_units(model), model]:
                fully_shard(module, mesh=mesh)
        except (ValueError, NotImplementedError, RuntimeError) as exc:
            raise SettingsError(
                f'learner.sharding = "fsdp" cannot split the model; write "zero1": {" ".join(str(exc).split())}'
            ) from exc

    def num_forwards(self, n: int) -> int:
        """Return the largest `n` of all ranks: each forward pass gathers shards from all of them."""
        largest = torch.tensor(n)  # on the CPU, so that nothing waits for the device
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def local_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the shards of this rank."""
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def norm(self, norm: Tensor) -> Tensor:
        """Return the root of the sum of the squared norms of all ranks."""
        squares = norm.square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, each gathered from all ranks when it is due, in the order of the names.

        Sorted, since every rank has to gather in the same sequence, and ranks may have restored tensors in different
        ones.
        """
        for name, value in sorted(tensors.items()):
            yield name, value.full_tensor() if isinstance(value, DTensor) else value.detach()

    def full_copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full copies, gathered from all ranks."""
        return {
            name: full if isinstance(tensors[name], DTensor) else full.clone()
            for name, full in self.full_tensors(tensors)
        }

    def shard_like(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of tensors that every rank has in full."""
        return {name: _shard_of(value, like.get(name)) for name, value in tensors.items()}


def _shard_of(value: Tensor, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor) or like.shape != value.shape:
        return value
    device = torch.device(like.device_mesh.device_type)
    return distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: the members of the model's outermost sequences.

    Tied parameters have to be in one unit: a model that has any is gathered as one.
    """
    ids = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(ids)) < len(ids):
        return []
    children = [child for sequence in sequences(model, nn.Sequential | nn.ModuleList) for child in sequence.children()]
    return [child for child in children if next(child.parameters(), None) is not None]
