"""What the table lets ranks do learns: each strategy with each exchange, precision and size of micro-batches."""

import itertools
from typing import Any

import pytest

from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from tests.support.facts import facts_of

AXES: dict[str, list[Any]] = {
    "strategy": list(STRATEGIES),
    "precision": ["fp32", "bf16"],
    "micro_batch_size": [None, 4],
    "sync_every": [1, 3],
    "comm_hook": ["none", "fp16", "powersgd", "int8", "topk"],
    "sharding": ["none", "zero1"],
}


def cells():
    """Return every combination that the table does not refuse."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [cell for cell in every if not list(conflicts(facts_of(learner=settings_of(cell))))]


def settings_of(cell):
    return LearnerSettings.model_validate({**cell, **few(cell), "replicas": 2})


def few(cell):
    """Return the fraction of top-k for a model of a few numbers, which would send one of them in a step."""
    return {"topk_fraction": 0.5} if cell["comm_hook"] == "topk" else {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_ranks_may_do_learns(play):
    """Cells that have every pair of values that is not refused: one in seven, since all take a minute."""
    allowed, chosen = cells(), list[dict[str, Any]]()
    left = set().union(*map(pairs, allowed))
    while left:
        chosen.append(max(allowed, key=lambda cell: len(pairs(cell) & left)))
        left -= pairs(chosen[-1])
    assert len(chosen) < len(allowed) / 5
    assert all({cell[name] for cell in chosen} == set(values) for name, values in AXES.items())
    scenarios = []
    for cell in chosen:
        settings = few(cell) | {name: value for name, value in cell.items() if name != "strategy"}
        optimizer = {"name": "adam", "lr": 0.2}
        steps = [[9, *[6] * len(STRATEGIES[cell["strategy"]]().samples(6))]]
        whole = {"settings": {**settings, "replicas": 2, "optimizer": optimizer}, "steps": steps, "times": 5}
        scenarios.append({**whole, "strategy": cell["strategy"], "separable": True, "double": False})
    for cell, found in zip(chosen, play(2, scenarios, 250), strict=True):
        assert found["loss_new"] < 0.7 * found["begun"], cell


def pairs(cell):
    """Return each pair of values of a cell, with the names of their axes."""
    return set(itertools.combinations(cell.items(), 2))
