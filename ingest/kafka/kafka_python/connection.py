"""Creates clients of kafka-python from `[stream.properties]`, and translates its errors."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from kafka import errors as kafka_errors
from kafka.net.sasl.oauth import AbstractTokenProvider
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError, CodecError, CredentialsError, TruncatedError
from anabranch.ingest.kafka.diagnostics import (
    TRUNCATED,
    auth_error,
    not_a_broker_message,
    unreachable,
    unreachable_advertised,
)
from anabranch.ingest.kafka.kafka_python.records import UnreadableError
from anabranch.ingest.kafka.tokens import Token, TokenSource, token_source
from anabranch.ingest.settings.kafka_properties import DEFAULTS, check, kafka_python_options
from anabranch.ingest.settings.stream import StreamSettings

PATIENCE = timedelta(seconds=8)
"""How long to try to reach a broker."""
_CODECS = {"snappy": "python-snappy", "lz4": "lz4", "zstd": "zstandard"}
"""The packages that kafka-python needs, except for gzip, which is in Python."""
_REFUSALS = (kafka_errors.SaslAuthenticationFailedError, kafka_errors.UnsupportedSaslMechanismError)


def client_options(kind: Any, settings: StreamSettings, patience: timedelta = PATIENCE, **ours: Any) -> dict[str, Any]:
    """Return kafka-python's options for a client of the given class: `[stream.properties]`, and above them ours."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings.bootstrap_servers.split(",")],
        "bootstrap_timeout_ms": int(patience / timedelta(milliseconds=1)),
    }
    for name, value in DEFAULTS.items():
        options |= kafka_python_options(name, value)
    if (source := token_source(settings)) is not None:
        options["sasl_oauth_token_provider"] = _Provider(source)
    for name, value in settings.client_properties.items():
        try:
            if source is None or not name.startswith("sasl."):
                check("kafka-python", name, value)
        except ValueError as exc:
            what = str(exc).partition("; ")[0]
            raise SettingsError(
                f"stream.properties: what writes events is kafka-python, and {what}; the pipeline itself reads with "
                f'stream.client = "{settings.client}"'
            ) from exc
        options |= kafka_python_options(name, value)
    return {name: value for name, value in options.items() if name in kind.DEFAULT_CONFIG} | ours


class _Provider(AbstractTokenProvider):  # type: ignore[misc]
    """Hands tokens to kafka-python, which asks at each authentication, in the thread of its connections."""

    def __init__(self, source: TokenSource) -> None:
        super().__init__()
        self._source = source

    @override
    def token(self) -> str:
        return self._next().value

    @override
    def extensions(self) -> dict[str, str]:
        return dict(self._next().extensions)

    def _next(self) -> Token:
        try:
            return self._source.token()
        except CredentialsError as exc:  # the connection is made again, as after others of its errors
            raise kafka_errors.KafkaConnectionError(str(exc)) from exc


def connect(kind: Any, settings: StreamSettings, patience: timedelta = PATIENCE, **options: Any) -> Any:
    """Return a kafka-python client of the given class, or raise BrokerError with the reason.

    Tries to reach a broker for up to `patience`, once there is a token of `stream.token`. kafka-python itself raises
    only that it could not bootstrap. It logs the broker's answer, so the reason is taken from its log.
    """
    error: Exception | None = None
    if (source := token_source(settings)) is not None:
        source.token()
    with _logged_errors() as logged:
        # A broker may close the connection before its refusal is read: a second attempt may find the reason.
        for _ in range(2 if "sasl.username" in settings.properties else 1):
            try:
                return kind(**client_options(kind, settings, patience, **options))
            except kafka_errors.KafkaError as exc:
                error = exc
            except (OSError, ValueError, AssertionError) as exc:
                raise BrokerError(f"invalid stream.properties: {exc}") from exc
            if any(isinstance(cause, _REFUSALS) for cause in logged):
                break
    assert error is not None
    raise _explained(settings, error, logged) from error


def _explained(settings: StreamSettings, error: Exception, logged: Sequence[BaseException]) -> BrokerError:
    servers = settings.bootstrap_servers
    for cause in logged:
        if isinstance(cause, _REFUSALS):
            return auth_error(settings, mechanism=isinstance(cause, kafka_errors.UnsupportedSaslMechanismError))
    # kafka-python discards a refusal that it reads together with the end of the connection.
    if "sasl.mechanism" in settings.client_properties and any("socket disconnected" in str(cause) for cause in logged):
        what = "the credentials, or the sasl.mechanism, in stream.properties"
        what = what if settings.token is None else f'the token of stream.token = "{settings.token}"'
        return CredentialsError(f"the Kafka broker at {servers} hangs up: it seems that it refuses {what}")
    return BrokerError(unreachable(servers) or not_a_broker_message(servers, brief(logged[-1] if logged else error)))


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[BaseException]]:
    """Collect the errors that kafka-python logs."""
    causes: list[BaseException] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            arguments = record.args if isinstance(record.args, tuple) else ()
            causes.extend(value for value in arguments if isinstance(value, BaseException))

    theirs = logging.getLogger("kafka")
    level, collector = theirs.level, Collector(logging.WARNING)
    silent = logging.NullHandler()
    theirs.addHandler(collector)
    theirs.addHandler(silent)
    propagate, theirs.propagate = theirs.propagate, False
    theirs.setLevel(logging.WARNING)
    try:
        yield causes
    finally:
        theirs.removeHandler(collector)
        theirs.removeHandler(silent)
        theirs.propagate = propagate
        theirs.setLevel(level)


def reason(error: kafka_errors.KafkaError, client: Any, settings: StreamSettings) -> str:
    """Return why a request of a client failed: by an address that cannot be reached, if a broker has given one."""
    manager = getattr(client, "_manager", None)
    known = [] if manager is None else manager.cluster.brokers()
    fault = unreachable_advertised(settings.bootstrap_servers, [(str(each.host), int(each.port)) for each in known])
    return fault or brief(error)


@contextlib.contextmanager
def translated(what: str, client: Any, settings: StreamSettings) -> Iterator[None]:
    """Translate the errors of a client of kafka-python into ours, except those that the caller handles."""
    try:
        yield
    except (kafka_errors.OffsetOutOfRangeError, UnreadableError):
        raise
    except kafka_errors.LogTruncationError as exc:
        raise TruncatedError(TRUNCATED) from exc
    except kafka_errors.UnsupportedCodecError as exc:
        raise undecodable(exc) from exc
    except kafka_errors.KafkaError as exc:
        raise BrokerError(f"{what}: {reason(exc, client, settings)}") from exc


def undecodable(error: kafka_errors.UnsupportedCodecError) -> CodecError:
    """Return the error that names the package that kafka-python needs for a codec."""
    codec = next((name for name in _CODECS if name in str(error)), None)
    if codec is None:
        return CodecError(f"messages are compressed in a way that kafka-python does not know ({error})")
    return CodecError(
        f"messages are compressed with {codec}, which kafka-python reads with the package {_CODECS[codec]} alone: "
        f'"pip install \'anabranch[codecs]\'", or set stream.client = "confluent"'
    )


def brief(error: BaseException) -> str:
    """Return the sentence of an error of kafka-python."""
    if "Invalid frame length" in str(error):
        return f"its answer is larger than receive.message.max.bytes, which stream.properties can raise: {error}"
    return str(error) or type(error).__name__
