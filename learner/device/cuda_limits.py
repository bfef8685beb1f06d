"""Limits on the memory, multiprocessors and threads of a CUDA device; a device or its driver may lack some of them."""

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.core.job_thread import at_start_of_job_threads
from anabranch.learner.device.visible_devices import device_bytes, show_only
from anabranch.learner.settings.learner import CONTEXTS_MEMORY, DeviceSharingSettings

_MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_MPS_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
_BELOW_NORMAL = "1"
_MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_PIPE_USUAL = "/tmp/nvidia-mps"  # noqa: S108 the default pipe of NVIDIA's MPS daemon
_MEBIBYTE = 1 << 20
_ROUNDING_BYTES = 64 * _MEBIBYTE
"""By which the allocator may round up what it takes."""

log = logging.getLogger(__name__)


def prepare_cuda(devices: str, settings: DeviceSharingSettings) -> None:
    """Set what CUDA reads when it is initialized: the devices to see, and the parts that training may take under MPS.

    Limits that the environment sets already stay as they are.

    Args:
        devices: `learner.device`.
        settings: how they are shared.

    Raises:
        SettingsError: this machine has no device of a UUID.
    """
    show_only("learner.device", devices)
    if settings.mps_percentage is not None:
        os.environ.setdefault(_MPS_PERCENTAGE, str(settings.mps_percentage))
    if settings.policy != "exclusive":
        os.environ.setdefault(_MPS_PRIORITY, _BELOW_NORMAL)
    if settings.learner_memory is not None and not mps_fault():
        part = min(1.0, settings.learner_memory + CONTEXTS_MEMORY)
        limits = [f"{index}={int(part * size) // _MEBIBYTE}M" for index, size in enumerate(device_bytes())]
        if limits:
            os.environ.setdefault(_MPS_MEMORY, ",".join(limits))


@contextlib.contextmanager
def using_device(settings: DeviceSharingSettings, device: torch.device, *, reserve: bool = False) -> Iterator[None]:
    """Make a CUDA device the current one of this thread and of later `JobThread`s, and bound this process's memory.

    Enter it before anything is allocated there.

    Args:
        settings: say which fraction of the memory the learner may take.
        device: of this process; nothing happens for one that is not CUDA's.
        reserve: take all of that memory at once. What is free decides which algorithms cuDNN takes, so that it must not
            depend on what serving holds at the moment where results are to be the same bit for bit.
    """
    if device.type != "cuda":
        yield
        return
    index = device.index or 0
    torch.cuda.set_device(index)
    if settings.learner_memory is not None:
        torch.cuda.set_per_process_memory_fraction(settings.learner_memory, index)
        if reserve:
            _reserve(device, settings.learner_memory)
    with at_start_of_job_threads(lambda: torch.cuda.set_device(index)):
        yield


def limit_server_memory(settings: DeviceSharingSettings, device: torch.device, workers: int) -> torch.device:
    """Bound the memory of one of `workers` processes of serving on a CUDA device, and return the device."""
    fraction = settings.server_memory(workers)
    if device.type == "cuda" and fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, device.index or 0)
    return device


def _reserve(device: torch.device, fraction: float) -> None:
    """Let torch's allocator keep nearly this fraction of the device's memory."""
    size = int(fraction * torch.cuda.get_device_properties(device).total_memory) - _ROUNDING_BYTES
    try:
        torch.empty(size, dtype=torch.uint8, device=device)  # the allocator keeps what is freed
    except RuntimeError as exc:
        if not out_of_memory(exc):
            raise
        log.warning("learner.deterministic: %s has less than %d bytes free; results may differ", device, size)


@contextlib.contextmanager
def confined(
    settings: DeviceSharingSettings, device: torch.device
) -> Iterator[Callable[[], AbstractContextManager[object]]]:
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
    except (RuntimeError, AttributeError, ImportError) as exc:
        # Torch 2.10 has no streams of green contexts, and 2.14 needs cuda-bindings for them.
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
    return f"has no effect: {fault}" if (fault := mps_fault()) else None


def mps_fault() -> str | None:
    """Return why CUDA will not use MPS, as a clause; None where its daemon listens.

    The files of a daemon that was killed stay, so that they alone say nothing.
    """
    control = Path(os.environ.get(_MPS_PIPE, _MPS_PIPE_USUAL)) / "control"
    try:
        if stat.S_ISFIFO(control.stat().st_mode):
            os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
        else:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(control))
    except FileNotFoundError:
        return f"no MPS daemon listens, since there is no {control}"
    except OSError as exc:
        if exc.errno != errno.EPROTOTYPE:  # a listener that takes another kind of socket
            return f"no MPS daemon listens at {control}: {exc.strerror or exc}"
    return None
