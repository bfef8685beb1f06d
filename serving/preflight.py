"""What would keep serving from its start: its address, its certificate, its device. Imports no torch at load time."""

import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.core.preflight import Finding, check_address, check_import, info, ok, problem, warning
from anabranch.core.settings import uuids_in
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.topic_inspector import Inspector
from anabranch.ingest.preflight.broker import denied_topic
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.device.visible_devices import VISIBLE, machine_devices, visible_devices
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.versions.format import Versions
from anabranch.serving.http.listening_socket import load_certificate
from anabranch.serving.reporting.report import read_report
from anabranch.serving.rollout.eligibility import misfit, requirements_of
from anabranch.serving.settings import ServingSettings, TlsSettings, check_versions_from

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
    for key, number in (("serving.port", port), ("serving.grpc_port", serving.grpc_port)):
        if number is not None:
            yield from check_address(key, "serving.host", host, number, read_report(state_dir))


def check_stream(serving: ServingSettings, stream: StreamSettings) -> Iterator[Finding]:
    """Whether the topics of `[serving.stream]` and `[serving.log]` can be read and written, and the broker has
    transactions if needed."""
    answers, log = serving.stream, serving.log
    topics: list[tuple[str, str, str]] = []
    if answers is not None:
        topics += [(name, "stream.topics", "READ") for name in answers.topics]
        topics.append((answers.output, "stream.output", "WRITE"))
        yield from check_import("[serving.stream]", "confluent_kafka", "fast")
    if log is not None:
        topics.append((log.topic, "log.topic", "WRITE"))
        yield from check_import("[serving.log]", "confluent_kafka", "fast")
    if not topics:
        return
    try:
        with Inspector(stream) as inspector:
            faults = [
                found
                for name, key, right in topics
                if (found := _check_topic(inspector, stream, name, key, right)) is not None
            ]
            transactions = answers is not None and answers.delivery == "exactly-once"
            if transactions and not inspector.has_transactions():
                message = f"The Kafka broker at {stream.bootstrap_servers} has no transactions."
                faults.append(problem("stream.transactions", message, 'Set serving.stream.delivery = "at-least-once".'))
    except AnabranchError:
        return  # a finding of the broker's check
    if answers is not None and not faults:
        yield ok(f"{', '.join(answers.topics)} can be answered in {answers.output}.")
    if log is not None and not faults:
        yield ok(f"Answers can be logged in {log.topic}.")
    yield from faults


def _check_topic(inspector: Inspector, stream: StreamSettings, name: str, key: str, right: str) -> Finding | None:
    topic = inspector.topic(name)
    if topic is None:
        fix = f'Make it: "anabranch topics create", or fix serving.{key}.'
        message = f"There is no topic {name} on {stream.bootstrap_servers}."
        return problem("topic.missing", message, fix, unreachable=True)
    return denied_topic(name, topic, right)


def check_versions(settings: PipelineSettings, serving: ServingSettings) -> Iterator[Finding]:
    """Whether the newest version is whole and one that serving takes, and serving reads them where they are written."""
    try:
        check_versions_from(serving, settings.storage)
    except SettingsError as exc:
        what, _, fix = str(exc).rpartition(": ")
        yield problem("version.nowhere", f"{what}.", f"{fix[:1].upper()}{fix[1:]}.")
        return
    versions = Versions(settings.state_dir / "versions")
    needed = requirements_of(Schema(settings.events), settings.model)
    if not (numbers := versions.numbers()):
        yield ok("There is no version yet.")
        return
    number = numbers[-1]
    try:
        manifest = versions.manifest(number)
        for name in manifest.files:
            versions.checked(manifest, name)
        versions.checked_base(manifest)
    except (SettingsError, OSError) as exc:
        if number not in versions.numbers():
            yield ok(f"The learner has just replaced version {number}.")
            return
        fix = f'Nothing, serving takes none such; see "anabranch versions show {number}".'
        yield warning("version.damaged", f"The newest version is damaged: {exc}.", fix)
        return
    why = misfit(manifest, needed)
    if why is None:
        yield ok(f"The newest version, {number}, is whole and of this schema.")
    elif manifest.schema != needed.schema:
        fix = "Nothing, when [schema] was changed on purpose: serving waits for newer ones."
        yield info("version.schema", f"Serving does not take the newest version, {number}: {why}.", fix)
    else:
        fix = "Put [model] back, or let the learner publish a version of it."
        yield warning("version.model", f"Serving does not take the newest version, {number}: {why}.", fix)


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
