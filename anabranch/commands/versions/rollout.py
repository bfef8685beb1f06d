"""`anabranch versions serve`, `rollback`, `reject` and `unpin`: which version is served. Loads no torch.

A running server writes `state.json` itself, so it is asked over HTTP. When none runs, the command writes `state.json`,
and the next server applies it.
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

from anabranch.command import confirm, output, say
from anabranch.commands.versions.fleet import apply_to_fleet, commands_fleet
from anabranch.commands.versions.ls import list_versions
from anabranch.commands.versions.show import Which, stored_versions, version_number
from anabranch.config.loader import Config
from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES
from anabranch.core.net import is_loopback
from anabranch.learner.versions.format import RegistryState
from anabranch.serving.errors import RequestError
from anabranch.serving.reporting.health import SILENT
from anabranch.serving.reporting.report import REPORT, STOPPED, ServingReport, read_report
from anabranch.serving.rollout.commands import COMMANDS, version_before
from anabranch.serving.settings import ServingSettings

_PATIENCE_SECONDS = 60
_WORDS = {"promote": "serve", "pin": "serve"}
_PREVIEWS = {
    "promote": "{} would be served{}, until a newer one passes the gate",
    "pin": "{} would be served{}, and no other until it is unpinned",
    "rollback": "{} would be served{} again, until a newer one passes the gate",
    "reject": "{} would never be served{} again",
    "unpin": "{} would no longer be pinned{}: the newest that may be served would be",
}


@dataclass(frozen=True)
class RolloutResult:
    """The result of a command."""

    state: RegistryState
    running: bool
    """Whether serving runs and has applied it; otherwise it will on start."""
    servers: int | None = None
    """How many servers of a fleet are to apply it; None where it is for this host's."""

    def sentence(self) -> str:
        """Return it as one sentence."""
        state = self.state
        if self.servers is not None:
            return f"saved for all servers: {self.servers} run, and apply it within seconds"
        if not self.running:
            return "saved; serving is not running and will apply it on start"
        pinned = "" if state.pinned is None else ", and no other until it is unpinned"
        return f"version {state.serving} is served{pinned}"

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        servers = {} if self.servers is None else {"servers": self.servers}
        return {**msgspec.to_builtins(self.state), "running": self.running, **servers}


