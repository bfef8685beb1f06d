"""Modules that grow while they train: a frozen base, and parts that are added to it, such as experts.

The module keeps its class, its names and its base. It gets one more submodule, the pool, which has the tensors of all
parts and of their router: the part whose class means are nearest in the embedding space answers an event. A fresh
module has one part; `grow` gives it as many as some weights have, before those are loaded.

Legend: B events, C classes, D dimensions of an embedding, E parts, F frozen ones, P prototypes: one for each class of
each part.
"""

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.learner.errors import ModelError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.embedding import module_of
from anabranch.learner.model.factory import forward, sample
from anabranch.learner.model.trained_set import deep_copy, freeze

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


POOL = "expert_pool"
"""The name of the submodule."""
_SHIFT, _OWNER, _LABEL = (f"{POOL}.{name}" for name in ("shift", "router.owner", "router.label"))
NEVER = -1e4
"""Added to the logit of a class that a part has not seen; fits fp16."""

Run = Callable[[], Tensor]
"""Runs the module's own forward pass; returns its output."""


class PoolLayer(Protocol):
    """What all parts have next to one layer of the module."""

    def freeze_open(self) -> None:
        """Freeze what belongs to the open part; the next one starts as its copy."""
        ...

    def resize(self, frozen: int) -> None:
        """Make room for the tensors of so many frozen parts."""
        ...


class Pool(nn.Module, abc.ABC):
    """The parts of a module, of which the last one is open: it is trained. Used by one thread at a time."""

    def __init__(self, dim: int, classes: int, most: int) -> None:
        """Start with the open part alone, for embeddings `[B, dim]` and logits `[B, classes]`; `most` parts at most."""
        super().__init__()
        self.most = most
        self.router = Router(dim, classes)
        self.shift = fixed(torch.zeros(0, classes))
        """Added to the logits of each frozen part, float32 `[F, C]`."""
        self.open_shift = fixed(torch.zeros(classes))
        self.embedding_BD: Tensor | None = None
        """The embeddings of the last pass in training, float32."""
        self._shifts: list[Tensor] | None = None
        """Of all parts, once prepared."""

    @property
    def size(self) -> int:
        """The number of parts, with the open one."""
        return len(self.shift) + 1 if self._shifts is None else len(self._shifts)

    def forward(self, x: Any) -> Any:
        """Return the input: an `nn.Sequential` runs its submodules one after the other, and this one too."""
        return x

    def open_to(self, classes: list[int]) -> None:
        """Let the open part predict these classes alone."""
        self.open_shift.fill_(NEVER)[classes] = 0.0

    def freeze_open(self) -> None:
        """Freeze the open part; the next one starts as its copy, without classes."""
        self._shifts = None
        self.shift.data = torch.cat([self.shift, self.open_shift[None]])
        self.open_shift.fill_(NEVER)
        for each in self._layers():
            each.freeze_open()

    def resize(self, frozen: int, prototypes: int) -> None:
        """Make room for the tensors of other weights, which are loaded next."""
        self._shifts = None
        self.shift.data = self.shift.new_zeros(frozen, self.shift.shape[1])
        self.router.resize(prototypes)
        for each in self._layers():
            each.resize(frozen)

    def prepare(self, model: nn.Module) -> None:  # noqa: ARG002 - a hook
        """Let the module that has the pool predict with fewer operations, and the same result but for rounding; its
        weights do not change any more. Not for modules that are copied or trained afterwards."""
        if self.shift.is_cpu:
            self._shifts = [*self.shift.detach().unbind(), self.open_shift.detach()]
            self.router.prepare(self.size)

    def train_pass(self, run: Run, rows: int) -> Tensor:
        """Return the logits of the open part for all events, and keep their embeddings."""
        output, self.embedding_BD = self._train_pass(run, rows)
        return output + self.open_shift.to(output.dtype)

    def predict(self, run: Run, rows: int) -> Tensor:
        """Return the logits of the open part while it is the only one; else logarithms of probabilities, each event by
        the part that the router chooses."""
        if self.size == 1:
            output, _ = self._train_pass(run, rows)
            return output + self.open_shift.to(output.dtype)
        routes: list[Route] = []

        def choose(embedding_BD: Tensor) -> Chosen:
            routes.append(self.router.route(embedding_BD, self.size))
            return routes[-1].chosen

        output = self._routed_pass(run, rows, choose).float()
        return routes[-1].combine(output + self._shift_of(routes[-1].chosen))

    def _shift_of(self, chosen: Chosen) -> Tensor:
        if isinstance(chosen, int):
            if self._shifts is not None:
                return self._shifts[chosen]
            return self.shift[chosen] if chosen < len(self.shift) else self.open_shift
        return torch.cat([self.shift, self.open_shift[None]]).index_select(0, chosen)

    @abc.abstractmethod
    def _train_pass(self, run: Run, rows: int) -> tuple[Tensor, Tensor]:
        """Run the open part; return its logits and the embeddings, which have no gradient."""

    @abc.abstractmethod
    def _routed_pass(self, run: Run, rows: int, choose: Callable[[Tensor], Chosen]) -> Tensor:
        """Run the part of each event that `choose` returns for its embedding; return the logits."""

    @abc.abstractmethod
    def _layers(self) -> Iterable["PoolLayer"]:
        """Return what the parts consist of, in the order of the model."""


