"""Limits on the multiprocessors and threads of a CUDA device for training; a device or its driver may lack them."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from anabranch.core.errors import SettingsError
from learner.config import DeviceSharingSettings
from learner.training.passes import LaunchContext

_MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_PIPE_USUAL = "/tmp/nvidia-mps"  # noqa: S108 the default pipe of NVIDIA's MPS daemon


def limit_threads(settings: DeviceSharingSettings) -> None:
    """Set the part of the device that training may use under MPS; call it before CUDA is initialized."""
    if settings.mps_percentage is not None:
        os.environ.setdefault(_MPS_PERCENTAGE, str(settings.mps_percentage))


@contextlib.contextmanager
def confined(settings: DeviceSharingSettings, device: torch.device) -> Iterator[LaunchContext]:
    """Yield the launch context of steps, limited to some multiprocessors where `device_sharing.sms` is set.

    Raises:
        SettingsError: `device_sharing.sms` is set, and the device or this torch cannot do that.
    """
    if settings.sms is None:
        yield contextlib.nullcontext
        return
    if fault := lacks_green_contexts(device):
        raise SettingsError(f"device_sharing.sms = {settings.sms} {fault}; take the key out")
    from torch.cuda.green_contexts import GreenContext

    try:
        # Torch's annotations lack methods of it.
        context: Any = GreenContext.create(num_sms=settings.sms, device_id=device.index or 0)
        # Not `set_context`: autograd runs backward in other threads, which inherit streams but not contexts.
        stream: torch.cuda.Stream = context.Stream()
    except RuntimeError as exc:
        raise SettingsError(
            f"device_sharing.sms = {settings.sms} is refused by {device}: {' '.join(str(exc).split())}"
        ) from exc
    yield lambda: _on(stream, device)
    stream.synchronize()  # before the context goes


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Launch work on `stream`, ordered after earlier and before later work of the current stream."""
    usual = torch.cuda.current_stream(device)
    stream.wait_stream(usual)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        usual.wait_stream(stream)


def lacks_green_contexts(device: torch.device) -> str | None:
    """Return why steps cannot be limited to some multiprocessors, as a clause after the key; None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, but the device is {device}"
    try:
        from torch.cuda import green_contexts
    except ImportError:
        return f"needs green contexts, which torch {torch.__version__} does not have"
    if not getattr(green_contexts, "SUPPORTED", True):  # later releases find out when they create one
        return f"needs green contexts, which this build of torch {torch.__version__} does not have"
    return None


def lacks_mps(device: torch.device) -> str | None:
    """Return why `device_sharing.mps_percentage` has no effect, as a clause after the key; None if it has."""
    if device.type != "cuda":
        return f"needs a CUDA device, but the device is {device}"
    if not os.path.exists(os.environ.get(_MPS_PIPE, _MPS_PIPE_USUAL)):  # noqa: PTH110 a path from the environment
        return "has no effect, since no MPS daemon listens"
    return None
