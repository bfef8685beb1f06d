"""Refinements on a CUDA device, as far as they can be told without one."""

import subprocess
import sys

import pytest
import torch

from ingest.errors import SettingsError
from learner.config import ShareSettings
from learner.confinement import confined, lacks_green_contexts, lacks_mps

CPU = torch.device("cpu")


def test_training_is_not_confined_unless_somebody_says_so() -> None:
    with confined(ShareSettings(), CPU):
        pass


def test_multiprocessors_of_a_device_that_has_none_are_one_sentence() -> None:
    with pytest.raises(SettingsError, match=r"share\.sms = 8 needs a CUDA device, .* cpu; take the key out"):
        confined(ShareSettings(sms=8), CPU).__enter__()
    assert lacks_green_contexts(CPU)
    assert lacks_mps(CPU)


@pytest.mark.parametrize(("before", "after"), [(None, "30"), ("70", "70")])
def test_the_driver_is_told_what_part_training_may_take_unless_it_was_told_before(
    before: str | None, after: str
) -> None:
    code = (
        "import os; from learner.config import ShareSettings; from learner.confinement import limit_threads;"
        "limit_threads(ShareSettings(mps_percentage=30)); print(os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    )
    environment = {} if before is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": before}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == after, done.stderr


@pytest.mark.gpu
def test_training_is_kept_to_some_multiprocessors() -> None:
    device = torch.device("cuda", 0)
    if lacks_green_contexts(device):
        pytest.skip("this torch has no green contexts")
    with confined(ShareSettings(sms=8), device):
        assert torch.ones(100, device=device).sum().item() == 100
    with pytest.raises(SettingsError, match=r"share\.sms = 1000000 is refused"):
        confined(ShareSettings(sms=1_000_000), device).__enter__()
