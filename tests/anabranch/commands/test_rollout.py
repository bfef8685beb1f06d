"""`anabranch versions serve`, `rollback`, `reject` and `unpin`, with a serving process and without one."""

import contextlib
import io
import json
import os
import socket
import threading
import time

import pytest
import torch
from torch import nn

from anabranch import cli
from anabranch.commands.versions.rollout import _is_configured
from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from anabranch.serving.reporting.report import ServingReport, read_report, write_report
from anabranch.serving.settings import ServingSettings
from tests.pipelines import Part
from tests.support.manifests import manifest_of

CONFIG = """
[serving]
port = {port}
tokens = {{read = "lesen", admin = "verwalten"}}
"""


@pytest.fixture
def config(write_pipeline, free_port):
    found = load_config(write_pipeline("127.0.0.1:1", "events", CONFIG.format(port=free_port())))
    for number, verdict in enumerate(("pass", "pass", "fail"), start=1):
        publish(found, number, verdict)
    return found


def publish(config, number, verdict):
    manifest = manifest_of(
        number,
        time=time.time(),
        through={"events:0": number},
        schema=Schema(config.pipeline.events).digest,
        factory="tiny_model:build",
    )
    torch.manual_seed(number)
    found(config).write(nn.Linear(3, 3).state_dict(), manifest, Verdict(verdict))  # type: ignore[arg-type]


def found(config):
    return Versions(config.state_dir / "versions")


@pytest.fixture
def serving(config):
    """A serving process, once it is ready."""
    with contextlib.closing(Part("serving", config.path)) as process:

        def ready_report():
            report = read_report(config.state_dir)
            return report if report is not None and report.ready else None

        yield process.until(ready_report)
        process.stop()


def run(config, *words):
    return cli.main(["versions", *words, "-c", str(config.path)])


@pytest.mark.process
def test_a_serving_process_applies_a_command_at_once_and_says_what_it_serves(config, serving, capsys):
    assert serving.version == 2
    assert run(config, "serve", "3", "--yes") == 0
    assert capsys.readouterr().out == "version 3 is served\n"
    assert run(config, "rollback", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "serving": 2,
        "previous": 3,
        "pinned": None,
        "rolled_back": [3],
        "recent": [2, 3, 2],
        "promoted": 2,
        "replaced": None,
        "running": True,
    }
    assert run(config, "serve", "1", "--pin", "--yes") == 0
    assert capsys.readouterr().out == "version 1 is served, and no other until it is unpinned\n"
    assert run(config, "serve", "2", "--yes") == 2
    assert "version 1 is pinned, and nothing else is served" in capsys.readouterr().err
    assert run(config, "unpin", "--yes") == 0
    assert found(config).state().serving == 2


@pytest.mark.process
def test_a_wrong_token_is_one_sentence(config, serving, capsys, monkeypatch):
    assert serving.ready
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "something else")
    assert run(config, "serve", "1", "--pin", "--yes") == 2
    assert capsys.readouterr().err.splitlines() == [
        "anabranch: send the header Authorization: Bearer and a token of this server"
    ]
    monkeypatch.setenv("ANABRANCH__SERVING__TOKENS__ADMIN", "lesen")
    assert run(config, "serve", "1", "--pin", "--yes") == 2
    assert "this token is for reading" in capsys.readouterr().err
    assert found(config).state().pinned is None


def test_without_a_serving_process_the_order_is_written_down(config, capsys):
    assert run(config, "serve", "served", "--pin", "--yes") == 2
    assert "serving has taken no version" in capsys.readouterr().err
    assert run(config, "unpin", "--yes") == 2
    assert "no version is pinned" in (said := capsys.readouterr().err)
    assert "to end a rollback, `anabranch versions serve` a newer one" in said
    assert run(config, "serve", "9", "--yes") == 2
    assert "there is no version 9; there are 1 to 3" in capsys.readouterr().err
    found(config).write_state(RegistryState(serving=2, previous=1))
    assert run(config, "rollback", "--yes") == 0
    assert found(config).state() == RegistryState(serving=2, previous=1, rolled_back=[2, 3], promoted=1)
    assert capsys.readouterr().out == "saved; serving is not running and will apply it on start\n"
    assert run(config, "serve", "latest", "--yes") == 0
    assert found(config).state() == RegistryState(serving=2, previous=1, rolled_back=[2], promoted=3, replaced=2)


def test_a_rollback_without_a_version_before_names_the_way_out(config, capsys):
    found(config).write_state(RegistryState(serving=1))
    assert run(config, "rollback", "--yes") == 2
    assert "`anabranch versions serve` serves one whatever its verdict" in capsys.readouterr().err


