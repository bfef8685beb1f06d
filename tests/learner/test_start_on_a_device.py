"""The order of a start on a CUDA device: the devices to see, the current one and its memory, before anything else."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingest.events.schema import Schema
from learner import run, run_follower
from learner.build import LearnerSpec
from learner.config import (
    LearnerSettings,
    ModelSettings,
)
from learner.device_sharing import cuda_limits
from learner.distributed.process_group import RankAssignment
from learner.model import visible_devices
from learner.run import Learner
from learner.run_follower import follow_leader
from tests.learner.learner_spec import learner_spec

CUDA = torch.device("cuda", 1)
ORDER = ["see GPU-aaaa", "choose", "set_device 1", "fraction 0.7", "build"]


class BuiltError(Exception):
    """Ends a start where it begins to build."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a start does, up to where it builds."""
    done: list[str] = []

    def record(text: str, result: object = None) -> Callable[..., Any]:
        return lambda *_, **__: (done.append(text), result)[1]

    def build(*_: object, **__: object) -> None:
        done.append("build")
        raise BuiltError

    @contextlib.contextmanager
    def join(*_: object) -> Iterator[torch.device]:
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
    monkeypatch.setattr(run, "choose_device", record("choose", CUDA))
    monkeypatch.setattr(run, "build_training_setup", build)
    monkeypatch.setattr(run_follower, "join_group", join)
    monkeypatch.setattr(run_follower, "confined", build)
    for name in ("CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    return done


@pytest.fixture
def deployment(tmp_path: Path, schema: Schema) -> LearnerSpec:
    """A learner on a GPU by its UUID."""
    model, settings = ModelSettings(factory="no_model:build"), LearnerSettings(device="GPU-aaaa")
    return learner_spec(tmp_path, schema.settings, model, learner=settings)


def test_a_learner_bounds_its_memory_before_it_builds(order: list[str], deployment: LearnerSpec) -> None:
    with contextlib.ExitStack() as stack, pytest.raises(BuiltError):
        Learner(deployment, threading.Event(), None, stack).build(None)
    assert order == ORDER


def test_so_does_each_other_rank(order: list[str], deployment: LearnerSpec, tmp_path: Path) -> None:
    with pytest.raises(BuiltError):
        follow_leader(deployment, threading.Event(), RankAssignment(1, 2, tmp_path))
    assert order == ORDER
