"""`python -m anabranch.doctor.probe FD`: the process in which doctor tries torch, the device and the model."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.core.settings import uuids_in
from anabranch.doctor.accelerator_checks import (
    DeviceLoad,
    ServerLoad,
    check_compiler,
    learner_ledger,
    list_devices,
)
from anabranch.doctor.model_process import Asked, ProbeFinding, Size, Step
from learner.config import DeviceSharingSettings, LearnerSettings
from learner.model.visible_devices import VISIBLE, machine_devices, visible_devices
from replay.config import ReplaySettings

if TYPE_CHECKING:
    import torch

    from replay.row_layout import Fields

_MAX_CHARACTERS = 2_000
_OVERHEAD = 1.1
"""Slots of replay by slots for events: some are kept free."""


def main() -> int:
    """Read an `Asked` from stdin, and write messages as lines of JSON into the descriptor given."""
    descriptor = int(sys.argv[1])

    def send(message: Step | ProbeFinding | Size) -> None:
        if isinstance(message, ProbeFinding):
            message.message = message.message[:_MAX_CHARACTERS]  # a pipe buffers this much without a reader
        os.write(descriptor, msgspec.json.encode(message) + b"\n")

    run_probe(msgspec.json.decode(sys.stdin.buffer.read(), type=Asked), send)
    return 0


def run_probe(asked: Asked, send: Callable[[Step | ProbeFinding | Size], None]) -> None:
    """Try torch, the device and the model; send each step before it begins, and each finding."""
    send(Step("importing torch"))
    try:
        import torch
    except (ImportError, OSError) as exc:
        send(ProbeFinding("install.torch", f"torch cannot be imported: {exc}."))
        return
    send(ProbeFinding("", f"torch {torch.__version__} can be imported."))
    from anabranch.doctor.model_checks import choose, try_device, try_model

    learner = LearnerSettings.model_validate_json(asked.learner)
    sharing = DeviceSharingSettings.model_validate_json(asked.device_sharing)
    visible = dict(os.environ)
    send(Step("choosing the device"))
    for finding in list_devices():
        send(finding)
    device = try_device(learner, send)
    server = _try_server(asked.serving_device, device, visible, functools.partial(choose, send=send), send)
    for finding in _share(sharing, device):
        send(finding)
    if learner.compile:
        for finding in check_compiler(device.type):
            send(finding)
    replay = ReplaySettings.model_validate_json(asked.replay)
    on_host = replay.device_memory == "host" or device.type != "cuda"
    columns, elements, base_bytes = try_model(asked, device, send)
    needed = _needed_bytes(replay, columns) if learner.strategy.replays else 0
    if on_host and needed > (free := free_memory()):
        message = f"replay.device_bytes needs {needed / 1e6:,.0f} MB, but cpu has {free / 1e6:,.0f} MB free."
        send(ProbeFinding("device.memory", message))
    if device.type == "cuda" and elements:
        servers = ServerLoad(asked.serving_workers, asked.serving_shadow)
        serving = servers.ledger(elements, base_bytes) if server == device else {}
        total = int(torch.cuda.get_device_properties(device).total_memory)
        training = learner_ledger(elements, learner, 0 if on_host else needed, base_bytes, asked.challengers)
        load = DeviceLoad(str(device), total, training, serving)
        for finding in load.check(sharing):
            send(finding)


def _try_server(
    name: str,
    device: "torch.device",
    visible: Mapping[str, str],
    choose: "Callable[[str, str], torch.device | None]",
    send: Callable[[ProbeFinding], None],
) -> "torch.device | None":
    """Return serving's device, the learner's `device` where both name the same; None where it is another or missing.

    CUDA, which the learner's device has begun, cannot show those that a UUID names any more: only its UUID is checked,
    against the devices that were `visible` before.
    """
    if not uuids_in(name):
        narrowed = os.environ.get(VISIBLE) != visible.get(VISIBLE)
        if narrowed and ":" in name:
            return None
        chosen = choose("serving.device", name)
        return None if narrowed and len(machine_devices()) > 1 else chosen
    try:
        shown = visible_devices("serving.device", name, visible)
    except SettingsError as exc:
        send(ProbeFinding("device.missing", f"{exc}.", "serving.device"))
        return None
    return device if os.environ.get(VISIBLE) == shown[VISIBLE] else None


def _share(sharing: DeviceSharingSettings, device: "torch.device") -> Iterator[ProbeFinding]:
    """Yield how the device is shared, and which refinements it lacks."""
    from learner.device_sharing.cuda_limits import lacks_green_contexts, lacks_mps, mps_fault

    also = ["; its threads run at a lower priority"] if device.type == "cpu" and sharing.policy != "exclusive" else []
    if device.type == "cuda" and sharing.stream_priority:
        also.append("; serving's kernels are taken first")
    if sharing.sms is not None:
        if fault := lacks_green_contexts(device):
            yield ProbeFinding("device_sharing.refinement", f"device_sharing.sms = {sharing.sms} {fault}.")
        else:
            also.append(f"; steps keep to {sharing.sms} multiprocessors")
            if fault := mps_fault():
                message = f"device_sharing.sms = {sharing.sms} slows training and gives serving nothing: {fault}."
                yield ProbeFinding("device_sharing.sms", message)
    if sharing.mps_percentage is not None:
        if fault := lacks_mps(device):
            yield ProbeFinding(
                "device_sharing.mps", f"device_sharing.mps_percentage = {sharing.mps_percentage} {fault}."
            )
        else:
            also.append(f"; training takes at most {sharing.mps_percentage} % of the device's threads")
    how = {
        "inference-first": f"Training yields to requests on {device}",
        "fraction": f"Training yields to requests on {device}, and gets at least {sharing.fraction:.0%} of it",
        "exclusive": "Training and serving do not share a device",
    }[sharing.policy]
    yield ProbeFinding("", f"{how}{''.join(also)}.")


def _needed_bytes(replay: ReplaySettings, columns: "Fields") -> int:
    from replay.row_layout import RowLayout

    most = int(replay.capacity * _OVERHEAD) * RowLayout(columns).row_bytes
    return min(int(replay.device_bytes), most)


def free_memory() -> int:
    """Return the free bytes of the host; all of them where it does not report that."""
    free = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
        # What a container may take, when it is less.
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, StopIteration):
        pass
    return min(free) if free else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    # A model may leave threads behind that never end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
