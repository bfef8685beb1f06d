"""Experts: low-rank adapters on the linear and convolutional layers of a frozen model, and a head each.

The layers up to the embedding are run once. Where an adapted layer runs before the embedding is known, the model runs
twice: up to the embedding to choose experts, then with them.

Legend: B events, C classes, D dimensions of an embedding, E experts, F frozen ones, N rows of a layer's input, R rank.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from learner.errors import ModelError
from learner.model.growing.parts import Chosen, Pool, Run, one_or_each
from learner.model.growing.router import fixed

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}


class _EmbeddingReached(Exception):  # noqa: N818 no error
    """Ends a pass that is needed for the embedding alone."""


@dataclass
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
    choose: Callable[[Tensor], Tensor] | None = None
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
        self._rank = rank
        self._dtype = dtype
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
        for name in ("first", "second"):
            frozen, opened = getattr(self, name), getattr(self, f"open_{name}")
            frozen.data = torch.cat([frozen, opened.detach()[None].to(frozen.dtype)])

    def resize(self, frozen: int) -> None:
        """Make room for as many frozen experts."""
        for each in (self.first, self.second):
            each.data = each.new_zeros(frozen, *each.shape[1:])

    def apply_to(self, layer: nn.Module, x_N: Tensor, output_N: Tensor, chosen: Chosen, rows: int) -> Tensor:
        """Return the output of a layer with the chosen experts, given its input and the base's output."""
        if isinstance(chosen, Tensor):
            if len(x_N) % rows:
                raise ModelError(
                    f"a layer gets {len(x_N)} rows for {rows} events; events have to be the first dimension"
                )
            chosen = chosen.repeat_interleave(len(x_N) // rows) if len(x_N) != rows else chosen
        if isinstance(layer, nn.Linear):
            return self._linear(x_N, output_N, chosen)
        return self._convolution(layer, x_N, output_N, chosen)

    def _of(self, expert: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if expert == len(self.first):
            return self.open_first.to(like.dtype), self.open_second.to(like.dtype)
        return self.first[expert].to(like.dtype), self.second[expert].to(like.dtype)

    def _linear(self, x_N: Tensor, output_N: Tensor, chosen: Chosen) -> Tensor:
        if isinstance(chosen, int):
            first, second = self._of(chosen, x_N)
            if self._rank is None:
                return functional.linear(x_N, first, second)
            return output_N + functional.linear(functional.linear(x_N, first), second)
        first_N, second_N = (
            torch.cat([frozen, opened[None].to(frozen.dtype)])[chosen].to(x_N.dtype)
            for frozen, opened in ((self.first, self.open_first), (self.second, self.open_second))
        )
        x_NTI = x_N.reshape(len(x_N), -1, x_N.shape[-1])
        product_NTR = torch.bmm(x_NTI, first_N.transpose(1, 2))
        if self._rank is None:
            return (product_NTR + second_N[:, None]).reshape(output_N.shape)
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
        self._pass: _Pass | None = None
        self.layers = nn.ModuleList()
        for layer, rank in layers:
            added = ExpertLayer(layer, rank, dtype)
            self.layers.append(added)
            layer.register_forward_hook(_LayerHook(self, added))
        embedding.register_forward_hook(_EmbeddingHook(self))

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
    def _routed_pass(self, run: Run, rows: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
        if self._early:
            return self._run(run, _Pass(rows, one_or_each(choose(self._embed(run, rows)))))
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
        self._pass = now
        try:
            return run()
        finally:
            self._pass = None

    def layer_ran(self, layer: nn.Module, added: ExpertLayer, x_N: Tensor, output_N: Tensor) -> Tensor:
        """Return the output of a layer with the experts of this pass."""
        now = self._pass
        if now is None or now.chosen is None:
            return output_N
        return added.apply_to(layer, x_N, output_N, now.chosen, now.rows)

    def embedding_ran(self, output: object) -> None:
        """Choose the experts of this pass; raises _EmbeddingReached when it is needed no further."""
        now = self._pass
        if now is None or now.embedding_BD is not None or not isinstance(output, Tensor) or not output.ndim:
            return
        now.embedding_BD = output.detach().reshape(len(output), -1).float()
        if now.chosen is None:
            if now.choose is None:
                raise _EmbeddingReached
            now.chosen = one_or_each(now.choose(now.embedding_BD))


@dataclass
class _LayerHook:
    pool: ExpertPool
    added: ExpertLayer

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return self.pool.layer_ran(layer, self.added, inputs[0], output)


@dataclass
class _EmbeddingHook:
    pool: ExpertPool

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.pool.embedding_ran(output)


def _reached(embedding_BD: Tensor | None) -> Tensor:
    if embedding_BD is None:
        raise ModelError("model.embedding: the module gives out no tensor when the model is run on events")
    return embedding_BD
