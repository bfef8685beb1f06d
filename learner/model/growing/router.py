"""Which expert answers an event: the one whose class means are nearest in the embedding space.

Legend: B events, C classes, D dimensions of an embedding, E experts, P prototypes: one for each class of each expert.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


def fixed(values: Tensor) -> nn.Parameter:
    """Return a parameter that is not trained: unlike a buffer, it may change its shape between two steps."""
    return nn.Parameter(values, requires_grad=False)


class Router(nn.Module):
    """Gives each prototype a probability: normal distributions with one covariance, all equally likely."""

    def __init__(self, dim: int, classes: int) -> None:
        """Start without prototypes, for embeddings `[B, dim]` and labels in `0..classes-1`."""
        super().__init__()
        self.classes = classes
        self.weight = fixed(torch.zeros(0, dim))
        self.bias = fixed(torch.zeros(0))
        self.owner = fixed(torch.zeros(0, dtype=torch.int64))
        """The expert of each prototype, int64 `[P]`."""
        self.label = fixed(torch.zeros(0, dtype=torch.int64))
        """The class of each prototype, int64 `[P]`."""

    def forward(self, embedding_BD: Tensor) -> Tensor:
        """Return the probability of each prototype, float32 `[B, P]`."""
        with _float32(embedding_BD.device.type):
            return functional.linear(embedding_BD.to(self.weight.dtype), self.weight, self.bias).softmax(dim=1)

    def set(self, weight_PD: Tensor, bias_P: Tensor, owner_P: Tensor, label_P: Tensor) -> None:
        """Replace all prototypes."""
        for parameter, value in zip(
            (self.weight, self.bias, self.owner, self.label), (weight_PD, bias_P, owner_P, label_P), strict=True
        ):
            parameter.data = value.to(parameter.dtype)

    def resize(self, prototypes: int) -> None:
        """Make room for the prototypes of a version, which are loaded next."""
        for parameter in self.parameters():
            parameter.data = parameter.new_zeros(prototypes, *parameter.shape[1:])

    def route(self, embedding_BD: Tensor, experts: int) -> "Route":
        """Choose the expert with the most probability for each event."""
        probability_BP = self(embedding_BD)
        total_BE = probability_BP.new_zeros(len(probability_BP), experts).index_add_(1, self.owner, probability_BP)
        own_B1, chosen_B1 = total_BE.max(dim=1, keepdim=True)
        others_BP = probability_BP.masked_fill(self.owner == chosen_B1, 0.0)
        others_BC = others_BP.new_zeros(len(others_BP), self.classes).index_add_(1, self.label, others_BP)
        return Route(chosen_B1[:, 0], own_B1, others_BC)


@dataclass(frozen=True)
class Route:
    """Which experts answer B events.

    Attributes:
        chosen_B: the expert of each event, int64 `[B]`.
        own_B1: the probability that the router gives it, float32 `[B, 1]`.
        others_BC: the probability of each class by the prototypes of the other experts, float32 `[B, C]`.
    """

    chosen_B: Tensor
    own_B1: Tensor
    others_BC: Tensor

    def combine(self, logits_BC: Tensor) -> Tensor:
        """Return logarithms of the probability of each class, float32 `[B, C]`, from logits of the chosen experts.

        The chosen expert divides its own probability among its classes; that of the others is as the router has it.
        """
        class_BC = torch.addcmul(self.others_BC, self.own_B1, logits_BC.float().softmax(dim=1))
        return class_BC.clamp_min(torch.finfo(torch.float32).tiny).log()


def _float32(device: str) -> contextlib.AbstractContextManager[object]:
    # Entering a context of autocast takes as long as several layers of one row.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
