"""The broker, the topics, and the newest message of each as the pipeline would read it."""

import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from anabranch.doctor.schema_checks import blank
from anabranch.doctor.stream.label_checks import check_labels
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import BrokerError, CodecError, CredentialsError
from ingest.events.block import Outcome, SkipReason
from ingest.events.key_forms import PLAIN, form_of
from ingest.events.position import Position
from ingest.events.schema import Schema
from ingest.formats import json_text
from ingest.formats.other_formats import other_format
from ingest.formats.registry import FORMATS
from ingest.kafka.client import Messages
from ingest.kafka.diagnostics import ADVERTISED
from ingest.kafka.topic_inspector import Inspector, Topic
from ingest.schema_registry.cache import writer_schemas
from ingest.worker.block_builder import BlockBuilder, Incoming

_CONNECT_SECONDS = 3.0
_MOST_YEARS_SECONDS = 30 * 365 * 86_400
"""A record time that is further from now is in another unit than milliseconds."""
_AHEAD_SECONDS = 5.0


def check_broker(context: CheckContext) -> Iterator[Finding]:
    """Connect to the broker step by step, then check each topic and its newest message."""
    stream = context.config.pipeline.stream
    servers = [server.strip() for server in stream.bootstrap_servers.split(",")]
    faults = {server: reach(server, stream) for server in servers}
    wrong = [fault for fault in faults.values() if fault is not None]
    if len(wrong) == len(servers):
        yield from wrong
        return
    for fault in wrong:
        yield found("broker.partly", fault.message)
    try:
        with Inspector(stream) as inspector:
            yield ok(f"The broker at {stream.bootstrap_servers} answers.")
            partitions: dict[str, int] = {}
            for name in stream.all_topics:
                yield from _check_topic(context, inspector, name, partitions)
            yield from _check_dead_letters(inspector, stream)
            if stream.labels is not None:
                yield from check_labels(context, inspector, partitions)
    except CredentialsError as exc:
        yield found("broker.credentials", f"{exc}.")
    except CodecError as exc:
        yield found("message.codec", f"The newest message cannot be read: {exc}.")
    except BrokerError as exc:
        yield found("broker.advertised" if ADVERTISED in str(exc) else "broker.protocol", f"{exc}.")
    except SettingsError as exc:
        yield found("broker.unseen", f"The topics were not checked: {exc}.")


