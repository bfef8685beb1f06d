"""The broker, the topics, and the newest message of each as the pipeline would read it."""

import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.core.preflight import Finding, info, ok, problem, warning
from anabranch.ingest.errors import BrokerError, CodecError, CredentialsError
from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.events.key_forms import PLAIN, form_of
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats import json_text
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.other_formats import other_format
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.diagnostics import ADVERTISED
from anabranch.ingest.kafka.topic_inspector import Inspector, Topic
from anabranch.ingest.preflight.schema import blank
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming

_LABELS = 2_000
_EVENTS = 20_000
"""The newest labels of all topics, and the newest events, that are compared."""
_FEWEST = 20
"""Fewer labels show nothing."""


def check_labels(
    stream: StreamSettings, events: SchemaSettings, inspector: Inspector, partitions: Mapping[str, int]
) -> Iterator[Finding]:
    """Compare the newest labels with the newest events.

    Args:
        stream: has the topics, and how labels find their events.
        events: the fields of an event.
        inspector: reads the topics.
        partitions: how many partitions each topic of events and of labels has, where it can be read.
    """
    assert stream.labels is not None
    schema = Schema(events, stream.labels)
    builder = BlockBuilder(schema, stream, HoldOut(fraction=0, seed=0), writer_schemas(stream, is_patient=False))
    samples = []
    for topics, most in ((stream.labels.topics, _LABELS), (stream.topics, _EVENTS)):
        known = [topic for topic in topics if topic in partitions]
        messages = [each for topic in known for each in inspector.tail(topic, partitions[topic], most // len(known))]
        samples.append(_sampled_rows(builder, messages))
    labels, sampled = samples
    is_label = labels["outcome"] == Outcome.LABEL
    label_keys, label_ms = (labels[name][is_label].astype(np.int64) for name in (schema.join_column, "time_ms"))
    event_keys, event_ms = (sampled[name].astype(np.int64) for name in (schema.join_column, "time_ms"))
    if len(label_keys) < _FEWEST or not len(event_keys):
        return
    lags = _lags(label_keys, label_ms, event_keys, event_ms)
    field = stream.labels.key or schema.key
    if not len(lags):
        compared = (
            f"the {len(label_keys):,} newest labels has the key ({field}) of one of the {len(event_keys):,} newest"
        )
        fix = "Set stream.labels.key to the field that both messages have, or check what the producers write to it."
        yield warning("labels.key", f"None of {compared} events.", fix)
        return
    p99 = timedelta(milliseconds=int(np.quantile(lags, 0.99)))
    if p99 > stream.labels.wait:
        wait = format_duration(stream.labels.wait)
        message = f"Of the newest labels, 1 in 100 comes more than {_rounded(p99)} after its event"
        fix = "Raise stream.labels.wait: labels that come later are dropped."
        yield warning("labels.wait", f"{message}, and stream.labels.wait is {wait}.", fix)
        return
    yield ok(f"{len(lags):,} of the {len(label_keys):,} newest labels find one of the newest events.")


def _sampled_rows(builder: BlockBuilder, messages: Sequence[Messages]) -> Mapping[str, Array]:
    incoming = [Incoming(each, index, Position(0)) for index, each in enumerate(messages)]
    return builder.assemble(incoming).columns


def _lags(
    label_keys: NDArray[np.int64],
    label_ms: NDArray[np.int64],
    event_keys: NDArray[np.int64],
    event_ms: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the time from event to label of each label whose key an event has, milliseconds."""
    order = np.argsort(event_keys, kind="stable")
    at = np.searchsorted(event_keys[order], label_keys)
    nearest = order[np.minimum(at, len(order) - 1)]
    matches = event_keys[nearest] == label_keys
    return np.asarray(label_ms[matches] - event_ms[nearest[matches]])


def _rounded(value: timedelta) -> str:
    """Write a duration to the second."""
    return format_duration(timedelta(seconds=max(1, round(value.total_seconds()))))


_CONNECT_SECONDS = 3.0
_MOST_YEARS_SECONDS = 30 * 365 * 86_400
"""A record time that is further from now is in another unit than milliseconds."""
_AHEAD_SECONDS = 5.0


def check_broker(stream: StreamSettings, events: SchemaSettings) -> Iterator[Finding]:
    """Connect to the broker step by step, then check each topic and its newest message."""
    servers = [server.strip() for server in stream.bootstrap_servers.split(",")]
    faults = {server: reach(server, stream) for server in servers}
    wrong = [fault for fault in faults.values() if fault is not None]
    if len(wrong) == len(servers):
        yield from wrong
        return
    for fault in wrong:
        yield warning("broker.partly", fault.message, "Take it out of stream.bootstrap_servers, or start it.")
    try:
        with Inspector(stream) as inspector:
            yield ok(f"The broker at {stream.bootstrap_servers} answers.")
            partitions: dict[str, int] = {}
            for name in stream.all_topics:
                yield from _check_topic(stream, events, inspector, name, partitions)
            yield from _check_dead_letters(inspector, stream)
            if stream.labels is not None:
                yield from check_labels(stream, events, inspector, partitions)
    except CredentialsError as exc:
        login = "sasl.username, sasl.password and sasl.mechanism in [stream.properties]"
        fix = f"Fix {login if stream.token is None else 'stream.token, or give its user the right to connect'}."
        yield problem("broker.credentials", f"{exc}.", fix, unreachable=True)
    except CodecError as exc:
        fix = "Install it: pip install 'anabranch[codecs]'; or set stream.client = \"confluent\"."
        yield problem("message.codec", f"The newest message cannot be read: {exc}.", fix)
    except BrokerError as exc:
        if ADVERTISED in str(exc):
            fix = "Fix advertised.listeners of the broker, or the name service of this host."
            yield problem("broker.advertised", f"{exc}.", fix, unreachable=True)
        else:
            fix = "Fix security.protocol and the rest of [stream.properties], or the port."
            yield problem("broker.protocol", f"{exc}.", fix, unreachable=True)
    except SettingsError as exc:
        fix = "Nothing, if the pipeline itself reads; doctor and produce take what kafka-python can do."
        yield warning("broker.unseen", f"The topics were not checked: {exc}.", fix)


def reach(server: str, stream: StreamSettings) -> Finding | None:
    """Try the name, the connection and TLS, and return what fails."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:  # Python itself refuses some names, such as a..b
        why = getattr(exc, "strerror", None) or exc
        message = f"The name {host} of stream.bootstrap_servers is not known: {why}."
        fix = "Fix stream.bootstrap_servers, or the name service."
        return problem("broker.name", message, fix, unreachable=True)
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    except OSError as exc:
        message = f"No connection can be made to {server}: {exc.strerror or exc}."
        fix = "Start the broker, or fix stream.bootstrap_servers or the firewall."
        return problem("broker.connect", message, fix, unreachable=True)
    with connection:
        values = stream.client_properties
        if "SSL" not in values.get("security.protocol", "").upper().split("_"):
            return None
        try:
            context = _context(values)
        except OSError as exc:  # ssl.SSLError is one
            fix = "Fix the ssl.* paths in [stream.properties]."
            return problem("broker.files", f"The ssl.* files of [stream.properties] cannot be used: {exc}.", fix)
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLCertVerificationError as exc:
            message = f"The certificate of {server} is not accepted: {exc.verify_message}."
            fix = "Set ssl.ca.location in [stream.properties] to the authority that signed it, or renew it."
            return problem("broker.certificate", message, fix)
        except OSError as exc:
            what = getattr(exc, "reason", None) or exc.strerror or exc
            fix = "Fix security.protocol in [stream.properties], or the port in stream.bootstrap_servers."
            return problem("broker.tls", f"{server} does not speak TLS as security.protocol asks: {what}.", fix)
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
    stream: StreamSettings, events: SchemaSettings, inspector: Inspector, name: str, partitions: dict[str, int]
) -> Iterator[Finding]:
    """Check one topic, and add its number of partitions if it can be read."""
    topic = inspector.topic(name)
    if topic is None:
        yield _missing(name, stream, "labels.topics" if name in stream.label_topics else "topics")
        return
    if denied := denied_topic(name, topic, "READ"):
        yield denied
        return
    start = stream.start_time
    if topic.retention is not None and start is not None and datetime.now(UTC) - start > topic.retention:
        message = f'stream.start = "{stream.start}", but the topic {name} keeps messages for'
        fix = "Raise the topic's retention.ms, or set stream.start later."
        yield warning("topic.retention", f"{message} {format_duration(topic.retention)} only.", fix)
    partitions[name] = topic.partitions
    newest = inspector.newest(name, topic.partitions)
    yield ok(f"The topic {name} has {topic.partitions} partitions.")
    if newest is None:
        yield info("message.none", f"The topic {name} holds no message.", 'Send some: "anabranch produce FILE".')
    else:
        yield from _check_message(stream, events, newest)


def _check_dead_letters(inspector: Inspector, stream: StreamSettings) -> Iterator[Finding]:
    assert stream.dead_letter_topic is not None
    topic = inspector.topic(stream.dead_letter_topic)
    if topic is None:
        yield _missing(stream.dead_letter_topic, stream, "dead_letter_topic")
    else:
        yield denied_topic(stream.dead_letter_topic, topic, "WRITE") or ok(
            f"The dead-letter topic {stream.dead_letter_topic} is there."
        )


def _missing(name: str, stream: StreamSettings, key: str) -> Finding:
    fix = f'Make it: "anabranch produce --create-topic FILE", or fix stream.{key}.'
    return problem("topic.missing", f"There is no topic {name} on {stream.bootstrap_servers}.", fix, unreachable=True)


def denied_topic(name: str, topic: Topic, right: str) -> Finding | None:
    """Return that the user has no right to a topic, such as READ; None where it has."""
    if topic.rights is None or right in topic.rights:
        return None
    verb = right.lower()
    message = f"The user of [stream.properties] may not {verb} the topic {name}."
    fix = f"Let the user of [stream.properties] {verb} it."
    return problem("topic.denied", message, fix, unreachable=True)


def _check_message(stream: StreamSettings, events: SchemaSettings, newest: Messages) -> Iterator[Finding]:
    source = f"{newest.partition.topic}[{newest.partition.partition}]@{newest.offsets[0]}"
    ahead = newest.times_ms[0] / 1000 - time.time()
    if not -_MOST_YEARS_SECONDS < ahead < _MOST_YEARS_SECONDS and newest.times_ms[0] > 0:
        written = "seconds" if ahead < 0 else "microseconds or nanoseconds"
        message = (
            f"The newest message, {source}, has the record time {newest.times_ms[0]}, which seems to be {written}."
        )
        yield warning("message.time", message, "Let the producer write milliseconds since 1970, or leave the time out.")
    elif ahead > _AHEAD_SECONDS:
        message = f"The newest message, {source}, is {ahead:,.0f} s ahead of this machine's clock."
        yield warning("clock.ahead", message, "Set this machine's clock, or the producer's (ntp).")
    try:
        schema = Schema(events, stream.labels)
        schemas = writer_schemas(stream, is_patient=False)
        assembler = BlockBuilder(schema, stream, HoldOut(fraction=0, seed=0), schemas)
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
            fix = "Let the connector write the key as text, or erase with anabranch erase --key."
            yield warning("message.tombstone", message, fix)
        return
    if assembled.letters:
        reasons = _reasons(newest, stream, events)
        reasons = reasons or [dict(assembled.letters[0].added)["anabranch-error"].decode()]
        fix = "Fix the producer of the topic, or [schema] and stream.format."
        yield problem("message.unusable", f"The newest message, {source}, cannot be used: {'; '.join(reasons)}.", fix)
        return
    unlabelled = int((assembled.columns["labelled"] == 0).sum())
    if unlabelled and stream.labels is not None:
        yield ok(f"The newest message, {source}, has no label and waits for it.")
    elif unlabelled:
        skipped = int((assembled.columns["outcome"] == Outcome.SKIPPED).sum())
        without = {"store": "is stored without training", "distil": "is trained on by the teacher's output alone"}
        fate = f"and {'is skipped' if skipped else without[stream.unlabelled]}"
        message = f"The newest message, {source}, has no label ({schema.label.name}) {fate}."
        yield (
            warning("message.unlabelled", message, 'Send labels, or set stream.unlabelled = "store".')
            if skipped
            else ok(message)
        )
    else:
        yield ok(f"The newest message, {source}, can be used.")
    if assembled.unknown_fields and (value := newest.values[0]) is not None:
        message = "The newest message has fields that [schema] does not know"
        if stream.format == "json" and stream.envelope == "none":
            named = {schema.path(name)[0] for name in schema.names}
            message += f": {', '.join(sorted(set(json_text.decoded(msgspec.json.decode, value)) - named))}"
        yield info("message.unknown", f"{message}.", "Nothing, if they are not meant to be features.")


def _reasons(newest: Messages, stream: StreamSettings, events: SchemaSettings) -> list[str]:
    """Say what is wrong field by field, where the format has fields by name: each feature is tried alone."""
    value = newest.values[0]
    is_plain = stream.format == "json" and stream.envelope == "none"
    if not is_plain or value is None or len(value) > stream.max_message_bytes:
        return []
    if JsonFormat(Schema(events)).decode([value]).rejects and (what := other_format(value)) is not None:
        return [what]
    alone: dict[str, Any] = {"key": None, "time": None, "weight": None, "group": None}
    tries = [alone | {"features": {name: feature}} for name, feature in events.features.items()]
    (first, *_) = events.features
    optional = {first: events.features[first].model_copy(update={"default": blank(events, first)})}
    reasons: list[str] = []
    for changes in (*tries, {"features": optional}):
        schema = Schema(events.model_copy(update=changes))
        for reject in JsonFormat(schema).decode([value]).rejects:
            if reject.reason not in reasons:
                reasons.append(reject.reason)
    return reasons