def carry_out(config: Config, action: str, which: Which | None, *, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Apply a rollout command after a question, and print its result; with `dry_run` print what it would do.

    Raises:
        SettingsError: as `apply_command`, or nobody agrees.
    """
    sentence = preview(config, action, which)
    if dry_run:
        output({"preview": sentence} if as_json else None, lambda: sentence)
        return
    confirm(f"versions {_WORDS.get(action, action)}", sentence, yes=yes)
    result = apply_command(config, action, which)
    if as_json:
        output(result.document(), lambda: None)
    else:
        say(result.sentence())


def apply_command(config: Config, action: str, which: Which | None) -> RolloutResult:
    """Apply a rollout command to a version.

    Args:
        config: the pipeline.
        action: a key of `COMMANDS`.
        which: the version. None means the pinned one for `unpin`, and the one that was served before for `rollback`.

    Raises:
        SettingsError: there is no such version, or the command cannot be applied.
        DependencyError: serving runs, and does not answer.
    """
    report = read_report(config.state_dir)
    is_running = _is_running(report)
    if not is_running and (storage := commands_fleet(config)) is not None:
        state, servers = apply_to_fleet(storage, action, which)
        return RolloutResult(state, running=servers > 0, servers=servers)
    versions, chosen = stored_versions(config), _chosen(config, action, which)
    if report is not None and is_running:
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


def _is_running(report: ServingReport | None) -> bool:
    return report is not None and time.time() - report.time < SILENT.total_seconds() and report.problems != [STOPPED]


def preview(config: Config, action: str, which: Which | None) -> str:
    """Return what a command would do, as one sentence; raises SettingsError when it would be refused."""
    if not _is_running(read_report(config.state_dir)) and commands_fleet(config) is not None:
        return _PREVIEWS[action].format("the version" if which is None else f"version {which}", " by all servers")
    versions, number = stored_versions(config), _chosen(config, action, which)
    state = versions.state()
    try:
        after = COMMANDS[action](state, number, versions.numbers())
    except RequestError as exc:
        raise SettingsError(str(exc)) from exc
    sentence = _PREVIEWS[action].format(f"version {number}", "")
    if action == "reject" and number == state.serving:
        others = [one.number for one in list_versions(config, None) if one.refused is None and one.number != number]
        then = f"version {max(others)} would be served" if others else "no other may be served, so it would stay"
        return f"{sentence}, and is served now; {then}"
    passed_over = sorted(set(after.rolled_back) - set(state.rolled_back)) if action in ("promote", "rollback") else []
    newer = f"; newer ones would not be: {', '.join(map(str, passed_over))}" if passed_over else ""
    return f"{sentence}{newer}; now {'none' if state.serving is None else f'version {state.serving}'} is served"


def _chosen(config: Config, action: str, which: Which | None) -> int:
    """Return the number of the version that a command is about; None means what `apply_command` says."""
    if which is not None:
        return which if isinstance(which, int) else version_number(config, which)
    versions = stored_versions(config)
    state = versions.state()
    if action == "unpin":
        if state.pinned is None:
            raise SettingsError(
                f"no version is pinned in {versions.location}; to end a rollback, "
                "`anabranch versions serve` a newer one"
            )
        return state.pinned
    if state.serving is None:
        raise SettingsError(f"serving has taken no version yet in {versions.location}")
    usable = sorted(one.number for one in list_versions(config, None) if one.refused is None)
    before = version_before(state, versions.numbers(), usable)
    if before is None:
        raise SettingsError(
            f"no version before {state.serving} in {versions.location} may be served; "
            "`anabranch versions serve` serves one whatever its verdict"
        )
    return before


def connect(config: Config, report: ServingReport, token: str) -> tuple[http.client.HTTPConnection, dict[str, str]]:
    """Return a connection to the running server, and the headers that carry the token.

    Raises:
        SettingsError: the report names an address at which [serving] does not listen, so that no token is sent there.
    """
    if not _is_configured(config.pipeline.serving, report.address):
        raise SettingsError(
            f"{config.state_dir / REPORT} says that serving is at {report.address!r}, where [serving] does not have it "
            "listen: no token is sent there; name the config that it runs under with -c, or start it again"
        )
    if token and config.pipeline.serving.port == 0 and not report.address.startswith("https:"):
        raise SettingsError(
            f"serving.port = 0 takes any port, and {config.state_dir / REPORT}, which says that it is at "
            f"{report.address}, proves nothing: no token is sent there; name a port, or set serving.tls"
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return _connection(config, report.address), headers


def _ask(config: Config, report: ServingReport, action: str, number: int) -> RegistryState:
    connection, headers = connect(config, report, config.pipeline.serving.tokens.admin.get_secret_value())
    try:
        connection.request("POST", f"/api/versions/{number}:{action}", headers=headers)
        status, body = answer_of(connection)
    except TimeoutError as exc:
        raise DependencyError(
            f"serving at {report.address} has not answered within {_PATIENCE_SECONDS} s, and may still apply the "
            "command: see `anabranch status` before you send it again"
        ) from exc
    except (OSError, http.client.HTTPException) as exc:
        raise DependencyError(f"serving at {report.address} does not answer: {exc}") from exc
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise refusal_error(status)(refusal_in(body) or f"serving at {report.address} answered {status}")
    try:
        return decoded(body, RegistryState)
    except DamagedError as exc:
        raise DependencyError(f"what answers at {report.address} is not this pipeline's serving: {exc}") from exc


def answer_of(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a request.

    Raises:
        http.client.HTTPException: there is none, or it has too many bytes.
        OSError: the connection has failed.
    """
    reply = connection.getresponse()
    return reply.status, body_of(reply)


def body_of(reply: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer; raises as `answer_of`."""
    body = reply.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise http.client.HTTPException(f"the answer is longer than {MOST_BYTES:,} bytes")
    return body


def refusal_error(status: int) -> type[AnabranchError]:
    """Return what a refusal by serving is: of the command, or of what passes, so that the same may work later."""
    passes = status == http.HTTPStatus.TOO_MANY_REQUESTS or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
    return DependencyError if passes else SettingsError


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


def refusal_in(body: bytes) -> str | None:
    """Return the sentence of a refusal; None of another body."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return None


def _connection(config: Config, address: str) -> http.client.HTTPConnection:
    """Connect without a proxy; the certificate of the config is trusted under any name."""
    parts, cert = urlsplit(address), config.pipeline.serving.tls.cert
    host = parts.hostname or ""
    if parts.scheme != "https" or cert is None:
        return http.client.HTTPConnection(host, parts.port, timeout=_PATIENCE_SECONDS)
    context = ssl.create_default_context(cafile=str(config.folder / cert))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # who issued it need not be in the file
    return http.client.HTTPSConnection(host, parts.port, timeout=_PATIENCE_SECONDS, context=context)
