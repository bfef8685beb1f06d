"""FSDP: each rank keeps a part of every weight, gradient and moment, and has a module whole only while it runs.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel"; torch's `fully_shard`. Only those
import it who ask for it: torch takes seconds to import what it is made of.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from anabranch.core.errors import SettingsError


class ShardedWeights:
    """Split along their first dimension, as evenly as it goes."""

    sharded = True

    def split(self, model: nn.Module) -> None:
        """Give all ranks the weights of rank 0, and let each keep its part.

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

    def rounds(self, n: int) -> int:
        """As often as the rank that has the most: all have to send what they have of the model."""
        most = torch.tensor(n)  # on the CPU, so that nothing waits for the device
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of this rank."""
        return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]

    def norm(self, norm: Tensor) -> Tensor:
        """Return the root of the sum of all ranks' squares."""
        squares = norm.square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, for which all ranks send their parts: in the order of their names, since a rank that has heard
        of a checkpoint may have them in another than the one that has read it."""
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
            for name, value in sorted(tensors.items())
        }

    def mine(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut this rank's parts out of tensors that every rank has whole."""
        return {name: _cut_out(value, like.get(name)) for name, value in tensors.items()}


def _cut_out(value: Tensor, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor) or like.shape != value.shape:
        return value
    device = torch.device(like.device_mesh.device_type)
    return distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are brought together one at a time: what the outermost sequences of the model consist of.

    A parameter that is in two places has to be in one unit: then there are none but the model itself.
    """
    every = [id(each) for _, each in model.named_parameters(remove_duplicate=False)]
    if len(set(every)) < len(every):
        return []
    return [
        child for each in _sequences(model) for child in each.children() if next(child.parameters(), None) is not None
    ]


def _sequences(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield module
    else:
        for child in module.children():
            yield from _sequences(child)
