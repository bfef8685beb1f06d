"""Numbers too small for the processor's fast path: what an optimizer keeps fades into them, and a learner has none."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

from anabranch.config import load_config
from learner.__main__ import _deployment
from learner.config import OptimizerSettings
from learner.optimizer import build_optimizer
from learner.precision import flush_denormals
from learner.workbench import prepare
from tests.pipelines import LINEAR, write_pipeline

CPU = torch.device("cpu")
T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> T:
    """Do it where the setting, which is the thread's, ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def denormals() -> int:
    """Return how many of a hundred moments are denormal once their weights have had no gradient for long."""
    weight = nn.Parameter(torch.ones(100))
    optimizer = build_optimizer(OptimizerSettings(), [weight])
    weight.grad = torch.full((100,), 1e-3)
    for _ in range(850):
        optimizer.step()
        weight.grad = torch.zeros(100)
    moment = optimizer.state[weight]["exp_avg"]
    return int(((moment != 0) & (moment.abs() < torch.finfo(torch.float32).tiny)).sum())


def test_moments_of_weights_without_a_gradient_become_denormal_unless_those_are_flushed() -> None:
    def flushed() -> int:
        flush_denormals(CPU)
        return denormals()

    assert in_a_thread(denormals) == 100
    assert in_a_thread(flushed) == 0


def test_a_learner_flushes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(write_pipeline(tmp_path, "127.0.0.1:1", "events", "", model=LINEAR, status="127.0.0.1:0"))

    def smallest() -> float:
        state = torch.get_rng_state()
        prepare(_deployment(config), CPU)
        torch.set_rng_state(state)
        return float(torch.tensor(1e-38) * 0.1)

    assert float(torch.tensor(1e-38) * 0.1) > 0
    assert in_a_thread(smallest) == 0
