"""Devices by UUID: the settings that name them, and what CUDA is shown."""

import sys
from types import ModuleType

import pytest
from pydantic import ValidationError

from anabranch.core.errors import SettingsError
from anabranch.learner.device import visible_devices as module
from anabranch.learner.device.visible_devices import (
    device_bytes,
    leave_out_unusable,
    machine_devices,
    show_only,
    visible_devices,
)
from anabranch.learner.settings.learner import DeviceSettings, LearnerSettings
from anabranch.serving.settings import ServingSettings
from tests.support.nvml import OTHER, UUID

A, B = "GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-bbbb2222-0000-0000-0000-000000000000"
SLICE = "MIG-cccc3333-0000-0000-0000-000000000000"
GIB = 1 << 30


class FakeNVML(ModuleType):
    """Stands for `pynvml`, with the GPUs and the instances of MIG that it is given."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, *, broken=False):
        super().__init__("pynvml")
        self.gpus = gpus
        self.broken = broken
        self.open = 0

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return list(self.gpus)[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle.encode() if handle == B else handle

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        if not self.gpus[handle]:
            raise self.NVMLError("Not Supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        try:
            return self.gpus[handle][index]
        except IndexError:
            raise self.NVMLError("Not Found") from None

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"total": 80 * GIB if handle == A else 24 * GIB})


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    """Installs a fake NVML, `nvml({A: [], B: [SLICE]})`; until then neither it nor the driver's files are there."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(module, "DRIVER_FILES", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(gpus, **options):
        fake = FakeNVML(gpus, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr("anabranch.learner.device.nvml.ctypes.CDLL", lambda _name: None)  # the driver's library
        return fake

    return install


def driver_files(folder, uuids):
    for number, uuid in enumerate(uuids):
        path = folder / "gpus" / f"0000:{number:02x}:00.0"
        path.mkdir(parents=True)
        (path / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")


class TestSettings:
    @pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:1", A, SLICE, "GPU-aaaa", f"{A},{B}"])
    def test_devices_that_can_be_named(self, device):
        assert LearnerSettings(device=device, replicas=1 + device.count(",")).device == device
        if "," not in device:
            assert ServingSettings(device=device).device == device

    @pytest.mark.parametrize("device", ["gpu", "cuda:", "GPU-", "GPU-xyz", f"{A},", f"{A};{B}", f"cuda:0,{A}", f"x{A}"])
    def test_devices_that_cannot(self, device):
        for settings in (LearnerSettings, ServingSettings):
            with pytest.raises(ValidationError, match=r'write "auto", .* or a UUID such as "GPU-5ea7'):
                settings.model_validate({"device": device})

    def test_serving_has_one(self):
        with pytest.raises(ValidationError, match='write "auto"'):
            ServingSettings(device=f"{A},{B}")

    @pytest.mark.parametrize(
        ("device", "replicas", "sentence"),
        [
            (A, 2, "device names 1 devices, but replicas = 2: one for each"),
            (f"{A},{B}", 1, "device names 2 devices, but replicas = 1"),
            (f"{A},{A}", 2, "device names 1 devices, but replicas = 2"),
            (f"{SLICE},{A}", 2, "is an instance of MIG, over which NCCL does not work; set replicas to 1"),
        ],
    )
    def test_each_replica_has_its_own(self, device, replicas, sentence):
        with pytest.raises(ValidationError, match=sentence):
            LearnerSettings(device=device, replicas=replicas)

    def test_an_instance_of_mig_is_for_a_learner_of_one_process(self):
        assert LearnerSettings(device=SLICE).device == SLICE
        with pytest.raises(ValidationError, match="over which NCCL does not work"):
            LearnerSettings(device=SLICE, replicas=2)


class TestShown:
    def test_names_without_a_uuid_change_nothing(self, nvml):
        nvml({A: []})
        for name in ("auto", "cpu", "mps", "cuda", "cuda:1"):
            assert visible_devices("learner.device", name, {}) == {}

    @pytest.mark.parametrize("device", [A, B, SLICE, "GPU-aaaa", f"{B},{A}"])
    def test_those_of_the_machine_are_shown_in_their_order(self, nvml, device):
        fake = nvml({A: [], B: [SLICE]})
        assert visible_devices("learner.device", device, {}) == {"CUDA_VISIBLE_DEVICES": device}
        assert fake.open == 0

    def test_one_that_is_absent_is_one_sentence_with_those_that_there_are(self, nvml):
        nvml({A: [], B: [SLICE]})
        with pytest.raises(SettingsError) as caught:
            visible_devices("serving.device", "GPU-dddd", {})
        assert str(caught.value) == (
            f'serving.device = "GPU-dddd": this machine has no such device; it has {A}, {B}, {SLICE}'
        )

    @pytest.mark.parametrize(
        ("before", "device"),
        [(f"{A},{B}", B), ("GPU-bbbb", B), (B, "GPU-bbbb"), (B, SLICE), ("1", B), ("0,1", SLICE), (SLICE, SLICE)],
    )
    def test_within_what_the_environment_shows(self, nvml, before, device):
        nvml({A: [], B: [SLICE]})
        environment = {"CUDA_VISIBLE_DEVICES": before}
        assert visible_devices("learner.device", device, environment) == {"CUDA_VISIBLE_DEVICES": device}

    @pytest.mark.parametrize(
        ("before", "there"),
        [(A, f"it has {A}"), ("0", f"it has {A}"), ("", "it has none"), ("-1,1", "it has none"), ("7", "device 7")],
    )
    def test_nothing_beyond_what_the_environment_shows(self, nvml, before, there):
        nvml({A: [], B: []})
        with pytest.raises(SettingsError, match=f'CUDA_VISIBLE_DEVICES = "{before}" has no such device; .*{there}'):
            visible_devices("learner.device", B, {"CUDA_VISIBLE_DEVICES": before})

    def test_a_part_that_was_started_with_its_device_may_name_it_again(self, nvml):
        nvml({A: [], B: []})
        shown = visible_devices("learner.device", "GPU-bbbb", {})
        assert visible_devices("learner.device", "GPU-bbbb", shown) == shown

    def test_cuda_sees_it_as_its_first_device(self, nvml, monkeypatch):
        nvml({A: [], B: []})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{A},{B}")
        assert show_only("learner.device", "cuda:1") == "cuda:1"
        assert module.os.environ["CUDA_VISIBLE_DEVICES"] == f"{A},{B}"
        assert show_only("learner.device", B) == "cuda"
        assert module.os.environ["CUDA_VISIBLE_DEVICES"] == B


class TestMachine:
    def test_without_nvml_the_driver_is_asked(self, nvml, tmp_path):
        assert machine_devices() == {}
        driver_files(tmp_path, [A, B])
        assert machine_devices() == {A: [], B: []}
        nvml({}, broken=True)
        assert machine_devices() == {A: [], B: []}
        with pytest.raises(SettingsError, match=f"it has {A}, {B}"):
            visible_devices("learner.device", "GPU-dddd", {})
        # The files do not list instances.
        assert visible_devices("learner.device", SLICE, {}) == {"CUDA_VISIBLE_DEVICES": SLICE}

    def test_where_none_can_be_asked_the_name_is_taken(self, nvml):
        del nvml
        assert visible_devices("learner.device", A, {}) == {"CUDA_VISIBLE_DEVICES": A}
        with pytest.raises(SettingsError, match="it has device 2, device 3"):
            visible_devices("learner.device", A, {"CUDA_VISIBLE_DEVICES": "2,3"})

    def test_memory_is_that_of_the_devices_shown(self, nvml, monkeypatch):
        assert device_bytes() == []
        nvml({A: [], B: []})
        assert device_bytes() == [80 * GIB, 24 * GIB]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{B},{A}")
        assert device_bytes() == [24 * GIB, 80 * GIB]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert device_bytes() == [24 * GIB]


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
