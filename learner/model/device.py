"""The device, precision and determinism of training, from `learner.device`, `learner.precision` and others."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from anabranch.core.errors import SettingsError


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


def choose_device(name: str) -> torch.device:
    """Return the device that the setting names; raises SettingsError when torch has no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[device.type]
    if not present or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise SettingsError(f'learner.device = "{name}": torch {torch.__version__} sees no such device; try "auto"')
    return device


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


def check_scaling(precision: Precision, sharding: str, sync_every: int) -> None:
    """Raise SettingsError where ranks cannot agree on a loss scale, and the arithmetic needs one."""
    if precision.scaled and (sharding == "fsdp" or sync_every > 1):
        other = 'learner.sharding = "fsdp"' if sharding == "fsdp" else f"learner.sync_every = {sync_every}"
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
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
