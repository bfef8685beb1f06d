"""Which layers of a model run on events, in which order, and what they give: decided by running it on a few events."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ingest.events.schema import Schema
from learner.errors import ModelError
from learner.model.factory import forward, sample

_ROWS = 3, 2
"""Numbers of events of two runs: the first dimension of a layer's input has to grow with them."""


@dataclass
class Survey:
    """What runs showed.

    Attributes:
        before: linear and convolutional layers that ran before the embedding was known.
        after: those that ran after it.
        dim: numbers of an embedding.
        classes: logits of an event.
    """

    before: list[nn.Module] = field(default_factory=list)
    after: list[nn.Module] = field(default_factory=list)
    dim: int = 0
    classes: int = 0

    @property
    def layers(self) -> list[nn.Module]:
        """All layers, in order."""
        return [*self.before, *self.after]


@torch.no_grad()
def survey(model: nn.Module, embedding: nn.Module, schema: Schema, device: torch.device) -> Survey:
    """Run a model on events of zeros, in evaluation mode; `embedding` is one of its modules.

    Raises:
        ModelError: the embedding's module gives out no tensor, or a layer has other rows than events first.
    """
    found, leading = Survey(), [dict[nn.Module, int](), dict[nn.Module, int]()]
    was_training = model.training
    model.eval()
    try:
        for rows, sizes in zip(_ROWS, leading, strict=True):
            found = Survey()
            handles = list(_hooks(model, embedding, found, sizes))
            try:
                found.classes = forward(model, sample(schema, rows, device)).shape[-1]
            finally:
                for handle in handles:
                    handle.remove()
    finally:
        model.train(was_training)
    if not found.dim:
        raise ModelError("model.embedding: the module gives out no tensor when the model is run on events")
    names = {module: name for name, module in model.named_modules()}
    for layer, size in leading[0].items():
        if size * _ROWS[1] != leading[1].get(layer, 0) * _ROWS[0]:
            raise ModelError(
                f"learner.strategy: the layer {names[layer]} gets {size} rows for {_ROWS[0]} events and "
                f"{leading[1].get(layer, 0)} for {_ROWS[1]}; experts need a model whose first dimension are the events"
            )
    return found


def _hooks(
    model: nn.Module, embedding: nn.Module, found: Survey, sizes: dict[nn.Module, int]
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    def layer_ran(layer: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        if layer not in sizes:
            sizes[layer] = len(inputs[0])
            (found.after if found.dim else found.before).append(layer)

    def embedding_ran(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim and not found.dim:
            found.dim = output[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield module.register_forward_hook(layer_ran)
    yield embedding.register_forward_hook(embedding_ran)
