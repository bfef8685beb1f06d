"""What `[stream.properties]` takes: librdkafka's names, and what each is for kafka-python. Imports no Kafka client."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Property:
    """A client setting: kafka-python's option for it, or None where it has none, and what it holds."""

    kafka_python: str | None
    kind: Literal["string", "whole number", "true or false"] = "string"
    consumer_only: bool = False


_NUMBER: Literal["whole number"] = "whole number"
_SWITCH: Literal["true or false"] = "true or false"

PROPERTIES: Mapping[str, Property] = {
    "broker.address.family": Property(None),
    "check.crcs": Property("check_crcs", _SWITCH, consumer_only=True),
    "client.dns.lookup": Property("client_dns_lookup"),
    "client.id": Property("client_id"),
    "client.rack": Property("client_rack", consumer_only=True),
    "connections.max.idle.ms": Property("connections_max_idle_ms", _NUMBER),
    "enable.ssl.certificate.verification": Property(None, _SWITCH),
    "fetch.max.bytes": Property("fetch_max_bytes", _NUMBER, consumer_only=True),
    "fetch.message.max.bytes": Property("max_partition_fetch_bytes", _NUMBER, consumer_only=True),
    "fetch.min.bytes": Property("fetch_min_bytes", _NUMBER, consumer_only=True),
    "fetch.wait.max.ms": Property("fetch_max_wait_ms", _NUMBER, consumer_only=True),
    "https.ca.location": Property(None),
    "max.partition.fetch.bytes": Property("max_partition_fetch_bytes", _NUMBER, consumer_only=True),
    "receive.message.max.bytes": Property("receive_message_max_bytes", _NUMBER),
    "reconnect.backoff.max.ms": Property("reconnect_backoff_max_ms", _NUMBER),
    "reconnect.backoff.ms": Property("reconnect_backoff_ms", _NUMBER),
    "retry.backoff.ms": Property("retry_backoff_ms", _NUMBER),
    "sasl.kerberos.service.name": Property("sasl_kerberos_service_name"),
    "sasl.mechanism": Property("sasl_mechanism"),
    "sasl.mechanisms": Property("sasl_mechanism"),
    "sasl.oauthbearer.client.id": Property(None),
    "sasl.oauthbearer.client.secret": Property(None),
    "sasl.oauthbearer.config": Property(None),
    "sasl.oauthbearer.extensions": Property(None),
    "sasl.oauthbearer.method": Property(None),
    "sasl.oauthbearer.scope": Property(None),
    "sasl.oauthbearer.token.endpoint.url": Property(None),
    "sasl.password": Property("sasl_plain_password"),
    "sasl.username": Property("sasl_plain_username"),
    "security.protocol": Property("security_protocol"),
    "socket.connection.setup.timeout.ms": Property(None, _NUMBER),
    "socket.keepalive.enable": Property(None, _SWITCH),
    "socket.nagle.disable": Property(None, _SWITCH),
    "socket.receive.buffer.bytes": Property("receive_buffer_bytes", _NUMBER),
    "socket.send.buffer.bytes": Property("send_buffer_bytes", _NUMBER),
    "socket.timeout.ms": Property("request_timeout_ms", _NUMBER),
    "ssl.ca.location": Property("ssl_cafile"),
    "ssl.ca.pem": Property(None),
    "ssl.certificate.location": Property("ssl_certfile"),
    "ssl.certificate.pem": Property(None),
    "ssl.cipher.suites": Property("ssl_ciphers"),
    "ssl.crl.location": Property("ssl_crlfile"),
    "ssl.curves.list": Property(None),
    "ssl.endpoint.identification.algorithm": Property("ssl_check_hostname"),
    "ssl.key.location": Property("ssl_keyfile"),
    "ssl.key.password": Property("ssl_password"),
    "ssl.key.pem": Property(None),
    "ssl.keystore.location": Property(None),
    "ssl.keystore.password": Property(None),
    "ssl.sigalgs.list": Property(None),
    "topic.metadata.refresh.interval.ms": Property("metadata_max_age_ms", _NUMBER),
}

DEFAULTS: Mapping[str, str] = {
    # librdkafka's own default hands out what was damaged on the way as if it were good.
    "check.crcs": "true",
    "client.id": "anabranch",
    "fetch.max.bytes": "16000000",
    "reconnect.backoff.max.ms": "5000",
    "topic.metadata.refresh.interval.ms": "5000",
}
"""Defaults of both clients, which `[stream.properties]` overrides."""

_UNGROUPED = "it has no effect, since partitions are assigned and no group is joined"
_PROMISED = "it is fixed, since dead letters have to be acknowledged"

REFUSED: Mapping[str, str] = {
    "acks": _PROMISED,
    "allow.auto.create.topics": "topics are never created by reading them",
    "auto.commit.enable": "set by the learner, whose checkpoints hold the positions",
    "auto.commit.interval.ms": "set by the learner, whose checkpoints hold the positions",
    "auto.offset.reset": "use stream.start and stream.on_gap",
    "bootstrap.servers": "use stream.bootstrap_servers",
    "enable.auto.commit": "set by the learner, whose checkpoints hold the positions",
    "enable.auto.offset.store": "set by the learner, whose checkpoints hold the positions",
    "enable.idempotence": _PROMISED,
    "enable.partition.eof": "it is fixed, since positions depend on it",
    "group.id": "use stream.group_id",
    "group.instance.id": _UNGROUPED,
    "group.protocol": _UNGROUPED,
    "heartbeat.interval.ms": _UNGROUPED,
    "isolation.level": "use stream.isolation_level",
    "max.poll.interval.ms": _UNGROUPED,
    "message.max.bytes": "use stream.max_message_bytes",
    "metadata.broker.list": "use stream.bootstrap_servers",
    "partition.assignment.strategy": _UNGROUPED,
    "queued.max.messages.kbytes": "use stream.buffer_bytes",
    "queued.min.messages": "use stream.buffer_bytes",
    "request.required.acks": _PROMISED,
    "session.timeout.ms": _UNGROUPED,
    "transactional.id": _PROMISED,
}
"""Properties that would break a guarantee, and what decides instead."""


