"""Devices by UUID: the settings that name them, and what CUDA is shown."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from anabranch.core.errors import SettingsError
from learner.config import LearnerSettings
from learner.model import visible_devices as module
from learner.model.visible_devices import device_bytes, machine_devices, show_only, visible_devices
from serving.config import ServingSettings

A, B = "GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-bbbb2222-0000-0000-0000-000000000000"
SLICE = "MIG-cccc3333-0000-0000-0000-000000000000"
GIB = 1 << 30


class FakeNVML(ModuleType):
    """Stands for `pynvml`, with the GPUs and the instances of MIG that it is given."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: dict[str, list[str]], *, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.broken = broken
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 its name in the library
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return list(self.gpus)[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:  # noqa: N802
        return handle.encode() if handle == B else handle

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        if not self.gpus[handle]:
            raise self.NVMLError("Not Supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        try:
            return self.gpus[handle][index]
        except IndexError:
            raise self.NVMLError("Not Found") from None

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return type("Memory", (), {"total": 80 * GIB if handle == A else 24 * GIB})


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeNVML]:
    """Installs a fake NVML, `nvml({A: [], B: [SLICE]})`; until then neither it nor the driver's files are there."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(module, "DRIVER_FILES", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(gpus: dict[str, list[str]], **options: bool) -> FakeNVML:
        fake = FakeNVML(gpus, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr("learner.device_health.nvml.ctypes.CDLL", lambda _name: None)  # the driver's library
        return fake

    return install


def driver_files(folder: Path, uuids: Sequence[str]) -> None:
    for number, uuid in enumerate(uuids):
        path = folder / "gpus" / f"0000:{number:02x}:00.0"
        path.mkdir(parents=True)
        (path / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")


class TestSettings:
    @pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:1", A, SLICE, "GPU-aaaa", f"{A},{B}"])
    def test_devices_that_can_be_named(self, device: str) -> None:
        assert LearnerSettings(device=device, replicas=1 + device.count(",")).device == device
        if "," not in device:
            assert ServingSettings(device=device).device == device

    @pytest.mark.parametrize("device", ["gpu", "cuda:", "GPU-", "GPU-xyz", f"{A},", f"{A};{B}", f"cuda:0,{A}", f"x{A}"])
    def test_devices_that_cannot(self, device: str) -> None:
        for settings in (LearnerSettings, ServingSettings):
            with pytest.raises(ValidationError, match=r'write "auto", .* or a UUID such as "GPU-5ea7'):
                settings.model_validate({"device": device})

    def test_serving_has_one(self) -> None:
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
    def test_each_replica_has_its_own(self, device: str, replicas: int, sentence: str) -> None:
        with pytest.raises(ValidationError, match=sentence):
            LearnerSettings(device=device, replicas=replicas)

    def test_an_instance_of_mig_is_for_a_learner_of_one_process(self) -> None:
        assert LearnerSettings(device=SLICE).device == SLICE
        with pytest.raises(ValidationError, match="over which NCCL does not work"):
            LearnerSettings(device=SLICE, replicas=2)


class TestShown:
    def test_names_without_a_uuid_change_nothing(self, nvml: Callable[..., FakeNVML]) -> None:
        nvml({A: []})
        for name in ("auto", "cpu", "mps", "cuda", "cuda:1"):
            assert visible_devices("learner.device", name, {}) == {}

    @pytest.mark.parametrize("device", [A, B, SLICE, "GPU-aaaa", f"{B},{A}"])
    def test_those_of_the_machine_are_shown_in_their_order(self, nvml: Callable[..., FakeNVML], device: str) -> None:
        fake = nvml({A: [], B: [SLICE]})
        assert visible_devices("learner.device", device, {}) == {"CUDA_VISIBLE_DEVICES": device}
        assert fake.open == 0

    def test_one_that_is_absent_is_one_sentence_with_those_that_there_are(self, nvml: Callable[..., FakeNVML]) -> None:
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
    def test_within_what_the_environment_shows(self, nvml: Callable[..., FakeNVML], before: str, device: str) -> None:
        nvml({A: [], B: [SLICE]})
        environment = {"CUDA_VISIBLE_DEVICES": before}
        assert visible_devices("learner.device", device, environment) == {"CUDA_VISIBLE_DEVICES": device}

    @pytest.mark.parametrize(
        ("before", "there"),
        [(A, f"it has {A}"), ("0", f"it has {A}"), ("", "it has none"), ("-1,1", "it has none"), ("7", "device 7")],
    )
    def test_nothing_beyond_what_the_environment_shows(
        self, nvml: Callable[..., FakeNVML], before: str, there: str
    ) -> None:
        nvml({A: [], B: []})
        with pytest.raises(SettingsError, match=f'CUDA_VISIBLE_DEVICES = "{before}" has no such device; .*{there}'):
            visible_devices("learner.device", B, {"CUDA_VISIBLE_DEVICES": before})

    def test_a_part_that_was_started_with_its_device_may_name_it_again(self, nvml: Callable[..., FakeNVML]) -> None:
        nvml({A: [], B: []})
        shown = visible_devices("learner.device", "GPU-bbbb", {})
        assert visible_devices("learner.device", "GPU-bbbb", shown) == shown

    def test_cuda_sees_it_as_its_first_device(
        self, nvml: Callable[..., FakeNVML], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml({A: [], B: []})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{A},{B}")
        assert show_only("learner.device", "cuda:1") == "cuda:1"
        assert module.os.environ["CUDA_VISIBLE_DEVICES"] == f"{A},{B}"
        assert show_only("learner.device", B) == "cuda"
        assert module.os.environ["CUDA_VISIBLE_DEVICES"] == B


class TestMachine:
    def test_without_nvml_the_driver_is_asked(self, nvml: Callable[..., FakeNVML], tmp_path: Path) -> None:
        assert machine_devices() == {}
        driver_files(tmp_path, [A, B])
        assert machine_devices() == {A: [], B: []}
        nvml({}, broken=True)
        assert machine_devices() == {A: [], B: []}
        with pytest.raises(SettingsError, match=f"it has {A}, {B}"):
            visible_devices("learner.device", "GPU-dddd", {})
        # The files do not list instances.
        assert visible_devices("learner.device", SLICE, {}) == {"CUDA_VISIBLE_DEVICES": SLICE}

    def test_where_none_can_be_asked_the_name_is_taken(self, nvml: Callable[..., FakeNVML]) -> None:
        del nvml
        assert visible_devices("learner.device", A, {}) == {"CUDA_VISIBLE_DEVICES": A}
        with pytest.raises(SettingsError, match="it has device 2, device 3"):
            visible_devices("learner.device", A, {"CUDA_VISIBLE_DEVICES": "2,3"})

    def test_memory_is_that_of_the_devices_shown(
        self, nvml: Callable[..., FakeNVML], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert device_bytes() == []
        nvml({A: [], B: []})
        assert device_bytes() == [80 * GIB, 24 * GIB]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{B},{A}")
        assert device_bytes() == [24 * GIB, 80 * GIB]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert device_bytes() == [24 * GIB]
