"""Device memory by purpose, counted from the tensors that are there."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def live_bytes(
    device: torch.device, model: nn.Module, optimizer: Optimizer, others: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes of a learner on its device, by purposes as in `ledger`, without those of 0 bytes.

    Weights include the model's buffers on the device, `base` has the frozen ones, and `others` are added as they are.
    On CUDA `other` is what is allocated besides, such as activations and what a strategy keeps, and `cached` what
    torch's allocator keeps for later.
    """
    inner = getattr(optimizer, "optim", optimizer)  # of one whose state is sharded over ranks
    weights, buffers = list(model.parameters()), [each for each in model.buffers() if each.device.type == device.type]
    state = [value for values in inner.state.values() for value in values.values() if isinstance(value, Tensor)]
    found = {
        "weights": _nbytes([*(each for each in weights if each.requires_grad), *buffers]),
        "base": _nbytes(each for each in weights if not each.requires_grad),
        "gradients": _nbytes(weight.grad for weight in model.parameters() if weight.grad is not None),
        "optimizer": _nbytes(value for value in state if value.device.type == device.type),
        **others,
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
        found |= {"other": max(0, allocated - sum(found.values())), "cached": reserved - allocated}
    return {purpose: size for purpose, size in found.items() if size}


def _nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; of those that are sharded over ranks, of this rank's shards."""
    shards: Iterable[Any] = (each.to_local() if hasattr(each, "device_mesh") else each for each in tensors)
    return sum(int(each.nbytes) for each in shards)
