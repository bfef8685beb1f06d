"""What would keep serving from its start: its address, its certificate, its device. Imports no torch at load time."""

import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.core.errors import SettingsError
from anabranch.core.preflight import Finding, check_address, ok, problem, warning
from anabranch.core.settings import uuids_in
from anabranch.learner.device.visible_devices import VISIBLE, machine_devices, visible_devices
from anabranch.serving.http.listening_socket import load_certificate
from anabranch.serving.reporting.report import read_report
from anabranch.serving.settings import ServingSettings, TlsSettings

if TYPE_CHECKING:
    import torch

_SOON = timedelta(days=14)
_EXPIRED = (9, 10)
"""OpenSSL's codes of a certificate that is not valid yet, and of one that is no longer."""


def check_port(serving: ServingSettings, status: str, state_dir: Path) -> Iterator[Finding]:
    """Whether the address of serving is free, or held by this pipeline's own process, and not that of `status` too."""
    host, port = serving.host.strip("[]"), serving.port
    if f"{host}:{port}" == re.sub(r"[\[\]]", "", status) and port:
        fix = "Set serving.port or learner.status to another port."
        yield problem("port.clash", f"serving.port and learner.status are both {host}:{port}.", fix)
    yield from check_address("serving.port", "serving.host", host, port, read_report(state_dir))


def check_tls(tls: TlsSettings, folder: Path) -> Iterator[Finding]:
    """Whether certificate and key can be read, belong together, and are valid today."""
    try:
        server = load_certificate(tls, folder)
    except SettingsError as exc:
        yield problem("tls.unusable", f"{exc}.", "Fix serving.tls.cert and serving.tls.key.")
        return
    if server is None or tls.cert is None:
        return
    cert = folder / tls.cert
    try:
        until = _valid_until(server, cert)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code in _EXPIRED:
            fix = "Renew the certificate."
            yield problem("tls.expired", f"The certificate {cert} cannot be used today: {exc.verify_message}.", fix)
        else:
            yield ok(f"{cert} and its key belong together.")
        return
    left = until - datetime.now(UTC)
    if left < _SOON:
        fix = "Renew the certificate."
        yield warning("tls.expiring", f"The certificate {cert} expires on {until:%Y-%m-%d}, in {left.days} days.", fix)
    else:
        yield ok(f"The certificate {cert} is valid until {until:%Y-%m-%d}.")


def check_device(
    name: str, device: "torch.device", visible: Mapping[str, str], send: Callable[[Finding], None]
) -> "torch.device | None":
    """Send what is wrong with serving's device, and return it; None where it is missing, or is not the learner's.

    CUDA, which the learner's `device` has begun, cannot show those that a UUID names any more: only its UUID is
    checked, against the devices that were `visible` before.
    """
    from anabranch.learner.preflight.model import choose

    if not uuids_in(name):
        narrowed = os.environ.get(VISIBLE) != visible.get(VISIBLE)
        if narrowed and ":" in name:
            return None
        chosen = choose("serving.device", name, send)
        return None if narrowed and len(machine_devices()) > 1 else chosen
    try:
        shown = visible_devices("serving.device", name, visible)
    except SettingsError as exc:
        send(
            problem("device.missing", f"{exc}.", 'Set serving.device = "auto", or install a torch that has the device.')
        )
        return None
    return device if os.environ.get(VISIBLE) == shown[VISIBLE] else None


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
