"""What a GPU needs in addition: a compiler, and memory for the learner and serving together. Imports no torch."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.files import existing_folder
from anabranch.doctor.model_process import ProbeFinding
from learner.config import DeviceSharingSettings, LearnerSettings
from learner.device_memory.ledger import ledger, serving_ledger
from learner.model.visible_devices import machine_devices
from learner.sections.mesh import MeshSettings

_NOEXEC: int = getattr(os, "ST_NOEXEC", 0)  # Linux has it
_FLOAT32 = 4
_LARGEST = 3
"""Items of a ledger that a finding names."""
_COMPILERS = {"cuda": ("CC", ("cc", "gcc", "clang")), "cpu": ("CXX", ("g++", "clang++"))}
"""By type of device: the variable that names the compiler, and what is looked for without it."""


def list_devices() -> Iterator[ProbeFinding]:
    """Yield the UUIDs of this machine's GPUs, which `learner.device` and `serving.device` take."""
    gpus = machine_devices()
    if gpus:
        named = [f"{gpu} (instances {', '.join(instances)})" if instances else gpu for gpu, instances in gpus.items()]
        yield ProbeFinding("", f"The machine's GPUs are {', '.join(named)}.")


def check_compiler(device: str, environment: Mapping[str, str] = os.environ) -> Iterator[ProbeFinding]:
    """Yield what keeps `learner.compile` from working on a type of device."""
    variable, usual = _COMPILERS.get(device, _COMPILERS["cpu"])
    programs = [environment[variable]] if environment.get(variable) else usual
    faults = []
    if not any(shutil.which(program.split()[0]) for program in programs):
        faults.append(
            ProbeFinding("compile.compiler", f"learner.compile needs a C compiler, but there is no {programs[0]}.")
        )
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
            faults.append(ProbeFinding("compile.folder", message, key))
    yield from faults or [ProbeFinding("", "learner.compile has a compiler, and a folder for what it compiles.")]


@dataclass(frozen=True)
class ServerLoad:
    """How many copies of a model serving keeps on a device."""

    workers: int
    shadow: bool

    def ledger(self, parameters: int, base_bytes: int = 0) -> dict[str, int]:
        """Return the bytes of all workers by purpose, at a swap while a request still holds the version before."""
        return {
            **serving_ledger(parameters, workers=self.workers, shadow=self.shadow, base_bytes=base_bytes),
            "held_version": _FLOAT32 * parameters * self.workers,
        }


@dataclass(frozen=True)
class DeviceLoad:
    """What a pipeline puts on one device at the same time."""

    device: str
    """Its name, for sentences."""
    total: int
    """Bytes of its memory."""
    learner: Mapping[str, int]
    """Bytes of the learner by purpose, without activations."""
    serving: Mapping[str, int]
    """The same of all processes of serving; empty when they have another device."""

    def check(self, sharing: DeviceSharingSettings) -> Iterator[ProbeFinding]:
        """Yield who needs more than its part, or one sentence when all fits."""
        parts = {"the learner": (self.learner, sharing.learner_memory)}
        if self.serving:
            parts["serving"] = (self.serving, sharing.server_memory(1))
        findings = []
        for who, (everything, fraction) in parts.items():
            items = everything
            if fraction is not None:  # the bound of a process does not count its context
                items = {name: size for name, size in items.items() if name != "contexts"}
            needed = sum(items.values())
            bound = int((fraction or 1.0) * self.total)
            if needed > bound:
                findings.append(self._finding(who, needed, items, f"has {_gigabytes(bound)} for it", sharing))
        both = sum(self.learner.values()) + sum(self.serving.values())
        if not findings and both > self.total:
            items = {**{f"serving's {name}": size for name, size in self.serving.items()}, **self.learner}
            findings.append(self._finding("the pipeline", both, items, f"has {_gigabytes(self.total)}", sharing))
        amounts = [f"{who} takes at least {_gigabytes(sum(items.values()))}" for who, (items, _) in parts.items()]
        message = f"Of {_gigabytes(self.total)} of {self.device}, {' and '.join(amounts)}; activations come on top."
        yield from findings or [ProbeFinding("", message)]

    def _finding(
        self, who: str, needed: int, items: Mapping[str, int], has: str, sharing: DeviceSharingSettings
    ) -> ProbeFinding:
        largest = sorted(items.items(), key=lambda item: -item[1])[:_LARGEST]
        named = ", ".join(f"{name} {_gigabytes(size)}" for name, size in largest)
        part = "" if sharing.learner_memory is None else f" with device_sharing.memory = {sharing.learner_memory:g}"
        message = (
            f"{who[0].upper()}{who[1:]} needs at least {_gigabytes(needed)} without activations, but {self.device} "
            f"{has}{part}; most is {named}."
        )
        return ProbeFinding("device.ledger", message)


def learner_ledger(
    parameters: int, learner: LearnerSettings, replay_bytes: int, base_bytes: int = 0, challengers: int = 0
) -> dict[str, int]:
    """Return the bytes of rank 0 of a learner on its device, by purpose."""
    mesh = learner.mesh or MeshSettings(data=learner.replicas)
    return ledger(
        parameters,
        optimizer=learner.optimizer.name,
        optimizer_arguments=learner.optimizer.model_extra,
        strategy=learner.strategy.name,
        precision=learner.precision,
        sharding=learner.sharding,
        comm_hook=learner.comm_hook,
        ranks=mesh.data,
        parts=mesh.tensor * mesh.pipeline,
        replay_bytes=replay_bytes,
        base_bytes=base_bytes,
        challengers=challengers,
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
