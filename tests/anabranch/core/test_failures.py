"""What an error means: damaged, away for now, out of memory, or a bug."""

import errno
import os

import msgspec
import pytest
import torch

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import (
    DamagedError,
    Failure,
    PanicError,
    away_is_dependency,
    damage_is,
    decoded,
    failure_of,
    panics_are_errors,
)
from anabranch.core.object_store.bucket import BucketAwayError
from anabranch.ingest.errors import BrokerError
from anabranch.learner.errors import CheckpointError, VersionError

AWAY = [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES, errno.EROFS, errno.ETIMEDOUT, errno.ENXIO]
DAMAGED = [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP]


def system_error(number):
    return OSError(number, os.strerror(number), "checkpoints/1/manifest.json")


def chained(outer, cause):
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize("number", AWAY, ids=errno.errorcode.get)
def test_what_the_operating_system_does_not_give_is_away_and_no_damage(number):
    assert failure_of(system_error(number)) is Failure.AWAY
    assert failure_of(chained(VersionError("version 1"), system_error(number))) is Failure.AWAY
    with pytest.raises(OSError, match="manifest"), damage_is(CheckpointError, "checkpoint 1"):
        raise system_error(number)


@pytest.mark.parametrize("number", DAMAGED, ids=errno.errorcode.get)
def test_a_file_that_is_missing_or_no_file_is_damage(number):
    assert failure_of(system_error(number)) is Failure.DAMAGED
    with pytest.raises(CheckpointError, match=r"checkpoint 1: .*manifest"), damage_is(CheckpointError, "checkpoint 1"):
        raise system_error(number)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("NCCL Error 1: unhandled cuda error, Cuda failure 2 'out of memory'"),
        MemoryError(),
        system_error(errno.ENOMEM),
    ],
    ids=["torch", "cpu", "driver", "launch", "cublas", "cudnn", "nccl", "python", "errno"],
)
def test_what_runs_out_of_memory_is_no_damage_whatever_wraps_it(error):
    assert failure_of(error) is Failure.MEMORY
    assert failure_of(chained(VersionError("version 1: OutOfMemoryError"), error)) is Failure.MEMORY


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    ],
    ids=["assert", "access", "launch", "ecc"],
)
def test_a_sticky_error_of_a_device_is_neither_damage_nor_a_lack_of_memory(error):
    assert failure_of(error) is Failure.DEVICE
    assert failure_of(chained(VersionError("version 1: AcceleratorError"), error)) is Failure.DEVICE


def test_damage_dependencies_and_bugs_are_distinguished():
    assert failure_of(DamagedError("no JSON")) is Failure.DAMAGED
    assert failure_of(SettingsError("another schema")) is Failure.DAMAGED
    assert failure_of(chained(VersionError("version 1"), RuntimeError("size mismatch"))) is Failure.DAMAGED
    assert failure_of(BrokerError("no answer")) is Failure.AWAY
    assert failure_of(RuntimeError("shape mismatch")) is None
    assert failure_of(KeyError("bug")) is None


@pytest.mark.parametrize(
    "content",
    [b'{"a": "\xff"}', b"[" * 100_000, b"{", b"", b'{"a": 1}'],
    ids=["utf-8", "deep", "checkpoint", "empty", "type"],
)
def test_json_that_cannot_be_decoded_is_damage_whatever_is_wrong_with_it(content):
    with pytest.raises(DamagedError):
        decoded(content, dict[str, str])


def test_each_flipped_bit_of_a_document_is_decoded_or_damage():
    class Document(msgspec.Struct):
        name: str
        files: dict[str, str]

    good = msgspec.json.encode(Document("é", {"a": "0f"}))
    outcomes = set()
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            outcomes.add(type(decoded(bytes(flipped), Document)))
        except DamagedError as exc:
            outcomes.add(type(exc.__cause__))
    assert {Document, UnicodeDecodeError, msgspec.DecodeError, msgspec.ValidationError} == outcomes


def test_an_error_of_the_system_that_ends_a_process_is_a_dependency_that_names_the_file():
    with (
        pytest.raises(
            DependencyError, match=r"^no checkpoint can be read: checkpoints/1/manifest.json: Input/output error$"
        ),
        away_is_dependency("no checkpoint can be read"),
    ):
        raise system_error(errno.EIO)
    with (
        pytest.raises(BucketAwayError, match=r"^storage\.url: no reply$"),
        away_is_dependency("no checkpoint can be read"),
    ):
        raise BucketAwayError("storage.url: no reply")


def test_a_panic_in_rust_and_an_exit_of_the_users_code_are_errors_and_an_interrupt_is_not():
    class PanicException(BaseException):  # as PyO3 has it
        pass

    with pytest.raises(PanicError, match="retry-limit-in-match over"), panics_are_errors():
        raise PanicException("retry-limit-in-match\nover")
    with pytest.raises(PanicError, match=r"^it calls sys\.exit\(3\)$"), panics_are_errors():
        raise SystemExit(3)
    with pytest.raises(KeyboardInterrupt), panics_are_errors():
        raise KeyboardInterrupt
