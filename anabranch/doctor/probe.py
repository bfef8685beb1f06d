"""`python -m anabranch.doctor.probe FD`: the process in which doctor tries torch, the device and the model."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.doctor.model_process import Asked, ProbeFinding, Size, Step
from learner.config import DeviceSharingSettings, LearnerSettings
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
    from anabranch.doctor.model_checks import try_device, try_model
    from serving.errors import DeviceError
    from serving.model.deployment import pick_device

    learner = LearnerSettings.model_validate_json(asked.learner)
    send(Step("choosing the device"))
    device = try_device(learner, send)
    try:
        pick_device(asked.serving_device)
    except (SettingsError, DeviceError) as exc:
        send(ProbeFinding("device.missing", f"{exc}.", "serving.device"))
    for finding in _share(DeviceSharingSettings.model_validate_json(asked.device_sharing), device):
        send(finding)
    replay = ReplaySettings.model_validate_json(asked.replay)
    near = torch.device("cpu") if replay.device_memory == "host" else device
    free = _free(near)
    needed = _needed_bytes(replay, try_model(asked, device, send))
    if learner.strategy.replays and needed > free:
        message = f"replay.device_bytes needs {needed / 1e6:,.0f} MB, but {near} has {free / 1e6:,.0f} MB free."
        send(ProbeFinding("device.memory", message))


def _share(sharing: DeviceSharingSettings, device: "torch.device") -> Iterator[ProbeFinding]:
    """Yield how the device is shared, and which refinements it lacks."""
    from learner.device_sharing.cuda_limits import lacks_green_contexts, lacks_mps

    also = ["; its threads run at a lower priority"] if device.type == "cpu" and sharing.policy != "exclusive" else []
    if device.type == "cuda" and sharing.stream_priority:
        also.append("; serving's kernels are taken first")
    if sharing.sms is not None:
        if fault := lacks_green_contexts(device):
            yield ProbeFinding("device_sharing.refinement", f"device_sharing.sms = {sharing.sms} {fault}.")
        else:
            also.append(f"; steps keep to {sharing.sms} multiprocessors")
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


def _free(device: object) -> int:
    """Return the free bytes of a device; all bytes of a host that does not report them."""
    import torch

    assert isinstance(device, torch.device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
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
