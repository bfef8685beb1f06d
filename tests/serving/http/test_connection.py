"""Connections are bounded before a token is compared, whichever library parses them."""

import asyncio
import contextlib
import gc
import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import pytest

import anabranch.serving.http.acceptor
import anabranch.serving.http.connection
from anabranch.serving.http.connection import H11Connection
from anabranch.serving.http.httptools_connection import HttpToolsConnection
from anabranch.serving.http.listening_socket import listen_patiently
from anabranch.serving.http.server import HttpServer
from anabranch.serving.settings import ServingSettings
from tests.support.waiting import PATIENCE_SECONDS

Serve = Callable[..., AbstractContextManager[int]]

SOON = timedelta(milliseconds=200)
LATE = timedelta(hours=1)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def answer(scope, receive, send):
    """Read the body and answer with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await reply(send, str(size).encode())


async def reply(send, body, *headers):
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(params=[H11Connection, HttpToolsConnection], ids=["h11", "httptools"])
def serve(request, monkeypatch, tmp_path):
    """Serve an ASGI application on a free port, which is what the context returns."""
    monkeypatch.setattr("anabranch.serving.http.server.connection_class", lambda: request.param)

    @contextmanager
    def serving_(app=answer, **settings):
        chosen = ServingSettings.model_validate({"timeout": "1s", **settings})
        server = HttpServer(app, chosen, tmp_path)
        server.load()
        with listen_patiently("127.0.0.1", 0, timedelta(0)) as listener:
            port = listener.getsockname()[1]
            thread = threading.Thread(target=lambda: asyncio.run(server.serve(listener)))
            thread.start()
            try:
                yield port
            finally:
                server.stop()
                thread.join(PATIENCE_SECONDS)
                assert not thread.is_alive()

    return serving_


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)


def is_closed(client):
    """Wait until the server closes a connection; it sends nothing before."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def received(client):
    """Return all that comes until the connection ends."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            found += piece
    return found


def reply_of(client):
    """Read one complete reply with a Content-Length."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, response.read()


def status(port):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)) as client:
        client.request("GET", "/")
        return client.getresponse().status


@pytest.mark.slow
@pytest.mark.parametrize("begin", [b"", GET[:20]], ids=["silent", "half a head"])
def test_a_connection_without_a_complete_head_is_closed(serve, monkeypatch, begin):
    monkeypatch.setattr(anabranch.serving.http.connection, "HEAD_PATIENCE", LATE)  # until no complete head is to come
    with serve() as port, connect(port) as other:
        other.sendall(GET)
        assert reply_of(other) == (200, b"0")
        monkeypatch.setattr(anabranch.serving.http.connection, "HEAD_PATIENCE", SOON)
        other.sendall(GET[:20])
        assert is_closed(other)
        with connect(port) as client:
            client.sendall(begin)
            assert is_closed(client)


@pytest.mark.slow
def test_a_connection_may_be_idle_between_requests(serve, monkeypatch):
    async def hurry(scope, receive, send):
        monkeypatch.setattr(anabranch.serving.http.connection, "HEAD_PATIENCE", SOON)  # the first head is here
        await answer(scope, receive, send)

    monkeypatch.setattr(anabranch.serving.http.connection, "HEAD_PATIENCE", LATE)
    with serve(hurry) as port, connect(port) as client:
        client.sendall(GET)
        assert reply_of(client) == (200, b"0")
        client.settimeout(2 * SOON.total_seconds())
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(PATIENCE_SECONDS)
        client.sendall(GET)
        assert reply_of(client) == (200, b"0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [b"x: " + b"y" * 1000 + b"\r\n", b"a:b\r\n" * 200, b"y" * 1000],
    ids=["long fields", "short fields", "one field"],
)
def test_an_endless_head_is_refused(serve, piece):
    with serve() as port, connect(port) as client:
        sent = 0
        with contextlib.suppress(ConnectionError):
            client.sendall(GET[:-2] + b"z: ")
            while sent < 50_000_000:
                client.sendall(piece)
                sent += len(piece)
        assert sent < 50_000_000  # the kernel's buffers take several MB
        assert status(port) == 200


