"""The load generator counts every reply but a good one as a failure, and follows what the model has learned."""

import http.server
import json
import threading

import numpy as np
import pytest

from anabranch.commands.demo.dataset import Digits
from anabranch.commands.demo.load_generator import LoadGenerator, answers
from tests.support.waiting import PATIENCE_SECONDS


class Server(http.server.ThreadingHTTPServer):
    """Serves a fake model: `answer` is called for each inference request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ready = True
        self.answer = good
        self.bodies = []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(200 if self.server.ready else 503, b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        self.server.answer(self)

    def reply(self, code, content):
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def good(handler, learned="events:0=7,events:1=-1"):
    outputs = [{"name": "prediction", "shape": [1], "datatype": "INT64", "data": [0]}]
    reply = {"model_version": "3", "outputs": outputs, "parameters": {"trained_through": learned}}
    handler.reply(200, json.dumps(reply).encode())


def reset(handler):
    handler.close_connection = True
    handler.connection.close()


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def digits():
    labels = np.arange(10)
    pixels = np.repeat(labels[:, None] / 10, 64, axis=1).astype(np.float32)
    return Digits(pixels, labels, pixels, labels)


@pytest.fixture
def load(server, digits, monkeypatch):
    monkeypatch.setattr("anabranch.commands.demo.load_generator._TIMEOUT_SECONDS", PATIENCE_SECONDS)
    load = LoadGenerator("127.0.0.1", server.server_address[1], "digits", digits, rate=2000, seed=0)
    yield load
    load.stop()


@pytest.mark.slow
def test_good_replies_are_counted_and_their_progress_recorded(server, load, until):
    load.start()
    until(lambda: load.requests >= 20, "requests")
    assert (load.failures, load.last_failure) == (0, None)
    assert load.trained_through == {"events:0": 7, "events:1": -1}
    path, body = server.bodies[0]
    assert path == "/v2/models/digits/infer"
    assert body["inputs"][0] | {"data": None} == {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": None}


@pytest.mark.slow
def test_only_digits_of_classes_that_were_seen_are_asked_for(server, load, until):
    load.classes_seen = 3
    load.start()
    until(lambda: load.requests >= 40, "requests")
    assert {round(body["inputs"][0]["data"][0] * 10) for _, body in server.bodies} == {0, 1, 2}


def test_requests_begin_when_serving_is_ready(server, load, until):
    server.ready = False
    checks = []
    server.RequestHandlerClass.do_GET = lambda self: (checks.append(1), Handler.reply(self, 503, b""))
    try:
        load.start()
        until(lambda: len(checks) >= 3, "health checks")
        assert (load.requests, server.bodies) == (0, [])
    finally:
        server.RequestHandlerClass.do_GET = lambda self: Handler.reply(self, 200, b"")
    until(lambda: load.requests, "a request")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda handler: handler.reply(503, b"busy"), "503 busy"),
        (reset, "RemoteDisconnected"),
        (lambda handler: handler.reply(200, b"{"), "JSONDecodeError"),
        (lambda handler: handler.reply(200, b'{"outputs": []}'), "the reply has no prediction"),
        (lambda handler: good(handler, learned="nonsense"), "ValueError"),
    ],
)
def test_everything_else_is_a_failure_and_requests_go_on(server, load, until, answer, said):
    server.answer = answer
    load.start()
    until(lambda: load.failures >= 3, "failures")
    assert load.last_failure.startswith(said)
    server.answer = good
    before = until(lambda: load.trained_through and load.requests, "a good reply")
    until(lambda: load.requests > before + 5, "more requests")
    assert load.last_failure is None


@pytest.mark.slow
def test_a_model_that_has_learned_nothing_yet_is_no_failure(server, load, until):
    server.answer = lambda handler: good(handler, learned="")
    load.start()
    until(lambda: load.requests >= 5, "requests")
    assert (load.failures, load.trained_through) == (0, {})


def test_an_address_where_nobody_listens_does_not_answer(free_port):
    assert not answers("127.0.0.1", free_port(), "/v2/health/live")
