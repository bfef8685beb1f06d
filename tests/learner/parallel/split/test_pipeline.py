"""Pipelines: the ranks of one learn what one rank learns from the same events."""

import torch

UNEVEN = [[11, 9], [1, 0], [1, 1], [2, 0], [1, 5], [3, 1], [7, 0]]
STRATEGIES = {"none": 1, "er": 1, "er-ace": 1, "der": 1, "der++": 2}
"""Strategies that run the model once a micro-batch, and how many samples they take."""
STAGES = {"gpipe": ["1"], "1f1b": ["1"], "interleaved": ["1", "2", "4"]}


def scenario(schedule, strategy="er", steps=UNEVEN, mesh=None, **others):
    mesh = mesh or {"pipeline": 2}
    settings = {"pipeline_schedule": schedule, "mesh": mesh, "replicas": 2} | others.pop("settings", {})
    steps = [[new, *[old] * STRATEGIES[strategy]] for new, old in steps]
    return {"strategy": strategy, "steps": steps, "width": 8, "stages": STAGES[schedule], "settings": settings} | others


def check_same(one, other, which):
    other.pop("seconds", None)
    assert one.keys() == other.keys(), which
    for name, value in one.items():
        atol = 1e-6 if value.dtype is torch.float64 else 1e-5
        assert torch.allclose(value, other[name], rtol=0, atol=atol, equal_nan=True), (which, name)


def test_a_pipeline_of_two_learns_what_one_learns(play):
    adamw = {"optimizer": {"name": "adamw", "lr": 0.01}, "max_grad_norm": 0.1}
    scenarios = [scenario(schedule) for schedule in STAGES]
    scenarios += [scenario("1f1b", strategy, settings={"micro_batch_size": 3}) for strategy in STRATEGIES]
    scenarios += [scenario(schedule, checkpoint_at=3, settings=adamw) for schedule in STAGES]
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        check_same(one, two, each)


def test_a_step_that_is_not_finite_is_skipped_by_all_stages(play):
    """Also running statistics, which only the second stage has."""
    steps, small = [[8, 4]] * 3, {"micro_batch_size": 3}
    scenarios = [
        scenario(each, steps=steps, settings=small, spoilt_at=1, norm=True) for each in ("1f1b", "interleaved")
    ]
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        assert "model.4.running_mean" in one
        check_same(one, two, each)


def test_batch_norm_learns_the_same_from_steps_that_get_micro_batches_of_weight_0(play):
    """The micro-batches of a step are of one size: copies that fill one up would count in running statistics."""
    steps, small = [[1, 0], [2, 0], [3, 1], [6, 0], [10, 0]], {"micro_batch_size": 2}
    scenarios = [
        scenario(each, steps=steps, settings=small | checkpointed, norm=True, raises="none")
        for each in STAGES
        for checkpointed in ({}, {"activation_checkpointing": True})
        if each == "1f1b" or not checkpointed
    ]
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        assert two["model.4.num_batches_tracked"] == 11
        assert not len(two["raised"])
        check_same(one, two, each)


def test_a_batch_on_which_a_stage_raises_is_skipped_on_all_ranks(play):
    steps = [[11, 9], [1, 0], [2, 0], [2, 5], [6, 3], [12, 0]]
    small = {"micro_batch_size": 3, "optimizer": {"name": "adamw", "lr": 0.01}}
    scenarios = [
        scenario(schedule, steps=steps, raises=which, settings=small, skips_batches=True)
        for schedule in STAGES
        for which in ("stage 0", "stage 1", "backward 0", "backward 1", "loss", "score")
        if schedule == "1f1b" or which == "stage 1"
    ]
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        assert len(one["raised"]) >= 8
        check_same(one, two, each)


def test_the_reason_is_that_of_the_stage_that_raised(play):
    scenarios = [
        scenario("1f1b", raises=which, reports_why=True, skips_batches=True)
        for which in ("stage 0", "stage 1", "loss", "score")
    ]
    for each, one, two in zip(scenarios, play(1, scenarios), play(2, scenarios), strict=True):
        why, found = (bytes(found["why"].tolist()).decode().splitlines() for found in (one, two))
        assert found == [f"{line}; ranks that split a model leave out all of the step" for line in why], each


def test_a_checkpoint_of_any_mesh_goes_on_in_any_other_with_the_same_bits(play, tmp_path):
    settings = {"optimizer": {"name": "adamw", "lr": 0.01}}
    meshes = {1: ["gpipe"], 2: ["1f1b", "interleaved"]}
    written = {
        (size, schedule): scenario(
            schedule, settings=settings, write_at=7, write_to=str(tmp_path / f"{size}{schedule}")
        )
        for size, schedules in meshes.items()
        for schedule in schedules
    }
    of_mesh = {}
    for size, schedules in meshes.items():
        of_mesh |= {
            (size, schedule): found
            for schedule, found in zip(schedules, play(size, [written[size, each] for each in schedules]), strict=True)
        }
    for size, schedules in meshes.items():
        scenarios = [
            scenario(schedule, settings=settings, go_on_from=written[other]["write_to"])
            for schedule in schedules
            for other in written
        ]
        for one, other in zip(play(size, scenarios), [*written] * len(schedules), strict=True):
            same = [name for name in of_mesh[other] if name.startswith(("model.", "optimizer."))]
            assert len(same) > 20
            assert all(torch.equal(one[name], of_mesh[other][name]) for name in same), (size, other)
