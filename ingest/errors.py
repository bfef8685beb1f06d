"""The branches of the error tree that ingest adds.

AnabranchError
|-- SettingsError            the configuration or the input is wrong: fix it, then start again (exit 2)
|   `-- GapError             the broker has removed offsets that were not read yet
|       `-- RecreatedError   a topic was deleted and created again
|           `-- TruncatedError   a partition's log lost its end; reading continues as a new incarnation
`-- DependencyError          something outside cannot be reached: wait or fix it, then start again (exit 3)
    `-- BrokerError          Kafka is unreachable, or has no such topic
        |-- CodecError       the client lacks the package that decompresses the messages
        `-- CredentialsError Kafka refuses the user, the password or the mechanism
"""

from anabranch.core.errors import DependencyError, SettingsError


class GapError(SettingsError):
    """The broker has removed offsets that this pipeline has not read, and `stream.on_gap` is `fail`."""


class RecreatedError(GapError):
    """A topic was deleted and created again: its offsets hold other records than those that were read."""


class TruncatedError(RecreatedError):
    """A log lost its end: the reader that owns new partitions opens a new incarnation, whatever `on_gap`."""


class BrokerError(DependencyError):
    """The Kafka broker cannot be reached, refuses the credentials, or lacks a topic."""


class CodecError(BrokerError):
    """Messages are compressed by a codec that the Kafka client lacks the package for."""


class CredentialsError(BrokerError):
    """The Kafka broker answers, and refuses the credentials or the way in which they are given."""
