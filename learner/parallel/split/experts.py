"""Expert parallelism: each rank has some experts of every mixture, and ranks send each other vectors for them.

Lepikhin et al. 2020, "GShard: scaling giant models with conditional computation and automatic sharding".

Legend: N vectors, D numbers of one, E experts, L of them on this rank, R ranks.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import RankLostError
from anabranch.learner.model.factory import eval_mode, forward
from anabranch.learner.model.faulty_events import may_be_of_events
from anabranch.learner.model.mixture import MixtureOfExperts
from anabranch.learner.parallel.split.divided_weights import DividedWeights
from anabranch.learner.train.parallelism import Weights


def mixtures(
    model: nn.Module, parallel: Mapping[str, str], ranks: int, features: Mapping[str, Tensor]
) -> list[MixtureOfExperts]:
    """Return the mixtures that `model.parallel` names, in the order in which they run on features.

    Raises:
        SettingsError: there is none, or one that cannot be divided.
    """
    modules, layers = dict(model.named_modules()), dict[str, MixtureOfExperts]()
    for pattern in (key for key, style in parallel.items() if style == "expert"):
        matched = {name: module for name, module in modules.items() if name and fnmatchcase(name, pattern)}
        for name, module in matched.items():
            if not isinstance(module, MixtureOfExperts):
                raise SettingsError(
                    f'model.parallel."{name}" = "expert": it is a {type(module).__name__}; name a MixtureOfExperts of '
                    "anabranch.learner.model.mixture"
                )
            if len(module.experts) % ranks:
                raise SettingsError(
                    f'model.parallel."{name}" = "expert": its {len(module.experts)} experts are not divisible by '
                    f"learner.mesh.expert = {ranks}; change the model or the mesh"
                )
            layers[name] = module
        if not matched:
            able = [name for name, module in modules.items() if isinstance(module, MixtureOfExperts)]
            raise SettingsError(
                f'model.parallel: "{pattern}" matches no module; those with experts are {", ".join(able) or "none"}'
            )
    if not layers:
        raise SettingsError(
            f"learner.mesh.expert = {ranks}, but model.parallel names no module with experts; write such as "
            '{"body.1" = "expert"}, or set learner.mesh.expert to 1'
        )
    ordered = _in_order(model, layers, features)
    _check_not_shared(model, layers)
    return ordered


def _check_not_shared(model: nn.Module, layers: Mapping[str, MixtureOfExperts]) -> None:
    """Raise SettingsError if a parameter of an expert is used outside of it: each rank would train its own."""
    experts = tuple(f"{name}.experts.{index}." for name, layer in layers.items() for index in range(len(layer.experts)))
    found: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = found.setdefault(id(parameter), name)
        if any(first.startswith(expert) != name.startswith(expert) for expert in experts):
            raise SettingsError(
                f"model.parallel: {first} and {name} are one parameter, and experts are divided over ranks; let each "
                "expert have its own parameters, or set learner.mesh.expert to 1"
            )


def _in_order(
    model: nn.Module, layers: Mapping[str, MixtureOfExperts], features: Mapping[str, Tensor]
) -> list[MixtureOfExperts]:
    """Return the layers in the order in which they run; raises SettingsError unless each runs once."""
    order: list[str] = []
    hooks = [layer.register_forward_pre_hook(partial(_record, order, name)) for name, layer in layers.items()]
    try:
        with torch.no_grad(), torch.random.fork_rng([]), eval_mode(model):
            forward(model, features)
    finally:
        for hook in hooks:
            hook.remove()
    if sorted(order) != sorted(layers):
        raise SettingsError(
            f"model.parallel: the modules with experts run as {', '.join(order) or 'none'}; each has to run once a pass"
        )
    return [layers[name] for name in order]


def _record(order: list[str], name: str, *_: Any) -> None:
    order.append(name)


class ExpertWeights(DividedWeights):
    """Experts of which each rank has some."""

    def __init__(self, inner: Weights, layers: Sequence[MixtureOfExperts], group: dist.ProcessGroup) -> None:
        """Take the layout within a module, the mixtures in the order in which they run, and the ranks."""
        sizes = [len(layer.experts) // group.size() for layer in layers]
        by_rank = [
            [expert for layer, n in zip(layers, sizes, strict=True) for expert in [*layer.experts][rank * n :][:n]]
            for rank in range(group.size())
        ]
        super().__init__(inner, by_rank, group)
        self._passes = ExpertPasses(layers, group)

    @override
    def begin_pass(self) -> None:
        super().begin_pass()
        self._passes.begin()

    @override
    def begin_again(self, error: Exception) -> None:
        super().begin_again(error)
        self._passes.complete()


class ExpertPasses:
    """The exchanges of the mixtures of a model in a pass, in the order in which they run.

    All ranks exchange vectors at the same points. When the model raises on one rank, the others wait for its next
    exchange: it completes those of the pass without sending any vectors, and the step is undone on all ranks.
    """

    def __init__(self, layers: Sequence[MixtureOfExperts], group: dist.ProcessGroup) -> None:
        """Divide the experts of the layers, which run in this order, over the ranks of a group."""
        self.group = group
        self._layers = layers
        self.outputs: list[Tensor] = []
        """Of the mixtures that have run in this pass."""
        self.skips = False
        """Whether nothing is exchanged until the next pass."""
        self.gradients = 0
        """Exchanges of gradients in this pass: two of each mixture."""
        for layer in layers:
            layer.exchange = _DividedExperts(self, layer)

    def begin(self) -> None:
        """Begin a pass."""
        self.outputs, self.skips, self.gradients = [], False, 0

    def complete(self) -> None:
        """Take part in the remaining exchanges of a pass that raised; until the next one nothing is exchanged.

        Raises:
            RankLostError: it raised in the backward pass, after some gradients were exchanged.
        """
        if 0 < self.gradients < 2 * len(self._layers):
            raise RankLostError("the backward pass raised while ranks exchanged the gradients of experts")
        if self.skips or self.gradients:
            self.skips = True
            return
        for layer in self._layers[len(self.outputs) :]:
            weight = layer.router.weight
            counts_E = torch.zeros(len(layer.experts), dtype=torch.int64, device=weight.device)
            try:
                layer.exchange(weight.new_zeros(0, weight.shape[1]).requires_grad_(), counts_E)
            except Exception as exc:  # of the vectors of other ranks, which have their outputs then
                if not may_be_of_events(exc):
                    raise
        torch.autograd.backward([output.sum() * 0 for output in self.outputs if output.requires_grad])
        self.begin()
        self.skips = True


class _DividedExperts:
    """Runs this rank's experts on the vectors of all ranks."""

    def __init__(self, passes: ExpertPasses, layer: MixtureOfExperts) -> None:
        self._passes = passes
        ranks, rank = passes.group.size(), passes.group.rank()
        self._dtype = layer.router.weight.dtype
        """In which vectors are exchanged: with autocast, theirs depends on what computed them, on each rank."""
        n = len(layer.experts) // ranks
        self.own = list(layer.experts)[rank * n : (rank + 1) * n]
        with torch.no_grad():
            none_ND = layer.router.weight.new_zeros(0, layer.router.in_features)
            self._shape = self.own[0](none_ND).shape[1:]

    def __call__(self, x_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        passes = self._passes
        if passes.skips:
            return self.own[0](x_ND), counts_E
        counts_RL = counts_E.view(passes.group.size(), len(self.own))
        received_RL, load_E = torch.empty_like(counts_RL), counts_E.clone()
        dist.all_to_all_single(received_RL, counts_RL, group=passes.group)
        dist.all_reduce(load_E, group=passes.group)
        # The sizes of messages have to be known on the host: the two waits for the device in a pass of this layer.
        sizes, received = counts_RL.sum(dim=1).tolist(), received_RL.tolist()
        sizes_here = [sum(of_rank) for of_rank in received]
        if not x_ND.requires_grad:  # all ranks exchange gradients, whatever those of one are of
            x_ND = x_ND.detach().requires_grad_()
        x_ND = _sent(x_ND.to(self._dtype), sizes, sizes_here, passes)
        error: Exception | None = None
        try:
            output = self._run(x_ND, received).to(self._dtype)
        except Exception as exc:  # noqa: BLE001 raised below, when the other ranks have their outputs
            error, output = exc, x_ND.new_zeros(len(x_ND), *self._shape) + x_ND.sum() * 0
        output = _sent(output, sizes_here, sizes, passes)
        passes.outputs.append(output)
        if error is not None:
            raise error
        return output, load_E

    def _run(self, x_ND: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
        """Run each expert on its vectors of all ranks; those of a rank are sorted by expert."""
        n = len(self.own)
        blocks = torch.split(x_ND, [size for of_rank in received for size in of_rank])
        outputs = [expert(torch.cat(blocks[index::n])) for index, expert in enumerate(self.own)]
        by_expert = [torch.split(output, [of_rank[i] for of_rank in received]) for i, output in enumerate(outputs)]
        return torch.cat([by_expert[index][rank] for rank in range(len(received)) for index in range(n)])


class _AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, sizes: list[int], received: list[int], passes: ExpertPasses) -> Tensor:
        ctx.sizes, ctx.received, ctx.passes = sizes, received, passes
        return _exchanged(x, sizes, received, passes.group)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.passes.gradients += 1
        return _exchanged(gradients[0], ctx.received, ctx.sizes, ctx.passes.group), None, None, None


def _sent(x: Tensor, sizes: list[int], received: list[int], passes: ExpertPasses) -> Tensor:
    """Send `sizes` rows to each rank, and return the `received` ones of each."""
    output: Tensor = _AllToAll.apply(x, sizes, received, passes)  # type: ignore[no-untyped-call]
    return output


def _exchanged(x: Tensor, sizes: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(output, x.contiguous(), received, sizes, group=group)
    return output
