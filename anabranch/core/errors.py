"""The root of the error tree; any other exception is a bug.

    AnabranchError
    |-- SettingsError     the configuration or the input is wrong: fix it, then start again (exit 2)
    `-- DependencyError   something outside cannot be reached: wait or fix it, then start again (exit 3)

Each package has its own branches in its `errors.py`.
"""


class AnabranchError(Exception):
    """Base of all errors that are one clear sentence to the user."""


class SettingsError(AnabranchError):
    """The configuration or the input is wrong; starting again without a change fails in the same way."""


class DependencyError(AnabranchError):
    """A service outside the program cannot be reached, or refuses to work with it."""
