"""The branches of the error tree that ingest adds.

AnabranchError
|-- SettingsError            the configuration or the input is wrong: fix it, then start again (exit 2)
|   |-- GapError             the broker has removed offsets that were not read yet
|   |   |-- HistoryError     a file of the history is missing, changed or damaged
|   |   `-- RecreatedError   a topic was deleted and created again
|   |       `-- TruncatedError   a partition's log lost its end; reading continues as a new incarnation
|   |-- MissingSchemaError   the Schema Registry has no such schema
|   `-- OversizedSchemaError a schema is longer than any that is read
`-- DependencyError          something outside cannot be reached: wait or fix it, then start again (exit 3)
    |-- BrokerError          Kafka is unreachable, or has no such topic
    |   |-- CodecError       the client lacks the package that decompresses the messages
    |   |-- HistoryAwayError the storage of the history does not answer
    |   `-- CredentialsError Kafka refuses the user, the password or the mechanism
    `-- RegistryError        the Schema Registry cannot be reached, or does not answer as one
        |-- RegistryCertificateError   its certificate is not trusted
        `-- RegistryCredentialsError   it refuses the credentials, or asks for some
"""

from anabranch.core.errors import DependencyError, SettingsError


class GapError(SettingsError):
    """The broker has removed offsets that this pipeline has not read, and `stream.on_gap` is `fail`."""


class HistoryError(GapError):
    """A file of the history is not the one that was listed, or cannot be decoded."""


class RecreatedError(GapError):
    """A topic was deleted and created again: its offsets hold other records than those that were read."""


class TruncatedError(RecreatedError):
    """A log lost its end: the reader that owns new partitions opens a new incarnation, whatever `on_gap`."""


class BrokerError(DependencyError):
    """The Kafka broker cannot be reached, refuses the credentials, or lacks a topic."""


class CodecError(BrokerError):
    """Messages are compressed by a codec that the Kafka client lacks the package for."""


class HistoryAwayError(BrokerError):
    """The storage of the history does not answer, as a broker that is away: reading is tried again."""


class CredentialsError(BrokerError):
    """The Kafka broker answers, and refuses the credentials or the way in which they are given."""


class MissingSchemaError(SettingsError):
    """The Schema Registry answers that it has no schema of this id, or no such subject."""


class OversizedSchemaError(SettingsError):
    """A schema of the Schema Registry has more bytes, or refers to more others, than are read."""


class RegistryError(DependencyError):
    """The Schema Registry cannot be reached, or does not answer as one."""


class RegistryCertificateError(RegistryError):
    """The certificate of the Schema Registry is not trusted."""


class RegistryCredentialsError(RegistryError):
    """The Schema Registry refuses the credentials, or asks for some."""
