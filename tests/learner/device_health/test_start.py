"""How the watch starts, and what a start leaves out."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from anabranch.core.errors import SettingsError
from learner.device_health import start
from learner.device_health.config import DeviceSettings
from learner.device_health.start import leave_out_unusable, start_watch
from tests.support.nvml import OTHER, UUID

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("device-", "nvml-"))]


@pytest.fixture
def torch_device(monkeypatch):
    """Let torch have one CUDA device."""
    properties = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_on_a_cpu_there_is_one_line_and_no_thread(caplog):
    earlier = {*threading.enumerate()}  # those of another test may not have ended yet
    with caplog.at_level(logging.INFO):
        assert start_watch(DeviceSettings(), [CPU], lambda: None) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "cpu is no NVIDIA device" in caplog.text
    assert {*threading.enumerate()} <= earlier


def test_off_there_is_nothing_at_all(caplog):
    with caplog.at_level(logging.INFO):
        assert start_watch(DeviceSettings(enabled="off"), [CUDA], lambda: None) is None
    assert caplog.records == []


def test_on_a_device_that_cannot_be_watched_is_refused():
    with pytest.raises(SettingsError, match=r'device.enabled = "on", but cpu is no NVIDIA device'):
        start_watch(DeviceSettings(enabled="on"), [CPU], lambda: None)


def test_on_a_device_that_is_gone_for_now_is_no_fault_of_the_settings(fake_nvml, torch_device, caplog):
    fake_nvml(at_start="error=15")
    with pytest.raises(SystemExit) as ended:
        start_watch(DeviceSettings(enabled="on"), [CUDA], lambda: None)
    assert ended.value.code == 1
    assert "GPU is lost" in caplog.text
    assert start_watch(DeviceSettings(), [CUDA], lambda: None) is None


def test_the_device_of_torch_is_watched_by_its_uuid(fake_nvml, torch_device):
    fake_nvml(uuids=(OTHER, UUID))
    watch = start_watch(DeviceSettings(), [CUDA], lambda: None)
    try:
        assert {"device-reader", "device-watch"} <= set(threads())
        watch.judge()
        assert [device.uuid for device in watch.report.devices] == [UUID]
    finally:
        watch.close()


def test_a_library_that_hangs_at_the_start_is_not_waited_for(monkeypatch, torch_device, caplog):
    monkeypatch.setattr(start, "_PATIENCE_SECONDS", 0.05)
    hangs = threading.Event()
    monkeypatch.setattr(start, "Nvml", hangs.wait)
    try:
        with caplog.at_level(logging.INFO):
            assert start_watch(DeviceSettings(), [CUDA], lambda: None) is None
        assert "NVML has not answered" in caplog.text
    finally:
        hangs.set()


@pytest.mark.parametrize("state", ["error=15", "error=16", "recovery=1", "remap_failed=1"])
def test_a_device_that_is_not_usable_is_left_out_if_there_is_another(fake_nvml, state, caplog):
    fake_nvml([state], uuids=(UUID, OTHER))
    environment = {}
    leave_out_unusable(DeviceSettings(), "auto", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": OTHER}
    assert UUID in caplog.text


def test_a_device_that_is_gone_at_the_start_is_left_out(fake_nvml):
    fake_nvml(uuids=(UUID, OTHER), at_start="error=15")
    environment = {}
    leave_out_unusable(DeviceSettings(), "auto", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": OTHER}


def test_of_the_visible_devices_the_usable_ones_stay_in_their_order(fake_nvml):
    third = "GPU-cccccccc-0000-0000-0000-000000000000"
    fake_nvml(uuids=(UUID, OTHER, third), at_start="1:recovery=1")
    environment = {"CUDA_VISIBLE_DEVICES": "2,1,0"}
    leave_out_unusable(DeviceSettings(), "cuda", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": f"{third},{UUID}"}


@pytest.mark.parametrize(
    ("settings", "name", "uuids", "state"),
    [
        ({}, "auto", (UUID, OTHER), ""),
        ({}, "auto", (UUID,), "recovery=1"),
        ({}, "auto", (UUID, OTHER), "recovery=1 1:recovery=1"),
        ({}, "cuda:0", (UUID, OTHER), "recovery=1"),
        ({}, "cpu", (UUID, OTHER), "recovery=1"),
        ({"enabled": "off"}, "auto", (UUID, OTHER), "recovery=1"),
    ],
)
def test_else_all_devices_stay_visible(fake_nvml, settings, name, uuids, state):
    fake_nvml([state], uuids=uuids)
    environment = {}
    leave_out_unusable(DeviceSettings(**settings), name, environment)
    assert environment == {}


def test_without_nvml_all_devices_stay_visible(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_NVML_SCRIPT", str(tmp_path / "absent"))
    environment = {}
    leave_out_unusable(DeviceSettings(), "auto", environment)
    assert environment == {}
