"""The addresses to listen on, and serving's certificate."""

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from anabranch.commands.status import read_status
from anabranch.doctor.findings import CheckContext, Finding, found, ok

_SOON = timedelta(days=14)
_EXPIRED = (9, 10)
"""OpenSSL's codes of a certificate that is not valid yet, and of one that is no longer."""


def check_ports(patient: CheckContext) -> Iterator[Finding]:
    """Whether each address is free, or held by this pipeline's own process."""
    pipeline, parts = patient.config.pipeline, read_status(patient.config)
    serving = (pipeline.serving.host.strip("[]"), pipeline.serving.port)
    host, _, port = pipeline.learner.status.rpartition(":")
    status = (host.strip("[]"), int(port))
    if serving == status and serving[1]:
        yield found("port.clash", f"serving.port and learner.status are both {status[0]}:{status[1]}.")
    for address, key, report in (
        (serving, "serving.port", parts.serving),
        (status, "learner.status", parts.learner),
    ):
        fault = _taken(*address)
        if fault is None:
            yield ok(f"{key}: {address[0]}:{address[1]} can be listened on.")
        elif fault.errno == errno.EADDRINUSE and report is not None and parts.condition(report) != "not running":
            yield ok(f"{key}: {address[0]}:{address[1]} is held by this pipeline's own process {report.pid}.")
        elif fault.errno == errno.EADDRINUSE:
            yield found("port.taken", f"{key}: another program listens on {address[0]}:{address[1]}.", key=key)
        else:
            message = f"{key}: {address[0]}:{address[1]} cannot be listened on: {fault.strerror}."
            yield found("port.address", message, key=key if fault.errno == errno.EACCES else _host_key(key))


def check_tls(patient: CheckContext) -> Iterator[Finding]:
    """Whether certificate and key can be read, belong together, and are valid today."""
    tls = patient.config.pipeline.serving.tls
    if tls.cert is None or tls.key is None:
        return
    cert, key = patient.config.folder / tls.cert, patient.config.folder / tls.key
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key, password="")
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            yield found("tls.mismatch", f"{key} is not the key of the certificate {cert}.")
        else:
            yield found("tls.unreadable", f"{cert} and {key} cannot be read as PEM: {exc.reason or exc}.")
        return
    except OSError as exc:
        path = next((path for path in (cert, key) if not os.access(path, os.R_OK)), cert)
        yield found("tls.unreadable", f"{path} cannot be read: {exc.strerror}.")
        return
    try:
        until = _valid_until(server, cert)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code in _EXPIRED:
            yield found("tls.expired", f"The certificate {cert} cannot be used today: {exc.verify_message}.")
        else:
            yield ok(f"{cert} and {key} belong together.")
        return
    left = until - datetime.now(UTC)
    if left < _SOON:
        yield found("tls.expiring", f"The certificate {cert} expires on {until:%Y-%m-%d}, in {left.days} days.")
    else:
        yield ok(f"The certificate {cert} is valid until {until:%Y-%m-%d}.")


def _taken(host: str, port: int) -> OSError | None:
    """Return why an address cannot be listened on; bound as servers bind it, and closed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        return exc
    return None


def _host_key(key: str) -> str:
    return "serving.host" if key == "serving.port" else key


def _valid_until(server: ssl.SSLContext, cert: Path) -> datetime:
    """Return when a certificate ends, by a handshake in memory that trusts that certificate alone.

    The standard library reads a certificate's dates only as those of a peer that was verified.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    ours = client.wrap_bio(to_client, to_server)
    for side in (ours, theirs, ours):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    peer = ours.getpeercert()
    assert peer is not None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(peer["notAfter"])), UTC)
