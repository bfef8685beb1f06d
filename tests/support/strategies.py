"""Strategies for the small models of tests."""

from typing import Any

import torch
from torch import nn

from ingest.events.schema import Schema
from learner.config import ModelSettings
from learner.strategies.base import Strategy
from learner.strategies.registry import STRATEGIES

CPU = torch.device("cpu")


def small_strategy(name: str, **arguments: Any) -> Strategy:
    """Return a strategy; the head of an expert is most of a small model."""
    return STRATEGIES[name](**({"size": 10.0} if name == "experts" else {}), **arguments)


def extended(
    strategy: Strategy, model: nn.Module, schema: Schema, device: torch.device = CPU, embedding: str = "0"
) -> Strategy:
    """Let a strategy add to a model what it trains, as building a learner does; return the strategy."""
    settings = ModelSettings(factory="my_model:build", embedding=embedding)
    strategy.extend(model.to(device), settings, schema, device)
    return strategy
