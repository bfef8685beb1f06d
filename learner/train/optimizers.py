"""Optimizers by name, with torch's own keyword arguments.

`torch.distributed.checkpoint.state_dict` does not fit: it requires ZeroRedundancyOptimizer to gather all state on every
rank first, and restores the learning rate of the checkpoint instead of that of the config.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.core.users_code import in_one_line, name_of
from anabranch.learner.settings.learner import OPTIMIZER, OptimizerSettings

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
        SettingsError: it has no such argument, or refuses a value.
    """
    kind = OPTIMIZERS[settings.name] if settings.name in OPTIMIZERS else OPTIMIZER.find(settings.name)
    weights = [parameter for parameter in parameters if parameter.requires_grad]
    if not weights:
        raise SettingsError("model.factory: the model has no parameters that require a gradient")
    names = [name for name in inspect.signature(kind).parameters if name != "params"]
    arguments: dict[str, Any] = {"lr": settings.lr, **(settings.model_extra or {})}
    unknown = sorted(set(arguments) - set(names))
    if unknown:
        raise SettingsError(f"learner.optimizer: {settings.name} has no {unknown[0]!r}; it takes {', '.join(names)}")
    try:
        return kind(weights, **arguments, **_fused(settings.name, weights, arguments))
    except (TypeError, ValueError, RuntimeError) as exc:
        raise SettingsError(f"learner.optimizer: {settings.name} refuses {arguments}: {exc}") from exc
    except Exception as exc:
        raise SettingsError(f"learner.optimizer: {settings.name} fails with {arguments}: {in_one_line(exc)}") from exc


class FusedAdam:
    """Steps of torch's fused Adam, bit for bit, without what torch looks up again in each: three quarters of the time
    for a small model on a CPU. Keeps no state: that of the optimizer changes."""

    def __init__(self, optimizer: torch.optim.Adam) -> None:
        """Take an optimizer for which `of` returns one."""
        self._optimizer = optimizer
        self._weights: list[Tensor] = optimizer.param_groups[0]["params"]
        decoupled = optimizer.defaults["decoupled_weight_decay"]
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self._first: dict[str, Tensor] | None = None
        """The state of the first weight, by whose identity it shows that all were replaced."""
        self._moments: tuple[list[Tensor], ...] = ()
        """Means, means of squares, and steps."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "FusedAdam | None":
        """Return one for a fused Adam or AdamW with a group of weights of one dtype on one device; None for others."""
        # Not of a class of the user, which may take steps in another way.
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not isinstance(optimizer, torch.optim.Adam):
            return None
        if len(optimizer.param_groups) != 1:
            return None
        (group,) = optimizer.param_groups
        kinds = {(weight.dtype, weight.device) for weight in group["params"]}
        plain = not (group["amsgrad"] or group["capturable"] or group["differentiable"])
        numbers = all(isinstance(value, float) for value in (group["lr"], *group["betas"]))
        return cls(optimizer) if group["fused"] and plain and numbers and len(kinds) == 1 else None

    def step(self, skip: Tensor | None = None) -> bool:
        """Take a step, unless `skip`, a scalar on the device, is 1 instead of 0.

        Returns:
            False, and nothing has changed, where a weight has no gradient, or no state yet: `Optimizer.step` has to be
            called.
        """
        gradients = [gradient for weight in self._weights if (gradient := weight.grad) is not None]
        if len(gradients) < len(self._weights) or not self._has_found_moments():
            return False
        (group,), (means, squares, steps) = self._optimizer.param_groups, self._moments
        with torch.no_grad():
            torch._foreach_add_(steps, 1)
            self._kernel(
                self._weights,
                gradients,
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
                grad_scale=None,
                found_inf=skip,
            )
            if skip is not None:
                torch._foreach_sub_(steps, [skip] * len(steps))
        return True

    def _has_found_moments(self) -> bool:
        """Return whether all weights have their state, which `_moments` then has."""
        state = self._optimizer.state
        first = state.get(self._weights[0])
        if first is None or first is not self._first:
            states = [state[weight] for weight in self._weights if weight in state]
            if len(states) < len(self._weights) or not all(states):
                return False
            names = "exp_avg", "exp_avg_sq", "step"
            self._first, self._moments = first, tuple([each[name] for each in states] for name in names)
        return True


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors, each as `<index of the parameter>.<name>`; its steps change them.

    Parameters without elements have none: in a pipeline they are those of other ranks.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor) and weights[index].numel()
    }


def param_of(weights: Sequence[Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return which of an optimizer's weights each name that `state_tensors` gives belongs to, if there is one."""
    indices = {name: int(name.partition(".")[0]) for name in names}
    return {name: weights[index] for name, index in indices.items() if index < len(weights)}


