"""What a process and its threads do with the device: choose it and its arithmetic, free memory, end when it is lost."""

import contextlib
from collections.abc import Iterator

import torch

from anabranch.core.errors import SettingsError
from anabranch.core.failures import Failure, failure_of
from learner.model.device import Precision
from learner.training.out_of_memory import explained_by_own, memory_use
from serving.config import PrecisionName
from serving.errors import DeviceError

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each precision with 16 bits."""


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
