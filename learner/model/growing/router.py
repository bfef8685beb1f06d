"""Which expert answers an event: the one whose class means are nearest in the embedding space.

Legend: B events, C classes, D dimensions of an embedding, E experts, P prototypes: one for each class of each expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Chosen = int | Tensor
"""One part for all events, or that of each, int64 `[B]`."""
_TINY = torch.finfo(torch.float32).tiny
_MOST_ONES = 2**18
"""Elements of the matrices that sum the probabilities of a single event: a megabyte."""


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
        self._single: _SingleRoutes | None = None

    def forward(self, embedding_BD: Tensor) -> Tensor:
        """Return the probability of each prototype, float32 `[B, P]`."""
        return _probability(embedding_BD, self.weight, self.bias)

    def set(self, weight_PD: Tensor, bias_P: Tensor, owner_P: Tensor, label_P: Tensor) -> None:
        """Replace all prototypes."""
        for parameter, value in zip(
            (self.weight, self.bias, self.owner, self.label), (weight_PD, bias_P, owner_P, label_P), strict=True
        ):
            parameter.data = value.to(parameter.dtype)
        self._single = None

    def resize(self, prototypes: int) -> None:
        """Make room for the prototypes of a version, which are loaded next."""
        for parameter in self.parameters():
            parameter.data = parameter.new_zeros(prototypes, *parameter.shape[1:])
        self._single = None

    def prepare(self, experts: int) -> None:
        """Keep what a route of a single event on the CPU needs of prototypes that do not change any more, if that is
        little."""
        if experts * self.classes * len(self.owner) <= _MOST_ONES:
            self._single = _SingleRoutes(self, experts)

    def route(self, embedding_BD: Tensor, experts: int) -> "Route":
        """Choose the expert with the most probability for each event."""
        if self._single is not None and len(embedding_BD) == 1 and not torch.is_grad_enabled():
            return self._single.route(embedding_BD)
        probability_BP = self(embedding_BD)
        total_BE = probability_BP.new_zeros(len(probability_BP), experts).index_add_(1, self.owner, probability_BP)
        own_B1, chosen_B1 = total_BE.max(dim=1, keepdim=True)
        others_BP = probability_BP.masked_fill(self.owner == chosen_B1, 0.0)
        others_BC = others_BP.new_zeros(len(others_BP), self.classes).index_add_(1, self.label, others_BP)
        return Route(one_or_each(chosen_B1[:, 0]), own_B1, others_BC)


@dataclass(frozen=True, slots=True)
class Route:
    """Which experts answer B events.

    Attributes:
        chosen: the expert of all events, or that of each.
        own_B1: the probability that the router gives it, float32 `[B, 1]`.
        others_BC: the probability of each class by the prototypes of the other experts, float32 `[B, C]`.
    """

    chosen: Chosen
    own_B1: Tensor
    others_BC: Tensor

    def combine(self, logits_BC: Tensor) -> Tensor:
        """Return logarithms of the probability of each class, float32 `[B, C]`, from logits of the chosen experts.

        The chosen expert divides its own probability among its classes; that of the others is as the router has it.
        """
        class_BC = torch.addcmul(self.others_BC, self.own_B1, logits_BC.float().softmax(dim=1))
        return class_BC.clamp_min(_TINY).log()


class _SingleRoutes:
    """Routes of single events, as `Router.route` has them but for rounding, with half of its operations.

    The operations of a single event take as long as it takes to start them. So probabilities are summed by a product
    with a matrix of zeros and ones: one for the experts, and for each expert one with the classes of all others.
    """

    def __init__(self, router: Router, experts: int) -> None:
        self._weight, self._bias, owner_P = router.weight.detach(), router.bias.detach(), router.owner.detach()
        prototypes = torch.arange(len(owner_P))
        self._owners_EP = self._weight.new_zeros(experts, len(owner_P))
        self._owners_EP[owner_P, prototypes] = 1.0
        labels_CP = self._weight.new_zeros(router.classes, len(owner_P))
        labels_CP[router.label.detach(), prototypes] = 1.0
        self._others_CP = [labels_CP.masked_fill(owned_P > 0, 0.0) for owned_P in self._owners_EP]

    def route(self, embedding_1D: Tensor) -> Route:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.route(embedding_1D)
        embedding_1D = embedding_1D.to(self._weight.dtype)
        probability_1P = functional.linear(embedding_1D, self._weight, self._bias).softmax(dim=1)
        own_11, chosen_11 = functional.linear(probability_1P, self._owners_EP).max(dim=1, keepdim=True)
        chosen = int(chosen_11)
        return Route(chosen, own_11, functional.linear(probability_1P, self._others_CP[chosen]))


def one_or_each(chosen_B: Tensor) -> Chosen:
    """Return the part of all events as a number where they have one in common, as most requests at a time do, and no
    device is waited for: to take one part costs less than to gather that of each event, which gradients need."""
    if chosen_B.is_cpu and not torch.is_grad_enabled() and len(distinct := set(chosen_B.tolist())) == 1:
        return int(distinct.pop())
    return chosen_B


def _probability(embedding_BD: Tensor, weight_PD: Tensor, bias_P: Tensor) -> Tensor:
    device = embedding_BD.device.type
    if torch.is_autocast_enabled(device):  # entering a context of autocast takes as long as several layers of one row
        with torch.autocast(device, enabled=False):
            return _probability(embedding_BD, weight_PD, bias_P)
    return functional.linear(embedding_BD.to(weight_PD.dtype), weight_PD, bias_P).softmax(dim=1)
