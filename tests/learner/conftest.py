"""A schema and a small model for the tests of the learner, and learners as processes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ingest.config import SchemaSettings
from ingest.schema import Schema
from tests.pipelines import Learner


@pytest.fixture(scope="session")
def schema() -> Schema:
    """Three numbers, one of three classes."""
    return Schema(
        SchemaSettings.model_validate(
            {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
        )
    )


@pytest.fixture
def make_model() -> Callable[[], nn.Module]:
    """The same small classifier, with the same weights, at each call."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., Learner]]:
    """Starts a learner, `start(config, **environment)`, which is killed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def begin(config: Path, **environment: str) -> Learner:
            learner = Learner(config, **environment)
            stack.callback(learner.close)
            return learner

        yield begin
