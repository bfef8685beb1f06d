"""Limits on a CUDA device, as far as they can be tested without one."""

import contextlib
import os
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.core.job_thread import BackgroundWorker, JobThread
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.device import cuda_limits as module
from anabranch.learner.device import visible_devices
from anabranch.learner.device.cuda_limits import (
    confined,
    lacks_green_contexts,
    lacks_mps,
    limit_server_memory,
    prepare_cuda,
    using_device,
)
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import DeviceSharingSettings, LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


def test_training_is_not_confined_unless_somebody_says_so():
    with confined(DeviceSharingSettings(), CPU) as launch_context:
        assert launch_context is contextlib.nullcontext


def test_all_passes_of_a_step_and_the_update_run_in_the_launch_context(schema):
    model, given = nn.Linear(3, 3), []

    @contextlib.contextmanager
    def launch_context():
        given.append("begin")
        yield
        given.append("end")

    trainer = Trainer(
        TrainingSetup(
            model, Classification(), STRATEGIES["mir"](), schema, LearnerSettings(), CPU, choose_precision("fp32", CPU)
        ),
        hooks=StepHooks(launch_context=launch_context),
    )
    model.register_forward_pre_hook(lambda *_: given.append("forward"))
    model.weight.register_hook(lambda _: given.append("backward"))
    before = model.weight.detach().clone()
    new = trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2]))
    trainer.step(new, [new] * len(trainer.strategy.samples(8)))
    assert not torch.equal(model.weight, before)
    assert {"forward", "backward"} <= set(given)
    assert (given[0], given[-1], given.count("begin")) == ("begin", "end", 1)


def test_multiprocessors_of_a_device_that_has_none_are_one_sentence():
    with pytest.raises(SettingsError, match=r"device_sharing\.sms = 8 needs a CUDA device, .* cpu; take the key out"):
        confined(DeviceSharingSettings(sms=8), CPU).__enter__()
    assert lacks_green_contexts(CPU)
    assert lacks_mps(CPU)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """The environment of `prepare_cuda`, at first empty but for the folder in which MPS would listen."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    monkeypatch.setattr(module.os, "environ", variables)
    return variables


@pytest.fixture
def mps(tmp_path):
    """A socket on which an MPS daemon would listen."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        yield


@pytest.mark.parametrize(("before", "after"), [(None, "30"), ("70", "70")])
def test_the_part_that_training_may_take_is_set_unless_it_was_set_before(environment, before, after):
    if before is not None:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = before
    prepare_cuda("auto", DeviceSharingSettings(mps_percentage=30))
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == after


@pytest.mark.usefixtures("mps")
def test_training_has_a_lower_priority_and_less_memory_under_mps(environment, monkeypatch):
    monkeypatch.setattr(module, "device_bytes", lambda: [1000 << 20, 2000 << 20])
    prepare_cuda("auto", DeviceSharingSettings())
    assert environment["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=750M,1=1500M"  # its part, and that of contexts
    environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = "0=9G"
    prepare_cuda("auto", DeviceSharingSettings(memory=0.5))
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9G"


@pytest.mark.parametrize("settings", [{"policy": "exclusive"}, {"memory": 0.5}, {}])
def test_without_mps_no_memory_of_its_clients_is_bounded(environment, monkeypatch, settings):
    monkeypatch.setattr(module, "device_bytes", lambda: [1000 << 20])
    prepare_cuda("auto", DeviceSharingSettings(**settings))
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in environment
    assert ("CUDA_MPS_CLIENT_PRIORITY" in environment) == (settings.get("policy") != "exclusive")


def test_devices_are_chosen_before_their_memory_is_asked_for(environment, monkeypatch, mps):
    del mps
    seen = []
    monkeypatch.setattr(visible_devices, "machine_devices", dict)
    monkeypatch.setattr(module, "device_bytes", lambda: seen.append(dict(environment)) or [])
    prepare_cuda("GPU-aaaa", DeviceSharingSettings())
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa"


def test_an_mps_daemon_has_to_listen(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    cuda, control = torch.device("cuda"), tmp_path / "control"
    assert lacks_mps(cuda) == f"has no effect: no MPS daemon listens, since there is no {control}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(control))
        listener.listen()
        assert lacks_mps(cuda) is None
    assert lacks_mps(cuda) == f"has no effect: no MPS daemon listens at {control}: Connection refused"
    control.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(control))
        listener.listen()
        assert lacks_mps(cuda) is None
    control.unlink()
    os.mkfifo(control)
    assert "no MPS daemon listens" in str(lacks_mps(cuda))
    reader = os.open(control, os.O_RDONLY | os.O_NONBLOCK)
    assert lacks_mps(cuda) is None
    os.close(reader)


@pytest.fixture
def calls(monkeypatch):
    """The calls of torch that choose a device, bound its memory or allocate, in order; a device has 1,000 MiB."""
    made: list[tuple[Any, ...]] = []
    empty = torch.empty

    def allocate(*shape, **options):
        if torch.device(options.get("device", "cpu")).type == "cuda":
            made.append(("empty", shape[0] >> 20))
            return empty(0)
        return empty(*shape, **options)

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: made.append(("set_device", index)))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, index: made.append(("fraction", part, index))
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000 << 20))
    monkeypatch.setattr(torch, "empty", allocate)
    return made


