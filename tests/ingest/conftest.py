"""Schemas that the tests of ingest share."""

import pytest

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings


@pytest.fixture
def schema():
    """Three numbers and a class of three."""
    return make_schema({"x": {"dtype": "float32", "shape": [3]}}, {"name": "y", "classes": 3})


def make_schema(features, label, **extra):
    return Schema(SchemaSettings.model_validate({"features": features, "label": label, **extra}))


@pytest.fixture(name="make_schema")
def _make_schema():
    """`make_schema(features, label, key={"name": ...})`, as in the config file."""
    return make_schema
