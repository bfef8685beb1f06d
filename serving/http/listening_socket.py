"""The socket that serving listens on. Loads neither torch nor the web framework."""

import logging
import os
import socket
import ssl
import time
from datetime import timedelta
from pathlib import Path

from anabranch.core.errors import SettingsError
from anabranch.core.net import TakenError, listen
from anabranch.core.start_report import start_does
from anabranch.serving.settings import ServingSettings, TlsSettings

log = logging.getLogger("anabranch.serving")

BACKLOG = 2048
UNTIL_GONE = timedelta(seconds=5)
"""How long the server of a new supervisor waits for the port: that of one that was killed has just begun to end."""
_POLL_SECONDS = 0.05


def load_certificate(tls: TlsSettings, folder: Path) -> ssl.SSLContext | None:
    """Return a context with certificate and key, whose paths are relative to `folder`; None where there are none.

    Raises:
        SettingsError: they cannot be used.
    """
    if tls.cert is None or tls.key is None:
        return None
    cert, key, context = folder / tls.cert, folder / tls.key, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # an encrypted key is refused: OpenSSL would ask for a password
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"serving.tls.key: {key} is not the key of the certificate {cert}") from exc
        raise SettingsError(f"serving.tls: {cert} and {key} cannot be used as PEM: {exc.reason or exc}") from exc
    except OSError as exc:
        path = next((path for path in (cert, key) if not os.access(path, os.R_OK)), cert)
        raise SettingsError(f"serving.tls: {path} cannot be used: {exc.strerror}") from exc
    return context


def listen_patiently(host: str, port: int, patience: timedelta) -> socket.socket:
    """Return a listening socket; wait up to `patience` for a port that processes of a killed one still hold.

    Raises:
        SettingsError: the address cannot be bound; the sentence names the key to change.
    """
    deadline = time.monotonic() + patience.total_seconds()
    waits = False
    while True:
        try:
            return listen("serving.port", "serving.host", host, port, BACKLOG)
        except TakenError:
            if time.monotonic() >= deadline:
                raise
            if not waits:
                log.info("serving.port = %d is taken on %s, perhaps by a process that is about to end", port, host)
                start_does(f"waits for port {port}, which another process still has")
            waits = True
            time.sleep(_POLL_SECONDS)


def inherited(descriptor: int) -> socket.socket:
    """Return the listening socket that this process inherited."""
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        family = duplicate.family
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)


def address_of(settings: ServingSettings, listener: socket.socket) -> str:
    """Return the URL by which this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    scheme = "https" if settings.tls.cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
