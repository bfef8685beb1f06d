"""The real nvidia-ml-py on our own libnvidia-ml.so.1, which replays what a test writes."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from anabranch.learner.device.nvml import Nvml
from anabranch.learner.device.reading import Reading

SOURCE = Path(__file__).parent.parent / "learner" / "device" / "fake_nvml.c"
UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-66666666-7777-8888-9999-000000000000"
WELL = (
    "memory_used=20e9 utilization=90 temperature=62 memory_temperature=70 power=520 power_limit=700 energy=1e9"
    " sm_clock=1900 memory_clock=2600 slowdown=0 links=4 pid=4242 pid_bytes=20e9 corrected=3 uncorrected=0"
    " lifetime_corrected=40 lifetime_uncorrected=1 pcie_replays=5 nvlink_replays=0 nvlink_recoveries=0"
    " remapped_corrected=0 remapped_uncorrected=0 remap_pending=0 remap_failed=0 recovery=0"
)
"""A device at work that is well: its counters began before the process."""


def reading(time, **values):
    """Return a reading by names such as `power` or `ecc_errors.corrected`; None is not known."""
    fields = {}
    for name, value in values.items():
        field, _, key = name.partition(".")
        if key and value is not None:
            fields.setdefault(field, {})[key] = value
        elif not key:
            fields[field] = value
    return Reading(time=time, **fields)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    """The path of the fake library, built."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc, which builds the fake libnvidia-ml.so.1")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    build = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*build, "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def fake_nvml(fake_library, tmp_path, monkeypatch):
    """Return a function that opens the library on a script: a string a tick, after the state `well` and `at_start`."""
    import pynvml

    # The loader finds a library that is loaded by its soname, so that pynvml's own CDLL gets this one.
    library = ctypes.CDLL(str(fake_library))
    if pynvml.nvmlLib is not None and pynvml.nvmlLib._handle != library._handle:
        pytest.skip("the NVML of a driver is loaded in this process")

    def start(ticks=(), uuids=(UUID,), well=WELL, at_start=""):
        path = tmp_path / "script"
        first = " ".join(f"{index}:{pair}" for index, _ in enumerate(uuids) for pair in well.split())
        with path.open("w") as file:
            file.write(" ".join(uuids) + f"\n{first} {at_start}\n")
            file.writelines(f"{tick}\n" for tick in ticks)
        monkeypatch.setenv("FAKE_NVML_SCRIPT", str(path))
        return Nvml()

    return start
