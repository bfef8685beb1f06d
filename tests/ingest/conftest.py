"""Schemas that the tests of ingest share."""

from typing import Any

import pytest

from ingest.config import SchemaSettings
from ingest.events.schema import Schema


@pytest.fixture
def schema() -> Schema:
    """Three numbers and a class of three."""
    return make_schema({"x": {"dtype": "float32", "shape": [3]}}, {"name": "y", "classes": 3})


def make_schema(features: dict[str, Any], label: dict[str, Any], **extra: Any) -> Schema:
    return Schema(SchemaSettings.model_validate({"features": features, "label": label, **extra}))


@pytest.fixture(name="make_schema")
def _make_schema() -> Any:
    """`make_schema(features, label, key={"name": ...})`, as in the config file."""
    return make_schema
