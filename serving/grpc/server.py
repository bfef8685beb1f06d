"""The gRPC server: its listener, TLS, limits and stop. It answers by `InferenceCalls`."""

import logging
import math
from datetime import timedelta
from pathlib import Path

import grpc

from anabranch.core.errors import SettingsError
from anabranch.serving.grpc.calls import InferenceCalls
from anabranch.serving.http.acceptor import most_grpc_connections
from anabranch.serving.http.connection import HEAD_PATIENCE
from anabranch.serving.http.listening_socket import load_certificate
from anabranch.serving.http.request_body import BodyReader
from anabranch.serving.inference.service import Service
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.settings import ServingSettings

log = logging.getLogger("anabranch.serving")

_MESSAGE_OVERHEAD = 65_536
"""Bytes of a message besides the elements of its inputs."""
_MOST_STREAMS = 256
"""Calls of one connection at a time."""
_WINDOW_BYTES = 65_536
"""Bytes of a message that are accepted before it is read."""
_IDLE = timedelta(seconds=30)
"""How long a connection may be without a call. The same connection can be opened again: clients do so by themselves."""
_OLDEST = timedelta(minutes=2)
"""How long a connection may be open, so that a client which does not read its replies cannot hold them permanently."""


class GrpcServer:
    """Answers calls in the event loop that starts it, on a port of `serving.host`."""

    def __init__(
        self, service: Service, settings: ServingSettings, metrics: ServingMetrics, bodies: BodyReader, folder: Path
    ) -> None:
        """`folder` is that of the config, to which the paths of `serving.tls` are relative."""
        self._calls = InferenceCalls(service, settings, metrics, bodies)
        self._settings = settings
        self._folder = folder
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listen, answer calls from now on, and return the address; workers of a server listen on one port together.

        Raises:
            SettingsError: the port cannot be taken, or the TLS files cannot be used.
        """
        settings = self._settings
        most_bytes = int(settings.max_body_bytes) + _MESSAGE_OVERHEAD
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", most_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                ("grpc.max_allowed_incoming_connections", most_grpc_connections()),
                ("grpc.max_connection_idle_ms", _milliseconds(_IDLE)),
                ("grpc.max_connection_age_ms", _milliseconds(_OLDEST)),
                ("grpc.max_connection_age_grace_ms", _milliseconds(settings.timeout)),
                ("grpc.server_handshake_timeout_ms", _milliseconds(HEAD_PATIENCE)),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                ("grpc.http2.bdp_probe", 0),  # it would widen that window
                ("grpc.so_reuseport", int(settings.workers > 1)),
            ],
        )
        self._server.add_generic_rpc_handlers((self._calls.handler(),))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        port = self._listen(f"{host}:{settings.grpc_port}")
        await self._server.start()
        address = f"{host}:{port}"
        log.info("serving gRPC on %s", address)
        return address

    async def stop(self) -> None:
        """Accept no more calls, and finish those in flight, within the time that a request may take."""
        if self._server is not None:
            await self._server.stop(self._settings.timeout.total_seconds())

    def _listen(self, address: str) -> int:
        assert self._server is not None
        tls = self._settings.tls
        credentials: grpc.ServerCredentials | None = None
        if tls.cert is not None and tls.key is not None:
            load_certificate(tls, self._folder)
            pair = (self._folder / tls.key).read_bytes(), (self._folder / tls.cert).read_bytes()
            credentials = grpc.ssl_server_credentials([pair])
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError as exc:
            raise SettingsError(
                f"serving.grpc_port = {self._settings.grpc_port} cannot be bound: {address} is taken, or "
                "serving.host is no address of this machine"
            ) from exc


def _milliseconds(time: timedelta) -> int:
    return math.ceil(time.total_seconds() * 1000)
