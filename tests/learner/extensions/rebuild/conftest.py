"""Fixtures of rebuilds: an audited pipeline, and a process that is left as it was."""

import os
import subprocess
import sys

import pytest
import torch

from tests import forkserver
from tests.learner.extensions.rebuild.audited import Audited


@pytest.fixture(autouse=True)
def forked_ingest(monkeypatch):
    """Fork ingest processes, which saves the second that each takes to import its modules."""

    def start(command, **options):
        assert command[:2] == [sys.executable, "-P"]
        return forkserver.start(command[2:], **options)

    class Processes:
        Popen, DEVNULL, TimeoutExpired = staticmethod(start), subprocess.DEVNULL, subprocess.TimeoutExpired

    monkeypatch.setattr("anabranch.ingest.reader.ingest_process.subprocess", Processes)


@pytest.fixture(autouse=True)
def as_before():
    """Put back what a deterministic learner sets for its process."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    path, variable = list(sys.path), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    sys.path[:] = path
    sys.modules.pop("audited_model", None)
    if variable is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.fixture
def audited(kafka, make_topic, tmp_path):
    """A pipeline over an empty topic of two partitions."""
    return Audited(tmp_path, kafka.bootstrap, make_topic(partitions=2))
