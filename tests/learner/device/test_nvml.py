"""Readings of the real nvidia-ml-py from a fake library."""

import ctypes
import subprocess
import sys

import pytest

from anabranch.learner.device.health_rules import is_usable
from anabranch.learner.device.nvml import Nvml, NvmlError
from tests.support.nvml import OTHER, UUID


def test_a_reading_has_what_the_device_reports_in_base_units(fake_nvml):
    device = fake_nvml(["slowdown=36"]).open(UUID)
    reading = device.read(7.0)
    assert (device.info.uuid, device.info.name) == (UUID, "NVIDIA Fake")
    assert (device.info.slowdown_celsius, device.info.memory_max_celsius) == (90, 95)
    assert device.info.nvlinks == 4
    assert (reading.time, reading.memory_used, reading.memory_total) == (7.0, 20 * 10**9, 80 * 10**9)
    assert (reading.utilization, reading.temperatures) == (0.9, {"gpu": 62, "memory": 70})
    assert (reading.power, reading.power_limit, reading.energy) == (520.0, 700.0, 1e6)
    assert reading.clocks == {"sm": 1.9e9, "memory": 2.6e9}
    assert reading.slowdown == ["power_cap", "thermal"]
    assert reading.ecc_errors == {"corrected": 3, "uncorrected": 0}
    assert reading.ecc_lifetime_errors == {"corrected": 40, "uncorrected": 1}
    assert (reading.pcie_replays, reading.nvlink_active, reading.nvlink_errors) == (5, 4, 0)
    assert (reading.recovery, reading.processes, reading.lost) == (0, {"4242": 20 * 10**9}, None)


def test_a_uuid_as_torch_writes_it_is_enough(fake_nvml):
    assert fake_nvml().open(UUID.removeprefix("GPU-")).info.uuid == UUID


def test_a_uuid_that_is_not_there_is_named(fake_nvml):
    with pytest.raises(NvmlError, match=OTHER):
        fake_nvml().open(OTHER)


def test_what_a_device_does_not_report_is_none_and_not_queried_again(fake_nvml, fake_library):
    device = fake_nvml(well="temperature=50").open(UUID)
    reading = device.read(0.0)
    assert reading.temperatures == {"gpu": 50}
    assert (reading.power, reading.ecc_errors, reading.nvlink_active, reading.slowdown) == (None, {}, None, [])
    calls = ctypes.CDLL(str(fake_library)).fake_nvml_calls
    before = calls()
    device.read(1.0)
    assert calls() - before == 4  # memory, fields, temperature, events


def test_a_query_that_the_package_does_not_have_is_left_out(fake_nvml, monkeypatch):
    import pynvml

    for name in (
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureThreshold",
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    ):
        monkeypatch.delattr(pynvml, name)
    device = fake_nvml().open(UUID)
    reading = device.read(0.0)
    assert (device.info.slowdown_celsius, reading.temperatures, reading.recovery) == (None, {"memory": 70}, None)
    assert reading.power == 520.0


def test_xid_events_are_in_the_next_reading_alone(fake_nvml):
    device = fake_nvml(["xid=63 xid=13", ""]).open(UUID)
    assert [device.read(float(time)).xids for time in range(2)] == [(63, 13), ()]


def test_links_whose_state_cannot_be_had_for_now_are_not_down(fake_nvml, monkeypatch):
    import pynvml

    device = fake_nvml(["", "", "links_up=3"]).open(UUID)
    assert device.read(0.0).nvlink_active == 4
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetNvLinkState", lambda *_: pynvml._nvmlCheckReturn(999))
        assert device.read(1.0).nvlink_active is None
    assert device.read(2.0).nvlink_active == 3


def test_a_device_that_is_lost_is_reported_with_its_last_event(fake_nvml):
    device = fake_nvml(["", "error=15 xid=79"]).open(UUID)
    assert device.read(0.0).lost is None
    reading = device.read(1.0)
    assert (reading.lost, reading.xids, reading.temperatures) == ("GPU is lost", (79,), {})
    assert not is_usable(reading)


def test_an_error_that_may_pass_is_no_answer(fake_nvml):
    device = fake_nvml(["error=999", "error=0"]).open(UUID)
    assert device.read(0.0) is None
    assert device.read(1.0) is not None


@pytest.mark.parametrize(
    ("named", "visible"),
    [
        (None, [UUID, OTHER]),
        ("1", [OTHER]),
        ("1,0", [OTHER, UUID]),
        ("0,7,1", [UUID]),
        ("", []),
        ("GPU-666", [OTHER]),
        ("MIG-abc", ["MIG-abc"]),
    ],
)
def test_the_visible_devices_are_those_of_cuda(fake_nvml, named, visible):
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert fake_nvml(uuids=(UUID, OTHER)).visible(environment) == visible


def test_without_a_driver_there_is_one_sentence(fake_library, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_NVML_SCRIPT", str(tmp_path / "absent"))
    with pytest.raises(NvmlError, match="Driver Not Loaded"):
        Nvml()


@pytest.mark.process
def test_without_the_library_no_package_is_imported():
    code = "import sys\nfrom anabranch.learner.device.nvml import *\ntry: Nvml()\nexcept NvmlError as e: print(e)\n"
    code += "print('pynvml' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    if "no libnvidia-ml.so.1" not in first:
        pytest.skip("this machine has NVIDIA's driver")
    assert second == "False False"
