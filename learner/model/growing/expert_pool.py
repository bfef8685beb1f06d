"""Experts: low-rank adapters on the linear and convolutional layers of a frozen model, and a head each.

The layers up to the embedding are run once. Where an adapted layer runs before the embedding is known, the model runs
twice: up to the embedding to choose experts, then with them.

Legend: B events, C classes, D dimensions of an embedding, E experts, F frozen ones, N rows of a layer's input, R rank.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from anabranch.learner.errors import ModelError
from anabranch.learner.model.embedding import embedding_of
from anabranch.learner.model.growing.pool import Chosen, Pool, Run, fixed

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}


class _EmbeddingReached(Exception):  # noqa: N818 no error
    """Ends a pass that is needed for the embedding alone."""


@dataclass(slots=True)
class _Pass:
    """One run of the model.

    Attributes:
        rows: B.
        chosen: None until the embedding is known: layers compute what the base does.
        choose: returns the experts for embeddings; None: the pass ends there.
        embedding_BD: of the pass, once it is known.
    """

    rows: int
    chosen: Chosen | None
    choose: Callable[[Tensor], Chosen] | None = None
    embedding_BD: Tensor | None = None


class ExpertLayer(nn.Module):
    """What experts add to a layer of the base: a product of two low-rank matrices; or, as a head, replace it by."""

    first: nn.Parameter
    """Of the frozen experts: `[F, R, inputs]` before `second`, `[F, outputs, R]`; weight and bias of heads."""
    second: nn.Parameter
    open_first: nn.Parameter
    open_second: nn.Parameter

    def __init__(self, layer: nn.Module, rank: int | None, dtype: torch.dtype) -> None:
        """Take the rank; None: experts replace the layer. Frozen experts are kept in `dtype`."""
        super().__init__()
        self.replaces = rank is None
        """Whether the base's output is not used."""
        self._dtype = dtype
        self._prepared: list[tuple[Tensor, Tensor]] | None = None
        """`first` and `second` of each expert, as views."""
        device = next(layer.parameters()).device
        if rank is None:
            assert isinstance(layer, nn.Linear)
            weight, bias = layer.weight, layer.bias
            first = weight.detach().float() if weight.is_floating_point() else torch.zeros(shape_of(layer))
            second = torch.zeros(layer.out_features) if bias is None else bias.detach().float()
        else:
            outputs, *inputs = shape_of(layer)
            first = torch.randn(rank, *inputs) / math.sqrt(math.prod(inputs))
            second = torch.zeros(outputs, rank)
        for name, value in (("first", first), ("second", second)):
            self.register_parameter(f"open_{name}", nn.Parameter(value.to(device, copy=True)))
            self.register_parameter(name, fixed(torch.zeros(0, *value.shape, dtype=dtype, device=device)))

    def freeze_open(self) -> None:
        """Keep the open expert among the frozen ones."""
        self._prepared = None
        for name in ("first", "second"):
            frozen, opened = getattr(self, name), getattr(self, f"open_{name}")
            frozen.data = torch.cat([frozen, opened.detach()[None].to(frozen.dtype)])

    def resize(self, frozen: int) -> None:
        """Make room for as many frozen experts."""
        self._prepared = None
        for each in (self.first, self.second):
            each.data = each.new_zeros(frozen, *each.shape[1:])

    def prepare(self) -> None:
        """Keep a view of each expert, whose weights do not change any more."""
        opened = self.open_first.detach(), self.open_second.detach()
        self._prepared = [*zip(self.first.detach(), self.second.detach(), strict=True), opened]

    def apply_to(self, layer: nn.Module, x_N: Tensor, output_N: Tensor, now: _Pass) -> Tensor:
        """Return the output of a layer with the chosen experts, given its input and the base's output."""
        chosen, rows = now.chosen, now.rows
        assert chosen is not None
        if not isinstance(chosen, int):
            if len(x_N) % rows:
                raise ModelError(
                    f"a layer gets {len(x_N)} rows for {rows} events; events have to be the first dimension"
                )
            chosen = chosen.repeat_interleave(len(x_N) // rows) if len(x_N) != rows else chosen
        if isinstance(layer, nn.Linear):
            return self._linear(x_N, output_N, chosen)
        return self._convolution(layer, x_N, output_N, chosen)

    def _of(self, expert: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._prepared is not None:
            first, second = self._prepared[expert]
            return first.to(like.dtype), second.to(like.dtype)
        if expert == len(self.first):
            return self.open_first.to(like.dtype), self.open_second.to(like.dtype)
        return self.first[expert].to(like.dtype), self.second[expert].to(like.dtype)

    def _linear(self, x_N: Tensor, output_N: Tensor, chosen: Chosen) -> Tensor:
        if isinstance(chosen, int):
            first, second = self._of(chosen, x_N)
            if self.replaces:
                return functional.linear(x_N, first, second)
            return output_N + functional.linear(functional.linear(x_N, first), second)
        first_N, second_N = (
            torch.cat([frozen, opened[None].to(frozen.dtype)]).index_select(0, chosen).to(x_N.dtype)
            for frozen, opened in ((self.first, self.open_first), (self.second, self.open_second))
        )
        x_NTI = x_N.reshape(len(x_N), -1, x_N.shape[-1])
        product_NTR = torch.bmm(x_NTI, first_N.transpose(1, 2))
        if self.replaces:
            return (product_NTR + second_N[:, None]).reshape(*x_N.shape[:-1], product_NTR.shape[-1])
        return output_N + torch.bmm(product_NTR, second_N.transpose(1, 2)).reshape(output_N.shape)

    def _convolution(self, layer: Any, x_N: Tensor, output_N: Tensor, chosen: Chosen) -> Tensor:
        run = next(function for kind, function in CONVOLUTIONS.items() if isinstance(layer, kind))

        def added(rows_N: Tensor, expert: int) -> Tensor:
            first, second = self._of(expert, x_N)
            inner = run(rows_N, first, None, layer.stride, layer.padding, layer.dilation)
            return run(inner, second[(...,) + (None,) * (first.ndim - 2)])

        if isinstance(chosen, int):
            return output_N + added(x_N, chosen)
        total_N = output_N.clone()
        for expert in torch.unique(chosen).tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            total_N[rows] += added(x_N[rows], expert).to(total_N.dtype)
        return total_N


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of a layer's weights, which quantized layers store in another one: outputs first."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    shape: torch.Size = layer.get_parameter("weight").shape
    return tuple(shape)


class ExpertPool(Pool):
    """Experts on some layers of a model."""

    def __init__(
        self,
        layers: list[tuple[nn.Module, int | None]],
        embedding: nn.Module,
        dim: int,
        classes: int,
        *,
        most: int,
        early: bool,
        dtype: torch.dtype,
    ) -> None:
        """Take each layer with its rank, None for the head; `early`: whether one runs before the embedding is known."""
        super().__init__(dim, classes, most)
        self._early = early
        self._passes: list[_Pass] = []
        """That which runs, if one does: setting an attribute of a module costs as much as a small operation."""
        self.layers = nn.ModuleList()
        for layer, rank in layers:
            added = ExpertLayer(layer, rank, dtype)
            self.layers.append(added)
            layer.register_forward_hook(_LayerHook(self, added))
        embedding.register_forward_hook(_EmbeddingHook(self))

    @override
    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        for each in self._layers():
            each.prepare()
        # Hooks of its layers keep torch from a fused pass, which takes their weights and calls none of them.
        fused = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
        hooked = {layer for each in fused for layer in each.modules()}
        for layer in set(model.modules()) - hooked:
            _hook_to_forward(layer)

    @override
    def _layers(self) -> Iterator[ExpertLayer]:
        return (each for each in self.layers if isinstance(each, ExpertLayer))

    @override
    def _train_pass(self, run: Run, rows: int) -> tuple[Tensor, Tensor]:
        embedding_BD = self._embed(run, rows) if self._early else None
        now = _Pass(rows, self.size - 1)
        output = self._run(run, now)
        return output, _reached(now.embedding_BD) if embedding_BD is None else embedding_BD

    @override
    def _routed_pass(self, run: Run, rows: int, choose: Callable[[Tensor], Chosen]) -> Tensor:
        if self._early:
            return self._run(run, _Pass(rows, choose(self._embed(run, rows))))
        now = _Pass(rows, None, choose)
        output = self._run(run, now)
        _reached(now.embedding_BD)
        return output

    def _embed(self, run: Run, rows: int) -> Tensor:
        """Run the base up to the embedding."""
        now = _Pass(rows, None)
        try:
            with torch.no_grad():
                self._run(run, now)
        except _EmbeddingReached:
            pass
        return _reached(now.embedding_BD)

    def _run(self, run: Run, now: _Pass) -> Tensor:
        self._passes.append(now)
        try:
            return run()
        finally:
            self._passes.clear()

    @property
    def running(self) -> _Pass | None:
        """The pass that runs; None until its experts are chosen."""
        return self._passes[0] if self._passes and self._passes[0].chosen is not None else None

    def embedding_ran(self, output: object) -> None:
        """Choose the experts of this pass; raises _EmbeddingReached when it is needed no further."""
        now = self._passes[0] if self._passes else None
        if now is None or now.embedding_BD is not None or not isinstance(output, Tensor) or not output.ndim:
            return
        now.embedding_BD = embedding_of(output)
        if now.chosen is None:
            if now.choose is None:
                raise _EmbeddingReached
            now.chosen = now.choose(now.embedding_BD)


@dataclass
class _LayerHook:
    pool: ExpertPool
    added: ExpertLayer

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        now = self.pool.running
        return output if now is None else self.added.apply_to(layer, inputs[0], output, now)


class _Adapted(nn.Module):
    """Mixed into the class of a layer: its forward pass with experts, which costs less than a hook after the pass, and
    does not compute what they replace."""

    experts: _LayerHook

    def forward(self, x_N: Tensor) -> Tensor:
        now, added = self.experts.pool.running, self.experts.added
        if now is None:
            return super().forward(x_N)  # type: ignore[no-any-return]
        return added.apply_to(self, x_N, x_N if added.replaces else super().forward(x_N), now)


@functools.cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Adapted, kind), {"__module__": kind.__module__})


def _hook_to_forward(layer: nn.Module) -> None:
    """Let a layer with a hook of experts run them in its forward pass, unless that is not its class's."""
    hooks = layer._forward_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, _LayerHook) and "forward" not in vars(layer):
            del hooks[key]
            layer.experts = hook  # type: ignore[assignment]
            layer.__class__ = _adapted(type(layer))  # type: ignore[arg-type]


@dataclass
class _EmbeddingHook:
    pool: ExpertPool

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.pool.embedding_ran(output)


def _reached(embedding_BD: Tensor | None) -> Tensor:
    if embedding_BD is None:
        raise ModelError("model.embedding: the module gives out no tensor when the model is run on events")
    return embedding_BD
