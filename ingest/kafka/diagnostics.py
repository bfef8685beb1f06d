"""Sentences and errors about a broker, a topic or a batch that cannot be used."""

import logging
import socket
from collections.abc import Iterable

from anabranch.ingest.errors import CredentialsError, GapError, RecreatedError
from anabranch.ingest.kafka.tokens import token_source
from anabranch.ingest.settings.stream import StreamSettings

log = logging.getLogger(__name__)

ADVERTISED = "(advertised.listeners)"
"""What the sentence of an address that cannot be reached has in it."""
_MOST_TRIED = 3
"""Addresses of a cluster that are tried after an error; each may take two seconds."""
BAD_HEADER = "header: the name of a header is not UTF-8"


def too_large(limit: int) -> str:
    """Return the reason to refuse a compressed batch."""
    return f"too-large: its batch is more than {limit} bytes once it is decompressed"


def damaged(reason: str) -> str:
    """Return the reason to refuse a batch."""
    return f"corrupt: its batch cannot be read: {reason}"


def unreachable(servers: str) -> str | None:
    """Return which server accepts no connection, and why; None when all do."""
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError as exc:
            return f"no Kafka broker can be reached at {server.strip()}: {exc.strerror or exc}"
    return None


def unreachable_advertised(servers: str, advertised: Iterable[tuple[str, int]]) -> str | None:
    """Return which address that a broker gives as its own accepts no connection, and why; None when all do.

    Clients use `servers` to ask for these addresses alone. None also where those do not answer.
    """
    if unreachable(servers) is not None:
        return None
    for host, port in sorted(set(advertised))[:_MOST_TRIED]:
        try:
            socket.create_connection((host, port), timeout=2).close()
        except (OSError, UnicodeError) as exc:
            return (
                f"the Kafka broker at {servers} gives {host}:{port} as its address (advertised.listeners), and no "
                f"connection can be made to that: {getattr(exc, 'strerror', None) or exc}; have it advertise an "
                "address that this host can reach, or make the name known here"
            )
    return None


def not_a_broker_message(servers: str, reason: str) -> str:
    """Return the sentence for a server that is no Kafka broker, or not one for these properties."""
    return (
        f"something listens at {servers}, but it does not answer as a Kafka broker with these stream.properties "
        f"(security.protocol, sasl.mechanism, credentials?): {reason}"
    )


def unresponsive_message(settings: StreamSettings, reason: str) -> str:
    """Return the sentence for a broker that no longer answers, or that cannot be asked without a token."""
    source = token_source(settings)
    reason = source.problem if source is not None and source.problem else reason
    return f"the Kafka broker at {settings.bootstrap_servers} does not answer ({reason})"


def auth_error(settings: StreamSettings, *, mechanism: bool) -> CredentialsError:
    """Return the error for a broker that refuses the mechanism, or else the user or the password, or the token."""
    broker = f"the Kafka broker at {settings.bootstrap_servers}"
    if mechanism:
        what = "the sasl.mechanism in stream.properties" if settings.token is None else "tokens (OAUTHBEARER)"
        return CredentialsError(f"{broker} does not take {what}")
    if settings.token is not None:
        return CredentialsError(f'{broker} refuses the token of stream.token = "{settings.token}"')
    return CredentialsError(f"{broker} refuses the credentials in stream.properties (sasl.username)")


def gone_topic(topic: str, servers: str) -> str:
    """Return the sentence for a topic that no longer exists."""
    return f'topic "{topic}" is gone from {servers}'


def missing_topic(topic: str | None, servers: str) -> str:
    """Return the sentence for a topic that does not exist, with the way out."""
    return (
        f'topic "{topic}" does not exist on {servers}; create it, for example with "anabranch topics create" or '
        f'"anabranch produce --create-topic FILE"'
    )


def check_gap(name: str, removed: int, on_gap: str) -> None:
    """Log that `removed` offsets from the one in `name` on are gone, or raise GapError or RecreatedError."""
    if removed <= 0:
        raise RecreatedError(f"{name} is beyond the topic's end: it seems to have been deleted and created again")
    if on_gap == "fail":
        raise GapError(
            f"{name} and {removed - 1} offsets after it were removed by retention before they were read; "
            f'set stream.on_gap = "earliest" to continue without them'
        )
    log.warning("%s and %d offsets after it were removed before they were read", name, removed - 1)


RECREATED = (
    "what the topic holds at offsets that were read is no longer the same: it seems to have been deleted and "
    'created again; move the state directory away to start over, or set stream.on_gap = "earliest" to continue with it'
)


TRUNCATED = "the log lost its end: records that were read are no longer there"


def overwritten(name: str) -> str:
    """Return the sentence for unread records below an offset, with the way out."""
    return (
        f"{name}: the log lost its end and has grown again, so that records at offsets before it were not read; set "
        'stream.on_gap = "earliest" to continue without them'
    )
