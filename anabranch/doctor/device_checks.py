"""The health of the NVIDIA devices, as their driver reports it. Imports no torch, and creates no CUDA context."""

from collections.abc import Iterator
from pathlib import Path

from anabranch.doctor.findings import CheckContext, Finding, found, ok
from learner.device_health.nvml import Nvml, NvmlDevice, NvmlError
from learner.device_health.rules import Level, judge

_DRIVER = Path("/proc/driver/nvidia/version")


def check_device(context: CheckContext) -> Iterator[Finding]:
    """Read each visible NVIDIA device once, and judge what needs no history."""
    settings = context.config.pipeline.device
    if settings.enabled == "off":
        yield ok('device.enabled = "off": no device is watched.')
        return
    try:
        nvml = Nvml()
        uuids = nvml.visible()
    except NvmlError as exc:
        missing = _DRIVER.exists() or settings.enabled == "on"
        yield found("device.unwatched", f"No device is watched: {exc}.") if missing else ok(f"No device: {exc}.")
        return
    if not uuids:
        yield ok("No NVIDIA device is visible.")
    for uuid in uuids:
        try:
            device = nvml.open(uuid) if uuid is not None else None
        except NvmlError as exc:
            yield found("device.failing", f"{exc}.")
            continue
        if device is None:
            yield found("device.failing", "A device does not answer: it has fallen off the bus, or needs a reset.")
        else:
            yield from _examine(device, context)


def _examine(device: NvmlDevice, context: CheckContext) -> Iterator[Finding]:
    info, reading = device.info, device.read(0.0)
    if reading is None:
        yield found("device.failing", f"{info.name} ({info.uuid}) does not answer.")
        return
    symptoms = judge([reading], info, context.config.pipeline.device)
    for symptom in symptoms:
        kind = "device.warning" if symptom.level is Level.EARLY else "device.failing"
        yield found(kind, f"{info.name} ({info.uuid}): {symptom.sentence}.")
    if not symptoms:
        used, total = (reading.memory_used or 0) / 1e9, (reading.memory_total or 0) / 1e9
        hot = "" if reading.temperature is None else f", {reading.temperature:.0f} °C"
        yield ok(f"{info.name} ({info.uuid}) is well{hot}, {used:.1f} of {total:.1f} GB in use.")
