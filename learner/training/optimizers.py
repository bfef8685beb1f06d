"""Optimizers by name, with torch's own keyword arguments."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from learner.config import OptimizerSettings

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


_FUSED = {"adamw", "adam", "sgd"}


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer, in its fused form where the device has one.

    Raises:
        SettingsError: an argument that it does not know, or a value that it refuses.
    """
    kind = OPTIMIZERS[settings.name]
    weights = [parameter for parameter in parameters if parameter.requires_grad]
    if not weights:
        raise SettingsError("model.factory: the model has no parameters that require a gradient")
    known = [name for name in inspect.signature(kind).parameters if name != "params"]
    arguments: dict[str, Any] = {"lr": settings.lr, **(settings.model_extra or {})}
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise SettingsError(f"learner.optimizer: {settings.name} has no {unknown[0]!r}; it takes {', '.join(known)}")
    if settings.name == "sgd" and arguments.get("fused") and _in_parts(weights):
        raise SettingsError(
            'learner.optimizer: sgd has no fused form for the weights of learner.sharding = "fsdp"; leave fused out'
        )
    try:
        return kind(weights, **arguments, **_fused(settings.name, weights, arguments))
    except (TypeError, ValueError, RuntimeError) as exc:
        raise SettingsError(f"learner.optimizer: {settings.name} refuses {arguments}: {exc}") from exc


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors, each as `<index of the parameter>.<name>`; its steps change them."""
    return {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def whose(optimizer: torch.optim.Optimizer, tensors: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameter that each of the names which `moments` gives is of, as far as there is one."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    places = {name: int(name.partition(".")[0]) for name in tensors}
    return {name: weights[place] for name, place in places.items() if place < len(weights)}


def numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what it has beside tensors, as JSON values."""
    state = optimizer.state_dict()
    others = {
        str(index): {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {"groups": state["param_groups"], "others": others, "kind": _kind(optimizer)}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Take up what `moments` and `numbers` returned; learning rates and so on stay those of the config.

    Raises:
        ValueError: it is of an optimizer with other parameters, or of another kind.
    """
    if state.get("kind", _kind(optimizer)) != _kind(optimizer):
        raise ValueError(f"the checkpoint is of {state['kind']}, and learner.optimizer is {_kind(optimizer)}")
    found: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in state["others"].items()}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        found.setdefault(int(index), {})[name] = value
    groups = _groups(optimizer)
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state["groups"]]:
        raise ValueError("the optimizer has other parameters")
    optimizer.load_state_dict({"state": found, "param_groups": groups})
    if (inner := getattr(optimizer, "optim", None)) is not None:
        _keep_once(optimizer, inner)


def _keep_once(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Leave what was taken up to the inner optimizer alone, on the devices that its own form wants.

    ZeroRedundancyOptimizer keeps a copy that no step changes, and puts the counts of steps of the inner one on the CPU,
    where fused kernels of CUDA refuse them (pytorch#124133).
    """
    optimizer.state.clear()
    inner.load_state_dict(inner.state_dict())


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Name the optimizer, and those of its arguments that decide what it keeps for each parameter."""
    inner = getattr(optimizer, "optim", optimizer)  # of one whose state lies on many ranks
    keeps = [name for name in ("momentum", "amsgrad", "centered") if optimizer.defaults.get(name)]
    return " with ".join([type(inner).__name__.lower(), *keeps])


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups as `state_dict` has them, which one whose state lies on many ranks cannot give at any time."""
    places = count()
    return [{**group, "params": [next(places) for _ in group["params"]]} for group in optimizer.param_groups]


def _in_parts(weights: Sequence[nn.Parameter]) -> bool:
    """Whether they are DTensors; to ask for the class would be to import it, which takes seconds."""
    return any(hasattr(weight, "device_mesh") for weight in weights)


def _fused(name: str, weights: Sequence[nn.Parameter], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for the fused form where there is one and it is faster, unless the user has said how."""
    if name not in _FUSED or {"fused", "foreach", "differentiable"} & arguments.keys():
        return {}
    if not all(weight.is_floating_point() for weight in weights) or (name == "sgd" and _in_parts(weights)):
        return {}
    kinds = {weight.device.type for weight in weights}
    if kinds == {"cuda"}:
        return {"fused": True}
    # Measured: on a CPU a third of the time for Adam, a fifth off for SGD with momentum, and nothing without.
    return {"fused": True} if kinds == {"cpu"} and (name != "sgd" or arguments.get("momentum")) else {}
