"""Progressive networks: a new column of a small network when the stream changes, connected to the frozen ones."""

import torch
from torch import nn
from typing_extensions import override

from ingest.events.schema import Schema
from learner.config import ModelSettings
from learner.model.growing.column_pool import ColumnPool, leaves_of
from learner.model.growing.layer_survey import survey
from learner.model.growing.parts import make_growing, module_named
from learner.strategies.growing.routed import RoutedParts


class Progressive(RoutedParts):
    """Trains a column next to the frozen model, and freezes it when another one is opened.

    Rusu et al. 2016, "Progressive neural networks". In the paper the task of an event is given; here a router chooses.
    A column has as many parameters as the model, and as many again for each column before it in all layers but the
    first, so it is for small networks.
    """

    def __init__(self, *, most: int = 5, least: int = 1000, shrinkage: float = 1e-4) -> None:
        """Take the most columns, without the frozen model, and the events after which a column may be frozen."""
        super().__init__(most, least, shrinkage)

    @override
    def extend(self, model: nn.Module, settings: ModelSettings, schema: Schema, device: torch.device) -> None:
        leaves_of(model)
        embedding = module_named(model, settings.embedding, "progressive")
        found = survey(model, embedding, schema, device)
        make_growing(model, ColumnPool(model, embedding, found.dim, found.classes, self._most).to(device))
