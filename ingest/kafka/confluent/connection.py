"""Creates clients of librdkafka from `[stream.properties]`, and translates its errors."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError, TruncatedError
from anabranch.ingest.kafka.diagnostics import (
    TRUNCATED,
    auth_error,
    not_a_broker_message,
    unreachable,
    unreachable_advertised,
)
from anabranch.ingest.settings.kafka_properties import DEFAULTS, PROPERTIES
from anabranch.ingest.settings.stream import StreamSettings

_METADATA_SECONDS = 2.0
_FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)

log = logging.getLogger(__name__)

# librdkafka's own log lines are discarded: all that matters is also reported as an error.
_theirs = logging.getLogger(f"{__name__}.own")
_theirs.propagate = False
_theirs.addHandler(logging.NullHandler())


def make(kind: Any, settings: StreamSettings, ours: Mapping[str, Any]) -> Any:
    """Make a client of the given class from `[stream.properties]`, and above them ours; raises SettingsError."""
    tuned = {**DEFAULTS, **{name: secret.get_secret_value() for name, secret in settings.properties.items()}}
    for name in ("sasl.mechanism", "sasl.mechanisms"):
        if name in tuned:
            tuned[name] = tuned[name].upper()
    fit = {name: value for name, value in tuned.items() if kind is Consumer or not PROPERTIES[name].consumer_only}
    try:
        return kind({"bootstrap.servers": settings.bootstrap_servers, **fit, **ours}, logger=_theirs)
    except KafkaException as exc:
        raise SettingsError(f"invalid stream.properties: {_without_secrets(exc, settings)}") from exc


def brief(exc: KafkaException) -> str:
    """Return the sentence of an error of librdkafka."""
    return str(exc.args[0].str())


def reason(exc: KafkaException, client: Any, settings: StreamSettings) -> str:
    """Return why a request of a client failed: by an address that cannot be reached, if a broker has given one."""
    try:
        found = client.list_topics(timeout=_METADATA_SECONDS).brokers.values()
    except KafkaException:
        return brief(exc)
    return unreachable_advertised(settings.bootstrap_servers, [(each.host, each.port) for each in found]) or brief(exc)


def reach(consumer: Any, settings: StreamSettings, errors: Sequence[KafkaError], patience: float) -> None:
    """Wait until a broker answers, or raise BrokerError with the error that came instead."""
    deadline = time.monotonic() + patience
    servers = settings.bootstrap_servers
    while True:
        try:
            consumer.list_topics(settings.topics[0], timeout=0.5)
        except KafkaException as exc:
            consumer.poll(0)  # calls back with the errors
            codes = {error.code() for error in errors}
            hopeless = KafkaError._ALL_BROKERS_DOWN in codes and unreachable(servers)
            if KafkaError._AUTHENTICATION in codes or hopeless or time.monotonic() > deadline:
                raise _explained(exc, settings.bootstrap_servers, errors) from exc
        else:
            return


def _explained(exc: KafkaException, servers: str, errors: Sequence[KafkaError]) -> BrokerError:
    for error in errors:
        if error.code() == KafkaError._AUTHENTICATION:
            return auth_error(servers, mechanism="mechanism" in error.str())
    sentence = errors[-1].str() if errors else brief(exc)
    return BrokerError(unreachable(servers) or not_a_broker_message(servers, sentence))


def raise_if_fatal(error: KafkaError) -> None:
    """Raise for errors that end the reading; librdkafka itself retries after all others."""
    if error.code() == KafkaError._LOG_TRUNCATION:
        raise TruncatedError(TRUNCATED)
    if error.fatal() or error.code() in _FORBIDDEN:
        raise BrokerError(f"cannot read the topics: {error.str()}")
    log.debug("librdkafka: %s", error.str())


def _without_secrets(exc: KafkaException, settings: StreamSettings) -> str:
    sentence = brief(exc)
    for secret in settings.properties.values():
        sentence = sentence.replace(secret.get_secret_value() or "\n", "...")
    return sentence
