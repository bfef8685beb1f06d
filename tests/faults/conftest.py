"""Learners, ingest and serving of fault tests are forked, but for those of commands that are started as users do."""

import subprocess

import pytest

from tests import forkserver


@pytest.fixture(autouse=True)
def _forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", forkserver.ForkingPopen)
