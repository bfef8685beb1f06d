"""Online EWC: penalizes changes of weights that past events depend on."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from anabranch.learner.model.examples import Examples, Tensors
from anabranch.learner.model.factory import eval_mode
from anabranch.learner.model.factory import forward as run
from anabranch.learner.model.faulty_events import may_be_of_events
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import shortened
from anabranch.learner.strategies.er import NoReplay


class ElasticWeights(NoReplay):
    """Pulls each weight back to where it was consolidated last, by how much past events depend on it.

    Online EWC: Schwarz et al. 2018, "Progress & compress"; Kirkpatrick et al. 2017. A stream has no borders between
    tasks, so it consolidates every `every` steps. How much events depend on a weight is its squared gradient (the
    empirical Fisher information), taken from one new event per step, in evaluation mode.
    """

    kind = KINDS["ewc"]

    def __init__(self, *, strength: float = 10.0, decay: float = 0.9, every: int = 1000) -> None:
        """Take the penalty's weight, what a consolidation leaves of earlier ones, and the steps between two of them."""
        if decay > 1:
            raise ValueError("decay has to be at most 1")
        self._strength, self._decay, self._every = strength, decay, every
        self._steps = 0
        self._sum: Tensor | None = None
        """Squared gradients of all weights, then the number of events: what a consolidation divides by it."""
        self._sum_of_all: Tensor | None = None
        self._usual: Tensor | None = None
        """The usual length of an event's gradient."""
        self._fisher: list[Tensor] = []
        self._anchor: list[Tensor] = []

    @override
    @torch.no_grad()
    def transform_gradients(self, _scale: Tensor | float) -> None:
        if not self._anchor:
            return
        weights = self.learner.weights
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        moved = torch._foreach_sub(weights, self._anchor)
        torch._foreach_addcmul_(gradients, moved, self._fisher, value=self._strength)

    @override
    def after_step(self, new: Examples, _output_B: Tensor) -> None:
        self._add(new[:1])
        self._sum_of_all = None
        self._steps += 1
        if self._steps % self._every == 0:
            self.on_drift()

    @override
    def on_drift(self) -> None:
        if self._sum is None:
            return
        self.learner.reduce([self._sum])
        latest = self._split(self._sum[:-1] / self._sum[-1].clamp_min(1e-9))
        before = torch._foreach_mul(self._fisher, self._decay) if self._fisher else None
        self._fisher = latest if before is None else list(torch._foreach_add(before, latest))
        self._anchor = [weight.detach().clone() for weight in self.learner.weights]
        self._sum = self._sum_of_all = None
        if (learned := features_of(self.learner.model)) is not None:
            learned.fix_numbers()  # else weights would be pulled to what they were for other inputs

    def _add(self, event: Examples) -> None:
        """Add the squared gradient of a single event, if there is one, and count it unless its weight is 0."""
        weights = self.learner.weights
        if self._usual is None:
            self._usual = torch.zeros((), dtype=torch.float64, device=weights[0].device)
        if self._sum is None:
            self._sum = torch.zeros(sum(weight.numel() for weight in weights) + 1, device=weights[0].device)
        for part in self.learner.parts(event) if len(event) else ():
            try:
                with eval_mode(self.learner.model):
                    loss = self.learner.task.loss(run(self.learner.model, part.features), part.label_B).sum()
                    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            except Exception as exc:  # the user's own code may raise anything, in evaluation alone too
                if not may_be_of_events(exc):
                    raise
                return  # it was trained on already; another event serves as well
            counts = (part.weight_B > 0).to(self._sum)
            # One event far from the others would tie the weights down permanently.
            gradient = torch.cat([each.reshape(-1) for each in gradients])[None].double()
            gradient = shortened(gradient, part.weight_B, self._usual)
            squares = torch.cat([gradient[0].to(self._sum), counts]).square_()
            # The first event of all may overflow, which would make the penalty infinite permanently.
            self._sum.addcmul_(squares.nan_to_num_(nan=0.0, posinf=0.0), counts)

    @override
    def gather(self) -> None:
        self._sum_of_all = None
        if self._sum is not None:
            self._sum_of_all = self._sum.clone()
            self.learner.reduce([self._sum_of_all])

    @override
    def tensors(self) -> dict[str, Tensor]:
        total = self._sum if self._sum_of_all is None else self._sum_of_all
        sums = [] if total is None else [*self._split(total[:-1]), total[-1]]
        usual = [] if self._usual is None else [self._usual]
        kinds = {"sum": sums, "fisher": self._fisher, "anchor": self._anchor, "usual": usual}
        return {f"{name}.{index}": each for name, tensors in kinds.items() for index, each in enumerate(tensors)}

    @override
    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    @override
    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        self._steps, self._sum_of_all = state["steps"], None
        device = self.learner.weights[0].device
        sums, self._fisher, self._anchor = (_numbered(tensors, name, device) for name in ("sum", "fisher", "anchor"))
        self._sum = torch.cat([each.reshape(-1) for each in sums]) if sums else None
        self._usual = next(iter(_numbered(tensors, "usual", device)), None)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a vector of all weights, in their shapes."""
        weights = self.learner.weights
        parts = torch.split(flat, [weight.numel() for weight in weights])
        return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


def _numbered(tensors: Tensors, name: str, device: torch.device) -> list[Tensor]:
    keys: Sequence[str] = [key for key in tensors if key.startswith(f"{name}.")]
    return [tensors[f"{name}.{index}"].to(device) for index in range(len(keys))]
