"""Limits on a CUDA device, as far as they can be tested without one."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.config import DeviceSharingSettings, LearnerSettings
from learner.device_sharing.cuda_limits import confined, lacks_green_contexts, lacks_mps
from learner.model.device import choose_precision
from learner.model.task import Classification
from learner.strategies.registry import STRATEGIES
from learner.training.passes import StepHooks
from learner.training.trainer import Trainer

CPU = torch.device("cpu")


def test_training_is_not_confined_unless_somebody_says_so() -> None:
    with confined(DeviceSharingSettings(), CPU) as launch_context:
        assert launch_context is contextlib.nullcontext


def test_all_passes_of_a_step_and_the_update_run_in_the_launch_context(schema: Schema) -> None:
    model, given = nn.Linear(3, 3), []

    @contextlib.contextmanager
    def launch_context() -> Iterator[None]:
        given.append("begin")
        yield
        given.append("end")

    trainer = Trainer(
        *(model, Classification(), STRATEGIES["mir"](), schema, LearnerSettings(), CPU, choose_precision("fp32", CPU)),
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


def test_multiprocessors_of_a_device_that_has_none_are_one_sentence() -> None:
    with pytest.raises(SettingsError, match=r"device_sharing\.sms = 8 needs a CUDA device, .* cpu; take the key out"):
        confined(DeviceSharingSettings(sms=8), CPU).__enter__()
    assert lacks_green_contexts(CPU)
    assert lacks_mps(CPU)


@pytest.mark.parametrize(("before", "after"), [(None, "30"), ("70", "70")])
@pytest.mark.process
def test_the_part_that_training_may_take_is_set_unless_it_was_set_before(before: str | None, after: str) -> None:
    code = (
        "import os; from learner.config import DeviceSharingSettings;"
        "from learner.device_sharing.cuda_limits import limit_threads;"
        "limit_threads(DeviceSharingSettings(mps_percentage=30)); "
        "print(os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    )
    environment = {} if before is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": before}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == after, done.stderr


@pytest.mark.gpu
def test_training_is_kept_to_some_multiprocessors() -> None:
    device = torch.device("cuda", 0)
    if lacks_green_contexts(device):
        pytest.skip("this torch has no green contexts")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3)).to(device), torch.randn(256, 64)

    def gradients() -> list[torch.Tensor]:
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
