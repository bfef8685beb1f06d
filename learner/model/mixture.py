"""A mixture of experts: a layer of which each event runs only a part.

Legend: N vectors, D numbers of one, E experts, k of them that each vector is sent to.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class ExpertExchange(Protocol):
    """Runs the experts, wherever they are."""

    def __call__(self, x_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' outputs for vectors that are sorted by expert, and how many each expert got in all.

        `counts_E`: how many of the vectors are each expert's.
        """
        ...


class LocalExperts:
    """All experts are in this process."""

    def __init__(self, experts: nn.ModuleList) -> None:
        self._experts = experts

    def __call__(self, x_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Run each expert on its vectors; one without any runs on none, so that its gradient is zero."""
        parts = torch.split(x_ND, counts_E.tolist())
        return torch.cat([expert(part) for expert, part in zip(self._experts, parts, strict=True)]), counts_E


class MixtureOfExperts(nn.Module):
    """Sends each vector to the `k` experts that its router rates highest, and adds up their outputs by that rating.

    Shazeer et al. 2017, "Outrageously large neural networks". No vector is left out, whatever the load: there is no
    capacity. The load is balanced without a loss term: a bias of each expert, by which alone experts are chosen, rises
    while the expert gets less than its share of vectors, and falls while it gets more (Wang et al. 2024,
    "Auxiliary-loss-free load balancing strategy for mixture-of-experts"). It is a buffer, as running statistics are.

    `model.parallel` with the style "expert" divides the experts over the ranks of `learner.mesh.expert`.
    """

    bias_E: Tensor

    def __init__(self, width: int, experts: Sequence[nn.Module], *, k: int = 2, balance: float = 1e-3) -> None:
        """Make the router.

        Args:
            width: D, numbers of an input vector.
            experts: modules that map `[N, D]` to `[N, *]`, also for N = 0.
            k: how many experts a vector is sent to.
            balance: by how much biases change in a training step's pass; 0: never.
        """
        super().__init__()
        if not 1 <= k <= len(experts):
            raise ValueError(f"k = {k} of {len(experts)} experts; take a number from 1 to that of the experts")
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.register_buffer("bias_E", torch.zeros(len(experts)))
        self.exchange: ExpertExchange = LocalExperts(self.experts)
        """Runs the experts."""
        self._k, self._balance = k, balance

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., *]`."""
        x_ND = x.reshape(-1, x.shape[-1])
        rating_NE: Tensor = self.router(x_ND).softmax(dim=1)
        chosen_Nk = (rating_NE + self.bias_E).topk(self._k).indices
        gate_Nk = rating_NE.gather(1, chosen_Nk)
        if self._k > 1:
            gate_Nk = gate_Nk / gate_Nk.sum(dim=1, keepdim=True)
        order = chosen_Nk.reshape(-1).argsort(stable=True)
        counts_E = torch.bincount(chosen_Nk.reshape(-1), minlength=len(self.experts))
        output, load_E = self.exchange(x_ND[order // self._k], counts_E)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        output = output[back].view(len(x_ND), self._k, *output.shape[1:])
        if self.training and self._balance:
            self._update_biases(load_E)
        gates = gate_Nk.view(*gate_Nk.shape, *[1] * (output.ndim - 2)).to(output.dtype)
        summed: Tensor = (output * gates).sum(dim=1)
        return summed.view(*x.shape[:-1], *summed.shape[1:])

    @torch.no_grad()
    def _update_biases(self, load_E: Tensor) -> None:
        load_E = load_E.to(self.bias_E.dtype)
        self.bias_E += self._balance * (load_E.mean() - load_E).sign()
