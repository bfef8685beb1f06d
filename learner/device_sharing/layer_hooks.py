"""The borders of a model's layers: where training may give way inside a micro-batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def look_between_layers(model: nn.Module, look: Callable[[], None]) -> None:
    """Have `look` called ahead of each layer of a training pass, forward and backward; no number is another for it.

    A layer is a module that has none within. Copies of the model look at nothing, nor does a pass without gradients. On
    a device autograd goes backward in a thread of its own, which is the one that looks then.
    """
    layers = {module for module in model.modules() if next(module.children(), None) is None}

    def forth(layer: nn.Module, _inputs: Any) -> None:
        if layer in layers and torch.is_grad_enabled():
            look()

    def heard(layer: nn.Module, _inputs: Any, output: Any) -> None:
        # Hooks of tensors, since those of modules for the backward pass refuse layers that work in place.
        if layer in layers and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(back)  # type: ignore[no-untyped-call]

    def back(_gradient: Tensor) -> None:
        look()

    for layer in layers:
        layer.register_forward_pre_hook(forth)
        layer.register_forward_hook(heard)
