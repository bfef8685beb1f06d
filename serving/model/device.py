"""What a process and its threads do with the device: choose it, free cached memory, end when it is lost."""

import contextlib
from collections.abc import Iterator

import torch

from anabranch.core.failures import Failure, failure_of
from serving.errors import DeviceError


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread, if it is a CUDA device.

    Each thread starts with device 0 as the current one: user code without an explicit device, events and new streams
    would be on another device than the model, and take memory there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def free_cached_memory(device: torch.device) -> None:
    """Return the blocks that torch's allocator caches to the device, for other processes and larger blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Turn errors of a lost device, and of too little memory, into DeviceError: a restart may fix them."""
    try:
        yield
    except Exception as exc:
        failure = None if isinstance(exc, DeviceError) else failure_of(exc)
        if failure is Failure.MEMORY:
            raise DeviceError(f"the device of the model has too little memory for now: {exc}") from exc
        if failure is Failure.DEVICE:
            raise DeviceError(f"the device of the model is lost until this process ends: {exc}") from exc
        raise