def reach(server: str, stream: StreamSettings) -> Finding | None:
    """Try the name, the connection and TLS, and return what fails."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:  # Python itself refuses some names, such as a..b
        why = getattr(exc, "strerror", None) or exc
        return found("broker.name", f"The name {host} of stream.bootstrap_servers is not known: {why}.")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    except OSError as exc:
        return found("broker.connect", f"No connection can be made to {server}: {exc.strerror or exc}.")
    with connection:
        values = {name: secret.get_secret_value() for name, secret in stream.properties.items()}
        if "SSL" not in values.get("security.protocol", "").upper().split("_"):
            return None
        try:
            context = _context(values)
        except OSError as exc:  # ssl.SSLError is one
            return found("broker.files", f"The ssl.* files of [stream.properties] cannot be used: {exc}.")
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLCertVerificationError as exc:
            return found("broker.certificate", f"The certificate of {server} is not accepted: {exc.verify_message}.")
        except OSError as exc:
            what = getattr(exc, "reason", None) or exc.strerror or exc
            return found("broker.tls", f"{server} does not speak TLS as security.protocol asks: {what}.")
    return None


def _context(values: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=values.get("ssl.ca.location"))
    if values.get("ssl.endpoint.identification.algorithm") == "none":
        context.check_hostname = False
    if "ssl.certificate.location" in values:
        context.load_cert_chain(
            values["ssl.certificate.location"], values.get("ssl.key.location"), values.get("ssl.key.password", "")
        )
    return context


def _check_topic(
    context: CheckContext, inspector: Inspector, name: str, partitions: dict[str, int]
) -> Iterator[Finding]:
    """Check one topic, and add its number of partitions if it can be read."""
    stream = context.config.pipeline.stream
    topic = inspector.topic(name)
    if topic is None:
        yield _missing(name, stream, "labels.topics" if name in stream.label_topics else "topics")
        return
    if denied := _denied(name, topic, "READ"):
        yield denied
        return
    start = stream.start_time
    if topic.retention is not None and start is not None and datetime.now(UTC) - start > topic.retention:
        message = f'stream.start = "{stream.start}", but the topic {name} keeps messages for'
        yield found("topic.retention", f"{message} {format_duration(topic.retention)} only.")
    partitions[name] = topic.partitions
    newest = inspector.newest(name, topic.partitions)
    yield ok(f"The topic {name} has {topic.partitions} partitions.")
    if newest is None:
        yield found("message.none", f"The topic {name} holds no message.")
    else:
        yield from _check_message(context, newest)


def _check_dead_letters(inspector: Inspector, stream: StreamSettings) -> Iterator[Finding]:
    assert stream.dead_letter_topic is not None
    topic = inspector.topic(stream.dead_letter_topic)
    if topic is None:
        yield _missing(stream.dead_letter_topic, stream, "dead_letter_topic")
    else:
        yield _denied(stream.dead_letter_topic, topic, "WRITE") or ok(
            f"The dead-letter topic {stream.dead_letter_topic} is there."
        )


def _missing(name: str, stream: StreamSettings, key: str) -> Finding:
    return found("topic.missing", f"There is no topic {name} on {stream.bootstrap_servers}.", key=key)


def _denied(name: str, topic: Topic, right: str) -> Finding | None:
    if topic.rights is None or right in topic.rights:
        return None
    verb = right.lower()
    return found("topic.denied", f"The user of [stream.properties] may not {verb} the topic {name}.", right=verb)


def _check_message(context: CheckContext, newest: Messages) -> Iterator[Finding]:
    pipeline = context.config.pipeline
    source = f"{newest.partition.topic}[{newest.partition.partition}]@{newest.offsets[0]}"
    ahead = newest.times_ms[0] / 1000 - time.time()
    if not -_MOST_YEARS_SECONDS < ahead < _MOST_YEARS_SECONDS and newest.times_ms[0] > 0:
        written = "seconds" if ahead < 0 else "microseconds or nanoseconds"
        message = (
            f"The newest message, {source}, has the record time {newest.times_ms[0]}, which seems to be {written}."
        )
        yield found("message.time", message)
    elif ahead > _AHEAD_SECONDS:
        message = f"The newest message, {source}, is {ahead:,.0f} s ahead of this machine's clock."
        yield found("clock.ahead", message)
    try:
        schema = Schema(pipeline.events, pipeline.stream.labels)
        schemas = writer_schemas(pipeline.stream, is_patient=False)
        assembler = BlockBuilder(schema, pipeline.stream, HoldOut(fraction=0, seed=0), schemas)
    except SettingsError:  # a finding of the schema's check
        return
    assembled = assembler.assemble([Incoming(newest, 0, Position(newest.offsets[0]))])
    if schemas is not None:
        schemas.close()
    if assembled.deferred:  # a finding of the registry's check
        return
    if (assembled.columns["reason"] == SkipReason.TOMBSTONE).any():
        form = form_of(newest.keys[0] or b"")
        tombstone = f"The newest message, {source}, is a tombstone"
        if form == PLAIN:
            yield ok(f"{tombstone}, which erases the events with its key.")
        else:
            message = f"{tombstone} that erases nothing: its key is {form}, not the text of [schema.key] {schema.key}."
            yield found("message.tombstone", message)
        return
    if assembled.letters:
        reasons = _reasons(newest, pipeline.events, pipeline.stream)
        reasons = reasons or [dict(assembled.letters[0].added)["anabranch-error"].decode()]
        yield found("message.unusable", f"The newest message, {source}, cannot be used: {'; '.join(reasons)}.")
        return
    unlabelled = int((assembled.columns["labelled"] == 0).sum())
    if unlabelled and pipeline.stream.labels is not None:
        yield ok(f"The newest message, {source}, has no label and waits for it.")
    elif unlabelled:
        skipped = int((assembled.columns["outcome"] == Outcome.SKIPPED).sum())
        without = {"store": "is stored without training", "distil": "is trained on by the teacher's output alone"}
        fate = f"and {'is skipped' if skipped else without[pipeline.stream.unlabelled]}"
        message = f"The newest message, {source}, has no label ({schema.label.name}) {fate}."
        yield found("message.unlabelled", message) if skipped else ok(message)
    else:
        yield ok(f"The newest message, {source}, can be used.")
    if assembled.unknown_fields and (value := newest.values[0]) is not None:
        message = "The newest message has fields that [schema] does not know"
        if pipeline.stream.format == "json":
            named = [*pipeline.events.features, schema.label.name, schema.key, schema.time, schema.weight, schema.group]
            message += f": {', '.join(sorted(set(json_text.decoded(msgspec.json.decode, value)) - set(named)))}"
        yield found("message.unknown", f"{message}.")


def _reasons(newest: Messages, events: SchemaSettings, stream: StreamSettings) -> list[str]:
    """Say what is wrong field by field, where the format has fields by name: each feature is tried alone."""
    value = newest.values[0]
    if stream.format != "json" or value is None or len(value) > stream.max_message_bytes:
        return []
    if FORMATS[stream.format](Schema(events)).decode([value]).rejects and (what := other_format(value)) is not None:
        return [what]
    alone: dict[str, Any] = {"key": None, "time": None, "weight": None, "group": None}
    tries = [alone | {"features": {name: feature}} for name, feature in events.features.items()]
    (first, *_) = events.features
    optional = {first: events.features[first].model_copy(update={"default": blank(events, first)})}
    reasons: list[str] = []
    for changes in (*tries, {"features": optional}):
        schema = Schema(events.model_copy(update=changes))
        for reject in FORMATS[stream.format](schema).decode([value]).rejects:
            if reject.reason not in reasons:
                reasons.append(reject.reason)
    return reasons
