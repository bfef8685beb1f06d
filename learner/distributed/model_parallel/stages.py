"""Divides a model into the stages of a pipeline, each a sequence of its modules."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anabranch.core.errors import SettingsError
from learner.model.device import Precision
from learner.model.factory import run_on
from learner.training.step_snapshot import Snapshots

_WAY_OUT = "write the model as modules that run one after the other, each on the output of the one before alone"


class Boundary(NamedTuple):
    """The output of a stage for one event."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stages:
    """The stages of a model.

    Attributes:
        units: the modules of each stage, in the order in which they run.
        outputs: what each stage returns; the last one's is the model's output.
    """

    units: list[list[nn.Module]]
    outputs: list[Boundary]


def divide(model: nn.Module, names: Sequence[str], features: Mapping[str, Tensor], precision: Precision) -> Stages:
    """Divide a model into stages; it is run once in evaluation mode to see that its modules are a sequence.

    Args:
        model: on its device.
        names: of the modules at which a stage begins, except the first.
        features: of a few events.
        precision: of training, which decides the dtype between stages.

    Raises:
        SettingsError: there is no such module, or the modules do not run one after the other.
    """
    units = dict(_units("", model, {name[:end] for name in names for end in _prefixes(name)}))
    for name in names:
        if name not in units:
            raise SettingsError(f'model.stages: the model has no module "{name}", but {", ".join(filter(None, units))}')
    begins = [list(units).index(name) for name in names]
    if any(one >= other for one, other in itertools.pairwise([0, *begins])):
        raise SettingsError(
            f"model.stages = {list(names)}: name modules in the order in which they run, the model's first left out"
        )
    outputs = _run(model, units, features, precision)
    ends = [*begins, len(units)]
    modules = list(units.values())
    stages = [modules[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    _refuse_shared(stages, model)
    return Stages(stages, [outputs[end - 1] for end in ends])


def _prefixes(name: str) -> Iterator[int]:
    """Yield the lengths of the names of the modules that contain a module; 0 is the model."""
    yield 0
    yield from (index for index, letter in enumerate(name) if letter == ".")


def _units(name: str, module: nn.Module, expanded: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that stages are made of: those that run and in which none of the named modules is."""
    if name not in expanded and not isinstance(module, nn.ModuleList):
        yield name, module
        return
    for child, value in module.named_children():
        yield from _units(f"{name}.{child}" if name else child, value, expanded)


class _Trace:
    """What the modules of a sequence took and returned in one pass."""

    def __init__(self, units: Mapping[str, nn.Module], features: Mapping[str, Tensor]) -> None:
        self.names = list(units)
        self.calls: list[str] = []
        self.outputs: list[Any] = []
        self.broken: str | None = None
        """The first module that took something else than the output of the module before."""
        self._features = features
        self._version = 0
        self._hooks = [hook for name, unit in units.items() for hook in self._hooked(name, unit)]

    def close(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def _hooked(self, name: str, unit: nn.Module) -> Iterator[RemovableHandle]:
        yield unit.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
        yield unit.register_forward_hook(partial(self._after, name))

    def _before(self, name: str, _unit: nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self.outputs:
            follows = len(positional) == 1 and not named and positional[0] is self.outputs[-1]
            follows = follows and positional[0]._version == self._version
        elif len(self._features) == 1:
            follows = not named and len(positional) == 1 and positional[0] is next(iter(self._features.values()))
        else:
            follows = not positional and named.keys() == self._features.keys()
            follows = follows and all(value is self._features[key] for key, value in named.items())
        if not follows:
            self.broken = self.broken or name

    def _after(self, name: str, _unit: nn.Module, _given: Any, output: Any) -> None:
        self.calls.append(name)
        self.outputs.append(output)
        self._version = output._version if isinstance(output, Tensor) else 0


def _run(
    model: nn.Module, units: Mapping[str, nn.Module], features: Mapping[str, Tensor], precision: Precision
) -> list[Boundary]:
    """Run the model, and return the output of each of its units."""
    trace, was_training = _Trace(units, features), model.training
    first = next(iter(features.values()))
    device, rows = first.device, len(first)
    try:
        with Snapshots(model, device).taken() as before, torch.no_grad(), precision.autocast(device):
            output = run_on(model.eval(), features)
            before.restore()
    finally:
        model.train(was_training)
        trace.close()
    if trace.calls != trace.names:
        raise SettingsError(
            f"model.stages: the model runs {', '.join(trace.calls) or 'none of its modules'}, which is not "
            f"{', '.join(trace.names)} once and in this order; {_WAY_OUT}"
        )
    if trace.broken is not None:
        raise SettingsError(
            f'model.stages: the module "{trace.broken}" takes something else than the module before it returns; '
            f"{_WAY_OUT}"
        )
    if output is not trace.outputs[-1]:
        raise SettingsError(
            f'model.stages: the model returns something else than its last module, "{trace.names[-1]}"; {_WAY_OUT}'
        )
    for name, value in zip(trace.names, trace.outputs, strict=True):
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != rows:
            raise SettingsError(f'model.stages: the module "{name}" returns no tensor with one row per event')
    return [Boundary(tuple(value.shape[1:]), value.dtype) for value in trace.outputs]


def _refuse_shared(stages: Sequence[Sequence[nn.Module]], model: nn.Module) -> None:
    """Raise SettingsError where two stages share a tensor."""
    names = {id(value): name for name, value in itertools.chain(model.named_parameters(), model.named_buffers())}
    owner: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for unit in stage:
            for value in itertools.chain(unit.parameters(), unit.buffers()):
                if owner.setdefault(id(value), index) != index:
                    raise SettingsError(
                        f"model.stages: the stages {owner[id(value)]} and {index} share {names[id(value)]}; begin no "
                        "stage between the modules that use it"
                    )
