"""Errors of the learner and of what it publishes.

AnabranchError
|-- SettingsError             the configuration or the input is wrong: fix it, then start again (exit 2)
|   |-- ModelError            the model's factory or its output does not fit
|   |-- VersionError          a version directory cannot be used: missing, torn, or another schema's
|   |-- CheckpointError       a checkpoint cannot be used: damaged
|   |   `-- MisfitError       ... or whole, and of another schema or release, or too old
|   |-- StorageError          the state in an object store cannot be used: another release's, or damaged
|   `-- SecondLearnerError    another learner holds the lock on the state directory, or the lease of the object store
`-- DependencyError           something outside cannot be reached: wait or fix it, then start again (exit 3)
    |-- StateBusyError        a command holds the lock on the state directory
    |-- TrackerError          curves or a version cannot be sent to the tracker for now: it is tried again
    |   `-- TrackerRefusedError   ... or would be refused again: what was sent is left out
    `-- TeacherError          the teacher has no usable outputs for a step's events, which is taken without them

CopyMemoryError           there is no memory for the copy of a version or checkpoint, which is skipped
RankLostError             another rank is gone: this rank ends, and all ranks restart from the newest checkpoint
RankTooLargeError         a device ran out of memory where ranks cannot repeat the step: the same, with smaller
                          micro-batches on this host
MemoryShortageError       a device has too little memory for now: the process ends with exit code 1, and may start again
UndoRequestedError          events are to be undone: the same; its next start returns to an earlier checkpoint
"""

import re

from anabranch.core.errors import DependencyError, SettingsError


class ModelError(SettingsError):
    """The factory does not import or return a module, or the module's output does not fit the schema."""


class VersionError(SettingsError):
    """A version is refused: no manifest, a file that does not have its digest, or weights that do not fit."""


class CheckpointError(SettingsError):
    """A checkpoint is refused: damaged, made under another schema, or of another model."""


class MisfitError(CheckpointError):
    """A checkpoint is undamaged, but of another schema or release, or too old: no older one is used instead."""


class SecondLearnerError(SettingsError):
    """Another learner holds the lock on this state directory."""


class StorageError(SettingsError):
    """The state in an object store cannot be used: made by another release, or damaged."""


class StateBusyError(DependencyError):
    """A command, which ends by itself, holds the lock on this state directory."""


class TrackerError(DependencyError):
    """The tracker of experiments cannot be reached, or failed on a request."""


class TrackerRefusedError(TrackerError):
    """The tracker of experiments refuses a request, and would again."""


class TeacherError(DependencyError):
    """The teacher does not answer in time, or not with outputs that can be learned from."""


class CopyMemoryError(MemoryError):
    """There is no memory for a copy of the weights or of other state; nothing was exchanged with other ranks."""


class RankLostError(Exception):
    """Another rank is gone."""


_LOST_RANK = re.compile(
    # gloo
    "Connection closed by peer|Connection reset by peer|writev .*Broken pipe|Timed out waiting [0-9]+ms for"
    # NCCL
    "|remote process exit|ncclRemoteError|NCCL communicator was aborted|NCCL communicator encountered error"
    "|Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
)
"""Parts of torch's sentences about another rank, in errors that have no class."""


def is_of_a_lost_rank(error: RuntimeError) -> bool:
    """Return whether torch raised the error because another rank has ended or does not answer."""
    return _LOST_RANK.search(str(error)) is not None


class RankTooLargeError(Exception):
    """A rank ran out of memory while others were in the middle of their passes.

    Attributes:
        rows: events of a micro-batch that may fit.
    """

    def __init__(self, rows: int, said: str) -> None:
        super().__init__(said)
        self.rows = rows


class MemoryShortageError(MemoryError):
    """A device has too little memory for now, since other processes use it too.

    Attributes:
        undone: whether the work that failed has changed nothing, so that it can be repeated.
    """

    def __init__(self, said: str, *, undone: bool) -> None:
        super().__init__(said)
        self.undone = undone


class UndoRequestedError(Exception):
    """A person has ordered to undo events that this learner has seen, or would read."""
