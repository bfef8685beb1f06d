"""Devices by UUID: which ones CUDA shows to a process, by `CUDA_VISIBLE_DEVICES`. Imports no torch.

A UUID means the same device after a restart of the machine, in each container and under MPS, where numbers change.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from anabranch.core.errors import SettingsError
from anabranch.core.settings import uuids_in
from anabranch.learner.device.health_rules import is_usable
from anabranch.learner.device.nvml import Nvml, NvmlError, answer_in_time, named_devices
from anabranch.learner.settings.learner import DeviceSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FILES = Path("/proc/driver/nvidia/gpus")

log = logging.getLogger(__name__)


def visible_devices(key: str, devices: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows only the devices with these UUIDs to CUDA, and `{}` for devices named otherwise.

    Args:
        key: the setting, for the sentence of an error.
        devices: its value.
        environment: may show only some of the machine's devices already.

    Raises:
        SettingsError: the machine, or the environment, has no such device.
    """
    uuids = uuids_in(devices)
    if not uuids:
        return {}
    gpus, before = machine_devices(), environment.get(VISIBLE)
    where = "this machine" if before is None else f'{VISIBLE} = "{before}"'
    shown = _shown(",".join(gpus) if before is None else before, gpus)
    for uuid in uuids:
        # Files of the driver do not list instances of MIG.
        unsure = not gpus or (uuid.startswith("MIG-") and not any(gpus.values()))
        if not (before is None and unsure) and not any(_same(uuid, other) for other in shown):
            there = f"it has {', '.join(shown)}" if shown else "it has none"
            raise SettingsError(f'{key} = "{uuid}": {where} has no such device; {there}')
    return {VISIBLE: ",".join(uuids)}


def show_only(key: str, devices: str) -> str:
    """Let CUDA see only the devices with these UUIDs in this process; call it before CUDA is initialized.

    Returns:
        The name by which torch has them: `cuda`. Devices that are named otherwise keep their name.

    Raises:
        SettingsError: the machine, or the environment, has no such device.
    """
    variables = visible_devices(key, devices, os.environ)
    os.environ.update(variables)
    return "cuda" if variables else devices


def leave_out_unusable(settings: DeviceSettings, name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide devices that are gone, need a reset or have no spare memory left, if others are visible that are usable.

    Called before CUDA is initialised, since it sets `CUDA_VISIBLE_DEVICES`. A `name` of one device hides none.
    """
    if settings.enabled == "off" or name not in ("auto", "cuda"):
        return
    try:
        visible, usable = answer_in_time(lambda: _find_usable(environment))
    except NvmlError:
        return
    if usable and len(usable) < len(visible):
        hidden = ", ".join(uuid or "one that is gone" for uuid in visible if uuid not in usable)
        log.warning("devices that are not used, since they need a reset or have failed: %s", hidden)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(usable)


def machine_devices() -> dict[str, list[str]]:
    """Return the UUIDs of this machine's GPUs, in the order of their numbers, and of the instances of MIG on each.

    It asks NVML if `nvidia-ml-py` is installed, else the driver's files, which list no instances. It starts no CUDA.
    Empty: there are none, or neither can be asked.
    """
    return _by_nvml() or _by_driver_files()


def device_bytes() -> list[int]:
    """Return the memory of each device that CUDA will show, in order, asked of NVML; empty where that is not known."""
    visible = os.environ.get(VISIBLE)
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = _handles(nvml)
        if visible is not None:
            shown = _shown(visible, {uuid: _instances(nvml, handle) for uuid, handle in handles.items()})
            handles = {uuid: handle for one in shown for uuid, handle in handles.items() if _same(one, uuid)}
        try:
            return [int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles.values()]
        except nvml.NVMLError:
            return []


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


def _by_nvml() -> dict[str, list[str]]:
    with _nvml() as nvml:
        return {} if nvml is None else {uuid: _instances(nvml, handle) for uuid, handle in _handles(nvml).items()}


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the module of `nvidia-ml-py`, ready for calls; None without it or its driver."""
    try:
        nvml = Nvml().api
    except NvmlError:  # the driver's files are asked then
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> dict[str, Any]:
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    except nvml.NVMLError:
        return {}


def _instances(nvml: Any, gpu: Any) -> list[str]:
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            found.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))))
    except nvml.NVMLError:  # no instance of that number, or no MIG
        pass
    return found


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid


def _by_driver_files() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        for path in sorted(DRIVER_FILES.glob("*/information")):  # named by PCI bus
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            if uuid := fields.get("GPU UUID", "").strip():
                found[uuid] = []
    except OSError:
        return {}
    return found


def _shown(visible: str, gpus: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the UUIDs that a value of `CUDA_VISIBLE_DEVICES` shows, with all instances of a GPU that it shows.

    Numbers count the machine's GPUs.
    """
    shown, numbered = [], dict(enumerate(gpus))
    for entry in named_devices(visible):
        shown.append(numbered.get(entry, f"device {entry}") if isinstance(entry, int) else entry)
    return shown + [instance for uuid in shown for gpu in gpus if _same(uuid, gpu) for instance in gpus[gpu]]


def _same(uuid: str, other: str) -> bool:
    """Return whether one is the beginning of the other: CUDA takes the first characters for the whole."""
    one, two = uuid.lower(), other.lower()
    return one.startswith(two) or two.startswith(one)
