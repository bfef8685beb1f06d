"""The device, precision and determinism of training, from `learner.device`, `learner.precision` and others."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.device.nvml import named_devices
from anabranch.learner.device.visible_devices import VISIBLE, show_only
from anabranch.learner.settings.learner import LearnerSettings

DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded, also in a container that has devices."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Precision:
    """The arithmetic of the forward pass; weights stay float32.

    Attributes:
        dtype: to which autocast converts; None: no autocast.
    """

    name: str
    dtype: torch.dtype | None

    def configure(self) -> None:
        """Set torch's flags of this process, for `tf32` alone: matrix products and convolutions round their inputs."""
        if self.name == "tf32":
            # Torch raises where both these and its newer `fp32_precision` are set, and the user's code may read either.
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True

    @property
    def scaled(self) -> bool:
        """Whether gradients need loss scaling, as fp16's do."""
        return self.dtype is torch.float16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the context manager for a forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


def choose_device(devices: str, key: str = "learner.device") -> torch.device:
    """Return the device that the setting `key` names, the first of several; a CUDA device has its index.

    Call it before CUDA is initialized: of devices that are named by UUID, CUDA sees no others then.

    Raises:
        SettingsError: torch has no such device.
        DependencyError: it has none, on a machine that has NVIDIA's driver: a device may be away for now.
    """
    name = show_only(key, devices)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device  # without a question to CUDA, which would initialize it
    present = torch.cuda.is_available() if device.type == "cuda" else torch.backends.mps.is_available()
    if not present or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        if fault := driver_fault():
            raise DependencyError(f'{key} = "{devices}": {fault}; try "auto"')
        raise SettingsError(f'{key} = "{devices}": torch {torch.__version__} sees no such device; try "auto"')
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_of_rank(index: int, settings: LearnerSettings) -> torch.device:
    """Return the device of a rank, 0 for the first of this host.

    Raises:
        SettingsError, DependencyError: there is none.
    """
    device, what = choose_device(settings.device), f"learner.replicas = {settings.replicas}"
    if device.type == "cpu":
        if settings.comm_hook == "bf16":
            raise SettingsError('learner.comm_hook = "bf16" needs CUDA devices; write "fp16", or "none"')
        return device
    if device.type != "cuda":
        raise SettingsError(f'{what} needs CUDA devices or learner.device = "cpu", but the device is {device}')
    if ":" in settings.device:
        raise SettingsError(f'{what} needs a device for each, but learner.device = "{settings.device}"; write "cuda"')
    if torch.cuda.device_count() < settings.replicas:
        there = torch.cuda.device_count()
        raise DependencyError(f"{what} needs as many CUDA devices, but there are {there}; one may be away or broken")
    return torch.device("cuda", index)


def driver_fault() -> str | None:
    """Return why torch sees no CUDA device on a machine that has NVIDIA's driver, as a clause; None without a fault."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    visible = os.environ.get(VISIBLE)
    if visible is None and not DRIVER.exists():
        return None
    if visible is not None and not named_devices(visible):
        return None  # devices are hidden on purpose, as by an empty value, -1 or NoDevFiles
    sign = f'{VISIBLE} = "{visible}"' if visible else f"{DRIVER} exists"
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and sees no device, although {sign}; is the "
        "driver too old (CUDA 13 needs 580 or later), or the device away?"
    )


@dataclass(frozen=True)
class UnusedDevice:
    """What `auto` could not take, as a component of a report."""

    problem: str | None
    """One sentence when the CPU computes on a machine that seems to have a GPU."""

    @classmethod
    def of(cls, key: str, devices: str, device: torch.device) -> "UnusedDevice":
        """Check the device that was chosen for a setting, and log a problem."""
        fault = driver_fault() if devices == "auto" and device.type == "cpu" else None
        if fault is None:
            return cls(None)
        problem = f'{key} = "auto" takes the CPU: {fault}'
        log.warning("%s", problem)
        return cls(problem)


@contextlib.contextmanager
def without_denormals(device: torch.device) -> Iterator[None]:
    """Flush denormals to zero in this thread and threads that it starts, while the block runs on a CPU.

    Without this, Adam's moments for weights behind dead units decay into the denormal range within some hundred steps,
    and every update from then on takes ten times as long.
    """
    if device.type != "cpu":
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def check_scaling(precision: Precision, settings: LearnerSettings) -> None:
    """Raise SettingsError where ranks cannot agree on a loss scale, and the arithmetic needs one."""
    mesh = settings.mesh
    causes = {
        'learner.sharding = "fsdp"': settings.sharding == "fsdp",
        f"learner.sync_every = {settings.sync_every}": settings.sync_every > 1,
        "learner.mesh.tensor, pipeline or expert above 1": mesh is not None
        and max(mesh.tensor, mesh.pipeline, mesh.expert) > 1,
    }
    other = next((name for name, holds in causes.items() if holds), None)
    if precision.scaled and other is not None:
        raise SettingsError(f'learner.precision = "auto" is fp16 here, which does not go with {other}; write "fp32"')


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the arithmetic that the setting names; raises SettingsError when the device cannot do it."""
    if name == "auto":
        name = (
            "fp32"
            if device.type != "cuda"
            else "bf16"
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else "fp16"
        )
    if name in {"fp8", "fp16", "tf32"} and device.type != "cuda":
        raise SettingsError(f'learner.precision = "{name}" needs a CUDA device, but the device is {device}; try "auto"')
    least = _CAPABILITIES.get(name)
    if least is not None and torch.cuda.get_device_capability(device) < least:
        needs = ".".join(map(str, least))
        raise SettingsError(
            f'learner.precision = "{name}" needs compute capability {needs}, which {device} lacks; try "auto"'
        )
    return Precision(name, _AUTOCAST.get(name))


_AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
_CAPABILITIES = {"tf32": (8, 0), "fp8": (8, 9)}
"""The first compute capability that has it."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def compute_deterministically() -> None:
    """Make torch use only deterministic algorithms, on one thread; call it before any other work of torch.

    Sums of floats depend on how many threads share them, and the number of threads on the machine's load and limits.
    """
    os.environ.setdefault(_CUBLAS, ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True)
    # It would write every new tensor, pinned buffers too, to show reads of what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
