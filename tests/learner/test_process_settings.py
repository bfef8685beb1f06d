"""What a learner sets for its whole process: numbers too small for the processor's fast path, into which what an
optimizer keeps fades, are 0, and threads hand over the interpreter's lock sooner than by themselves."""

import sys
import threading

import pytest
import torch
from torch import nn

from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.learner.assembly import learn
from anabranch.learner.model.device import without_denormals
from anabranch.learner.settings.learner import OptimizerSettings
from anabranch.learner.train.optimizers import build_optimizer
from tests.pipelines import write_pipeline

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="torch cannot flush on this processor")
CPU = torch.device("cpu")
MODEL = """
import sys, torch
def build():
    least = float(torch.tensor(1e-38) * 0.1)
    raise ValueError(f"a tenth of the least is {least}, a thread keeps the lock for {sys.getswitchinterval():g} s")
"""


def denormals():
    """Return how many of a hundred moments are denormal once their weights have had no gradient for long."""
    weight = nn.Parameter(torch.ones(100))
    optimizer = build_optimizer(OptimizerSettings(), [weight])
    weight.grad = torch.full((100,), 1e-3)
    for _ in range(850):
        optimizer.step()
        weight.grad = torch.zeros(100)
    moment = optimizer.state[weight]["exp_avg"]
    return int(((moment != 0) & (moment.abs() < torch.finfo(torch.float32).tiny)).sum())


def test_moments_of_weights_without_a_gradient_become_denormal_unless_those_are_flushed():
    assert denormals() == 100
    with without_denormals(CPU):
        assert denormals() == 0
    assert denormals() == 100


def test_a_learner_flushes_them_and_hands_over_the_lock_within_a_millisecond_until_it_ends(tmp_path):
    before = sys.getswitchinterval()
    config = load_config(write_pipeline(tmp_path, "127.0.0.1:1", "events", "", model=MODEL, status="127.0.0.1:0"))
    with pytest.raises(SettingsError, match=r"a tenth of the least is 0\.0, a thread keeps the lock for 0\.0005 s"):
        learn(config.pipeline, threading.Event())
    assert float(torch.tensor(1e-38) * 0.1) > 0
    assert sys.getswitchinterval() == before