@pytest.mark.parametrize(
    ("settings", "reserve", "then"),
    [
        ({}, False, [("fraction", 0.7, 1)]),
        ({"policy": "fraction", "memory": 0.5}, False, [("fraction", 0.5, 1)]),
        ({"policy": "exclusive"}, True, []),
        ({"policy": "exclusive", "memory": 0.9}, False, [("fraction", 0.9, 1)]),
        ({"memory": 0.5}, True, [("fraction", 0.5, 1), ("empty", 500 - 64)]),
    ],
)
def test_memory_is_bounded_on_the_device_that_is_current(calls, settings, reserve, then):
    with using_device(DeviceSharingSettings(**settings), torch.device("cuda", 1), reserve=reserve):
        assert calls == [("set_device", 1), *then]


def test_threads_of_the_learner_use_its_device(calls):
    background, store = BackgroundWorker("publisher"), JobThread("store")
    with using_device(DeviceSharingSettings(), torch.device("cuda", 1)):
        calls.clear()
        background.start(lambda: calls.append(("publish", threading.current_thread().name)))
        background.wait()
        store.start()
        store.close()
    assert calls == [("set_device", 1), ("publish", "publisher"), ("set_device", 1)]


def test_a_cpu_is_used_as_it_is(calls):
    with using_device(DeviceSharingSettings(), CPU, reserve=True):
        assert calls == []


def test_memory_that_others_hold_is_not_reserved(calls, monkeypatch, caplog):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", refuse)
    with using_device(DeviceSharingSettings(), torch.device("cuda", 0), reserve=True):
        assert calls[-1] == ("fraction", 0.7, 0)
    assert caplog.messages == [
        f"learner.deterministic: cuda:0 has less than {(700 - 64) << 20} bytes free; results may differ"
    ]


@pytest.mark.parametrize(
    ("settings", "workers", "part"),
    [({}, 1, 0.25), ({}, 5, 0.05), ({"memory": 0.45}, 2, 0.25), ({"memory": 0.9}, 1, 0.05)],
)
def test_servers_divide_what_the_learner_leaves(calls, settings, workers, part):
    device = torch.device("cuda", 1)
    assert limit_server_memory(DeviceSharingSettings(**settings), device, workers) == device
    ((_, fraction, index),) = calls
    assert (round(fraction, 6), index) == (part, 1)


def test_servers_with_their_own_device_have_no_bound(calls):
    limit_server_memory(DeviceSharingSettings(policy="exclusive"), torch.device("cuda"), 1)
    limit_server_memory(DeviceSharingSettings(), CPU, 1)
    assert calls == []


class Refused:
    """A green context that cannot be used."""

    def __init__(self, error):
        self._error = error

    def create(self, **_):
        return self

    def __getattr__(self, name):
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Green contexts need driver 550"),
        AttributeError("'GreenContext' object has no attribute 'Stream'"),
        ImportError("No module named 'cuda.bindings'"),
    ],
)
def test_green_contexts_that_torch_cannot_make_are_one_sentence(error, monkeypatch):
    monkeypatch.setattr(module, "lacks_green_contexts", lambda _: None)
    monkeypatch.setitem(
        sys.modules, "torch.cuda.green_contexts", cast("Any", SimpleNamespace(GreenContext=Refused(error)))
    )
    with pytest.raises(SettingsError, match=rf"device_sharing\.sms = 8 is refused by cuda:0: {error}"):
        confined(DeviceSharingSettings(sms=8), torch.device("cuda", 0)).__enter__()


@pytest.mark.gpu
def test_training_is_kept_to_some_multiprocessors():
    device = torch.device("cuda", 0)
    if lacks_green_contexts(device):
        pytest.skip("this torch has no green contexts")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3)).to(device), torch.randn(256, 64)

    def gradients():
        model.zero_grad()
        model(x.to(device)).square().sum().backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    usual = gradients()
    with confined(DeviceSharingSettings(sms=8), device) as lane:
        for _ in range(100):
            with lane():
                assert torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
                kept = gradients()
            torch.testing.assert_close(kept, usual)
    with pytest.raises(SettingsError, match=r"device_sharing\.sms = 1000000 is refused"):
        confined(DeviceSharingSettings(sms=1_000_000), device).__enter__()
