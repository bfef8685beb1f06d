"""Processes of ingest are not given the settings of others."""

import contextlib
import os
import subprocess
from typing import Any

import pytest

import ingest.reader.ingest_process
from ingest.child_environment import without_settings
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.reader.reader import BlockReader


def test_variables_of_settings_are_left_out_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "secret")
    monkeypatch.setenv("SSL_CERT_FILE", "ca.pem")
    found = without_settings()
    assert found["SSL_CERT_FILE"] == "ca.pem"
    assert "secret" not in found.values()


def test_the_process_is_started_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []
    actually = subprocess.Popen

    def start(_: list[str], *, env: dict[str, str] | None = None, **options: Any) -> Any:
        given.append(env or dict(os.environ))
        return actually(["sleep", "60"], env=env, **options)

    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "secret")
    monkeypatch.setattr(ingest.reader.ingest_process.subprocess, "Popen", start)
    schema = SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}
    )
    with contextlib.closing(
        BlockReader(StreamSettings(topics=["a"]).resolved("test"), schema, HoldOut(fraction=0, seed=0))
    ) as source:
        source.start()
    assert ["secret" in environment.values() for environment in given] == [False]
