"""The HTTP server: uvicorn, whose connections come from an `Acceptor`."""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from anabranch.serving.http.acceptor import Acceptor, most_connections
from anabranch.serving.http.connection import Connection, H11Connection
from anabranch.serving.http.listening_socket import load_certificate
from anabranch.serving.settings import ServingSettings, TlsSettings

_AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""


LIMITED = ("uvicorn.error", "asyncio")
"""Loggers that write a line, or a traceback, for a request that is not HTTP."""

_MOST_LINES = 10
_EVERY = timedelta(seconds=1)


class RateLimit(logging.Filter):
    """Passes ten lines a second; the next one contains how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._since = 0.0
        self._written = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the line."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= _EVERY.total_seconds():
                self._since, self._written = now, 0
            if self._written >= _MOST_LINES:
                self._left_out += 1
                return False
            self._written += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines before this one were left out)", ()
        return True


@contextlib.contextmanager
def limited_lines(names: tuple[str, ...] = LIMITED) -> Iterator[None]:
    """Limit each of these loggers separately while the block runs."""
    limits = [(logging.getLogger(name), RateLimit()) for name in names]
    for logger, limit in limits:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger, limit in limits:
            logger.removeFilter(limit)


class HttpServer:
    """Runs an ASGI application on a socket that is listening already; the process handles signals."""

    def __init__(self, app: ASGIApp, settings: ServingSettings, folder: Path, shared: bool = False) -> None:
        """`shared`: other processes accept from the same socket, so each accepts one connection at a time."""
        self._tls, self._folder = settings.tls, folder
        self._server = _UvicornServer(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=math.ceil(settings.timeout.total_seconds()),
                **_tls(settings.tls, folder),
            ),
            connection_class(),
            at_once=1 if shared else _AT_ONCE,
            grpc=settings.grpc_port is not None,
        )

    def load(self) -> None:
        """Read certificate and key; raises SettingsError when they cannot be used."""
        load_certificate(self._tls, self._folder)
        self._server.config.load()

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until `stop`, then finish those in flight; closes the listener."""
        await self._server.serve([listener])

    def stop(self) -> None:
        """Accept no more connections, and make `serve` return."""
        self._server.should_exit = True


class _UvicornServer(uvicorn.Server):
    """uvicorn's server with an `Acceptor` in place of asyncio's."""

    def __init__(self, config: uvicorn.Config, connection: type[Connection], at_once: int, grpc: bool) -> None:
        super().__init__(config)
        self._class = connection
        self._at_once = at_once
        self._grpc = grpc

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        tls = self.config.ssl
        most = most_connections(tls=tls is not None, grpc=self._grpc)
        self._acceptor = Acceptor(sockets[0], self._connection, most, self._at_once, tls)
        self._acceptor.start()
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.stop()
        await super().shutdown(sockets)

    def _connection(self) -> Connection:
        return self._class(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def connection_class() -> type[Connection]:
    """Return the class of connections parsed by httptools where it is installed, else by h11."""
    try:
        from anabranch.serving.http.httptools_connection import HttpToolsConnection
    except ModuleNotFoundError as exc:
        if exc.name != "httptools":
            raise
        return H11Connection
    return HttpToolsConnection


def _tls(tls: TlsSettings, folder: Path) -> dict[str, Any]:
    if tls.cert is None or tls.key is None:
        return {}
    return {"ssl_certfile": folder / tls.cert, "ssl_keyfile": folder / tls.key}
