"""`anabranch config check` and `show`."""

import functools
import json
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest

from anabranch.config.loader import load_config


@pytest.fixture
def run(example, anabranch, monkeypatch):
    """Runs `anabranch config` in the example's folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(example)
    return functools.partial(anabranch, "config")


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


def test_the_schema_accepts_what_the_settings_accept_and_explains_each_key(run):
    code, out, err = run("schema")
    assert (code, err) == (0, "")
    schema = json.loads(out)
    validator = jsonschema_rs.Draft202012Validator(schema)
    document = tomllib.loads(Path("pipeline.toml").read_text())
    assert list(validator.iter_errors(document)) == []
    document["learner"] |= {"strategy": "er", "stop_timeout": "20s"}
    document["stream"]["bootstrap_servers"] = {"env": "BROKERS"}
    assert list(validator.iter_errors(document)) == []
    document["learner"]["batch_sise"] = 1
    assert "batch_sise" in next(validator.iter_errors(document)).message
    timeout = schema["$defs"]["LearnerSettings"]["properties"]["stop_timeout"]
    assert timeout["default"] == "30s"
    assert timeout["description"]


def test_values_of_the_command_line_override_the_file_and_the_environment(run, monkeypatch):
    monkeypatch.setenv("ANABRANCH__LEARNER__BATCH_SIZE", "16")
    options = ["--set", "learner.batch_size=128", "--set", "learner.optimizer.lr = 0.1", "--set", 'stream.topics=["a"]']
    options += ["--set", "model.args.Hidden=7", "--set", "learner.strategy=er", "--set", "versions.publish_every=2s"]
    shown = json.loads(run("show", "--json", *options)[1])
    assert (shown["learner"]["batch_size"], shown["learner"]["optimizer"]["lr"]) == (128, 0.1)
    assert (shown["stream"]["topics"], shown["model"]["args"]["Hidden"]) == (["a"], 7)
    assert shown["versions"]["publish_every"] == "2s"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("learner.batch_size=0", "--set learner.batch_size: learner.batch_size"),
        ("learner.batch_sise=1", "--set learner.batch_sise: there is no key batch_sise"),
        ("learner.batch_size", "--set learner.batch_size: write SECTION.KEY=VALUE"),
        ("learner..x=1", "--set learner..x is no key: write SECTION.KEY=VALUE"),
        ("learner.max_delay=5", "--set learner.max_delay: learner.max_delay"),
    ],
)
def test_a_wrong_assignment_is_a_sentence_that_names_the_key(run, assignment, sentence):
    code, out, _ = run("check", "--set", assignment)
    assert code == 2
    assert out.startswith(sentence)
