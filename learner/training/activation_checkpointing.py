"""Activation checkpointing: modules keep only their inputs, and recompute activations in the backward pass.

Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anabranch.core.errors import SettingsError


def checkpoint_activations(model: nn.Module, which: bool | Sequence[str]) -> None:
    """Make modules of the model keep less in training; gradients, weights and names of weights stay the same.

    Args:
        model: changed in place.
        which: names of submodules, or True for the members of the model's outermost `nn.Sequential`.

    Raises:
        SettingsError: there is no such module.
    """
    for module in _chosen(model, which):
        module.__class__ = _checkpointed(type(module))


def _chosen(model: nn.Module, which: bool | Sequence[str]) -> list[nn.Module]:
    if isinstance(which, bool):
        chosen = (
            [child for sequence in sequences(model, nn.Sequential) for child in sequence.children()] if which else []
        )
        if which and not chosen:
            raise SettingsError(
                "learner.activation_checkpointing = true: the model has no nn.Sequential; write a list of names of "
                "its modules"
            )
        return chosen
    modules = dict(model.named_modules())
    for name in which:
        if not name or name not in modules:
            names = ", ".join(filter(None, modules))
            raise SettingsError(f'learner.activation_checkpointing: the model has no module "{name}", but {names}')
    return [modules[name] for name in which]


def sequences(module: nn.Module, kinds: type | UnionType) -> Iterator[nn.Module]:
    """Return the outermost modules of these kinds, whose children run one after the other."""
    if isinstance(module, kinds):
        yield module
    else:
        for child in module.children():
            yield from sequences(child, kinds)


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass: unlike a wrapper it changes no names, and unlike a bound function it can be copied."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **kwargs)
        return checkpoint(
            kind.forward,
            self,
            *args,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), OnCopiesOfBuffers(self)),
            **kwargs,
        )

    return type(kind.__name__, (kind,), {"forward": forward})


class OnCopiesOfBuffers:
    """Binds a module's buffers to copies in its block: a pass there, such as a recomputation, leaves them unchanged.

    Buffers that earlier passes keep for the backward pass are not written. May be entered several times in sequence: a
    retained graph is traversed once per gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the module whose buffers are copied, with those of its children."""
        self._module = module
        self._kept: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._kept = [(module._buffers, dict(module._buffers)) for module in self._module.modules()]
        for owner, buffers in self._kept:
            owner.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for owner, buffers in self._kept:
            owner.update(buffers)
        self._kept = []
