"""The devices: their health, a compiler, how they are shared, and memory for learner and serving together.

Imports no torch at load time, and creates no CUDA context.
"""

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.core.files import existing_folder
from anabranch.core.preflight import Finding, info, ok, problem, warning
from anabranch.learner.device.health_rules import Level, judge
from anabranch.learner.device.nvml import Nvml, NvmlDevice, NvmlError
from anabranch.learner.device.visible_devices import machine_devices
from anabranch.learner.settings.learner import DeviceSettings, DeviceSharingSettings

if TYPE_CHECKING:
    import torch

_NOEXEC: int = getattr(os, "ST_NOEXEC", 0)  # Linux has it
_DRIVER = Path("/proc/driver/nvidia/version")
_RESET = "Drain the machine and reset the device; if it is so again, have it replaced."
_START_MPS = "Start the daemon: nvidia-cuda-mps-control -d. Or take the key out."
_LARGEST = 3
"""Items of a ledger that a finding names."""
_COMPILERS = {"cuda": ("CC", ("cc", "gcc", "clang")), "cpu": ("CXX", ("g++", "clang++"))}
"""By type of device: the variable that names the compiler, and what is looked for without it."""


def list_devices() -> Iterator[Finding]:
    """Yield the UUIDs of this machine's GPUs, which `learner.device` and `serving.device` take."""
    gpus = machine_devices()
    if gpus:
        named = [f"{gpu} (instances {', '.join(instances)})" if instances else gpu for gpu, instances in gpus.items()]
        yield ok(f"The machine's GPUs are {', '.join(named)}.")


def check_device(settings: DeviceSettings) -> Iterator[Finding]:
    """Read each visible NVIDIA device once, and judge what needs no history."""
    if settings.enabled == "off":
        yield ok('device.enabled = "off": no device is watched.')
        return
    try:
        nvml = Nvml()
        uuids = nvml.visible()
    except NvmlError as exc:
        if _DRIVER.exists() or settings.enabled == "on":
            fix = "Install it: pip install 'anabranch[gpu]'. Or set device.enabled = \"off\"."
            yield info("device.unwatched", f"No device is watched: {exc}.", fix)
        else:
            yield ok(f"No device: {exc}.")
        return
    if not uuids:
        yield ok("No NVIDIA device is visible.")
    for uuid in uuids:
        try:
            device = nvml.open(uuid) if uuid is not None else None
        except NvmlError as exc:
            yield problem("device.failing", f"{exc}.", _RESET)
            continue
        if device is None:
            yield problem(
                "device.failing", "A device does not answer: it has fallen off the bus, or needs a reset.", _RESET
            )
        else:
            yield from _examine(device, settings)


def _examine(device: NvmlDevice, settings: DeviceSettings) -> Iterator[Finding]:
    name, reading = f"{device.info.name} ({device.info.uuid})", device.read(0.0)
    if reading is None:
        yield problem("device.failing", f"{name} does not answer.", _RESET)
        return
    symptoms = judge([reading], device.info, settings)
    for symptom in symptoms:
        if symptom.level is Level.EARLY:
            fix = "See docs/operate/device-health.md; reset the device when it is idle."
            yield warning("device.warning", f"{name}: {symptom.sentence}.", fix)
        else:
            yield problem("device.failing", f"{name}: {symptom.sentence}.", _RESET)
    if not symptoms:
        used, total = (reading.memory_used or 0) / 1e9, (reading.memory_total or 0) / 1e9
        celsius = reading.temperatures.get("gpu")
        hot = "" if celsius is None else f", {celsius:.0f} °C"
        yield ok(f"{name} is well{hot}, {used:.1f} of {total:.1f} GB in use.")


def check_sharing(sharing: DeviceSharingSettings, device: "torch.device") -> Iterator[Finding]:
    """Yield how the device is shared, and which refinements it lacks."""
    from anabranch.learner.device.cuda_limits import lacks_green_contexts, lacks_mps, mps_fault

    also = ["; its threads run at a lower priority"] if device.type == "cpu" and sharing.policy != "exclusive" else []
    if device.type == "cuda" and sharing.stream_priority:
        also.append("; serving's kernels are taken first")
    if sharing.sms is not None:
        if fault := lacks_green_contexts(device):
            fix = "Take the key out, or give the learner a device that can do it."
            yield problem("device_sharing.refinement", f"device_sharing.sms = {sharing.sms} {fault}.", fix)
        else:
            also.append(f"; steps keep to {sharing.sms} multiprocessors")
            if fault := mps_fault():
                message = f"device_sharing.sms = {sharing.sms} slows training and gives serving nothing: {fault}."
                yield warning("device_sharing.sms", message, _START_MPS)
    if sharing.mps_percentage is not None:
        if fault := lacks_mps(device):
            yield warning(
                "device_sharing.mps", f"device_sharing.mps_percentage = {sharing.mps_percentage} {fault}.", _START_MPS
            )
        else:
            also.append(f"; training takes at most {sharing.mps_percentage} % of the device's threads")
    how = {
        "inference-first": f"Training yields to requests on {device}",
        "fraction": f"Training yields to requests on {device}, and gets at least {sharing.fraction:.0%} of it",
        "exclusive": "Training and serving do not share a device",
    }[sharing.policy]
    yield ok(f"{how}{''.join(also)}.")


