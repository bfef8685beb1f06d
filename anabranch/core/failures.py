"""What an error of reading, loading or writing means: one answer for the learner, the eraser and serving.

    try:
        version = load(number)
    except (SettingsError, OSError, RuntimeError, MemoryError) as exc:
        match failure_of(exc):
            case Failure.DAMAGED: ...           # refuse this one until its contents change
            case Failure.AWAY | Failure.MEMORY: ...  # keep it, and try again later, with a back-off
            case None: raise                    # a bug

Imports no torch: whoever only reads reports needs none.
"""

import contextlib
import errno
from collections.abc import Iterator
from enum import Enum, auto
from typing import TypeVar

import msgspec

from anabranch.core.errors import DependencyError, SettingsError

_T = TypeVar("_T")
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_NAME = {errno.ELOOP, errno.ENAMETOOLONG}
_PERSON = (PermissionError, FileExistsError)
"""Where a folder is to be made or written, beside paths that cannot be right."""
_MEMORY_WORDS = (
    "DefaultCPUAllocator",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "HIP out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What torch says of memory in errors of no kind of their own."""
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""


class DamagedError(Exception):
    """What is there is not what was written: contents that cannot be decoded, or no regular file."""


class Failure(Enum):
    """What can be done about an error."""

    DAMAGED = auto()
    """The contents are wrong, or a file is missing that must be there: reading again gives the same."""
    AWAY = auto()
    """The operating system or another program failed (EIO, ESTALE, EACCES, EMFILE ...): the same may work later.

    Whatever could not be read may be whole: it must not be deleted, and nothing older may take its place.
    """
    MEMORY = auto()
    """A device or the host is out of memory: the same may work later, or with less."""


def failure_of(error: BaseException) -> Failure | None:
    """Return what an error means; None for one that is a bug.

    An error that was raised `from` another one means what that one does: a `VersionError` that says that a factory
    ran out of memory is of memory. A file that does not exist is damage here: for callers that read files which
    something names, such as a manifest.
    """
    causes = list(_causes(error))
    if any(out_of_memory(each) for each in causes):
        return Failure.MEMORY
    for each in causes:
        if isinstance(each, OSError):
            return Failure.DAMAGED if isinstance(each, _NO_FILE) or each.errno in _NO_NAME else Failure.AWAY
        if isinstance(each, DependencyError):
            return Failure.AWAY
    return Failure.DAMAGED if any(isinstance(each, DamagedError | SettingsError) for each in causes) else None


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory, on the host or on a device."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    said = str(error) if isinstance(error, RuntimeError) else ""
    return "torch.OutOfMemoryError" in kinds or any(words in said for words in _MEMORY_WORDS)


def decoded(content: bytes, kind: type[_T]) -> _T:
    """Decode the JSON of a file; raises DamagedError whatever is wrong with it."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNDECODABLE as exc:
        raise DamagedError(str(exc)) from exc


@contextlib.contextmanager
def damage_is(kind: type[SettingsError], what: str) -> Iterator[None]:
    """Raise an error of this kind, with a sentence that begins with `what`, where damage is met; the rest passes."""
    try:
        yield
    except (DamagedError, OSError) as exc:
        if failure_of(exc) is not Failure.DAMAGED:
            raise
        raise kind(f"{what}: {exc}") from exc


@contextlib.contextmanager
def away_is_dependency(what: str) -> Iterator[None]:
    """Raise DependencyError (exit 3), with a sentence that begins with `what`, where an OSError ends the process."""
    try:
        yield
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        raise DependencyError(f"{what}: {where}{exc.strerror or exc}") from exc


@contextlib.contextmanager
def state_errors(what: str) -> Iterator[None]:
    """As `away_is_dependency`, but raise SettingsError (exit 2) for what stays until a person changes a folder."""
    with away_is_dependency(what):
        try:
            yield
        except OSError as exc:
            if isinstance(exc, _PERSON) or failure_of(exc) is Failure.DAMAGED:
                raise SettingsError(f"{what}: {exc.strerror}") from exc
            raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
