"""Where on a CUDA device training may run besides giving way: refinements that a device or its driver may lack."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from anabranch.core.errors import SettingsError
from learner.config import DeviceSharingSettings
from learner.training.trainer import Lane

_MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_PIPE_USUAL = "/tmp/nvidia-mps"  # noqa: S108 where the MPS daemon of NVIDIA listens unless it is told otherwise


def limit_threads(settings: DeviceSharingSettings) -> None:
    """Tell the driver what part of the device training may take under MPS; to be called before CUDA begins."""
    if settings.mps_percentage is not None:
        os.environ.setdefault(_MPS_PERCENTAGE, str(settings.mps_percentage))


@contextlib.contextmanager
def confined(settings: DeviceSharingSettings, device: torch.device) -> Iterator[Lane]:
    """Yield the lane of steps: what it gives the device keeps to some multiprocessors, where the config says so.

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
        # What torch says of its type is less than it is.
        context: Any = GreenContext.create(num_sms=settings.sms, device_id=device.index or 0)
        # Not `set_context`: autograd goes backward in threads of its own, and follows streams into them, not contexts.
        stream: torch.cuda.Stream = context.Stream()
    except RuntimeError as exc:
        raise SettingsError(
            f"device_sharing.sms = {settings.sms} is refused by {device}: {' '.join(str(exc).split())}"
        ) from exc
    yield lambda: _on(stream, device)
    stream.synchronize()  # before the context goes


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Give work to a stream, after what the current one has been given so far and before what it is given then."""
    usual = torch.cuda.current_stream(device)
    stream.wait_stream(usual)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        usual.wait_stream(stream)


def lacks_green_contexts(device: torch.device) -> str | None:
    """Say why training cannot be kept to some multiprocessors, in words that follow the key; None when it can."""
    if device.type != "cuda":
        return f"needs a CUDA device, but the device is {device}"
    try:
        from torch.cuda import green_contexts
    except ImportError:
        return f"needs green contexts, which torch {torch.__version__} does not have"
    if not getattr(green_contexts, "SUPPORTED", True):  # later ones find out as they make one
        return f"needs green contexts, which this build of torch {torch.__version__} does not have"
    return None


def lacks_mps(device: torch.device) -> str | None:
    """Say why `device_sharing.mps_percentage` has no effect, in words that follow the key; None when it has."""
    if device.type != "cuda":
        return f"needs a CUDA device, but the device is {device}"
    if not os.path.exists(os.environ.get(_MPS_PIPE, _MPS_PIPE_USUAL)):  # noqa: PTH110 the environment's word
        return "has no effect, since no MPS daemon listens"
    return None
