"""The contract of a model converter: whatever changes a model between its factory and its first step attaches here.

`learner.model.factory.converters` lists those of the settings in their order, from the factory to the checks at start;
after these comes the strategy, whose model may grow; then those of a trainer: recomputation, ranks, the compiler.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.learner.settings.strategies import StrategySettings


@dataclass(frozen=True)
class ModelContext:
    """What a model is converted for.

    Attributes:
        device: on which it runs.
        schema: of its events; None where the model takes what its own `forward` does.
        embedding: `model.embedding`.
    """

    device: torch.device
    schema: Schema | None = None
    embedding: str = ""


class ModelConverter:
    """Changes a model: it gets its settings when it is constructed, and never sees the trainer."""

    def convert(self, model: nn.Module, _context: ModelContext, /) -> nn.Module:
        """Return the converted model, which may be the same object; names of weights stay, or are added to.

        Raises:
            SettingsError: the settings do not fit the model, or a package is not installed.
        """
        return model

    def check(self, model: nn.Module, strategy: StrategySettings) -> None:
        """Check what this has made, once the strategy has converted the model too.

        Raises:
            ModelError: the strategy takes it out again.
        """


def convert(model: nn.Module, converters: Iterable[ModelConverter], context: ModelContext) -> nn.Module:
    """Return a model after all converters, in their order."""
    for each in converters:
        model = each.convert(model, context)
    return model
