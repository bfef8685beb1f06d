"""Commands of a pipeline whose checkpoints and versions are in an object store."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.commands.erase import erase_events
from anabranch.config.loader import load_config
from anabranch.core.object_store.bucket import Bucket
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.opening import lease_storage
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.versions.format import Verdict, Versions, reference_to
from tests.support.manifests import manifest_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(anabranch):
    """Runs a command, `run(config, *arguments)`; returns its exit code, and what it printed."""
    return lambda config, *arguments: anabranch(*arguments, "-c", config.path)


@pytest.fixture
def pipeline(example):
    """Returns a pipeline with the checkpoints 3 and 4 and version 2 in an object store, of another host."""

    def make(mode):
        url, path = f"file://{example}/bucket", example / "pipeline.toml"
        path.write_text(f'{path.read_text()}\n[storage]\nurl = "{url}"\nmode = "{mode}"\n')
        config = load_config(path, {})
        settings, schema = StorageSettings(url=url), Schema(config.pipeline.events).digest
        other = example / "other"
        with lock_state_directory(other) as generation, lease_storage(settings, other, generation) as held:
            checkpoints = Checkpoints(other, schema, held.lease.generation, held.checkpoints)
            for number in (3, 4):
                parts = {"model": {"w": torch.full((1000,), float(number))}}
                checkpoints.write(
                    number, Checkpoint(number * 1000, parts, {"erased": 0, "ledger": []}), 1_700_000_000.0
                )
            manifest = manifest_of(2, time=1.0, step=10, schema=schema, model=reference_to(config.pipeline.model))
            Versions(other, held.versions).write({"w": torch.ones(9)}, manifest, Verdict("pass"))
        return config

    return make


def listed(config):
    """Return the checkpoints that a restart on an empty disk finds."""
    assert config.pipeline.storage is not None
    return BucketStorage(Bucket(config.pipeline.storage.url, {}), "checkpoints", Path("nowhere")).numbers()


def test_in_mode_only_they_are_read_from_the_object_store(pipeline, run):
    config = pipeline("only")
    checkpoints = json.loads(run(config, "checkpoints", "ls", "--json")[1])
    assert [(one["number"], one["step"], one["problem"]) for one in checkpoints] == [(4, 4000, None), (3, 3000, None)]
    assert checkpoints[0]["bytes"] > 4000
    assert "complete; a restart can resume from it" in run(config, "checkpoints", "show", "latest")[1]
    versions = json.loads(run(config, "versions", "ls", "--json")[1])
    assert [(one["number"], one["verdict"]["verdict"], one["refused"]) for one in versions] == [(2, "pass", None)]
    assert "whole; serving may take it" in run(config, "versions", "show", "2")[1]
    code, _, sentence = run(config, "versions", "show", "7")
    assert (code, f"there is no version 7 in file://{config.folder}/bucket/versions" in sentence) == (2, True)


def test_in_mode_only_a_checkpoint_is_restored_in_the_object_store(pipeline, run):
    config = pipeline("only")
    code, out, error = run(config, "checkpoints", "restore", "3", "--yes")
    assert code == 0, error
    assert "newer checkpoints (4) were set aside; the next erasure deletes them" in " ".join(out.split())
    assert listed(config) == [3]
    assert json.loads(run(config, "checkpoints", "ls", "--json")[1])[0]["number"] == 3


def test_in_mode_mirror_a_restored_checkpoint_is_newer_than_those_of_the_object_store(pipeline, run):
    config = pipeline("mirror")
    assert json.loads(run(config, "checkpoints", "ls", "--json")[1]) == [], "those of the state directory"
    local = Checkpoints(config.state_dir / "checkpoints", Schema(config.pipeline.events).digest, 1)
    local.write(3, Checkpoint(3000, {"model": {"w": torch.zeros(9)}}, {"erased": 0, "ledger": []}), 1_700_000_000.0)
    code, _, error = run(config, "checkpoints", "restore", "3", "--yes")
    assert code == 0, error
    assert listed(config) == [3]
    assert local.numbers() == [3]


@pytest.mark.slow
def test_a_store_that_is_away_is_one_sentence_and_code_3(pipeline, run, monkeypatch):
    config = pipeline("only")
    text = config.path.read_text().replace(f'"file://{config.folder}/bucket"', '"s3://bucket/prefix"')
    options = {"aws_access_key_id": "us", "aws_secret_access_key": "secret", "endpoint": "http://127.0.0.1:1"}
    config.path.write_text(text + "".join(f'options.{name} = "{value}"\n' for name, value in options.items()))
    for command in (
        ["checkpoints", "ls"],
        ["versions", "ls"],
        ["versions", "show", "latest"],
        ["checkpoints", "restore", "3"],
    ):
        code, out, error = run(config, *command)
        assert (code, out, error.count("\n")) == (3, "", 1), error
        assert "storage.url: s3://bucket/prefix/head.json: " in error


def test_without_a_learner_events_are_erased_in_the_object_store_and_the_log_is_stored_there(pipeline):
    config = pipeline("only")
    config.state_dir.mkdir()
    done: Any = erase_events(config, [], ["events[0]@1..2"], timedelta(0))
    assert done.applied
    assert config.pipeline.storage is not None
    bucket = Bucket(config.pipeline.storage.url, {})
    files = [(config.state_dir / name).read_bytes() for name in ("erasures.key", "erasures.log")]
    assert bucket.read("erasures") == b"".join(files)
