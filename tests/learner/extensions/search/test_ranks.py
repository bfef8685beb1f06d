"""A search on several ranks: each has the same model and challengers, and they are those of one rank."""

import json
from typing import Any

import pytest
import torch

from anabranch.learner.settings.search import LR

SCENARIO: dict[str, Any] = {
    "steps": [[16, 8], [9, 0], [1, 3]],
    "strategy": "er",
    "embeds": False,
    "separable": True,
    "settings": {"optimizer": {"name": "adam", "lr": 1e-6}},
    "search": {"promote": "auto", "challengers": 2, "share": 0.5},
}


def state_of(found):
    return json.loads(bytes(found["search"].tolist()))["search"]


def on(ranks, scenario):
    return scenario | {"settings": scenario["settings"] | {"replicas": ranks}}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_search_as_one_does_and_have_the_same_weights_bit_for_bit(play):
    """Through a restored checkpoint, a drift, a promotion, and a command of a person that rank 0 alone can read."""
    scenario = SCENARIO | {"times": 60, "checkpoint_at": 9, "drift_at": 20, "command_at": 170}
    (one,), (two,) = play(1, [scenario]), play(2, [on(2, scenario)], 250)
    first, second = two.pop("digests")
    assert torch.equal(first, second), "the ranks have different weights, or decide differently"
    assert one.keys() ^ two.keys() == {"seconds"}
    for name in one.keys() - {"search"}:
        atol = 1e-6 if one[name].dtype is torch.float64 else 1e-5
        assert torch.allclose(one[name], two[name], rtol=0, atol=atol, equal_nan=True), name
    alone, together = state_of(one), state_of(two)
    assert alone["outcomes"] == together["outcomes"] == {"promoted": 1, "stopped": 2}
    assert alone["values"] == together["values"] == {LR: 0.05}
    assert alone["trained"] == together["trained"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_happens_on_one_rank_alone_leaves_the_ranks_alike(play):
    """No memory for a challenger; events on which the model raises; no memory for a step; and another measure."""
    score = SCENARIO["search"] | {"measure": "score", "space": {LR: [1e-6, 1e-5]}}
    scenarios = [
        *(SCENARIO | {"times": 2, "starved": rank} for rank in (0, 1)),
        SCENARIO | {"times": 4, "raises": "forward"},
        SCENARIO | {"times": 4, "narrow_rank": 1, "narrow": 6},
        SCENARIO | {"times": 4, "search": score},
    ]
    found = play(2, [on(2, each) for each in scenarios], 250)
    for scenario, each in zip(scenarios, found, strict=True):
        first, second = each["digests"]
        assert torch.equal(first, second), scenario
    starved, raising, narrow, other = found[:2], *found[2:]
    assert [state_of(each)["outcomes"] for each in starved] == [{"no_memory": 1}] * 2
    assert len(raising["raised"])
    assert not state_of(narrow)["outcomes"]
    assert state_of(other)["trained"]
