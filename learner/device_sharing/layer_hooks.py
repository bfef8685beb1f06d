"""Hooks between the layers of a model, where training may yield within a micro-batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def call_between_layers(model: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` before every layer of a training pass, forward and backward. Results are unchanged.

    A layer is a module without submodules. It is not called in copies of the model, nor in passes without gradients. On
    a device, autograd runs backward in a separate thread, which then calls it.
    """
    layers = {module for module in model.modules() if next(module.children(), None) is None}

    def before_forward(layer: nn.Module, _inputs: Any) -> None:
        if layer in layers and torch.is_grad_enabled():
            callback()

    def after_forward(layer: nn.Module, _inputs: Any, output: Any) -> None:
        # Tensor hooks, since backward hooks of modules reject layers that work in place.
        if layer in layers and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def before_backward(_gradient: Tensor) -> None:
        callback()

    for layer in layers:
        layer.register_forward_pre_hook(before_forward)
        layer.register_forward_hook(after_forward)
