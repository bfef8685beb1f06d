"""What the trainer changes in a model: modules that recompute their activations, and `learner.compile`.

Activation checkpointing: modules keep only their inputs, and recompute activations in the backward pass (Chen et al.
2016, "Training deep nets with sublinear memory cost"). The compiler is torch's; where it fails, the module runs as it
is.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.model.converter import ModelContext, ModelConverter
from anabranch.learner.model.device import Precision
from anabranch.learner.model.factory import forward, sample
from anabranch.learner.train.parallelism import Ranks
from anabranch.learner.train.step_snapshot import Snapshots

BACKEND = "inductor"
_ROWS = (8, 12)
"""Two batch sizes: with the second the compiler makes the size dynamic, and does not compile again."""

log = logging.getLogger(__name__)


class Recomputation(ModelConverter):
    """Makes modules of a model keep less in training, in place; gradients, weights and their names stay the same."""

    def __init__(self, which: bool | Sequence[str]) -> None:
        """Take names of submodules, or True for the members of the model's outermost `nn.Sequential`."""
        self._which = which

    @override
    def convert(self, model: nn.Module, _context: ModelContext) -> nn.Module:
        for module in _chosen(model, self._which):
            module.__class__ = _checkpointed(type(module))
        return model


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


class Compilation(ModelConverter):
    """Compiles a module for training, where `learner.compile` is set, and tries it before the first step."""

    def __init__(self, precision: Precision, ranks: Ranks, *, enabled: bool) -> None:
        self._precision, self._ranks, self._enabled = precision, ranks, enabled

    @override
    def convert(self, module: nn.Module, context: ModelContext) -> nn.Module:
        """Return the compiled module, after a trial on a few events of zeros; its weights, buffers and generators are
        unchanged.

        Where the trial fails on any rank, a warning is logged, and the module is returned on all of them. Later
        compilations, for new shapes, fall back by themselves.
        """
        if not self._enabled:
            return module
        assert context.schema is not None
        device = context.device
        failed = torch.zeros((), dtype=torch.bool, device=device)
        fast = cast("nn.Module", torch.compile(module, backend=BACKEND))
        with Snapshots(module, device).taken() as before:
            try:
                for rows in _ROWS:
                    # Without averaging: if it failed on one rank, the others would wait for its gradient.
                    with self._ranks.no_sync():
                        with self._precision.autocast(device):
                            output = forward(fast, sample(context.schema, rows, device))
                        output.float().sum().backward()  # type: ignore[no-untyped-call]
            except Exception as exc:  # noqa: BLE001 the compiler runs other programs, which may raise anything
                why = " ".join(str(exc).split())
                log.warning("learner.compile: compiling fails, and the model runs as it is: %s", why)
                failed.fill_(True)
            for weight in module.parameters():
                weight.grad = None
            before.restore()
        if self._ranks.any(failed).item():
            return module
        torch._dynamo.config.suppress_errors = True
        return fast