class Growing(nn.Module):
    """Mixed into the class of a module that has a pool; the base runs in evaluation mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return logits `[B, C]`: in training of the open part, otherwise of the part that is chosen for each event."""
        pool = pool_of(self)
        assert pool is not None
        run = functools.partial(super().forward, *args, **kwargs)
        rows = len(args[0] if args else next(iter(kwargs.values())))
        if not self.training:
            return pool.predict(run, rows)
        self.training = False
        try:
            return pool.train_pass(run, rows)
        finally:
            self.training = True

    def train(self, mode: bool = True) -> "Growing":
        """Set the mode of this module alone."""
        super().train(False)
        self.training = mode
        return self


def make_growing(model: nn.Module, pool: Pool) -> None:
    """Freeze a module, and let its output be that of the pool's parts."""
    freeze(model)
    model.add_module(POOL, pool)
    kind = type(model)
    model.__class__ = type(kind.__name__, (Growing, kind), {"__module__": kind.__module__})
    model.train(model.training)


def pool_of(model: nn.Module) -> Pool | None:
    """Return the pool of a module; None when it does not grow."""
    pool = model._modules.get(POOL)
    return pool if isinstance(pool, Pool) else None


def parts_in(weights: Mapping[str, Tensor]) -> int:
    """Return the number of parts in weights; 0 of a module that does not grow."""
    return len(weights[_SHIFT]) + 1 if _SHIFT in weights else 0


def grow(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module as many parts as there are in weights, which are loaded next.

    Raises:
        RuntimeError: the weights have no parts and the module has, or the reverse; they have more than `most`, or a
            router that names others.
    """
    pool = pool_of(model)
    if pool is None:
        if parts_in(weights):
            raise RuntimeError("the weights have parts, and learner.strategy of the config adds none")
        return
    if not weights.keys() >= {_SHIFT, _OWNER, _LABEL}:
        raise RuntimeError("the weights have no parts, and learner.strategy of the config adds them")
    size, owner_P, label_P = parts_in(weights), weights[_OWNER], weights[_LABEL]
    if size > pool.most:
        raise RuntimeError(
            f"the weights have {size} parts, and learner.strategy allows most = {pool.most}; raise it to {size}"
        )
    if len(owner_P) and not (_within(owner_P, size) and _within(label_P, pool.router.classes)):
        raise RuntimeError("the router of the weights refers to parts or classes that do not exist")
    pool.resize(size - 1, len(owner_P))


def grown(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with as many parts as weights have, which shares its base; itself if it does not grow.

    Raises:
        RuntimeError: as `grow`.
    """
    if (pool := pool_of(model)) is None:
        grow(model, weights)
        return model
    own = {id(tensor) for tensor in pool.parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    other = deep_copy(model, {id(tensor): tensor for tensor in tensors if id(tensor) not in own})
    grow(other, weights)
    return other


def _within(values: Tensor, end: int) -> bool:
    return values.dtype == torch.int64 and bool(((values >= 0) & (values < end)).all())


def module_named(model: nn.Module, name: str, strategy: str) -> nn.Module:
    """Return the module whose output is the embedding; raises ModelError when none is named, or the model has none."""
    if not name:
        raise ModelError(
            f'learner.strategy = "{strategy}" routes events by their embedding, and model.embedding is ""; set it to '
            "the name of a module, such as the last before the head"
        )
    return module_of(model, name)


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
def survey(model: nn.Module, embedding: nn.Module, context: ModelContext) -> Survey:
    """Run a model on events of zeros, in evaluation mode; `embedding` is one of its modules.

    Raises:
        ModelError: the embedding's module gives out no tensor, or a layer has other rows than events first.
    """
    assert context.schema is not None
    found, leading = Survey(), [dict[nn.Module, int](), dict[nn.Module, int]()]
    was_training = model.training
    model.eval()
    try:
        for rows, sizes in zip(_ROWS, leading, strict=True):
            found = Survey()
            handles = list(_hooks(model, embedding, found, sizes))
            try:
                found.classes = forward(model, sample(context.schema, rows, context.device)).shape[-1]
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
