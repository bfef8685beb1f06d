"""The order of a start on a CUDA device: the devices to see, the current one and its memory, before anything else."""

import contextlib
import threading

import pytest
import torch

from anabranch.learner import assembly
from anabranch.learner.assembly import Assembly, follow_leader
from anabranch.learner.device import cuda_limits, visible_devices
from anabranch.learner.parallel.process_group import RankAssignment
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from tests.learner.learner_spec import learner_spec

CUDA = torch.device("cuda", 1)
ORDER = ["see GPU-aaaa", "choose", "set_device 1", "fraction 0.7", "build"]


class BuiltError(Exception):
    """Ends a start where it begins to build."""


@pytest.fixture
def order(monkeypatch):
    """What a start does, up to where it builds."""
    done: list[str] = []

    def record(text, result=None):
        return lambda *_, **__: (done.append(text), result)[1]

    def build(*_, **__):
        done.append("build")
        raise BuiltError

    @contextlib.contextmanager
    def join(*_):
        done.append("choose")
        yield CUDA

    monkeypatch.setattr(visible_devices, "machine_devices", dict)
    monkeypatch.setattr(
        cuda_limits, "show_only", lambda key, devices: done.append(f"see {devices}" if key == "learner.device" else key)
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(f"set_device {index}"))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, index: done.append(f"fraction {part}")
    )
    monkeypatch.setattr(assembly, "choose_device", record("choose", CUDA))
    monkeypatch.setattr(assembly, "build_training_setup", build)
    monkeypatch.setattr(assembly, "join_group", join)
    monkeypatch.setattr(assembly, "confined", build)
    for name in ("CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    return done


@pytest.fixture
def deployment(tmp_path, schema):
    """A learner on a GPU by its UUID."""
    model, settings = ModelSettings(factory="no_model:build"), LearnerSettings(device="GPU-aaaa")
    return learner_spec(tmp_path, schema.settings, model, learner=settings)


def test_a_learner_bounds_its_memory_before_it_builds(order, deployment):
    with contextlib.ExitStack() as stack, pytest.raises(BuiltError):
        Assembly(deployment, threading.Event(), None, stack).build(None)
    assert order == ORDER


def test_so_does_each_other_rank(order, deployment, tmp_path):
    with pytest.raises(BuiltError):
        follow_leader(deployment, threading.Event(), RankAssignment(1, 2, tmp_path))
    assert order == ORDER
