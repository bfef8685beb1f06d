"""Which expert answers an event: the one whose class means are nearest in the embedding space.

Legend: B events, C classes, D dimensions of an embedding, E experts, P prototypes: one for each class of each expert.
"""

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
        with torch.autocast(embedding_BD.device.type, enabled=False):
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

    def choose(self, probability_BP: Tensor, experts: int) -> Tensor:
        """Return the expert with the most probability of each event, int64 `[B]`."""
        total_BE = probability_BP.new_zeros(len(probability_BP), experts)
        return total_BE.index_add_(1, self.owner, probability_BP).argmax(dim=1)

    def combine(self, logits_BC: Tensor, chosen_B: Tensor, probability_BP: Tensor) -> Tensor:
        """Return logarithms of the probability of each class, float32 `[B, C]`, from logits of the chosen experts.

        The chosen expert divides its own probability among its classes; that of the others is as the router has it.
        """
        own_BP = self.owner == chosen_B[:, None]
        own_B1 = (probability_BP * own_BP).sum(dim=1, keepdim=True)
        class_BC = torch.zeros_like(logits_BC, dtype=torch.float32)
        class_BC.index_add_(1, self.label, probability_BP.masked_fill(own_BP, 0.0))
        least = torch.finfo(torch.float32).tiny
        return (class_BC + own_B1 * logits_BC.float().softmax(dim=1)).clamp_min(least).log()
