"""Classifies errors of reading, loading and writing, for the learner, the eraser and serving.

    try:
        version = load(number)
    except (SettingsError, OSError, RuntimeError, MemoryError) as exc:
        match failure_of(exc):
            case Failure.DAMAGED: ...           # refuse this one until its contents change
            case Failure.AWAY | Failure.MEMORY: ...  # keep it, and try again later, with a back-off
            case Failure.DEVICE | None: raise   # the process cannot continue; a bug

Imports no torch: readers of reports need none.
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
_NEEDS_A_PERSON = (PermissionError, FileExistsError)
"""Errors of a folder that only a person can fix, besides damaged paths."""
_MEMORY_WORDS = (
    "DefaultCPUAllocator",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "HIP out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # its handle does not fit
    "CUDNN_STATUS_ALLOC_FAILED",
    "failure 2 'out of memory'",  # of NCCL: "Cuda failure 2 ...", or "CUDA failure 2 ..."
)
"""Parts of torch's sentences about memory, in errors that have no class."""
_DEVICE_WORDS = ("CUDA error", "device-side assert", "HIP error", "MPS error", "NCCL error")
"""Parts of torch's sentences about a device that failed, in errors that have no class."""
_LONGEST_PANIC = 200
"""Characters of a panic's message that are kept: it may contain what the package was given."""
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that it cannot decode."""


class DamagedError(Exception):
    """Contents differ from those that were written: they cannot be decoded, or it is no regular file."""


class PanicError(Exception):
    """A package written in Rust panicked, or code called `sys.exit`: it has a bug, or its values are bad."""


class Failure(Enum):
    """What the caller can do about an error."""

    DAMAGED = auto()
    """The contents are wrong, or a file is missing that must be there: reading again gives the same."""
    AWAY = auto()
    """The operating system or another program failed (EIO, ESTALE, EACCES, EMFILE ...): the same may work later.

    A file that could not be read may be undamaged: do not delete it, nor use an older one instead.
    """
    MEMORY = auto()
    """A device or the host is out of memory: the same may work later, or with less."""
    DEVICE = auto()
    """The device is lost for this process: each later call fails too, until the process ends. Let it end."""


def failure_of(error: BaseException) -> Failure | None:
    """Return the kind of an error; None if it is a bug.

    An error raised `from` another one has its kind: a `VersionError` raised from a factory's MemoryError is MEMORY. A
    missing file is DAMAGED: callers read files that a manifest names.
    """
    causes = list(_causes(error))
    if any(out_of_memory(each) for each in causes):
        return Failure.MEMORY
    if any(map(device_lost, causes)):
        return Failure.DEVICE
    for each in causes:
        if isinstance(each, OSError):
            return Failure.DAMAGED if isinstance(each, _NO_FILE) or each.errno in _NO_NAME else Failure.AWAY
        if isinstance(each, DependencyError):
            return Failure.AWAY
    return Failure.DAMAGED if any(isinstance(each, DamagedError | SettingsError) for each in causes) else None


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error is due to too little memory, on the host or on a device."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    message = str(error) if isinstance(error, RuntimeError) else ""
    return _is_a(error, "torch.OutOfMemoryError") or any(words in message for words in _MEMORY_WORDS)


def device_lost(error: BaseException) -> bool:
    """Return whether a device can no longer be used by this process, as after a device-side assert or a fatal Xid.

    CUDA's errors are sticky: after one, every later call of the process fails with the same.
    """
    if out_of_memory(error):
        return False
    message = str(error) if isinstance(error, RuntimeError) else ""
    return _is_a(error, "torch.AcceleratorError") or any(words in message for words in _DEVICE_WORDS)


def panicked(error: BaseException) -> bool:
    """Return whether a package written in Rust panicked, which PyO3 raises as no Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def panics_are_errors() -> Iterator[None]:
    """Turn the panic of a package written in Rust, and SystemExit, into PanicError, which `except Exception` catches.

    Calls of such a package with the bytes of others go into this block, and calls of the user's code in a thread.
    """
    try:
        yield
    except SystemExit as exc:
        raise PanicError(f"it calls sys.exit({exc.code!r:.{_LONGEST_PANIC}})") from exc
    except BaseException as exc:
        if not panicked(exc):
            raise
        raise PanicError(" ".join(str(exc).split())[:_LONGEST_PANIC]) from exc


def _is_a(error: BaseException, kind: str) -> bool:
    """Return whether an error is of a class by its full name, without importing it."""
    return any(f"{base.__module__}.{base.__name__}" == kind for base in type(error).__mro__)


def decoded(content: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    """Decode the JSON of a file; raises DamagedError if that fails."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNDECODABLE as exc:
        raise DamagedError(str(exc)) from exc


@contextlib.contextmanager
def damage_is(kind: type[SettingsError], what: str) -> Iterator[None]:
    """Turn errors that are DAMAGED into `kind`, with a sentence that begins with `what`; let others through."""
    try:
        yield
    except (DamagedError, OSError) as exc:
        if failure_of(exc) is not Failure.DAMAGED:
            raise
        raise kind(f"{what}: {exc}") from exc


@contextlib.contextmanager
def away_is_dependency(what: str) -> Iterator[None]:
    """Turn an OSError into DependencyError (exit 3), with a sentence that begins with `what`.

    An OSError that is a DependencyError has its own sentence.
    """
    try:
        yield
    except DependencyError:
        raise
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        raise DependencyError(f"{what}: {where}{exc.strerror or exc}") from exc


@contextlib.contextmanager
def state_errors(what: str) -> Iterator[None]:
    """As `away_is_dependency`, but raise SettingsError (exit 2) where a person has to change a folder."""
    with away_is_dependency(what):
        try:
            yield
        except OSError as exc:
            if isinstance(exc, _NEEDS_A_PERSON) or failure_of(exc) is Failure.DAMAGED:
                raise SettingsError(f"{what}: {exc.strerror}") from exc
            raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
