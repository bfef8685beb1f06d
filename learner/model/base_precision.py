"""Layers whose frozen weights are stored in fewer bits: `model.adapter.base_precision`.

A layer computes in the dtype of its input, or in that of autocast, so that its neighbours need not have its precision.
NF4: Dettmers et al. 2023, "QLoRA", by bitsandbytes: 16 levels, and a float32 scale for each block of 64 weights. Scales
are not quantized a second time: that needs their mean, and a sum depends on the number of threads.

Weights are quantized on the CPU. They and the scales are plain frozen parameters, which every copy and file keeps.

Legend: B rows of input, F features, O outputs, P bytes of two weights each, S scales.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.core.extras import needs
from anabranch.learner.errors import ModelError

BasePrecision = Literal["bf16", "nf4"]
_BLOCK = 64
"""Weights with a common scale."""
_NF4 = "nf4"


def store_frozen(model: nn.Module, precision: BasePrecision) -> None:
    """Replace the layers of a model on the CPU, all of whose weights are frozen, by layers that store fewer bits.

    Biases, normalization layers and layers of unknown classes keep float32. Layers that had one weight still do, where
    both are stored in the same precision.

    Raises:
        SettingsError: bitsandbytes is not installed.
        ModelError: a weight is not finite.
    """
    if precision == "nf4":
        load_bitsandbytes()
    new: dict[nn.Module, nn.Module] = {}
    parts: dict[tuple[int, str], Any] = {}
    layers = list(_frozen_layers(model))  # which keeps their weights, and so the ids of these
    for parent, name, layer in layers:
        if layer not in new:
            new[layer] = stored(layer, precision)
            _share_weight(new[layer], parts, id(layer.weight))
        setattr(parent, name, new[layer])


def _share_weight(layer: nn.Module, parts: dict[tuple[int, str], Any], weight: int) -> None:
    """Let a layer have what stores the weight of an earlier one that was made of the same weight, which has this id."""
    name = "nf4" if isinstance(layer, Nf4Linear | Nf4Embedding) else "weight"
    if name == "nf4" or isinstance(layer, tuple(_ROUNDED.values())):
        setattr(layer, name, parts.setdefault((weight, name), getattr(layer, name)))


def stored(layer: nn.Module, precision: BasePrecision) -> nn.Module:
    """Return the layer that stores the weights of `layer`; the layer itself where there is none for its class."""
    if precision == "nf4" and type(layer) is nn.Linear and layer.in_features % 2 == 0:
        return Nf4Linear(layer)
    if precision == "nf4" and type(layer) is nn.Embedding and layer.embedding_dim % _BLOCK == 0:
        return Nf4Embedding(layer)
    kind = _ROUNDED.get(type(layer))
    if kind is None or not isinstance(layer.weight, Tensor):
        return layer
    rounded = copy.copy(layer)
    rounded.__class__ = kind
    rounded._parameters = dict(layer._parameters)
    rounded.weight = _frozen(layer.weight.detach().to(torch.bfloat16))
    return rounded


def load_bitsandbytes() -> None:
    """Import bitsandbytes; raises SettingsError where it is not installed."""
    stay_offline()
    with needs('model.adapter.base_precision = "nf4"', "bitsandbytes", "nf4", 'write "bf16"'):
        import bitsandbytes  # noqa: F401


def stay_offline() -> None:
    """Let nothing be fetched from the hub; call it before transformers, peft or bitsandbytes is imported.

    bitsandbytes, which peft imports too, fetches and runs kernels on some CPUs if the package `kernels` is installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"


