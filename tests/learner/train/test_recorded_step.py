"""Whole steps on a recorded device: where the host waits for it, and in which order work is queued."""

from collections import Counter

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.extensions.device_sharing.launches import LaunchLimiter
from anabranch.learner.model.device import Precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.cuda_recorder import CudaRecorder
from tests.support.strategies import small_strategy

STEPS = 3


def take_steps(schema, strategy, precision, hooks, **settings):
    """Take steps of which the first two are not part of what is judged."""
    torch.manual_seed(0)
    cuda = torch.device("cuda", 0)
    norm = nn.Identity() if strategy == "progressive" else nn.BatchNorm1d(8)  # it has columns of linear layers alone
    model = nn.Sequential(nn.Linear(3, 8), norm, nn.ReLU(), nn.Linear(8, 3)).to(cuda)
    options = LearnerSettings.model_validate(settings)
    kind = small_strategy(strategy, **({"every": 2} if strategy in {"ewc", "lwf"} else {}))
    extended(kind, model, schema, cuda)
    embedding = Embedding(model, "2") if kind.kind.embeds else None
    trainer = Trainer(
        TrainingSetup(model, Classification(), kind, schema, options, cuda, precision, embedding), hooks=hooks
    )
    for step in range(2 + STEPS):
        if step == 2:
            CudaRecorder.active().waits.clear()
        new, *old = (
            trainer.examples(fake_columns(schema, range(begin, begin + n), label=[0, 1, 2]))
            for begin, n in ((16 * step, 16), *((1000, n) for n in kind.samples(16)))
        )
        assert trainer.step(new, old).finite
    return trainer


def functions(waits):
    """Return how often the host waited, by the function that called."""
    return Counter({site.split()[-1].rpartition(".")[2]: count for site, count in waits.items()})


# The one_hot of er-ace reads its labels on a CPU alone, on which the recorder computes.
STRATEGIES_HERE = [name for name in STRATEGIES if name != "er-ace"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES_HERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_host_waits_once_a_step(schema, strategy, precision):
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with CudaRecorder() as cuda:
        trainer = take_steps(schema, strategy, Precision(precision, dtype), None)
        assert trainer.update.decides_on_device
    cuda.check()
    waits = functions(cuda.waits)
    grows = {"_classes_in"} if strategy in {"experts", "progressive"} else set()
    assert waits.keys() == {"_apply_if_finite"} | grows
    assert waits["_apply_if_finite"] == STEPS or precision == "fp16", "fp16 repeats steps until its scale fits"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["er", "mir"])
def test_with_device_sharing_the_host_waits_for_queued_micro_batches_too(schema, strategy):
    with CudaRecorder() as cuda:
        limiter = LaunchLimiter(torch.device("cuda", 0))
        hooks = StepHooks(lambda _index: limiter.wait())
        take_steps(schema, strategy, Precision("fp32", None), hooks, micro_batch_size=8)
    cuda.check()
    passes = {"er": 4, "mir": 10 + 2 + 10 + 4}[strategy]
    assert functions(cuda.waits) == {"_apply_if_finite": STEPS, "_reach": STEPS * passes}


def test_the_update_and_what_comes_next_are_queued_before_the_host_waits(schema):
    with CudaRecorder() as cuda:
        trainer = take_steps(schema, "er", Precision("fp32", None), None)
        trainer.runner.before_wait = lambda: trainer.examples(fake_columns(schema, range(16)))
        new = trainer.examples(fake_columns(schema, range(16), label=[0, 1, 2]))
        begin = len(cuda.log)
        assert trainer.step(new).finite
        kinds = [(each.kind, each.name) for each in cuda.log[begin:]]
    (wait,) = (index for index, (kind, _) in enumerate(kinds) if kind == "wait")
    updates = [index for index, (_, name) in enumerate(kinds) if "_fused_adamw_" in name]
    copies = [index for index, (kind, _) in enumerate(kinds) if kind == "copy"]
    assert updates
    assert max(updates) < min(index for index in copies if index > max(updates)) < wait
