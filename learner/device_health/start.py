"""Starts the watch of a learner's devices, and leaves out devices that a start may not use.

Both are harmless where there is no NVIDIA device: they do nothing.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

from anabranch.core.errors import SettingsError
from anabranch.core.state_metrics import StateCollector
from learner.device_health.config import DeviceSettings
from learner.device_health.nvml import Nvml, NvmlError, NvmlMissingError
from learner.device_health.rules import is_usable
from learner.device_health.sniff_test import SniffTest
from learner.device_health.watch import HealthWatch, ReadableDevice
from learner.state_dir.report import DeviceHealthReport

_T = TypeVar("_T")
_PATIENCE_SECONDS = 10.0
"""How long a start waits for NVML, which may hang in the driver."""

log = logging.getLogger(__name__)


def start_watch(
    settings: DeviceSettings,
    devices: Sequence[torch.device],
    request_checkpoint: Callable[[], object],
    metrics: StateCollector[DeviceHealthReport] | None = None,
    *,
    ranks: int = 1,
    sniff: SniffTest | None = None,
) -> HealthWatch | None:
    """Start to watch the devices of this process; return None where there is nothing to watch, or `enabled` is off.

    With `device.enabled = "on"`, a device that cannot be watched for now ends the process with code 1.

    Raises:
        SettingsError: `device.enabled = "on"`, and there is no NVIDIA device, or no NVML.
    """
    if settings.enabled == "off":
        return None
    try:
        opened = _open(devices)
    except NvmlError as exc:
        sentence = f'device.enabled = "{settings.enabled}", but {exc}'
        if settings.enabled == "on" and isinstance(exc, NvmlMissingError):
            raise SettingsError(sentence) from exc
        if settings.enabled == "on":
            log.error("%s", sentence)  # noqa: TRY400 the sentence says all
            sys.exit(1)
        log.info("the health of the device is not watched: %s", exc)
        return None
    watch = HealthWatch(opened, settings, request_checkpoint, metrics, ranks=ranks, sniff=sniff)
    watch.start()
    return watch


def leave_out_unusable(settings: DeviceSettings, name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide devices that are gone, need a reset or have no spare memory left, if others are visible that are usable.

    Called before CUDA is initialised, since it sets `CUDA_VISIBLE_DEVICES`. A `name` of one device hides none.
    """
    if settings.enabled == "off" or name not in ("auto", "cuda"):
        return
    try:
        visible, usable = _within(_find_usable, environment)
    except NvmlError:
        return
    if usable and len(usable) < len(visible):
        hidden = ", ".join(uuid or "one that is gone" for uuid in visible if uuid not in usable)
        log.warning("devices that are not used, since they need a reset or have failed: %s", hidden)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(usable)


def _find_usable(environment: MutableMapping[str, str]) -> tuple[list[str | None], list[str]]:
    nvml = Nvml()
    visible, usable = nvml.visible(environment), []
    for uuid in visible if len(visible) > 1 else ():
        try:
            reading = nvml.open(uuid).read(0.0) if uuid is not None else None
        except NvmlError:
            continue
        if uuid is not None and reading is not None and is_usable(reading):
            usable.append(uuid)
    return visible, usable


def _open(devices: Sequence[torch.device]) -> Sequence[ReadableDevice]:
    """Return the devices, by the UUIDs that torch has of them."""
    for device in devices:
        if device.type != "cuda":
            raise NvmlMissingError(f"{device} is no NVIDIA device")
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    return _within(_open_uuids, uuids)


def _open_uuids(uuids: Sequence[str]) -> Sequence[ReadableDevice]:
    nvml = Nvml()
    return [nvml.open(uuid) for uuid in uuids]


def _within(work: Callable[..., _T], *given: Any) -> _T:
    """Return the result of `work`, which runs in a thread; raises NvmlError when that takes too long."""
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work(*given))
        except Exception as exc:  # noqa: BLE001 the top of a thread: it is raised below
            errors.append(exc)

    thread = threading.Thread(target=run, name="nvml-start", daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    if errors:
        raise errors[0]
    if not results:
        raise NvmlError(f"NVML has not answered within {_PATIENCE_SECONDS:.0f} s")
    return results[0]
