"""The fleet in `anabranch status`, and rollout commands where no server of this host runs."""

import io
import json
import re
import time
from datetime import timedelta

import msgspec
import pytest
from rich.console import Console

from anabranch import cli
from anabranch.commands.status import read_status, render
from anabranch.config.loader import load_config
from anabranch.learner.object_storage.fleet import FleetRollout, FleetServer, RolloutFile, write_server
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.status import report as reports
from anabranch.learner.status.report import CanaryReport
from tests.anabranch.commands.test_status import learner_report


@pytest.fixture
def config(example):
    """A pipeline whose object store has the versions 1 to 3, and a server that serves version 2."""
    path = example / "pipeline.toml"
    path.write_text(f'{path.read_text()}\n[storage]\nurl = "file://{example}/bucket"\n')
    config = load_config(path, {})
    config.state_dir.mkdir()
    assert config.pipeline.storage is not None
    bucket = config.pipeline.storage.bucket
    lease = Lease(bucket, timedelta(seconds=20), "learner")
    lease.acquire(0)
    lease.update(lambda head: msgspec.structs.replace(head, versions={1: 1, 2: 1, 3: 1}))
    report(config, "a", version=2, requests_per_second=12.5)
    return config


def report(config, name, **fields):
    assert config.pipeline.storage is not None
    values = {"id": name, "beat": 1, "time": time.time(), "address": "", "ready": True, **fields}
    write_server(config.pipeline.storage.bucket, FleetServer(**values))  # type: ignore[arg-type]


def rollout(config):
    assert config.pipeline.storage is not None
    file = RolloutFile(config.pipeline.storage.bucket)
    file.poll()
    return file.contents


def run(config, *words):
    return cli.main([*words, "-c", str(config.path)])


def screen(config):
    console = Console(width=120, file=io.StringIO())
    console.print(render(read_status(config)))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_status_shows_how_many_servers_serve_which_version(config):
    report(config, "b", version=3)
    report(config, "c", version=2, problems=1)
    report(config, "d", version=1, time=time.time() - 100)
    report(config, "e", version=1, stopped=True)
    RolloutFile(config.pipeline.storage.bucket).replace(FleetRollout(stable=2, canary=3, canaries=["b"]))  # type: ignore[union-attr]
    text = screen(config)
    assert "fleet servers: 1 with version 3, 2 with version 2" in text
    assert "a version 2, 12.5 requests/s b version 3 (canary), 0.0 requests/s c version 2, problems: 1" in text
    assert re.search(r"d version 1, silent for 1\d\d s", text)
    document = json.loads(read_status(config).to_json())["fleet"]
    assert [(each["id"], each["version"], each["silent"]) for each in document["servers"]][2:] == [
        ("c", 2, False),
        ("d", 1, True),
    ]
    assert document["rollout"]["canary"] == 3


def test_status_shows_the_canary_of_the_learner(config):
    canary = CanaryReport(stable=2, version=3, servers=["b"], rows=40, required_rows=100, last="version 1 was promoted")
    reports.write_report(config.state_dir, learner_report(canary=canary))
    assert "canary version 3 against 2 on b, 40 of 100 labelled events since; version 1 was promoted" in screen(config)


def test_what_servers_write_is_text_on_the_screen(config):
    evil = "[/red] \x1b]0;owned\x07"
    bucket = config.pipeline.storage.bucket  # type: ignore[union-attr]
    report(config, "b", version=3, address=evil, model_problem=evil, refused={3: evil})
    for name in ("[", "c"):
        bucket.write(f"servers/{name}.json", msgspec.json.encode({"id": evil, "beat": 1, "time": 0.0, "address": ""}))
    bucket.write("rollout.json", msgspec.json.encode({"canaries": [evil, "b"]}))
    assert rollout(config).canaries == ["b"]
    canary = CanaryReport(stable=2, version=3, servers=["[/red]"], rows=40, required_rows=100, last="[bold")
    reports.write_report(config.state_dir, learner_report(canary=canary))
    assert "on [/red], 40 of 100 labelled events since; [bold" in screen(config)
    (server,) = [each for each in read_status(config).fleet.servers if each.id == "b"]  # type: ignore[union-attr]
    assert server.address == server.model_problem == server.refused[3] == "[/red] ?]0;owned?"


def test_status_says_that_the_object_store_cannot_be_read(config):
    (config.folder / "bucket" / "rollout.json").write_text("{")
    assert "the servers of the fleet cannot be read: file://" in screen(config)


def test_the_exit_code_is_about_the_parts_of_this_host(config):
    assert run(config, "status", "--exit-code") == 5
    reports.write_report(config.state_dir, learner_report(problems=[]))
    assert run(config, "status", "--exit-code") == 0


def test_a_command_on_a_host_without_a_server_reaches_all_servers(config, capsys):
    assert run(config, "versions", "serve", "1", "--pin", "--yes") == 0
    assert "saved for all servers: 1 run, and apply it within seconds" in capsys.readouterr().out
    assert rollout(config).pinned == 1
    assert run(config, "versions", "unpin", "--yes") == 0
    assert run(config, "versions", "serve", "1", "--yes") == 0
    assert rollout(config) == FleetRollout(promoted=1, rolled_back=[2, 3])
    assert run(config, "versions", "serve", "latest", "--yes") == 0
    assert run(config, "versions", "reject", "2", "--yes") == 0
    assert rollout(config) == FleetRollout(promoted=3, rolled_back=[2])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serve", "9"), "there is no version 9; there are 1 to 3"),
        (("rollback",), "name one by its number, as in `anabranch versions serve 7`"),
        (("unpin",), "no version is pinned for all servers"),
    ],
)
def test_a_command_that_cannot_be_applied_is_one_sentence(config, capsys, words, sentence):
    assert run(config, "versions", *words, "--yes") == 2
    assert sentence in capsys.readouterr().err
    assert rollout(config) == FleetRollout()
