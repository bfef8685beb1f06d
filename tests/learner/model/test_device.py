"""The choice of a device, and the generators of random numbers: nothing of CUDA begins where it is not asked for."""

import pytest
import torch
from torch import nn

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.model import device as module
from anabranch.learner.model.device import (
    UnusedDevice,
    choose_device,
    choose_precision,
    compute_deterministically,
    driver_fault,
)
from anabranch.learner.model.rng import restore_rng, rng_tensors, rng_values
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def forbidden(monkeypatch):
    """Fails a test that asks CUDA anything."""

    def refuse(name):
        def call(*_):
            raise AssertionError(f"torch.cuda.{name} was called")

        return call

    for name in ("is_available", "device_count", "get_rng_state", "get_rng_state_all", "set_rng_state", "init"):
        monkeypatch.setattr(torch.cuda, name, refuse(name))


def test_a_learner_on_the_cpu_asks_cuda_nothing(schema, request):
    model, settings = nn.Linear(3, 3), LearnerSettings()
    trainer = Trainer(
        TrainingSetup(model, Classification(), STRATEGIES["er"](), schema, settings, CPU, choose_precision("fp32", CPU))
    )
    request.getfixturevalue("forbidden")
    assert choose_device("cpu") == CPU
    tensors, values = trainer.generators()
    assert set(tensors) == {"cpu"}
    before = torch.rand(3)
    trainer.restore_generators(tensors, values)
    assert torch.equal(torch.rand(3), before)
    # A checkpoint of a learner on a GPU can be resumed from here.
    restore_rng({**tensors, "cuda": torch.zeros(16, dtype=torch.uint8)}, values, CPU)


def test_the_generator_of_a_device_is_restored_on_whatever_number_it_has_now(monkeypatch):
    state, given = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state + device.index)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda tensor, device: given.append((tensor, device)))
    tensors = rng_tensors(torch.device("cuda", 1))
    assert set(tensors) == {"cpu", "cuda"}
    restore_rng(tensors, rng_values(), torch.device("cuda", 0))
    ((restored, device),) = given
    assert torch.equal(restored, state + 1)
    assert device == torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with NVIDIA's driver, of which a torch that is built for CUDA 13 sees no device."""
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(module, "DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


def test_a_driver_that_is_too_old_is_a_loud_sentence(machine, caplog):
    with pytest.raises(DependencyError) as caught:  # exit code 3, with which `up` starts the part again
        choose_device("cuda")
    assert str(caught.value) == (
        f'learner.device = "cuda": torch {torch.__version__} is built for CUDA 13.0 and sees no device, although '
        f'{machine} exists; is the driver too old (CUDA 13 needs 580 or later), or the device away?; try "auto"'
    )
    device = choose_device("auto")
    assert device == CPU
    problem = UnusedDevice.of("learner.device", "auto", device).problem
    assert problem is not None
    assert problem.startswith('learner.device = "auto" takes the CPU: torch ')
    assert caplog.messages == [problem]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("visible", "is_fault"), [(None, True), ("0", True), ("", False), ("-1", False), ("NoDevFiles", False)]
)
def test_devices_that_are_hidden_on_purpose_are_no_fault(monkeypatch, visible, is_fault):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (driver_fault() is not None) == is_fault
    assert (UnusedDevice.of("learner.device", "auto", CPU).problem is not None) == is_fault


def test_a_machine_without_a_driver_has_no_fault(machine, monkeypatch):
    machine.unlink()
    assert driver_fault() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # a container that was promised one
    assert driver_fault() is not None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert driver_fault() is None


@pytest.mark.usefixtures("machine")
def test_a_cpu_that_was_asked_for_is_no_problem():
    assert UnusedDevice.of("learner.device", "cpu", CPU).problem is None


def test_a_cuda_device_has_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa,GPU-bbbb")
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:1", 1), ("GPU-aaaa,GPU-bbbb", 0)):
        assert choose_device(name) == torch.device("cuda", index)
    with pytest.raises(SettingsError, match=r'serving\.device = "cuda:2": torch .* sees no such device; try "auto"'):
        choose_device("cuda:2", "serving.device")


def test_deterministic_learners_do_not_fill_each_new_tensor(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    try:
        compute_deterministically()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(threads)
