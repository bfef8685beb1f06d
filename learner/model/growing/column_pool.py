"""Columns of a progressive network: copies of a small network, each with connections from all columns before it.

Rusu et al. 2016, "Progressive neural networks", with linear lateral connections. The frozen module is the first column.

Legend: B events, D dimensions of an embedding, F frozen columns, K columns before one, N rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from anabranch.learner.errors import ModelError
from anabranch.learner.model.embedding import embedding_of
from anabranch.learner.model.growing.pool import Chosen, Pool, Run, fixed


class ColumnLayer(nn.Module):
    """The weights of all columns in one layer: `[outputs, inputs]`, a bias, and one matrix for each column before."""

    weight: nn.Parameter
    bias: nn.Parameter
    lateral: nn.Parameter
    """Of all frozen columns, one after the other: of the first 1 matrix, of the second 2, and so on."""
    open_weight: nn.Parameter
    open_bias: nn.Parameter
    open_lateral: nn.Parameter
    """`[most, outputs, inputs]`; those of columns that there are not yet get no gradient but 0."""

    def __init__(self, layer: nn.Linear, *, most: int, connected: bool) -> None:
        """Take the layer of the first column, and whether columns are connected, which they are not in the input."""
        super().__init__()
        outputs, inputs, device = layer.out_features, layer.in_features, layer.weight.device
        sizes = {"weight": (outputs, inputs), "bias": (outputs,), "lateral": (outputs, inputs)}
        for name, size in sizes.items():
            laterals = (most * connected,) if name == "lateral" else ()
            self.register_parameter(f"open_{name}", nn.Parameter(torch.zeros(*laterals, *size, device=device)))
            self.register_parameter(name, fixed(torch.zeros(0, *size, device=device)))
        self.open_lateral.requires_grad_(connected)
        self._connected = connected
        self.start(0)

    @torch.no_grad()
    def start(self, column: int) -> None:
        """Give the open column the random weights of a new layer, which are the same on all ranks."""
        generator = torch.Generator().manual_seed(column)
        bound = 1 / math.sqrt(self.open_weight.shape[1])
        for opened in (self.open_weight, self.open_bias):
            opened.copy_(torch.rand(opened.shape, generator=generator) * 2 * bound - bound)
        self.open_lateral.zero_()

    def freeze_open(self) -> None:
        """Keep the open column among the frozen ones, and start another."""
        columns = len(self.weight) + 1
        for frozen, opened in ((self.weight, self.open_weight), (self.bias, self.open_bias)):
            frozen.data = torch.cat([frozen, opened.detach()[None]])
        self.lateral.data = torch.cat([self.lateral, self.open_lateral.detach()[:columns]])
        self.start(columns)

    def resize(self, frozen: int) -> None:
        """Make room for as many frozen columns."""
        laterals = frozen * (frozen + 1) // 2 * self._connected
        for each, size in ((self.weight, frozen), (self.bias, frozen), (self.lateral, laterals)):
            each.data = each.new_zeros(size, *each.shape[1:])

    def run(self, column: int, own_N: Tensor, before_KN: Sequence[Tensor]) -> Tensor:
        """Return the output of a column, from its input and those of the columns before it."""
        if column == len(self.weight):
            weight, bias, lateral_K = self.open_weight, self.open_bias, self.open_lateral
        else:
            first = column * (column + 1) // 2
            weight, bias, lateral_K = self.weight[column], self.bias[column], self.lateral[first:]  # type: ignore[assignment]
        dtype = own_N.dtype
        output_N = functional.linear(own_N, weight.to(dtype), bias.to(dtype))
        if not self._connected:
            return output_N
        for x_N, lateral in zip(before_KN, lateral_K, strict=False):
            output_N = output_N + functional.linear(x_N, lateral.to(dtype))
        return output_N


class ColumnPool(Pool):
    """Columns next to an `nn.Sequential` of linear layers and modules without parameters."""

    def __init__(self, model: nn.Module, embedding: nn.Module, dim: int, classes: int, most: int) -> None:
        """Take the model, and its module whose output is the embedding.

        Raises:
            ModelError: it is no such `nn.Sequential`.
        """
        super().__init__(dim, classes, most)
        leaves = leaves_of(model)
        first = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, nn.Linear))
        self._leaves = leaves[first:]
        self._inputs: list[Tensor] | None = None
        """Of the linear layers of the first column in this pass."""
        self._embedding: Tensor | None = None
        linear = [leaf for leaf in self._leaves if isinstance(leaf, nn.Linear)]
        self.layers = nn.ModuleList(
            ColumnLayer(layer, most=most, connected=index > 0) for index, layer in enumerate(linear)
        )
        for layer in linear:
            layer.register_forward_pre_hook(self._layer_runs)
        embedding.register_forward_hook(self._embedding_ran)

    @override
    def _train_pass(self, run: Run, rows: int) -> tuple[Tensor, Tensor]:
        inputs, embedding_BD = self._base(run)
        return self._column(inputs, self.size - 1), embedding_BD

    @override
    def _routed_pass(self, run: Run, rows: int, choose: Callable[[Tensor], Chosen]) -> Tensor:
        inputs, embedding_BD = self._base(run)
        chosen_B = choose(embedding_BD)
        if isinstance(chosen_B, int):
            return self._column(inputs, chosen_B)
        output = embedding_BD.new_empty(rows, self.shift.shape[1])
        for column in torch.unique(chosen_B).tolist():
            which = (chosen_B == column).nonzero()[:, 0]
            output[which] = self._column([each[which] for each in inputs], column).to(output.dtype)
        return output

    @override
    def _layers(self) -> list[ColumnLayer]:
        return [each for each in self.layers if isinstance(each, ColumnLayer)]

    def _base(self, run: Run) -> tuple[list[Tensor], Tensor]:
        """Run the first column; return the inputs of its linear layers, and the embedding."""
        inputs = self._inputs = []
        try:
            with torch.no_grad():
                run()
        finally:
            self._inputs = None
        assert self._embedding is not None
        embedding_BD, self._embedding = self._embedding, None
        return inputs, embedding_BD

    def _column(self, inputs: Sequence[Tensor], column: int) -> Tensor:
        """Run the columns up to one, layer by layer; return its output."""
        layers, own = iter(zip(self._layers(), inputs, strict=True)), [inputs[0]] * (column + 1)
        for leaf in self._leaves:
            if isinstance(leaf, nn.Linear):
                layer, base_N = next(layers)
                own = [layer.run(index, x_N, [base_N, *own[:index]]) for index, x_N in enumerate(own)]
            else:
                own = [leaf(x_N) for x_N in own]
        return own[column]

    def _layer_runs(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._inputs is not None:
            self._inputs.append(inputs[0])

    def _embedding_ran(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self._inputs is not None:
            self._embedding = embedding_of(output)


def leaves_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model runs one after the other.

    Raises:
        ModelError: it is no `nn.Sequential` of linear layers and modules without parameters.
    """
    if type(model) is nn.Sequential:
        leaves = [
            leaf for child in model for leaf in ([child] if type(child) is not nn.Sequential else leaves_of(child))
        ]
        other = next((leaf for leaf in leaves if type(leaf) is not nn.Linear and any(leaf.state_dict())), None)
        if other is None and any(type(leaf) is nn.Linear for leaf in leaves):
            return leaves
        found = "has no linear layer" if other is None else f"has a {type(other).__name__}"
    else:
        found = f"is a {type(model).__name__}"
    raise ModelError(
        'learner.strategy = "progressive" connects columns of an nn.Sequential of linear layers and modules without '
        f'parameters, and the model {found}; take "experts", which adds to any model'
    )
