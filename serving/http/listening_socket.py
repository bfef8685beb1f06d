"""The socket that serving listens on. Loads neither torch nor the web framework."""

import contextlib
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from anabranch.core.errors import SettingsError
from serving.config import ServingSettings, TlsSettings

log = logging.getLogger("anabranch.serving")

BACKLOG = 2048
_LOOK_SECONDS = 0.05


class TakenError(SettingsError):
    """Another program listens there."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        TakenError: another program has the port.
        SettingsError: the address cannot be listened on; the sentence names the key to change.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only where the protocol is named
    except OSError as exc:
        raise SettingsError(f'serving.host = "{host}" cannot be listened on: {exc.strerror}') from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise TakenError(
                f"serving.port = {port} is taken on {host}: stop the program that has it, "
                "or choose another port (0 takes a free one)"
            ) from exc
        key = f"serving.port = {port}" if exc.errno == errno.EACCES else f'serving.host = "{host}"'
        raise SettingsError(f"{key} cannot be listened on: {exc.strerror}") from exc
    return listener


@contextlib.contextmanager
def tls_errors() -> Iterator[None]:
    """Raise SettingsError for what goes wrong with certificate and key."""
    try:
        yield
    except OSError as exc:  # ssl.SSLError is one
        raise SettingsError(f"serving.tls: the certificate and key cannot be used: {exc}") from exc


def check_tls(tls: TlsSettings, folder: Path) -> None:
    """Raise SettingsError when there are certificate and key, and they cannot be used."""
    if tls.cert is not None and tls.key is not None:
        with tls_errors():
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / tls.cert, folder / tls.key)


def listen_patiently(host: str, port: int, patience: timedelta) -> socket.socket:
    """Do the same, and wait so long for a port that is taken: by the workers of a server that was killed."""
    deadline = time.monotonic() + patience.total_seconds()
    waits = False
    while True:
        try:
            return listen(host, port)
        except TakenError:
            if time.monotonic() > deadline:
                raise
            if not waits:
                log.info("serving.port = %d is taken on %s, perhaps by workers that are about to end", port, host)
            waits = True
            time.sleep(_LOOK_SECONDS)


def inherited(descriptor: int) -> socket.socket:
    """Return the listening socket that the process was started with."""
    with socket.socket(fileno=os.dup(descriptor)) as found:
        family = found.family
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)


def address_of(settings: ServingSettings, listener: socket.socket) -> str:
    """Return the URL by which this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    scheme = "https" if settings.tls.cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
