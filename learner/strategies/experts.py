"""Experts: a frozen base, and small experts that are added when the stream changes, chosen by class means."""

from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.growing.expert_pool import ExpertPool, shape_of
from anabranch.learner.model.growing.pool import Survey, make_growing, module_named, survey
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.growing import RoutedParts

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Experts(RoutedParts):
    """Trains low-rank adapters and a head on top of the frozen model, and freezes them when another expert is opened.

    A modular network (Rusu et al. 2016, "Progressive neural networks"; Hu et al. 2022, "LoRA"; Aljundi et al. 2017,
    "Expert gate"). The rank is the largest with which an expert has at most `size` of the base's parameters.
    """

    kind = KINDS["experts"]

    def __init__(
        self,
        *,
        most: int = 20,
        size: float = 0.02,
        least: int = 1000,
        base_precision: str = "fp32",
        shrinkage: float = 1e-4,
    ) -> None:
        """Take the most experts, the size of one as a fraction of the base, the events after which an expert may be
        frozen, and the precision in which the base and frozen experts are kept."""
        super().__init__(most, least, shrinkage)
        if not size:
            raise ValueError("size has to be more than 0")
        if base_precision not in PRECISIONS:
            raise ValueError(f"base_precision has to be one of {', '.join(PRECISIONS)}")
        self._size, self._dtype = size, PRECISIONS[base_precision]

    @override
    def convert(self, model: nn.Module, context: ModelContext) -> nn.Module:
        embedding = module_named(model, context.embedding, "experts")
        found = survey(model, embedding, context)
        ranks = self._ranks(found, sum(each.numel() for each in model.parameters()))
        pool = ExpertPool(
            [(layer, ranks[layer]) for layer in found.layers if layer in ranks],
            embedding,
            found.dim,
            found.classes,
            most=self._most,
            early=any(layer in ranks for layer in found.before),
            dtype=self._dtype,
        ).to(context.device)
        if self._dtype is not torch.float32:
            _keep_in(found.layers, self._dtype)
        make_growing(model, pool)
        return model

    def _ranks(self, found: Survey, total: int) -> dict[nn.Module, int | None]:
        """Return the rank of each layer that experts adapt; None for the head, of which each has its own.

        Where rank 1 on all layers has too many parameters, the layers that cost most go without.
        """
        head = next((layer for layer in reversed(found.layers) if isinstance(layer, nn.Linear)), None)
        if head is None:
            raise SettingsError(
                'learner.strategy = "experts" gives each expert its own last linear layer, and the model has none that '
                'runs; take another strategy, such as "er"'
            )
        outputs, inputs = shape_of(head)
        own, allowed = outputs * inputs + 2 * outputs, int(self._size * total)
        if own > allowed:
            raise SettingsError(
                f"learner.strategy: an expert's head has {own} parameters, and size = {self._size} of the model's "
                f"{total} are {allowed}; set size to {own / total:.2g} or more"
            )
        costs = {layer: _cost(layer) for layer in found.layers if layer is not head and _adaptable(layer)}
        while costs and own + sum(costs.values()) > allowed:
            del costs[max(costs, key=lambda layer: costs[layer])]
        rank = (allowed - own) // sum(costs.values()) if costs else 0
        return {head: None} | {layer: min(rank, *_sides(layer)) for layer in costs}


def _adaptable(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Linear):
        return True
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1 and layer.padding_mode == "zeros"


def _sides(layer: nn.Module) -> tuple[int, int]:
    """Return the outputs and the inputs of a layer's weights as a matrix."""
    outputs, *inputs = shape_of(layer)
    return outputs, torch.Size(inputs).numel()


def _cost(layer: nn.Module) -> int:
    """Return the parameters of rank 1."""
    return sum(_sides(layer))


def _keep_in(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Keep the weights of layers in another precision: they compute in it, and their outputs have the inputs' dtype."""
    for layer in layers:
        if all(each.dtype is torch.float32 for each in layer.parameters()):
            layer.to(dtype)
            layer.register_forward_pre_hook(_to_weights)
            layer.register_forward_hook(_to_float)


def _to_weights(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0].to(next(layer.parameters()).dtype), *inputs[1:])


def _to_float(_layer: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output.float()