def check_compiler(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what keeps `learner.compile` from working on a type of device."""
    variable, usual = _COMPILERS.get(device, _COMPILERS["cpu"])
    programs = [environment[variable]] if environment.get(variable) else usual
    faults = []
    if not any(map(_is_there, programs)):
        message = f"learner.compile needs a C compiler, but there is no {programs[0]}."
        fix = "Install it: apt-get install gcc libc6-dev (g++ for a CPU). Or set learner.compile = false."
        faults.append(warning("compile.compiler", message, fix))
    default = environment.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    caches = {"TORCHINDUCTOR_CACHE_DIR": default}
    if device == "cuda":
        caches["TRITON_CACHE_DIR"] = environment.get("TRITON_CACHE_DIR") or default
    for key, folder in caches.items():
        existing = existing_folder(Path(folder))
        noexec = os.statvfs(existing).f_flag & _NOEXEC
        if noexec or not os.access(existing, os.W_OK):
            fault = "is mounted noexec" if noexec else "cannot be written"
            message = f"learner.compile loads what it compiles from {folder}, which {fault}."
            fix = f"Set {key} to a folder that the learner can write, of a file system that is mounted exec."
            faults.append(warning("compile.folder", message, fix))
    yield from faults or [ok("learner.compile has a compiler, and a folder for what it compiles.")]


def _is_there(program: str) -> bool:
    """Return whether a program can be started that is a path, or quoted as for a shell, perhaps with arguments."""
    try:
        words = shlex.split(program)
    except ValueError:
        words = []
    return any(shutil.which(each) for each in (program, *words[:1]))


def check_load(
    device: str, total: int, learner: Mapping[str, int], serving: Mapping[str, int], sharing: DeviceSharingSettings
) -> Iterator[Finding]:
    """Yield who needs more of a device than its part, or one sentence when all fits.

    Args:
        device: its name, for sentences.
        total: bytes of its memory.
        learner: bytes of the learner by purpose, without activations.
        serving: the same of all processes of serving; empty when they have another device.
        sharing: has the parts.
    """
    parts = {"the learner": (learner, sharing.learner_memory)}
    if serving:
        parts["serving"] = (serving, sharing.server_memory(1))
    fits = True
    for who, (everything, fraction) in parts.items():
        # The bound of a process does not count its context.
        items = {name: size for name, size in everything.items() if fraction is None or name != "contexts"}
        bound = int((fraction or 1.0) * total)
        if sum(items.values()) > bound:
            fits = False
            yield _overload(who, device, items, f"has {_gigabytes(bound)} for it", sharing)
    if fits and sum(learner.values()) + sum(serving.values()) > total:
        fits, items = False, {**{f"serving's {name}": size for name, size in serving.items()}, **learner}
        yield _overload("the pipeline", device, items, f"has {_gigabytes(total)}", sharing)
    if fits:
        amounts = [f"{who} takes at least {_gigabytes(sum(items.values()))}" for who, (items, _) in parts.items()]
        yield ok(f"Of {_gigabytes(total)} of {device}, {' and '.join(amounts)}; activations come on top.")


def _overload(who: str, device: str, items: Mapping[str, int], has: str, sharing: DeviceSharingSettings) -> Finding:
    largest = sorted(items.items(), key=lambda item: -item[1])[:_LARGEST]
    named = ", ".join(f"{name} {_gigabytes(size)}" for name, size in largest)
    part = "" if sharing.learner_memory is None else f" with device_sharing.memory = {sharing.learner_memory:g}"
    needs = f"needs at least {_gigabytes(sum(items.values()))} without activations"
    message = f"{who[0].upper()}{who[1:]} {needs}, but {device} {has}{part}; most is {named}."
    fix = "Lower replay.device_bytes or serving.workers, raise learner.replicas with learner.sharding, set "
    return problem("device.ledger", message, f"{fix}device_sharing.memory, or give serving another device.")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
