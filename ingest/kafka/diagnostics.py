"""What is said about a broker, a topic or a batch that cannot be used."""

import logging
import socket

from ingest.errors import CredentialsError, GapError, RecreatedError

log = logging.getLogger(__name__)

BAD_HEADER = "header: the name of a header is not UTF-8"


def too_large(most: int) -> str:
    """Say why what comes out of a compressed batch is not taken."""
    return f"too-large: its batch is more than {most} bytes once it is decompressed"


def damaged(said: str) -> str:
    """Say why a batch is not taken."""
    return f"corrupt: its batch cannot be read: {said}"


def unreachable(servers: str) -> str | None:
    """Say which of the servers takes no connection and why, or return None when all do."""
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError as exc:
            return f"no Kafka broker can be reached at {server.strip()}: {exc.strerror or exc}"
    return None


def not_a_broker_message(servers: str, said: str) -> str:
    """Say that what listens is no Kafka broker, or another than the properties are for."""
    return (
        f"something listens at {servers}, but it does not answer as a Kafka broker with these stream.properties "
        f"(security.protocol, sasl.mechanism, credentials?): {said}"
    )


def unresponsive_message(servers: str, said: str) -> str:
    """Say that a broker that answered before does not any more."""
    return f"the Kafka broker at {servers} does not answer ({said})"


def auth_error(servers: str, *, mechanism: bool) -> CredentialsError:
    """Return the error for a broker that refuses the mechanism, or else the user or the password."""
    if mechanism:
        return CredentialsError(f"the Kafka broker at {servers} does not take the sasl.mechanism in stream.properties")
    return CredentialsError(
        f"the Kafka broker at {servers} refuses the credentials in stream.properties (sasl.username)"
    )


def gone_topic(topic: str, servers: str) -> str:
    """Say that a topic that was there does not exist any more."""
    return f'topic "{topic}" is gone from {servers}'


def missing_topic(topic: str | None, servers: str) -> str:
    """Say that a topic does not exist, and the way out."""
    return (
        f'topic "{topic}" does not exist on {servers}; create it, for example with '
        f'"anabranch produce --create-topic FILE"'
    )


def check_gap(name: str, removed: int, on_gap: str) -> None:
    """Go on where `removed` offsets from the one that `name` tells on are gone, or raise GapError."""
    if removed <= 0:
        raise RecreatedError(f"{name} is beyond the topic's end: it seems to have been deleted and created again")
    if on_gap == "fail":
        raise GapError(
            f"{name} and {removed - 1} offsets after it were removed by retention before they were read; "
            f'set stream.on_gap = "earliest" to go on without them'
        )
    log.warning("%s and %d offsets after it were removed before they were read", name, removed - 1)


RECREATED = (
    "what the topic holds at offsets that were read is no longer the same: it seems to have been deleted and "
    'created again; move the state directory away to begin anew, or set stream.on_gap = "earliest" to go on with it'
)


TRUNCATED = "the log lost its end: records that were read are no longer there"


def overwritten(name: str) -> str:
    """Say that records which were not read lie below an offset, and the way out."""
    return (
        f"{name}: the log lost its end and has grown again, so that records at offsets before it were not read; set "
        'stream.on_gap = "earliest" to go on without them'
    )
