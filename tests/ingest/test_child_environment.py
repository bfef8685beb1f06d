"""Processes of ingest are not given the settings of others."""

import contextlib
import os
import platform
import subprocess
import sys

import pytest

import anabranch.ingest.reader.ingest_process
from anabranch.ingest.reader.ingest_process import without_settings
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings


def test_variables_of_settings_are_left_out_and_others_stay(monkeypatch):
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "secret")
    monkeypatch.setenv("SSL_CERT_FILE", "ca.pem")
    found = without_settings()
    assert found["SSL_CERT_FILE"] == "ca.pem"
    assert "secret" not in found.values()


def started_with(monkeypatch, **stream):
    """The environment in which a reader starts its process."""
    given: list[dict[str, str]] = []
    actually = subprocess.Popen

    def start(_, *, env=None, **options):
        given.append(env or dict(os.environ))
        return actually(["sleep", "60"], env=env, **options)

    monkeypatch.setattr(anabranch.ingest.reader.ingest_process.subprocess, "Popen", start)
    schema = SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}
    )
    settings = StreamSettings.model_validate({"topics": ["a"], **stream}).resolved("test")
    with contextlib.closing(BlockReader(settings, schema, HoldOut(fraction=0, seed=0))) as source:
        source.start()
    (environment,) = given
    return environment


def test_the_process_is_started_without_them(monkeypatch):
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "secret")
    assert "secret" not in started_with(monkeypatch).values()


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "ARROW_DEFAULT_MEMORY_POOL"])
class TestHeap:
    HISTORY = {"backfill": {"files": ["*.parquet"]}}

    def test_threads_of_a_process_that_reads_files_share_one_heap(self, monkeypatch, name):
        assert started_with(monkeypatch, **self.HISTORY)[name] in ("1", "system")

    def test_what_a_user_has_set_stays(self, monkeypatch, name):
        monkeypatch.setenv(name, "4")
        assert started_with(monkeypatch, **self.HISTORY)[name] == "4"

    def test_those_of_a_process_that_reads_topics_alone_do_not(self, monkeypatch, name):
        assert name not in started_with(monkeypatch)


_ARRAYS_THAT_COME_AND_GO = """
import resource
import numpy as np

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(20):
    before = faults()
    arrays = [np.ones(3 << 20, np.uint8) for _ in range(8)]
    del arrays
print(faults() - before)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are those of glibc")
def test_memory_of_arrays_is_kept_for_the_next_ones():
    """Without the variables, each of the 6,144 pages is returned to the system, and cleared by it again."""
    command = [sys.executable, "-c", _ARRAYS_THAT_COME_AND_GO]
    found = subprocess.run(command, env=without_settings(reads_files=True), capture_output=True, text=True, check=True)
    assert int(found.stdout) < 600
