"""Modules that grow while they train: a frozen base, and parts that are added to it, such as experts.

The module keeps its class, its names and its base. It gets one more submodule, the pool, which has the tensors of all
parts and of their router. A fresh module has one part; `grow` gives it as many as some weights have, before those are
loaded.

Legend: B events, C classes, D dimensions of an embedding, E parts, F frozen ones, P prototypes.
"""

import abc
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from learner.errors import ModelError
from learner.model.growing.router import Chosen, Route, Router, fixed
from learner.model.trained_set import deep_copy, freeze

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
        raise RuntimeError("the router of the weights names parts or classes that there are not")
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
    try:
        return model.get_submodule(name)
    except AttributeError as exc:
        names = ", ".join(name for name, _ in model.named_modules() if name)
        raise ModelError(f'model.embedding = "{name}": the model has no such module, but {names}') from exc
