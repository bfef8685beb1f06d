"""A whole learner on a device: the order of all streams, and where the host waits. On a CPU that acts as CUDA."""

from typing import Any

import pytest
import torch

from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.replay import sample_plan
from tests.learner.learner_bench import LearnerBench, small_model
from tests.support.cuda_recorder import CudaRecorder

CUDA = torch.device("cuda")
pytestmark = pytest.mark.timeout(90)  # the first optimizer on CUDA imports much of torch
ON_THE_STEP_PATH = (
    "learner/loop/training_loop",
    "learner/loop/replay_feed",
    "learner/strategies",
    "learner/stream",
    "learner/train",
)
KINDS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"device_memory": "host"},
    "disk": {"disk": {"bytes": "1MB"}, "device_bytes": "1kB"},
}


@pytest.mark.slow
@pytest.mark.parametrize("replay", KINDS.values(), ids=KINDS)
def test_a_step_waits_once_for_the_device_and_all_streams_are_in_order(schema, tmp_path, replay):
    sample_plan._ones.cache_clear()  # of an earlier recorder
    with CudaRecorder() as cuda:
        torch.manual_seed(0)
        learner = {"batch_size": 10, "precision": "fp32"}
        options: dict[str, Any] = {"learner": learner, "strategy": STRATEGIES["er"](), "replay": replay, "device": CUDA}
        bench = LearnerBench(tmp_path, schema, small_model().to(CUDA), 8, **options)
        before = cuda.waits.copy()
        bench.run()
        waits = {
            site: n for site, n in (cuda.waits - before).items() if site.startswith((*ON_THE_STEP_PATH, "replay/"))
        }
        # Fused SGD brings its flag to the weights' device, which is the CPU here.
        waits.pop("learner/train/optimizer_step.py OptimizerStep.apply", None)
        assert bench.loop.state.steps >= 24
        assert sum(waits.values()) == bench.loop.state.steps, waits
        assert all(site.startswith("learner/train") for site in waits), waits
        bench.finish()
        assert bench.checkpointer.problem is None
        bench.close()
    cuda.check()


@pytest.mark.slow
def test_a_learner_that_keeps_outputs_and_losses_has_all_streams_in_order(schema, tmp_path):
    sample_plan._ones.cache_clear()
    with CudaRecorder() as cuda:
        torch.manual_seed(0)
        options: dict[str, Any] = {"learner": {"batch_size": 10, "precision": "fp32"}, "strategy": STRATEGIES["der"]()}
        options |= {"replay": {"sampling": "loss"}, "device": CUDA}
        bench = LearnerBench(tmp_path, schema, small_model().to(CUDA), 4, **options)
        bench.run()
        bench.finish()
        bench.close()
    cuda.check()
