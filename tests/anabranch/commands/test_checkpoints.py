"""`anabranch checkpoints ls` and `show`."""

import json
import re

import pytest
import torch

from anabranch.cli import app as cli
from anabranch.config.loader import load_config
from ingest.events.schema import Schema
from learner.state_dir.checkpoint import Checkpoint, Checkpoints


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
def run(config, capsys):
    def call(*arguments):
        code = cli.main(["checkpoints", *arguments, "-c", str(config.path)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


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
