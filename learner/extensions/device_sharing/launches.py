"""Limits how far the host runs ahead of a CUDA device, whose queued work cannot be cancelled; hooks between layers."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MOST_AHEAD = 2
"""Micro-batches, or stretches of layers, that are queued on the device at a time."""
_STRETCH_MILLISECONDS = 1.0
"""The device's time for the layers between two marks: with `MOST_AHEAD`, what a request waits for at most."""
_MOST_LAYERS = 256
"""Layers between two marks."""


class LaunchLimiter:
    """Limits the work that is queued on a CUDA device; does nothing on a CPU.

    Used by the training thread, and within a backward pass by the one that runs it.
    """

    def __init__(self, device: torch.device, *, within: bool = False) -> None:
        """`within`: whether work is limited within micro-batches too, by `wait_between_layers`."""
        self._device = device
        self._cuda = device.type == "cuda"
        self._within = within
        self._marks: deque[tuple[torch.cuda.Event, int]] = deque()
        """Events that the device may not have reached, each with the layers since the one before; 0: not counted."""
        self._reached: torch.cuda.Event | None = None
        """The last event that the device has reached."""
        self._spare: list[torch.cuda.Event] = []
        self._layers = 0
        """Layers since the last event."""
        self._stretch = 1
        """Layers that take the device about `_STRETCH_MILLISECONDS`."""
        self._counting = False
        """Whether nothing but layers was queued since the last event."""

    def wait(self) -> None:
        """Wait until at most `MOST_AHEAD` micro-batches are queued, including the next one; call it before each."""
        if self._cuda:
            self._mark(0)
            self._limit()

    def wait_between_layers(self) -> None:
        """Wait while layers of more than about `MOST_AHEAD` milliseconds are queued; call it before each layer."""
        if self._cuda:
            self._layers += 1
            if not self._counting or self._layers >= self._stretch:
                self._mark(self._layers if self._counting else 0)
                self._counting = True
                self._limit()

    def drain(self) -> None:
        """Wait until nothing is queued."""
        if self._cuda:
            self._mark(0)
            while self._marks:
                self._reach()

    def _mark(self, layers: int) -> None:
        mark = self._spare.pop() if self._spare else self._event()
        mark.record(torch.cuda.current_stream(self._device))
        self._marks.append((mark, layers))
        self._layers, self._counting = 0, False

    def _event(self) -> torch.cuda.Event:
        # Blocking: while this thread waits, serving has its core.
        return torch.cuda.Event(enable_timing=self._within, blocking=True)  # type: ignore[no-untyped-call]

    def _limit(self) -> None:
        while len(self._marks) >= MOST_AHEAD:
            self._reach()

    def _reach(self) -> None:
        """Wait for the oldest event, and measure the layers before it."""
        mark, layers = self._marks.popleft()
        mark.synchronize()
        if self._reached is not None:
            if layers:
                milliseconds = max(self._reached.elapsed_time(mark), 1e-3)
                self._stretch = max(
                    1, min(_MOST_LAYERS, 2 * layers, int(layers * _STRETCH_MILLISECONDS / milliseconds))
                )
            self._spare.append(self._reached)
        self._reached = mark


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
