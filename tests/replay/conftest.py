"""A schema and stores for the tests of replay."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ingest.config import SchemaSettings
from ingest.schema import Schema
from replay.build import build_store
from replay.config import ReplaySettings
from replay.contents import Contents
from replay.store import Store


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


@pytest.fixture(params=["device", "disk", "disk with a small cache"])
def make_store(schema: Schema, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Store]]:
    """`make_store(capacity, seed=0, contents=None)` on the CPU, once for each arrangement of tiers."""
    stores: list[Store] = []

    def make(capacity: int, seed: int = 0, contents: Contents | None = None) -> Store:
        options = {"device": {}, "disk": {"disk": {"bytes": "20MB"}}}.get(request.param)
        if options is None:
            options = {"disk": {"bytes": "20MB"}, "device_bytes": "1kB"}
        settings = ReplaySettings.model_validate({"capacity": capacity, **options})
        # One folder for all: files of the disk tier never get in each other's way.
        stores.append(build_store(settings, schema, torch.device("cpu"), seed, tmp_path / "replay", contents))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