def state_scalars(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state besides tensors, as JSON values."""
    state = optimizer.state_dict()
    others = {
        str(index): {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {"groups": state["param_groups"], "others": others, "kind": _kind(optimizer)}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore the state from `state_tensors` and `state_scalars`; learning rates and so on stay those of the config.

    Raises:
        ValueError: the state is of an optimizer with other parameters, or of another class.
    """
    if state["kind"] != _kind(optimizer):
        raise ValueError(f"the checkpoint is of {state['kind']}, and learner.optimizer is {_kind(optimizer)}")
    restored: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in state["others"].items()}
    weights = param_of([weight for group in optimizer.param_groups for weight in group["params"]], tensors)
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        restored.setdefault(int(index), {})[name] = _in_format_of(weights.get(key), value)
    groups = _groups(optimizer)
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state["groups"]]:
        raise ValueError("the optimizer has other parameters")
    optimizer.load_state_dict({"state": restored, "param_groups": groups})
    if (inner := getattr(optimizer, "optim", None)) is not None:
        _keep_once(optimizer, inner)


def _in_format_of(weight: Tensor | None, value: Tensor) -> Tensor:
    """Return a value of the optimizer's state in the memory format of its weight, which fused optimizers require.

    It differs from that of a file for weights in `torch.channels_last`.
    """
    if weight is None or weight.shape != value.shape or weight.is_contiguous():
        return value
    return torch.empty_like(weight, dtype=value.dtype, requires_grad=False).copy_(value)


def _keep_once(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Keep the restored state in the inner optimizer alone, on the devices that it requires.

    ZeroRedundancyOptimizer keeps an unused copy, and moves the inner optimizer's step counts to the CPU, where fused
    CUDA kernels refuse them (pytorch#124133).
    """
    optimizer.state.clear()
    inner.load_state_dict(inner.state_dict())


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's name, with the arguments that decide which state it keeps per parameter."""
    inner = getattr(optimizer, "optim", optimizer)  # of one whose state is sharded over ranks
    keeps = [name for name in ("momentum", "amsgrad", "centered") if optimizer.defaults.get(name)]
    name = name_of(type(inner))
    return " with ".join([name if ":" in name else name.lower(), *keeps])


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups as in `state_dict`, which an optimizer with sharded state cannot give at any time."""
    indices = count()
    return [{**group, "params": [next(indices) for _ in group["params"]]} for group in optimizer.param_groups]


def _fused(name: str, weights: Sequence[nn.Parameter], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fused=True` where the fused form exists and is faster, unless the user has set it."""
    if name not in _FUSED or {"fused", "foreach", "differentiable"} & arguments.keys():
        return {}
    if not all(weight.is_floating_point() for weight in weights):
        return {}
    kinds = {weight.device.type for weight in weights}
    if kinds == {"cuda"}:
        return {"fused": True}
    # Measured: on a CPU a third of the time for Adam, a fifth off for SGD with momentum, and nothing without.
    return {"fused": True} if kinds == {"cpu"} and (name != "sgd" or arguments.get("momentum")) else {}
