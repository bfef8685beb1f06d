"""What a process and its threads do with the device: choose it and its arithmetic, free memory, end when it is lost."""

import contextlib
from collections.abc import Iterator

import torch

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import Failure, failure_of
from anabranch.learner.device.out_of_memory import explained_by_own, memory_use
from anabranch.learner.model.device import Precision, driver_fault
from anabranch.serving.errors import DeviceError
from anabranch.serving.settings import PrecisionName

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each precision with 16 bits."""
_LONGEST_SENTENCE = 400
_TOO_OLD = "no kernel image"
"""Part of CUDA's sentence about a device for which this build of torch has no code."""


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread, if it is a CUDA device.

    Each thread starts with device 0 as the current one: user code without an explicit device, events and new streams
    would be on another device than the model, and take memory there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def use_precision(name: PrecisionName, device: torch.device) -> None:
    """Let this process multiply float32 matrices as `serving.precision` says.

    Raises:
        SettingsError: the device cannot compute with that precision.
    """
    if name in ("fp16", "tf32") and device.type != "cuda":
        raise SettingsError(f'serving.precision = "{name}" needs a CUDA device, but the device is {device}; try "bf16"')
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SettingsError(f'serving.precision = "bf16" is not supported by {device}; try "fp16"')
    Precision(name, None).configure()


@contextlib.contextmanager
def device_errors(device: torch.device | None = None) -> Iterator[None]:
    """Turn errors of a lost device, and of too little memory, into DeviceError: a restart may fix them.

    With `device`, whose memory the block takes: SettingsError where this process's part of it is too small.
    """
    try:
        yield
    except Exception as exc:
        failure = None if isinstance(exc, DeviceError) else failure_of(exc)
        if failure is Failure.MEMORY:
            if device is not None and device.type == "cuda" and explained_by_own(memory_use(device), str(exc)):
                raise SettingsError(
                    "the model does not fit into serving's part of the device; lower device_sharing.memory (the "
                    f"learner's part) or serving.workers, or set device_sharing.policy to exclusive: {exc}"
                ) from exc
            raise DeviceError(f"the device of the model has too little memory for now: {exc}") from exc
        if failure is Failure.DEVICE:
            raise DeviceError(f"the device of the model is lost until this process ends: {exc}") from exc
        raise


def pick_device(name: str) -> torch.device:
    """Return the device of that name, for `auto` CUDA where there is one, else the CPU.

    Raises:
        SettingsError: this machine has no such device.
        DependencyError: it has none, on a machine that has NVIDIA's driver: a device may be away for now.
        DeviceError: it has too little memory for now, or fails.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with device_errors():
            device = torch.device(name)
            if device.type == "cuda" and 0 < torch.cuda.device_count() <= (device.index or 0):
                raise SettingsError(
                    f'serving.device = "{name}" is not there: torch sees {torch.cuda.device_count()} CUDA devices'
                )
            return torch.zeros(1, device=device).device
    except DeviceError as exc:
        if _TOO_OLD not in str(exc):
            raise
        raise SettingsError(f'serving.device = "{name}" cannot be used here: {sentence_of(exc)}') from exc
    except (RuntimeError, AssertionError) as exc:
        if name.startswith("cuda") and (fault := driver_fault()):
            raise DependencyError(f'serving.device = "{name}": {fault}: {sentence_of(exc)}') from exc
        raise SettingsError(f'serving.device = "{name}" cannot be used here: {sentence_of(exc)}') from exc


def sentence_of(exc: BaseException) -> str:
    """Return an error as one sentence of bounded length."""
    sentence = " ".join(str(exc).split())[:_LONGEST_SENTENCE]
    return sentence if isinstance(exc, SettingsError) else f"{type(exc).__name__}: {sentence}"
