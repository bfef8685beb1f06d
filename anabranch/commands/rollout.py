"""`anabranch versions promote`, `rollback`, `pin` and `unpin`: what a person orders about versions. Loads no torch.

Serving writes `state.json`, so it is asked to, over HTTP. Where none runs the order is written down here, and the next
one obeys it.
"""

import http.client
import json
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.net import is_loopback
from learner.state_dir.version import RegistryState, Versions
from serving.config import ServingSettings
from serving.errors import RequestError
from serving.reporting.health import SILENT
from serving.reporting.report import REPORT, STOPPED, ServingReport, read_report
from serving.rollout.commands import COMMANDS

_PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class RolloutResult:
    """What became of an order."""

    state: RegistryState
    running: bool
    """Whether serving runs, and has obeyed; otherwise it will when it is started."""

    def sentence(self) -> str:
        """Say it."""
        state = self.state
        if not self.running:
            return "written down; serving does not run, and will obey when it is started"
        pinned = "" if state.pinned is None else ", and no other until it is unpinned"
        return f"version {state.serving} is served{pinned}"

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**msgspec.to_builtins(self.state), "running": self.running}


def apply_command(config: Config, action: str, number: int | None) -> RolloutResult:
    """Have serving do something about a version; None means the served, or the pinned one where that is unpinned.

    Raises:
        SettingsError: there is no such version, or the order cannot be obeyed.
        DependencyError: serving runs, and does not answer.
    """
    versions = Versions(config.state_dir / "versions")
    state = versions.state()
    chosen = number if number is not None else state.pinned if action == "unpin" else state.serving
    if chosen is None:
        what = "no version is pinned" if action == "unpin" else "serving has taken no version yet"
        raise SettingsError(f"{what} in {versions.path}")
    report = read_report(config.state_dir)
    if report is not None and time.time() - report.time < SILENT.total_seconds() and report.problems != [STOPPED]:
        return RolloutResult(_ask(config, report, action, chosen), running=True)
    try:
        with versions.changing_state():
            after = COMMANDS[action](versions.state(), chosen, versions.numbers())
            versions.write_state(after)
    except RequestError as exc:
        raise SettingsError(str(exc)) from exc
    except OSError as exc:
        raise SettingsError(f"{versions.path}/state.json cannot be written: {exc.strerror or exc}") from exc
    return RolloutResult(after, running=False)


def _ask(config: Config, report: ServingReport, action: str, number: int) -> RegistryState:
    if not _is_configured(config.pipeline.serving, report.address):
        raise SettingsError(
            f"{config.state_dir / REPORT} says that serving is at {report.address!r}, where [serving] does not have it "
            "listen: no token is sent there; name the config that it runs under with -c, or start it again"
        )
    token = config.pipeline.serving.tokens.admin.get_secret_value()
    if token and config.pipeline.serving.port == 0 and not report.address.startswith("https:"):
        raise SettingsError(
            f"serving.port = 0 takes any port, and {config.state_dir / REPORT}, which says that it is at "
            f"{report.address}, proves nothing: no token is sent there; name a port, or set serving.tls"
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection = _connection(config, report.address)
    try:
        connection.request("POST", f"/api/versions/{number}:{action}", headers=headers)
        reply = connection.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException) as exc:
        raise DependencyError(f"serving at {report.address} does not answer: {exc}") from exc
    finally:
        connection.close()
    if reply.status != http.HTTPStatus.OK:
        raise SettingsError(_refusal(body) or f"serving at {report.address} answered {reply.status}")
    try:
        return decoded(body, RegistryState)
    except DamagedError as exc:
        raise DependencyError(f"what answers at {report.address} is not this pipeline's serving: {exc}") from exc


def _is_configured(settings: ServingSettings, address: str) -> bool:
    """Whether an address is one at which serving listens by its settings: the report may be written by anybody."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return False
    host = parts.hostname or ""
    return (
        parts.scheme == ("https" if settings.tls.cert is not None else "http")
        and settings.port in (0, port)
        and (is_loopback(host) or host in _addresses(settings.host))
    )


def _addresses(host: str) -> set[str]:
    """Return a host's name and its addresses, where it has some."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return {host}
    return {host, *(str(sockaddr[0]) for *_, sockaddr in found)}


def _refusal(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return None


def _connection(config: Config, address: str) -> http.client.HTTPConnection:
    """Connect without a proxy; a certificate is trusted under whatever name if it is that of the config."""
    parts, cert = urlsplit(address), config.pipeline.serving.tls.cert
    host = parts.hostname or ""
    if parts.scheme != "https" or cert is None:
        return http.client.HTTPConnection(host, parts.port, timeout=_PATIENCE_SECONDS)
    context = ssl.create_default_context(cafile=str(config.folder / cert))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # who issued it need not be in the file
    return http.client.HTTPSConnection(host, parts.port, timeout=_PATIENCE_SECONDS, context=context)
