"""Serving's part of a device's memory, and the device that it takes."""

import dataclasses

import pytest
import torch

from anabranch.commands.init.command import write_example
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.learner.device import visible_devices
from anabranch.learner.model import device as device_module
from anabranch.serving.__main__ import deployment_of
from anabranch.serving.model import device as serving_device


@pytest.fixture
def calls(monkeypatch):
    """What is asked of torch, in order; every device that is asked for exists."""
    made: list[tuple[object, ...]] = []

    def pick(name):
        made.append(("pick", name))
        return torch.device("cuda", 0)

    monkeypatch.setattr(serving_device, "pick_device", pick)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, index: made.append(("fraction", round(part, 6), index)),
    )
    return made


def config(folder, **environment):
    write_example(folder, force=True)
    return load_config(folder / "pipeline.toml", environment)


@pytest.mark.parametrize(("workers", "part"), [("1", 0.25), ("2", 0.125)])
def test_each_worker_is_bounded_to_its_part(tmp_path, calls, workers, part):
    deployment_of(config(tmp_path, ANABRANCH__SERVING__DEVICE="cuda", ANABRANCH__SERVING__WORKERS=workers))
    assert calls == [("pick", "cuda"), ("fraction", part, 0)]


def test_a_uuid_is_the_first_device_that_cuda_sees(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(visible_devices, "machine_devices", lambda: {"GPU-aa11": ["MIG-bb22"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa11")
    settings = {"ANABRANCH__SERVING__DEVICE": "MIG-bb22", "ANABRANCH__DEVICE_SHARING__POLICY": "exclusive"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r'serving.device = "MIG-bb22": torch .* sees no such device'):
        deployment_of(config(tmp_path, **settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert deployment_of(config(tmp_path, **settings)).device == torch.device("cuda", 0)
    assert visible_devices.os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-bb22"
    assert calls == [("pick", "cuda")]


def test_a_gpu_that_auto_cannot_take_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(device_module, "driver_fault", lambda: "torch sees no device")
    monkeypatch.setattr(serving_device, "pick_device", lambda _: torch.device("cpu"))
    problem = deployment_of(config(tmp_path)).device_problem
    assert problem == 'serving.device = "auto" takes the CPU: torch sees no device'


@pytest.mark.slow
def test_that_problem_is_in_the_report(numbers, served):
    numbers.deployment = dataclasses.replace(numbers.deployment, device_problem="auto takes the CPU")
    numbers.publish(1)
    with served(numbers) as running:
        assert running.report().problems == ["auto takes the CPU"]
