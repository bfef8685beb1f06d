"""`anabranch checkpoints ls`, `show` and `restore`."""

import json
import re
import shutil

import pytest
import torch

from anabranch.commands.checkpoints import restore as commands
from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from anabranch.replay.erasure.erasure_log import ErasureLog
from tests.support.manifests import manifest_of


@pytest.fixture
def config(example):
    return load_config(example / "pipeline.toml", {})


@pytest.fixture
def checkpoints(config):
    """The directory with checkpoints 3 and 4."""
    directory = Checkpoints(config.state_dir / "checkpoints", Schema(config.pipeline.events).digest, 2)
    for number in (3, 4):
        directory.write(number, Checkpoint(number * 1000, {"model": {"w": torch.zeros(1000)}}, {}), 1_700_000_000.0)
    return directory


@pytest.fixture
def run(config, anabranch):
    return lambda *arguments: anabranch("checkpoints", *arguments, "-c", config.path)


def test_they_are_listed_the_newest_first(run, checkpoints):
    code, out, err = run("ls")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["checkpoint", "4", "3"]
    assert "2023-11-14 22:13:20Z" in out
    assert "4,000" in out
    listed = json.loads(run("ls", "--json")[1])
    assert [(one["number"], one["step"], one["problem"]) for one in listed] == [(4, 4000, None), (3, 3000, None)]
    assert listed[0]["bytes"] > 4000


def test_one_is_shown_and_its_files_are_checked(run, checkpoints):
    assert "complete; a restart can resume from it" in run("show", "latest")[1]
    path = checkpoints.path / "4" / checkpoints.name(4, "model")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert json.loads(run("show", "--json")[1])["problem"] == f"checkpoint 4: {path} does not have its digest"
    assert json.loads(run("show", "3", "--json")[1])["problem"] is None


@pytest.mark.parametrize(
    ("which", "sentence"), [("7", "there is no checkpoint 7 in .*; there are 3, 4"), ("newest", "is no checkpoint")]
)
def test_one_that_is_not_there_is_one_sentence(run, checkpoints, which, sentence):
    code, out, err = run("show", which)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(sentence, err)


def test_without_any_that_is_said(run):
    assert run("ls") == (0, "there is no checkpoint yet\n", "")
    assert run("show")[2].startswith("anabranch: no checkpoint has been written yet in ")


@pytest.fixture
def served(config):
    """Versions 7 to 9 of steps 2,500, 3,500 and 4,500; version 9 is served."""
    versions = Versions(config.state_dir / "versions")
    for number, step in ((7, 2500), (8, 3500), (9, 4500)):
        manifest = manifest_of(
            number, generation=2, time=1_700_000_000.0, step=step, schema="", factory="my_model:build"
        )
        versions.write({"w": torch.zeros(3)}, manifest, Verdict("pass"))
    versions.write_state(RegistryState(serving=9))
    return versions


def test_a_restored_checkpoint_is_the_newest_and_newer_ones_keep_their_files(run, checkpoints, served):
    code, out, _ = run("restore", "3", "--dry-run")
    resumes, renamed, versions = out.splitlines()
    assert code == 0
    assert resumes == (
        "the learner would resume from checkpoint 3 of step 3,000, written at 2023-11-14 22:13:20Z, at its next start, "
        "and reads the stream again from there"
    )
    assert renamed.startswith("newer checkpoints would be renamed to 4.set-aside;")
    assert "version 9 is served until a newer one has learned as far" in versions
    assert "`anabranch versions serve 7`" in versions
    assert checkpoints.newest()[0] == 4
    assert "there is no terminal to ask at" in run("restore", "3")[2]
    assert checkpoints.newest()[0] == 4
    code, out, _ = run("restore", "3", "--yes", "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "checkpoint": 3,
            "step": 3000,
            "time": 1_700_000_000.0,
            "set_aside": [4],
            "served": 9,
            "version_before": 7,
        },
    )
    assert checkpoints.newest()[0] == 3
    assert (checkpoints.path / "4.set-aside" / "manifest.json").exists()
    assert checkpoints.highest() == 4, "the number is not used again"
    assert run("restore", "3")[1].endswith("it is the newest, and nothing is changed\n")
    checkpoints.storage.delete_set_aside()
    assert sorted(path.name for path in checkpoints.path.iterdir()) == ["3"]


def test_a_checkpoint_is_not_restored_while_a_learner_runs(run, config, checkpoints):
    with lock_state_directory(config.state_dir):
        code, _, err = run("restore", "3", "--yes")
    assert (code, checkpoints.newest()[0]) == (2, 4)
    assert err.endswith(
        f"anabranch: another learner is at work in {config.state_dir}; stop it first, or give this pipeline another "
        "state_dir\n"
    )


@pytest.mark.parametrize("after", ["show_checkpoint", "check_age"])
def test_a_checkpoint_that_a_learner_deletes_meanwhile_is_one_sentence(run, checkpoints, monkeypatch, after):
    actually = getattr(commands, after)

    def deletes(*arguments):
        found = actually(*arguments)
        shutil.rmtree(checkpoints.path / "3")
        return found

    monkeypatch.setattr(commands, after, deletes)
    code, out, err = run("restore", "3", "--yes")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "checkpoint 3" in err


def test_a_damaged_checkpoint_or_one_older_than_the_erasures_is_not_restored(run, config, checkpoints, monkeypatch):
    path = checkpoints.path / "3" / checkpoints.name(3, "model")
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + b"x")
    assert run("restore", "3", "--yes")[2] == (
        f"anabranch: checkpoint 3 cannot be restored: checkpoint 3: {path} does not have its digest\n"
    )
    path.write_bytes(sound)
    monkeypatch.setattr(ErasureLog, "dropped", 1, raising=False)
    monkeypatch.setattr(ErasureLog, "refresh", lambda log: setattr(log, "dropped", 1))
    assert "checkpoint 3 was made before events were erased" in run("restore", "3", "--yes")[2]
    assert checkpoints.newest()[0] == 4


def test_a_checkpoint_whose_manifest_cannot_be_read_is_set_aside_too(run, checkpoints):
    (checkpoints.path / "4" / "manifest.json").write_text("{")
    assert json.loads(run("restore", "3", "--yes", "--json")[1])["set_aside"] == [4]
    assert checkpoints.numbers() == [3]
