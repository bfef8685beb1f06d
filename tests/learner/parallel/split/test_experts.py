"""Experts that are divided over ranks learn what one rank with all of them learns."""

import torch

from tests.learner.parallel.split.test_pipeline import STRATEGIES, check_same

EVEN = [[12, 8], [4, 2], [2, 2], [2, 0], [6, 4], [8, 0]]
"""New and old events of steps. Balancing counts the placeholder that a rank without an event gets, and each pass."""
MESH = {"mesh": {"expert": 2}, "replicas": 2}


def scenario(strategy="er", steps=EVEN, **others):
    steps = [[new, *[old] * STRATEGIES[strategy]] for new, old in steps]
    settings = MESH | others.pop("settings", {})
    common = {"strategy": strategy, "steps": steps, "width": 8, "experts": 4, "parallel": {"[46]": "expert"}}
    return common | {"embeds": False, "settings": settings} | others


def test_divided_experts_learn_what_one_rank_learns(play):
    adamw = {"optimizer": {"name": "adamw", "lr": 0.01}, "max_grad_norm": 0.1}
    scenarios = [scenario(strategy) for strategy in STRATEGIES]
    scenarios.append(scenario(settings={"micro_batch_size": 3}, unbalanced=True))
    scenarios.append(scenario(checkpoint_at=3, settings=adamw))
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        check_same(one, two, each)


def test_a_batch_on_which_the_model_raises_before_between_or_after_mixtures_is_skipped(play):
    steps = [[11, 9], [1, 0], [2, 0], [2, 5], [6, 3], [12, 0]]
    small = {"micro_batch_size": 3, "optimizer": {"name": "adamw", "lr": 0.01}}
    scenarios = [
        scenario(steps=steps, raises=which, settings=small, unbalanced=True, skips_batches=True)
        for which in ("forward", "within", "loss", "score")
    ]
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        assert len(one["raised"]) >= 8
        check_same(one, two, each)


def test_batches_are_skipped_where_vectors_have_16_bits_too(play):
    """A rank on which the model has raised sends none, of the same type as those of the others."""
    scenarios = [
        scenario(raises=which, settings={"precision": "bf16"}, double=False, skips_batches=True)
        for which in ("forward", "within")
    ]
    for one, two in zip(play(1, scenarios), play(2, scenarios), strict=True):
        assert len(one["raised"]) >= 4
        assert torch.equal(one["raised"], two["raised"])


def test_a_checkpoint_of_divided_experts_goes_on_on_one_rank_and_back(play, tmp_path):
    settings = {"optimizer": {"name": "adamw", "lr": 0.01}}
    found = {}
    for size in (1, 2):
        (found[size],) = play(size, [scenario(settings=settings, write_at=6, write_to=str(tmp_path / str(size)))])
    for size, other in ((1, 2), (2, 1), (2, 2)):
        (again,) = play(size, [scenario(settings=settings, go_on_from=str(tmp_path / str(other)))])
        same = [name for name in found[other] if name.startswith(("model.", "optimizer."))]
        assert len(same) > 50
        assert all(torch.equal(again[name], found[other][name]) for name in same)
