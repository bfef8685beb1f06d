"""The branches of the error tree that ingest and the state directory add.

AnabranchError
|-- SettingsError            the configuration or the input is wrong: fix it, then start again (exit 2)
|   |-- GapError             offsets that were not read yet are gone from the broker
|   |   `-- RecreatedError   a topic was deleted and created again
|   |       `-- TruncatedError   a partition's log lost its end, and reading goes on with a new account
|   `-- SecondLearnerError   another learner holds the state directory
`-- DependencyError          something outside cannot be reached: wait or fix it, then start again (exit 3)
    |-- StateBusyError       a command works on the state directory
    `-- BrokerError          Kafka: unreachable, or has no such topic
        |-- CodecError       messages are compressed in a way that the client cannot undo
        `-- CredentialsError it refuses the user, the password or the mechanism

"""

from anabranch.core.errors import DependencyError, SettingsError


class GapError(SettingsError):
    """Offsets that this pipeline has not read were removed from the broker, and `stream.on_gap` is `fail`."""


class RecreatedError(GapError):
    """A topic was deleted and created again: offsets are no longer what was read there."""


class TruncatedError(RecreatedError):
    """A partition's log lost its end: whoever finds partitions opens a new account from there on, whatever `on_gap`."""


class SecondLearnerError(SettingsError):
    """Another learner holds the lock on this state directory."""


class StateBusyError(DependencyError):
    """A command, which ends by itself, holds the lock on this state directory."""


class BrokerError(DependencyError):
    """The Kafka broker cannot be reached, refuses the credentials, or lacks a topic."""


class CodecError(BrokerError):
    """Messages are compressed by a codec that the Kafka client lacks the package for."""


class CredentialsError(BrokerError):
    """The Kafka broker answers, and refuses the credentials or the way in which they are given."""
