"""`anabranch config check` and `show`."""

import json
import tomllib

import pytest

from anabranch.cli import app as cli
from anabranch.config.loader import load_config


@pytest.fixture
def run(example, capsys, monkeypatch):
    """Runs `anabranch config` in the example's folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(example)

    def call(*arguments):
        code = cli.main(["config", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_valid_file_is_said_to_be(run, example):
    assert run("check") == (0, f"{example}/pipeline.toml is valid\n", "")
    assert json.loads(run("check", "--json")[1])["valid"] is True


def test_check_prints_every_fault_and_exits_with_2(run, monkeypatch):
    monkeypatch.setenv("ANABRANCH__LEARNER__BATCH_SIZE", "none")
    monkeypatch.setenv("ANABRANCH__SERVING__PORT", "-1")
    code, out, _ = run("check")
    assert (code, len(out.splitlines())) == (2, 2)
    document = json.loads(run("check", "--json")[1])
    assert {fault["key"] for fault in document["faults"]} == {"learner.batch_size", "serving.port"}


def test_what_show_prints_is_a_config_with_the_same_values(run, example, monkeypatch):
    monkeypatch.setenv("ANABRANCH__LEARNER__BATCH_SIZE", "17")
    code, out, err = run("show")
    assert (code, err) == (0, "")
    shown = tomllib.loads(out)
    assert (shown["learner"]["batch_size"], shown["versions"]["publish_every"]) == (17, "500ms")
    monkeypatch.delenv("ANABRANCH__LEARNER__BATCH_SIZE")
    before = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__BATCH_SIZE": "17"}).pipeline
    (example / "shown.toml").write_text(out)
    assert load_config(example / "shown.toml", {}).pipeline == before


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_show_hides_secrets_wherever_they_come_from(run, example, monkeypatch, options):
    monkeypatch.setenv("BROKER", "secret-broker:9092")
    monkeypatch.setenv("ANABRANCH__STREAM__BOOTSTRAP_SERVERS", '{env = "BROKER"}')
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "hunter2")
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__READ", "hunter3")
    code, out, _ = run("show", *options)
    assert code == 0
    assert not any(secret in out for secret in ("hunter2", "hunter3", "secret-broker"))
    assert out.count("(hidden)") == 3
