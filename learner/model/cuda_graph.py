"""CUDA graphs: the kernels of a pass are recorded once, and then launched together by one call."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

_FIRST_CALLS = 3
"""Calls of a shape that run as they are, before it is recorded: libraries choose their algorithms in them."""
_MOST_GRAPHS = 4
"""Shapes that are recorded; each needs memory."""

Outputs = Sequence[Tensor | None]
Pass = Callable[[list[Tensor]], Outputs]
"""Computes gradients from tensors, and returns tensors; all without waiting for the device."""
Record = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]
"""Records a function without running it; returns what it returns, and a function that runs it again, in place."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recorded:
    """A pass over tensors of one shape. Replays read and write the memory of these tensors."""

    inputs: list[Tensor]
    outputs: Outputs
    gradients: Outputs
    replay: Callable[[], None]


class CudaGraphs:
    """Records functions as CUDA graphs; other threads may use the device meanwhile.

    All share one pool of memory, since no two are replayed at once, and what one returns is copied before the next.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Record a function without running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        self._pool = graph.pool()
        return outputs, graph.replay


class GraphedPass:
    """Runs a pass that sets the gradients of a model, by a CUDA graph for each shape of its tensors.

    The first calls of a shape run as they are. So do all if one cannot be recorded, for example since the model reads a
    value on the host: a warning says why. A replay does not repeat what the model does in Python. Used by one thread.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        """Take the model, and what records its passes."""
        self._model = model
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._record_ = record
        self._calls: Counter[object] = Counter()
        self._recorded: dict[object, _Recorded] = {}
        self.refused = False
        """Whether no pass is recorded any more."""

    def __call__(self, run: Pass, inputs: list[Tensor], undo: Callable[[], object]) -> Outputs | None:
        """Return copies of the results of a pass; None: it has to run as it is.

        The gradients have to be None before. `undo` is called where a pass cannot be recorded: it has to put gradients,
        buffers and random generators back.
        """
        key = tuple((value.shape, value.dtype) for value in inputs)
        recorded = self._recorded.get(key)
        if recorded is None:
            self._calls[key] += 1
            if self.refused or self._calls[key] <= _FIRST_CALLS or len(self._recorded) >= _MOST_GRAPHS:
                return None
            try:
                recorded = self._recorded[key] = self._record(run, inputs)
            except Exception as exc:  # noqa: BLE001 the user's own code may raise anything
                log.warning(
                    "learner.graphs: the step cannot be recorded, and runs as it is: %s", " ".join(str(exc).split())
                )
                self.refused = True
                undo()
                return None
        else:
            torch._foreach_copy_(recorded.inputs, inputs)
        recorded.replay()
        for weight, gradient in zip(self._weights, recorded.gradients, strict=True):
            weight.grad = gradient
        return [None if value is None else value.clone() for value in recorded.outputs]

    def _record(self, run: Pass, inputs: list[Tensor]) -> _Recorded:
        static, buffers = [value.clone() for value in inputs], list(self._model.buffers())
        outputs, replay = self._record_(lambda: run(static))
        if not all(map(is_, buffers, self._model.buffers())):
            raise RuntimeError("the model binds other tensors to its buffers, which a replay does not")
        return _Recorded(static, outputs, [weight.grad for weight in self._weights], replay)


def graphed_pass(model: nn.Module, device: torch.device) -> GraphedPass | None:
    """Return what runs passes by CUDA graphs; None, with a warning, on another device."""
    if device.type == "cuda":
        return GraphedPass(model, CudaGraphs())
    log.warning("learner.graphs has no effect: it needs a CUDA device, but the device is %s", device)
    return None
