"""Meshes of two dimensions learn what one rank learns from the same events."""

import pytest

from tests.learner.parallel.split.test_experts import scenario as divided
from tests.learner.parallel.split.test_pipeline import UNEVEN, check_same

ADAMW = {"name": "adamw", "lr": 0.01}


def scenario(mesh, stages, schedule="1f1b", **others):
    settings = {"mesh": mesh, "replicas": 4, "pipeline_schedule": schedule, "max_grad_norm": 0.1}
    settings |= {"optimizer": others.pop("optimizer", ADAMW)}
    common = {"strategy": "er", "steps": UNEVEN, "width": 8, "parallel": {"0": "column", "2": "row"}, "embeds": False}
    return common | {"checkpoint_at": 2, "stages": stages, "settings": settings} | others


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_pipeline_within_another_dimension_learns_what_one_rank_learns(play):
    scenarios = [
        scenario({"data": 2, "pipeline": 2}, ["3"]),
        scenario({"data": 2, "pipeline": 2}, ["1", "2", "4"], "interleaved"),
        # The check of what is split runs the model in the precision of the schema.
        scenario({"tensor": 2, "pipeline": 2}, ["3"], double=False, optimizer={"name": "sgd", "lr": 0.1}),
    ]
    for each, one, four in zip(scenarios, play(1, scenarios), play(4, scenarios, 300), strict=True):
        check_same(one, four, each)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_experts_that_are_divided_within_each_of_two_copies_learn_what_one_rank_learns(play):
    """Without balancing: each copy counts the load of those events that it gets, as running statistics do."""
    settings = {"mesh": {"data": 2, "expert": 2}, "replicas": 4, "optimizer": ADAMW, "max_grad_norm": 0.1}
    steps = [[12, 8], [4, 4], [8, 0], [16, 4]]
    given = divided(steps=steps, checkpoint_at=2, settings=settings, unbalanced=True)
    (one,), (four,) = play(1, [given]), play(4, [given], 250)
    check_same(one, four, given)