_STORE = "it is for stores of Java: use ssl.ca.location, a file in PEM"
_CALLBACK = "it names a class of Java: use stream.token, or sasl.username and sasl.password"

OF_OTHERS: Mapping[str, str] = {
    "basic.auth.credentials.source": "use stream.registry.user and stream.registry.password",
    "basic.auth.user.info": "use stream.registry.user and stream.registry.password",
    "default.api.timeout.ms": "use socket.timeout.ms",
    "fetch.max.wait.ms": "use fetch.wait.max.ms",
    "key.deserializer": "use stream.format",
    "max.poll.records": "use stream.buffer_bytes",
    "metadata.max.age.ms": "use topic.metadata.refresh.interval.ms",
    "receive.buffer.bytes": "use socket.receive.buffer.bytes",
    "request.timeout.ms": "use socket.timeout.ms",
    "sasl.client.callback.handler.class": _CALLBACK,
    "sasl.jaas.config": "use sasl.username and sasl.password",
    "sasl.login.callback.handler.class": _CALLBACK,
    "sasl.login.class": _CALLBACK,
    "sasl.oauthbearer.jwks.endpoint.url": "use sasl.oauthbearer.token.endpoint.url",
    "schema.registry.url": "use stream.registry.url",
    "send.buffer.bytes": "use socket.send.buffer.bytes",
    "ssl.enabled.protocols": "the newest protocol that both sides know is used",
    "ssl.keystore.certificate.chain": "use ssl.certificate.pem, or ssl.certificate.location",
    "ssl.keystore.key": "use ssl.key.pem, or ssl.key.location",
    "ssl.keystore.type": "use ssl.certificate.location and ssl.key.location, files in PEM",
    "ssl.protocol": "the newest protocol that both sides know is used",
    "ssl.truststore.certificates": "use ssl.ca.pem, or ssl.ca.location",
    "ssl.truststore.location": _STORE,
    "ssl.truststore.password": _STORE,
    "ssl.truststore.type": _STORE,
    "value.deserializer": "use stream.format",
}
"""Names of Java's clients, and what has their meaning here: the nearest spelling has another one."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "sasl.mechanism": ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER"),
}
"""Values of properties that have few, in any case."""


def check_name(name: str) -> str:
    """Return the name of a property, or raise ValueError with the way out."""
    if name in REFUSED:
        raise ValueError(f"is not taken here: {REFUSED[name]}")
    if name in OF_OTHERS:
        raise ValueError(f"is a name of Java's client: {OF_OTHERS[name]}")
    if name not in PROPERTIES:
        same = [mine for mine, known in PROPERTIES.items() if name in (known.kafka_python, mine.replace(".", "_"))]
        if same:
            raise ValueError(f"is a name of kafka-python: use {same[0]!r}, in quotes")
        close = difflib.get_close_matches(name, (*PROPERTIES, *REFUSED), n=1)
        hint = f"; the nearest known one is {close[0]!r}" if close else f"; known are {', '.join(PROPERTIES)}"
        raise ValueError(f"unknown property{hint}")
    return name


def check(client: str, name: str, value: str) -> None:
    """Check that a client supports a property's value; raises ValueError, which never contains the value."""
    known, choices = PROPERTIES[name], _CHOICES.get(name.removesuffix("s"), ())
    if choices and value.upper() not in choices:
        aws = "; AWS_MSK_IAM is of Java's client alone: use stream.token" * (value.upper() == "AWS_MSK_IAM")
        raise ValueError(f"{name} is none of {', '.join(choices)}{aws}")
    if (known.kind == _NUMBER and not value.isdecimal()) or (known.kind == _SWITCH and value not in _BOOLEANS):
        raise ValueError(f"{name} is not a {known.kind}" if known.kind == _NUMBER else f"{name} is not {known.kind}")
    if client == "kafka-python":
        bearer = name in ("sasl.mechanism", "sasl.mechanisms") and value.upper() == "OAUTHBEARER"
        if known.kafka_python is None or bearer:
            what = f"{name} = OAUTHBEARER without stream.token" if bearer else name
            raise ValueError(f'kafka-python cannot do {what}; set {"it, or " * bearer}stream.client = "confluent"')


def kafka_python_options(name: str, value: str) -> dict[str, str | int | bool]:
    """Return kafka-python's option for a property that `check` has passed."""
    known = PROPERTIES[name]
    assert known.kafka_python is not None
    converted: str | int | bool = value
    if name == "ssl.endpoint.identification.algorithm":
        converted = value != "none"
    elif name in ("security.protocol", "sasl.mechanism", "sasl.mechanisms"):
        converted = value.upper()
    elif known.kind == _NUMBER:
        converted = int(value)
    elif known.kind == _SWITCH:
        converted = value == "true"
    return {known.kafka_python: converted}


_BOOLEANS = ("true", "false")