@pytest.mark.slow
def test_a_body_of_tiny_chunks_is_refused_and_one_of_fair_chunks_is_not(serve):
    with serve() as port:
        with connect(port) as client:
            client.sendall(CHUNKED + b"1\r\na\r\n" * 1000)
            assert received(client).startswith(b"HTTP/1.1 400")
        with connect(port) as client:
            client.sendall(CHUNKED + b"1\r\na\r\n" * 100 + (b"800\r\n" + b"a" * 2048 + b"\r\n") * 1000 + b"0\r\n\r\n")
            assert reply_of(client) == (200, b"2048100")


@pytest.mark.slow
def test_a_client_that_is_still_sending_reads_an_early_answer_and_then_the_connection_ends(serve, monkeypatch):
    async def refuse(_scope, _receive, send):
        await reply(send, b"no", (b"connection", b"close"))

    monkeypatch.setattr(anabranch.serving.http.connection, "_LINGER_PATIENCE", LATE)
    with serve(refuse) as port, connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16000000\r\n\r\n")
        client.sendall(b"a" * 8_000_000)  # more than the kernel's buffers take
        assert received(client).endswith(b"\r\n\r\nno")


@pytest.mark.slow
def test_what_follows_an_early_answer_is_not_parsed(serve, monkeypatch):
    parsed: list[int] = []
    add = anabranch.serving.http.connection.ChunkBudget.add

    def counted(self, chunks, size):
        parsed.append(size)
        return add(self, chunks, size)

    async def refuse(_scope, _receive, send):
        await reply(send, b"no", (b"connection", b"close"))

    monkeypatch.setattr(anabranch.serving.http.connection.ChunkBudget, "add", counted)
    with serve(refuse) as port, connect(port) as client:
        client.sendall(CHUNKED)
        assert b"\r\n\r\n" in client.recv(65536)
        client.sendall((b"1000\r\n" + b"a" * 4096 + b"\r\n") * 10)
        client.shutdown(socket.SHUT_WR)
        received(client)
    assert parsed == []


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected_and_a_slow_reader_is_not(serve, monkeypatch):
    lost = threading.Event()
    size = 20_000_000

    async def large(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a" * size, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        lost.set()

    monkeypatch.setattr(anabranch.serving.http.connection, "_REPLY_PATIENCE", timedelta(seconds=1))
    with serve(large) as port:
        with connect(port) as client:
            client.sendall(GET)
            assert lost.wait(PATIENCE_SECONDS)
            assert len(received(client)) < size
        monkeypatch.setattr(anabranch.serving.http.connection, "_REPLY_PATIENCE", timedelta(seconds=2))
        with connect(port) as client:
            client.sendall(GET)
            found = 0
            client.sendall(GET[:-2] + b"Connection: close\r\n\r\n" + GET)  # of which the last is not answered
            while piece := client.recv(1_000_000):
                found += len(piece)
                threading.Event().wait(len(piece) / 12_000_000)  # for longer than a check takes
            assert 2 * size < found < 2.1 * size


@pytest.mark.slow
def test_for_a_new_connection_the_one_that_waits_longest_is_closed(serve, monkeypatch):
    monkeypatch.setattr("anabranch.serving.http.server.most_connections", lambda tls, grpc: 4)
    with serve() as port, contextlib.ExitStack() as stack:
        polite = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        stack.callback(polite.close)
        polite.request("GET", "/")
        assert polite.getresponse().read() == b"0"
        polite_socket = polite.sock
        silent = [stack.enter_context(connect(port)) for _ in range(3)]
        assert status(port) == 200  # the polite one, which waited longest, was closed for it
        assert is_closed(polite_socket)
        more = [stack.enter_context(connect(port)) for _ in range(10)]
        assert all(map(is_closed, [*silent, *more[:6]]))


@pytest.mark.slow
def test_connections_with_a_request_are_not_closed_for_new_ones_which_wait(serve, monkeypatch):
    monkeypatch.setattr("anabranch.serving.http.server.most_connections", lambda tls, grpc: 2)
    arrived = threading.Semaphore(0)
    go_on = threading.Event()

    async def held(_scope, _receive, send):
        arrived.release()
        await asyncio.to_thread(go_on.wait, PATIENCE_SECONDS)
        await reply(send, b"late", (b"connection", b"close"))

    with serve(held) as port, contextlib.ExitStack() as stack:
        clients = []
        for arrives in (True, True, False, False, False):
            clients.append(stack.enter_context(connect(port)))
            clients[-1].sendall(GET)
            assert arrived.acquire(timeout=PATIENCE_SECONDS if arrives else 0.1) is arrives
        go_on.set()
        assert all(received(client).endswith(b"late") for client in clients)


@pytest.mark.slow
def test_pipelined_requests_of_one_connection_are_bounded(serve, request):
    go_on = threading.Event()

    async def held(_scope, _receive, send):
        await asyncio.to_thread(go_on.wait, PATIENCE_SECONDS)
        await reply(send, b"late")

    with serve(held) as port, connect(port) as client:
        client.sendall(GET * 200)
        try:
            if request.node.callspec.params["serve"] is HttpToolsConnection:
                assert is_closed(client)  # it would parse them all
            else:  # h11 parses one at a time
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                go_on.set()
                client.settimeout(PATIENCE_SECONDS)
                client.shutdown(socket.SHUT_WR)
                assert received(client).count(b"late") >= 1
        finally:
            go_on.set()


@pytest.mark.slow
def test_connections_wait_while_there_are_no_descriptors(serve, monkeypatch):
    monkeypatch.setattr(anabranch.serving.http.acceptor, "_RETRY", SOON)
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def failing(self):
        if failures:
            raise failures.pop()
        return accept(self)

    with serve() as port:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert status(port) == 200
    assert not failures


@pytest.mark.slow
def test_a_tls_handshake_that_takes_too_long_is_closed(serve, monkeypatch, certificate):
    for module in (anabranch.serving.http.acceptor, anabranch.serving.http.connection):
        monkeypatch.setattr(module, "HEAD_PATIENCE", LATE)  # until what it limits is not to come
    cert, key = certificate(days=3)
    context = ssl.create_default_context(cafile=str(cert))
    tls = {"cert": str(cert), "key": str(key)}
    with serve(tls=tls) as port:
        with connect(port) as client, context.wrap_socket(client, server_hostname="localhost") as secure:
            secure.sendall(GET)
            assert reply_of(secure) == (200, b"0")
        monkeypatch.setattr(anabranch.serving.http.connection, "HEAD_PATIENCE", SOON)
        with connect(port) as client, context.wrap_socket(client, server_hostname="localhost") as secure:
            assert is_closed(secure)
    monkeypatch.setattr(anabranch.serving.http.acceptor, "HEAD_PATIENCE", SOON)  # read when a server starts
    with serve(tls=tls) as port, connect(port) as client:
        assert is_closed(client)


@pytest.mark.slow
def test_a_tls_server_stops_during_handshakes(serve, certificate):
    cert, key = certificate(days=3)
    with contextlib.ExitStack() as stack:
        with serve(tls={"cert": str(cert), "key": str(key)}) as port:
            clients = [stack.enter_context(connect(port)) for _ in range(3)]
        assert all(map(is_closed, clients))


@pytest.mark.slow
def test_a_tls_connection_releases_its_memory_when_it_ends(serve, certificate):
    """It has buffers of 256 kB, for which no search for garbage is to be waited for."""
    cert, key = certificate(days=3)
    context = ssl.create_default_context(cafile=str(cert))
    gc.collect()
    gc.disable()
    try:
        with serve(tls={"cert": str(cert), "key": str(key)}) as port:
            for asks in (False, True) * 3:
                with connect(port) as client, context.wrap_socket(client, server_hostname="localhost") as secure:
                    if asks:
                        secure.sendall(GET)
                        assert reply_of(secure) == (200, b"0")
        left = [each for each in gc.get_objects() if type(each) is asyncio.sslproto.SSLProtocol]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("shared", [False, True])
def test_connections_that_were_not_accepted_yet_are_answered_when_it_stops(monkeypatch, shared, tmp_path):
    monkeypatch.setattr(
        anabranch.serving.http.acceptor, "_GRACE", timedelta(0)
    )  # as on a machine that is busy for longer
    server = HttpServer(answer, ServingSettings(), tmp_path, shared)
    server.load()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen_patiently("127.0.0.1", 0, timedelta(0)))
        address = listener.getsockname()
        clients = [stack.enter_context(connect(address[1])) for _ in range(20)]
        for client in clients[:-1]:
            client.sendall(GET)
        server.stop()
        asyncio.run(server.serve(listener))
        assert [reply_of(client) for client in clients[:-1]] == [(200, b"0")] * 19
        assert is_closed(clients[-1])
        with pytest.raises(ConnectionRefusedError):
            connect(address[1])
