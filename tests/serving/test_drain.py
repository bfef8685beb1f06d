"""`serving.drain`: after SIGTERM requests are answered until balancers have noticed."""

import contextlib
import json
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

import anabranch.serving.server
from anabranch.serving.http.connection import H11Connection
from anabranch.serving.http.server import connection_class
from anabranch.serving.reporting.report import STOPPED, read_report
from anabranch.serving.server import serve
from anabranch.serving.settings import ServingSettings
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def reports(monkeypatch):
    """The reports that servers write, as they come."""
    written, write = [], anabranch.serving.server.write_report
    monkeypatch.setattr(
        anabranch.serving.server, "write_report", lambda at, each: written.append(each) or write(at, each)
    )
    return written


@pytest.fixture
def end_drain(monkeypatch):
    """Moves the clock of servers to the end of `serving.drain`."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], time=time.time)
    monkeypatch.setattr(anabranch.serving.server, "time", clock)
    return lambda: passed.append(passed.pop() + 3600)


@pytest.fixture
def draining(numbers, eventually, end_drain):
    """A server that is to stop, and drains until `end_drain` is called."""
    with drained(numbers, eventually, end_drain) as client:
        yield client


@contextlib.contextmanager
def drained(numbers, eventually, end_drain):
    numbers.publish(1)
    stop = threading.Event()
    settings = ServingSettings.model_validate({"port": 0, "drain": "1h"})
    thread = threading.Thread(target=serve, args=(numbers.deployment, settings, stop))
    thread.start()
    try:
        state_dir = numbers.deployment.state_dir
        address = eventually(lambda: (report := read_report(state_dir)) and report.ready and report.address)
        with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
            assert client.get("/v2/health/ready").status_code == 200
            stop.set()
            eventually(lambda: httpx.get(f"{address}/v2/health/ready").status_code == 503)
            yield client
    finally:
        stop.set()
        end_drain()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_server_that_drains_is_not_ready_and_answers_old_and_new_connections(draining, body_of):
    for client in (draining, httpx.Client(base_url=draining.base_url)):
        reply = client.post("/v2/models/tiny/infer", json=body_of(1))
        assert reply.status_code == 200
        assert reply.headers["connection"] == "close"  # the next request goes to another server
    for path in ("/v2/health/ready", "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready"):
        assert httpx.get(f"{draining.base_url}{path}").json() == {"error": "the server is stopping"}
    assert httpx.get(f"{draining.base_url}/v2/health/live").status_code == 200


@pytest.mark.slow
def test_its_report_says_that_it_is_not_ready(reports, draining, end_drain, eventually):
    draining.get("/v2/health/live")
    end_drain()
    eventually(lambda: STOPPED in reports[-1].problems)
    assert [report.ready for report in reports[-2:]] == [False, False]
    assert STOPPED not in reports[-2].problems


@pytest.mark.slow
@pytest.mark.parametrize("parser", [H11Connection, connection_class()])
def test_all_requests_that_a_client_has_sent_at_once_are_answered(
    monkeypatch, numbers, eventually, end_drain, body_of, parser
):
    monkeypatch.setattr("anabranch.serving.http.server.connection_class", lambda: parser)
    with (
        drained(numbers, eventually, end_drain) as client,
        socket.create_connection(("127.0.0.1", client.base_url.port)) as one,
    ):
        body = json.dumps(body_of(1)).encode()
        head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        one.sendall(3 * (head.encode() + body))
        with one.makefile("rb") as replies:
            received = replies.read().lower()
    assert received.count(b"model_version") == 3
    assert received.count(b"connection: close") == 1


@pytest.mark.slow
def test_after_that_it_accepts_nothing(draining, end_drain, eventually):
    def refused():
        try:
            httpx.get(f"{draining.base_url}/v2/health/live")
        except httpx.TransportError:
            return True
        return False

    assert not refused()
    end_drain()
    eventually(refused)
