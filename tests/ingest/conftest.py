"""Schemas that the tests of ingest share, and ingest processes that cost no imports."""

import subprocess
from typing import Any

import pytest

from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from tests import forkserver


@pytest.fixture(autouse=True)
def _fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts of ingest is forked."""
    monkeypatch.setattr(subprocess, "Popen", forkserver.ForkingPopen)


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
