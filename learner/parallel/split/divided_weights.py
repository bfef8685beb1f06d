"""Weights of which each rank has some modules, such as the stages of a pipeline, or experts.

The module tree stays whole on every rank. The tensors of other ranks' modules are empty ones, so that names, and the
indices of parameters in an optimizer, are those of the model that is not divided.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from anabranch.learner.parallel.channel import to_bytes
from anabranch.learner.train.parallelism import Weights

_HEADER = 16
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
"""All dtypes, in an order that is the same on all ranks."""


class DividedWeights(Weights):
    """Adds to the layout of weights within a module that each rank of a group has other modules."""

    sharded = True

    def __init__(self, inner: Weights, modules: Sequence[Sequence[nn.Module]], group: dist.ProcessGroup) -> None:
        """Take the layout within a module, the modules of each rank, and the ranks; all have the other modules."""
        self._inner = inner
        self._group = group
        self._rank = group.rank()
        self._modules = modules
        self._shapes: dict[str, torch.Size] = {}
        """Shapes of the tensors of other ranks, by name."""
        self._placeholders: set[int] = set()
        """Ids of the empty tensors."""
        self.own: set[int] = set()
        """Ids of the parameters that this rank alone has."""

    @override
    def split(self, model: nn.Module, output: Callable[[], Tensor]) -> None:
        for value in model.state_dict().values():
            dist.broadcast(value, 0)
        self._inner.split(model, output)
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        others = [unit for rank, units in enumerate(self._modules) if rank != self._rank for unit in units]
        empty_of: dict[int, Tensor] = {}
        for module in chain.from_iterable(unit.modules() for unit in others):
            for tensors_of in (module._parameters, module._buffers):
                values = cast("dict[str, Tensor | None]", tensors_of)
                for name, value in values.items():
                    if value is not None:
                        values[name] = empty_of.setdefault(id(value), _empty(value))
        self._shapes = {name: value.shape for name, value in tensors if id(value) in empty_of}
        self._placeholders = {id(value) for value in empty_of.values()}
        self.own = {id(each) for unit in self._modules[self._rank] for each in unit.parameters()}

    @override
    def begin_pass(self) -> None:
        self._inner.begin_pass()

    @override
    def begin_again(self, error: Exception) -> None:
        self._inner.begin_again(error)

    @override
    def local_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._inner.local_shards(tensors)

    @override
    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        return self._inner.gradient(weight)

    @override
    def counts(self, weight: nn.Parameter) -> bool:
        return self._inner.counts(weight) and (self._rank == 0 or id(weight) in self.own)

    @override
    def norm(self, norm: Tensor) -> Tensor:
        square = self._inner.norm(norm).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @override
    def full_tensors(
        self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        own = {name: value for name, value in sorted(tensors.items()) if value.numel() or name not in self._shapes}
        full = self._inner.full_tensors(own, like)
        ranks: dict[str, list[int]] = {}
        for rank, names in enumerate(self._names_of_all([*own])):
            for name in names:
                ranks.setdefault(name, []).append(rank)
        device = next((value.device for value in own.values()), torch.device("cpu"))
        for name, (rank, *others) in sorted(ranks.items()):
            value = next(full)[1] if name in own else None
            yield name, value if value is not None and others else self._sent(value, rank, device)

    @override
    def shard_like(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shard full tensors as within a module; those of other ranks become empty, and their moments are left out.

        Raises:
            RuntimeError: a tensor of another rank has another shape than there.
        """
        kept, empty = dict[str, Tensor](), dict[str, Tensor]()
        for name, value in tensors.items():
            there = like.get(name)
            if there is not None and id(there) in self._placeholders:
                continue  # the optimizer's state of another rank
            if there is None or there.numel() or name not in self._shapes:
                kept[name] = value
                continue
            if value.numel() and value.shape != self._shapes[name]:
                raise RuntimeError(f"size mismatch for {name}: {list(value.shape)}, not {list(self._shapes[name])}")
            empty[name] = there
        return self._inner.shard_like(kept, like) | empty

    def _names_of_all(self, names: list[str]) -> list[list[str]]:
        """Return the names that each rank gives, by rank."""
        message = to_bytes(json.dumps(names).encode())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._group.size())]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
        padded = message.new_zeros(int(max(sizes)))
        padded[: len(message)] = message
        messages = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(messages, padded, group=self._group)
        return [json.loads(each[: int(n)].numpy().tobytes()) for each, n in zip(messages, sizes, strict=True)]

    def _sent(self, value: Tensor | None, rank: int, device: torch.device) -> Tensor:
        """Return a tensor that one rank sends to the others."""
        source = dist.get_global_rank(self._group, rank)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        if value is not None:
            form = [_DTYPES.index(value.dtype), int(value.is_cpu), value.ndim, *value.shape]
            header[: len(form)] = torch.tensor(form)
        dist.broadcast(header, source, group=self._group)
        dtype, on_cpu, ndim, *shape = header.tolist()
        if rank != self._rank or value is None:
            value = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device="cpu" if on_cpu else device)
        else:
            value = value.detach().contiguous()
        if value.numel():
            dist.broadcast(value.view(-1).view(torch.uint8), source, group=self._group)
        return value


def _empty(value: Tensor) -> Tensor:
    """Return an empty tensor of the same dtype and device."""
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
