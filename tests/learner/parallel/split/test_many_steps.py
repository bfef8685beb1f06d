"""Many steps of stages, and of divided experts, end where one rank does."""

import os

import pytest
import torch

PARALLEL = {"0": "column", "2": "row", "[46]": "expert"}
LONG = "ANABRANCH_TEST_STEPS"
EVEN = [[16, 8], [8, 4], [4, 4], [8, 0], [12, 8]]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_steps_of_stages_and_of_experts_end_where_one_rank_does(play):
    """In the precision that models have, within 1e-4; 1,000 steps with `ANABRANCH_TEST_STEPS=1000`."""
    times = -(-int(os.environ.get(LONG, "40")) // len(EVEN))
    common = {"strategy": "er", "steps": EVEN, "times": times, "width": 8, "embeds": False, "double": False}
    settings = {"replicas": 2, "optimizer": {"name": "sgd", "lr": 0.02}, "max_grad_norm": 1.0}
    pipeline, expert = settings | {"mesh": {"pipeline": 2}}, settings | {"mesh": {"expert": 2}}
    scenarios = [
        common | {"stages": ["3"], "settings": pipeline | {"pipeline_schedule": "gpipe"}},
        common | {"stages": ["3"], "settings": pipeline | {"pipeline_schedule": "1f1b"}},
        common | {"stages": ["1", "2", "4"], "settings": pipeline | {"pipeline_schedule": "interleaved"}},
        common | {"experts": 4, "parallel": PARALLEL, "settings": expert},
    ]
    for each, one, two in zip(scenarios, play(1, scenarios, 900), play(2, scenarios, 2400), strict=True):
        names = [name for name in one if name.startswith("model.")]
        off = max(float((one[name] - two[name]).abs().max()) for name in names)
        assert off <= 1e-4, each
        assert all(torch.isfinite(one[name]).all() for name in names)