class Nf4Weight(nn.Module):
    """A matrix in NF4."""

    def __init__(self, weight_OF: Tensor) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__()
        if not bool(torch.isfinite(weight_OF).all()):
            raise ModelError('model.adapter.base_precision = "nf4": a frozen weight is not finite')
        packed, state = quantize_4bit(
            weight_OF.detach().float().contiguous(), blocksize=_BLOCK, compress_statistics=False, quant_type=_NF4
        )
        self.shape = tuple(weight_OF.shape)
        self.packed_P = _frozen(packed.reshape(-1))
        self.scales_S = _frozen(state.absmax)

    def rows(self, rows_B: Tensor) -> Tensor:
        """Return some rows, float32 `[B, F]`; blocks must not span rows."""
        packed = self.packed_P.view(self.shape[0], -1)[rows_B]
        return _values(packed, self.scales_S.view(self.shape[0], -1)[rows_B], (len(rows_B), self.shape[1]))

    def times(self, input_BF: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return the product `[B, O]` in the dtype of the input; gradients pass to the input alone."""
        from bitsandbytes.autograd._functions import matmul_4bit

        state = _state(self.scales_S, self.shape, input_BF.dtype)
        bias_O = None if bias_O is None else bias_O.to(input_BF.dtype)
        product: Tensor = matmul_4bit(input_BF, self.packed_P, state, bias=bias_O)
        return product

    @property
    def full(self) -> Tensor:
        """The matrix in float32 `[O, F]`."""
        return _values(self.packed_P, self.scales_S, self.shape)


class Nf4Linear(nn.Module):
    """A frozen `nn.Linear` in NF4."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.nf4 = Nf4Weight(layer.weight)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weights, for code that reads them."""
        return self.nf4.full

    def forward(self, input_BF: Tensor) -> Tensor:
        """Return the layer's output `[B, O]`."""
        return self.nf4.times(_as_autocast(input_BF), self.bias)


class Nf4Embedding(nn.Module):
    """A frozen `nn.Embedding` in NF4, of which only the rows of a batch are read."""

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx = layer.padding_idx
        self.nf4 = Nf4Weight(layer.weight)

    @property
    def weight(self) -> Tensor:
        """The weights, for code that reads them."""
        return self.nf4.full

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows of the indices, float32 `[..., F]`."""
        return self.nf4.rows(index.reshape(-1)).reshape(*index.shape, self.embedding_dim)


class RoundedLinear(nn.Linear):
    """A frozen `nn.Linear` in bfloat16."""

    def forward(self, input_BF: Tensor) -> Tensor:
        """Return the layer's output `[B, O]`."""
        return functional.linear(input_BF, _for(input_BF, self.weight), self.bias)


class RoundedEmbedding(nn.Embedding):
    """A frozen `nn.Embedding` in bfloat16."""

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows of the indices, float32 `[..., F]`."""
        return super().forward(index).float()


class _RoundedConv(nn.modules.conv._ConvNd):
    """A frozen convolution in bfloat16."""

    def _conv_forward(self, pixels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = super()._conv_forward(pixels, _for(pixels, weight), bias)
        return output


class RoundedConv1d(_RoundedConv, nn.Conv1d):
    """A frozen `nn.Conv1d` in bfloat16."""


class RoundedConv2d(_RoundedConv, nn.Conv2d):
    """A frozen `nn.Conv2d` in bfloat16."""


class RoundedConv3d(_RoundedConv, nn.Conv3d):
    """A frozen `nn.Conv3d` in bfloat16."""


_ROUNDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RoundedLinear,
    nn.Embedding: RoundedEmbedding,
    nn.Conv1d: RoundedConv1d,
    nn.Conv2d: RoundedConv2d,
    nn.Conv3d: RoundedConv3d,
}


def _frozen_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each frozen layer with its parent and its name in it."""
    for parent in model.modules():
        for name, layer in parent._modules.items():  # `named_children` leaves out a layer's second name
            if layer is not None and type(layer) in _ROUNDED and _is_plain(layer):
                yield parent, name, layer


def _is_plain(layer: nn.Module) -> bool:
    """Return whether all weights of a layer are frozen, and nothing but its class says how they are used."""
    weights = dict(layer.named_parameters(recurse=False))
    return (
        "weight" in weights
        and not weights.keys() - {"weight", "bias"}
        and not any(value.requires_grad for value in weights.values())
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and getattr(layer, "max_norm", None) is None
    )


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _values(packed: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return weights in float32 from their bytes and scales, in the same order."""
    from bitsandbytes.functional import dequantize_4bit

    values: Tensor = dequantize_4bit(packed.reshape(-1, 1), _state(scales.reshape(-1), shape, torch.float32))
    return values


def _state(scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return what bitsandbytes has to be given with the bytes of a matrix."""
    from bitsandbytes.functional import QuantState

    return QuantState(  # type: ignore[no-untyped-call]
        scales, shape=torch.Size(shape), blocksize=_BLOCK, quant_type=_NF4, dtype=dtype
    )


def _for(features: Tensor, weight: Tensor) -> Tensor:
    """Return a weight in the dtype of a layer's input; autocast converts both itself."""
    return weight if torch.is_autocast_enabled(features.device.type) else weight.to(features.dtype)


def _as_autocast(features: Tensor) -> Tensor:
    """Return a layer's input in the dtype that autocast has for matrix products."""
    device = features.device.type
    return features.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else features
