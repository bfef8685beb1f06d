"""Optimizers by name, with torch's own keyword arguments."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ingest.errors import SettingsError
from learner.config import OptimizerSettings

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


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
    if all(weight.is_cuda for weight in weights) and not {"fused", "foreach"} & set(arguments):
        arguments["fused"] = True
    try:
        return kind(weights, **arguments)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise SettingsError(f"learner.optimizer: {settings.name} refuses {arguments}: {exc}") from exc
