"""How the watch of devices starts."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from anabranch.core.errors import SettingsError
from anabranch.learner.device import nvml
from anabranch.learner.extensions.device_health import extension
from anabranch.learner.extensions.device_health.extension import watch_devices
from anabranch.learner.settings.learner import DeviceSettings
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
        assert watch_devices(DeviceSettings(), [CPU], lambda: None) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "cpu is no NVIDIA device" in caplog.text
    assert {*threading.enumerate()} <= earlier


def test_off_there_is_nothing_at_all(caplog):
    with caplog.at_level(logging.INFO):
        assert watch_devices(DeviceSettings(enabled="off"), [CUDA], lambda: None) is None
    assert caplog.records == []


def test_on_a_device_that_cannot_be_watched_is_refused():
    with pytest.raises(SettingsError, match=r'device.enabled = "on", but cpu is no NVIDIA device'):
        watch_devices(DeviceSettings(enabled="on"), [CPU], lambda: None)


def test_on_a_device_that_is_gone_for_now_is_no_fault_of_the_settings(fake_nvml, torch_device, caplog):
    fake_nvml(at_start="error=15")
    with pytest.raises(SystemExit) as ended:
        watch_devices(DeviceSettings(enabled="on"), [CUDA], lambda: None)
    assert ended.value.code == 1
    assert "GPU is lost" in caplog.text
    assert watch_devices(DeviceSettings(), [CUDA], lambda: None) is None


def test_the_device_of_torch_is_watched_by_its_uuid(fake_nvml, torch_device):
    fake_nvml(uuids=(OTHER, UUID))
    watch = watch_devices(DeviceSettings(), [CUDA], lambda: None)
    try:
        assert {"device-reader", "device-watch"} <= set(threads())
        watch.judge()
        assert [device.uuid for device in watch.newest.devices] == [UUID]
    finally:
        watch.close()


def test_a_library_that_hangs_at_the_start_is_not_waited_for(monkeypatch, torch_device, caplog):
    monkeypatch.setattr(nvml, "_PATIENCE_SECONDS", 0.05)
    hangs = threading.Event()
    monkeypatch.setattr(extension, "Nvml", hangs.wait)
    try:
        with caplog.at_level(logging.INFO):
            assert watch_devices(DeviceSettings(), [CUDA], lambda: None) is None
        assert "NVML has not answered" in caplog.text
    finally:
        hangs.set()
