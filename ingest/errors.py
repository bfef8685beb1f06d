"""The errors a user can act on; everything else is a bug.

    AnabranchError
    |-- SettingsError            the configuration or the input is wrong: mend it, then start again (exit 2)
    |   |-- GapError             offsets that were not read yet are gone from the broker
    |   |   `-- RecreatedError   a topic was deleted and created again
    |   |       `-- TruncatedError   a partition's log lost its end, and reading goes on with a new account
    |   `-- SecondLearnerError   another learner holds the state directory
    `-- DependencyError          something outside cannot be reached: wait or mend it, then start again (exit 3)
        |-- StateBusyError       a command works on the state directory
        `-- BrokerError          Kafka: unreachable, or has no such topic
            |-- CodecError       messages are compressed in a way that the client cannot undo
            `-- CredentialsError it refuses the user, the password or the mechanism

They live in the lowest layer because every other one raises or catches them.
"""


class AnabranchError(Exception):
    """Base of all errors that are one clear sentence to the user."""


class SettingsError(AnabranchError):
    """The configuration or the input is wrong; starting again without a change fails in the same way."""


class GapError(SettingsError):
    """Offsets that this pipeline has not read were removed from the broker, and `stream.on_gap` is `fail`."""


class RecreatedError(GapError):
    """A topic was deleted and created again: offsets are no longer what was read there."""


class TruncatedError(RecreatedError):
    """A partition's log lost its end: whoever finds partitions opens a new account from there on, whatever `on_gap`."""


class SecondLearnerError(SettingsError):
    """Another learner holds the lock on this state directory."""


class DependencyError(AnabranchError):
    """Something outside the program cannot be reached or refuses to work with it."""


class StateBusyError(DependencyError):
    """A command, which ends by itself, holds the lock on this state directory."""


class BrokerError(DependencyError):
    """The Kafka broker cannot be reached, refuses the credentials, or lacks a topic."""


class CodecError(BrokerError):
    """Messages are compressed by a codec that the Kafka client lacks the package for."""


class CredentialsError(BrokerError):
    """The Kafka broker answers, and refuses the credentials or the way in which they are given."""
