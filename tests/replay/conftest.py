"""A schema and stores for the tests of replay."""

from collections.abc import Callable

import pytest
import torch

from ingest.config import SchemaSettings
from ingest.schema import Schema
from replay.config import ReplaySettings
from replay.store import Store, build_store


@pytest.fixture(scope="session")
def schema() -> Schema:
    return Schema(
        SchemaSettings.model_validate(
            {
                "features": {"x": {"dtype": "float32", "shape": [2]}, "n": {"dtype": "int16"}},
                "label": {"name": "y", "classes": 4},
                "weight": {"name": "w"},
            }
        )
    )


@pytest.fixture
def make_store(schema: Schema) -> Callable[..., Store]:
    """`make_store(capacity, seed=0)` on the CPU."""

    def make(capacity: int, seed: int = 0) -> Store:
        return build_store(ReplaySettings(capacity=capacity), schema, torch.device("cpu"), seed)

    return make
