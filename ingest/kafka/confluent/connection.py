"""Creates clients of librdkafka from `[stream.properties]`, and translates its errors."""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError, CredentialsError, TruncatedError
from anabranch.ingest.kafka.diagnostics import (
    TRUNCATED,
    auth_error,
    not_a_broker_message,
    unreachable,
    unreachable_advertised,
)
from anabranch.ingest.kafka.tokens import TokenSource, token_source
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
    """Make a client of the given class from `[stream.properties]`, and above them ours.

    Raises SettingsError, and CredentialsError where there is no token of `stream.token`.
    """
    tuned = {**DEFAULTS, **settings.client_properties}
    for name in ("sasl.mechanism", "sasl.mechanisms"):
        if name in tuned:
            tuned[name] = tuned[name].upper()
    fit = {name: value for name, value in tuned.items() if kind is Consumer or not PROPERTIES[name].consumer_only}
    if (source := token_source(settings)) is not None:
        source.token()  # or else the client would wait, and say no more than that it has waited
        ours = {"oauth_cb": partial(_next_token, source), **ours}
    try:
        return kind({"bootstrap.servers": settings.bootstrap_servers, **fit, **ours}, logger=_theirs)
    except KafkaException as exc:
        if exc.args[0].code() == KafkaError.SASL_AUTHENTICATION_FAILED:
            raise CredentialsError(source.problem if source is not None and source.problem else brief(exc)) from exc
        raise SettingsError(f"invalid stream.properties: {_without_secrets(exc, settings)}") from exc


def _next_token(source: TokenSource, _: str) -> tuple[str, float, str, dict[str, str]]:
    """Return what librdkafka, which asks in a separate thread, takes; after an error it asks again in ten seconds."""
    token = source.token()
    return token.value, token.end, "", dict(token.extensions)


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
                raise _explained(exc, settings, errors) from exc
        else:
            return


def _explained(exc: KafkaException, settings: StreamSettings, errors: Sequence[KafkaError]) -> BrokerError:
    servers = settings.bootstrap_servers
    for error in errors:
        if error.code() == KafkaError._AUTHENTICATION:
            return auth_error(settings, mechanism="mechanism" in error.str())
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