def test_reject_asks_first(config, capsys, monkeypatch):
    found(config).write_state(RegistryState(serving=2))
    before = found(config).state()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(config, "reject", "served") == 2
    assert capsys.readouterr().err == (
        "anabranch: versions reject asks first, and there is no terminal to ask at; add --yes, or --dry-run "
        "to see what it would do\n"
    )
    assert run(config, "reject", "served", "--dry-run") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown == "version 2 would never be served again, and is served now; version 1 would be served"
    assert found(config).state() == before
    for answer, code in (("n", 2), ("y", 0)):
        terminal = io.StringIO(f"{answer}\n")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        assert run(config, "reject", "2") == code
        assert "Continue? [y/N]" in capsys.readouterr().err
    assert found(config).state().rolled_back == [2]
    assert run(config, "reject", "3", "--yes") == 0
    assert found(config).state().rolled_back == [2, 3]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["serve", "1"],
            "version 1 would be served, until a newer one passes the gate; newer ones would not be: 2, 3; now version",
        ),
        (["serve", "3", "--pin"], "version 3 would be served, and no other until it is unpinned; now version 2"),
        (["rollback"], "version 1 would be served again, until a newer one passes the gate; newer ones would not"),
    ],
)
def test_what_changes_what_is_served_asks_first(config, capsys, monkeypatch, words, sentence):
    found(config).write_state(before := RegistryState(serving=2, previous=1))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(config, *words) == 2
    assert f"versions {words[0]} asks first" in capsys.readouterr().err
    assert run(config, *words, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["preview"].startswith(sentence)
    assert found(config).state() == before


def test_a_serving_process_that_reports_and_does_not_answer_is_a_dependency_out_of_reach(config, capsys):
    now, address = time.time(), f"http://127.0.0.1:{config.pipeline.serving.port}"
    write_report(config.state_dir, ServingReport(pid=os.getpid(), started=now, time=now, address=address, ready=True))
    assert run(config, "serve", "1", "--pin", "--yes") == 3
    assert f"serving at {address} does not answer" in capsys.readouterr().err
    assert found(config).state().pinned is None


@pytest.mark.parametrize(("status", "code"), [(503, 3), (429, 3), (500, 3), (404, 2), (409, 2), (403, 2)])
def test_a_refusal_that_passes_is_no_fault_of_the_command(config, capsys, status, code):
    now, body = time.time(), b'{"error": "the sentence of the server"}'
    with socket.create_server(("127.0.0.1", config.pipeline.serving.port)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = ServingReport(pid=os.getpid(), started=now, time=now, address=address, ready=True)
        write_report(config.state_dir, report)
        assert run(config, "serve", "1", "--pin", "--yes") == code
        thread.join()
    assert "the sentence of the server" in capsys.readouterr().err


def test_a_command_whose_answer_takes_long_may_still_be_applied(config, capsys, monkeypatch):
    monkeypatch.setattr("anabranch.commands.versions.rollout._PATIENCE_SECONDS", 0.01)
    now = time.time()
    with socket.create_server(("127.0.0.1", config.pipeline.serving.port)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        report = ServingReport(pid=os.getpid(), started=now, time=now, address=address, ready=True)
        write_report(config.state_dir, report)
        assert run(config, "serve", "1", "--pin", "--yes") == 3
    assert "may still apply the command: see `anabranch status` before you send it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:8001",
        "http://203.0.113.7:8000",
        "http://evil.example:8000",
        "https://127.0.0.1:8000",
        "http://127.0.0.1@203.0.113.7:8000",
        "http://127.0.0.1",
        "http://[",
        "http://127.0.0.1:x",
        "",
    ],
)
def test_no_token_goes_to_an_address_at_which_serving_is_not_configured_to_listen(config, capsys, monkeypatch, address):
    _no_token_goes(config, capsys, monkeypatch, "8000", address)


def test_no_token_goes_to_a_port_that_only_a_report_names(config, capsys, monkeypatch):
    _no_token_goes(config, capsys, monkeypatch, "0", "http://127.0.0.1:8001")


def _no_token_goes(config, capsys, monkeypatch, port, address):
    monkeypatch.setenv("ANABRANCH__SERVING__PORT", port)
    monkeypatch.setattr("anabranch.commands.versions.rollout.http.client.HTTPConnection", None)
    now = time.time()
    write_report(config.state_dir, ServingReport(pid=1, started=now, time=now, address=address, ready=True))
    assert run(config, "serve", "1", "--pin", "--yes") == 2
    assert "no token is sent there" in capsys.readouterr().err


def test_serving_may_listen_at_an_address_of_the_name_in_its_settings():
    settings = ServingSettings.model_validate({"host": "192.0.2.9", "port": 9, "tokens": {"read": "r", "admin": "a"}})
    assert _is_configured(settings, "http://192.0.2.9:9")
    assert _is_configured(settings, "http://[::1]:9")
    assert not _is_configured(settings, "http://192.0.2.8:9")
