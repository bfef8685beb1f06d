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


def started_with(monkeypatch: pytest.MonkeyPatch, **stream: Any) -> dict[str, str]:
    """The environment in which a reader starts its process."""
    given: list[dict[str, str]] = []
    actually = subprocess.Popen

    def start(_: list[str], *, env: dict[str, str] | None = None, **options: Any) -> Any:
        given.append(env or dict(os.environ))
        return actually(["sleep", "60"], env=env, **options)

    monkeypatch.setattr(ingest.reader.ingest_process.subprocess, "Popen", start)
    schema = SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}
    )
    settings = StreamSettings.model_validate({"topics": ["a"], **stream}).resolved("test")
    with contextlib.closing(BlockReader(settings, schema, HoldOut(fraction=0, seed=0))) as source:
        source.start()
    (environment,) = given
    return environment


def test_the_process_is_started_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "secret")
    assert "secret" not in started_with(monkeypatch).values()


class TestHeap:
    HISTORY = {"backfill": {"files": ["*.parquet"]}}

    def test_threads_of_a_process_that_reads_files_share_one_heap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert started_with(monkeypatch, **self.HISTORY)["MALLOC_ARENA_MAX"] == "1"

    def test_what_a_user_has_set_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
        assert started_with(monkeypatch, **self.HISTORY)["MALLOC_ARENA_MAX"] == "4"

    def test_those_of_a_process_that_reads_topics_alone_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "MALLOC_ARENA_MAX" not in started_with(monkeypatch)
