"""Ranks: two learn what one learns, whatever they are dealt."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.model.examples import Examples
from anabranch.learner.parallel.process_group import RankAssignment, join_group
from anabranch.learner.parallel.scatter import (
    RankBatch,
    layout_of,
    layouts_from_json,
    layouts_to_json,
    packed,
    scatter,
    unpacked,
)
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from tests.support.gpu import rtol

LONG = "ANABRANCH_TEST_STEPS"
UNEVEN = [[11, 9], [1, 0], [1, 1], [2, 0], [1, 5], [3, 1], [7, 0]]
"""New and old events of steps: some leave a rank with nothing new, or with nothing at all."""

NOISY = {"steps": UNEVEN, "times": 2, "noisy": True, "double": False}
"""Of a model that throws dice, in the precision that models have."""

GROWING = "experts", "progressive"
"""Strategies that add to the model while they train."""


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 5))
def test_every_event_is_scattered_once_in_order_and_ranks_have_nearly_as_many(counts, ranks):
    by_rank = scatter(counts, ranks)
    for group, count in enumerate(counts):
        slices = [slices[group] for slices in by_rank]
        assert [slices[0].start, slices[-1].stop] == [0, count]
        assert all(before.stop == after.start for before, after in pairwise(slices))
    totals = [sum(each.stop - each.start for each in slices) for slices in by_rank]
    assert max(totals) - min(totals) <= 1


@given(st.integers(0, 9), st.booleans())
@example(1, False)
def test_examples_are_sent_unchanged(n, kept):
    strided = torch.rand(n, 5)  # columns have strides, as those of a store's rows have
    examples = Examples(
        {"x": torch.rand(n, 3, 2), "flag": torch.rand(n) > 0.5, "scalar": strided[:, 1]},
        torch.arange(n),
        torch.rand(n, dtype=torch.float64),
        torch.rand(n, 4) if kept else None,
    )
    (layouts,) = (layouts_from_json(layouts_to_json([layout_of(examples)] * 2)),)
    messages = packed([[examples[:0]] * 2, [examples[:1], examples], [examples[:1]] * 2])
    first, second = unpacked(messages[1], layouts, [min(n, 1), n])
    assert len(first) == min(n, 1)
    assert len(unpacked(messages[2], layouts, [min(n, 1)] * 2)[1]) == min(n, 1)
    for ours, theirs in zip(examples.features.values(), second.features.values(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(examples.label_B, second.label_B)
    assert torch.equal(examples.weight_B, second.weight_B)
    assert (second.output_B is None) == (not kept)


def test_a_rank_without_an_event_gets_a_placeholder_of_no_weight():
    examples = Examples({"x": torch.rand(1, 3)}, torch.tensor([2]), torch.tensor([1.5]))
    one, other = (RankBatch.of([examples], slices) for slices in scatter([1], 2))
    assert (one.real, one.counts, other.real, other.counts) == ([1], [1], [0], [1])
    assert other.parts[0].weight_B.tolist() == [0]


def test_two_ranks_learn_what_one_learns_from_the_same_events(play):
    scenarios: list[dict[str, Any]] = []
    for strategy, kind in STRATEGIES.items():
        samples = len(kind().samples(2))
        steps = [[new, *[old] * samples] for new, old in UNEVEN]
        for micro in (None, 3):
            scenarios.append({"strategy": strategy, "steps": steps, "settings": {"micro_batch_size": micro}})
        adamw = {"optimizer": {"name": "adamw", "lr": 0.01}}
        scenarios.append({"strategy": strategy, "steps": steps, "checkpoint_at": 3, "settings": adamw})
    schedule = {"warmup_steps": 4, "restart": "drift"}
    scenarios.append({"strategy": "er", "steps": UNEVEN, "drift_at": 2, "settings": {"schedule": schedule}})
    scenarios.append({"strategy": "er", "steps": UNEVEN, "settings": {"activation_checkpointing": True}})
    replicas = [each | {"settings": each["settings"] | {"replicas": 2}} for each in scenarios]
    split = [index for index in range(2, len(scenarios), 3) if scenarios[index]["strategy"] not in GROWING]
    zero = [replicas[index] | {"settings": replicas[index]["settings"] | {"sharding": "zero1"}} for index in split]
    alone, together = play(1, scenarios), play(2, replicas + zero)
    every = [*range(len(scenarios)), *split]
    for index, two in zip(every, together, strict=True):
        scenario, one = scenarios[index], alone[index]
        del two["seconds"]
        assert one.keys() == two.keys(), scenario
        if scenario["strategy"] == "mir":
            continue  # each rank picks among the candidates that it was dealt; the next test deals both the same
        for name, value in one.items():
            atol = 1e-6 if value.dtype is torch.float64 else 1e-5
            assert torch.allclose(value, two[name], rtol=0, atol=atol, equal_nan=True), (scenario, name)


def test_a_model_grows_in_the_same_step_on_all_ranks(play):
    """With a drift, and then from a checkpoint on that has the new part; also in one that was made before."""
    scenarios = [
        {
            "strategy": name,
            "steps": UNEVEN,
            "drift_at": 2,
            "checkpoint_at": at,
            "arguments": {"least": 1},
            "settings": {},
        }
        for name in GROWING
        for at in (1, 4)
    ]
    replicas = [each | {"settings": {"replicas": 2}} for each in scenarios]
    for scenario, one, two in zip(scenarios, play(1, scenarios), play(2, replicas), strict=True):
        assert len(two["model.expert_pool.shift"]) == 1
        for name in one.keys() - {"seconds"}:
            assert torch.allclose(one[name], two[name], rtol=0, atol=1e-5, equal_nan=True), (scenario, name)


def test_events_on_which_the_model_raises_on_some_rank_are_left_out_on_all(play):
    steps, scenarios = [[11, 9], [1, 0], [2, 0], [2, 5], [6, 3], [12, 0]], []
    for strategy, kind in STRATEGIES.items():
        dealt = [[new, *[old] * len(kind().samples(2))] for new, old in steps]
        scenarios.append({"strategy": strategy, "steps": dealt, "raises": "forward", "settings": {}})
    small = {"micro_batch_size": 3, "optimizer": {"name": "adamw", "lr": 0.01}}
    for index in ("forward", "backward", "loss", "score"):
        scenarios.append({"strategy": "er", "steps": steps, "raises": index, "settings": small})
    # Zeros of the first label raise too: those of the second stand in.
    scenarios.insert(0, {"strategy": "er", "steps": steps, "raises": "loss", "refused": 0, "settings": small})
    replicas = [each | {"settings": each["settings"] | {"replicas": 2}} for each in scenarios]
    zero = replicas[-1] | {"settings": replicas[-1]["settings"] | {"sharding": "zero1"}}
    ways = {"sync_every": 2}, *({"comm_hook": name} for name in ("powersgd", "int8", "topk"))
    others = [replicas[-1] | {"settings": small | {"replicas": 2} | each} for each in ways]
    alone, together = play(1, scenarios), play(2, [*replicas, zero, *others])
    assert all(torch.equal(each["raised"], alone[-1]["raised"]) for each in together[-len(others) :])
    for scenario, one, two in zip([*scenarios, zero], [*alone, alone[-1]], together, strict=False):
        del two["seconds"]
        assert one.keys() == two.keys(), scenario
        assert len(one["raised"]) >= 8
        for name, value in one.items():
            if scenario["strategy"] == "mir" and name != "raised":
                continue  # as above
            atol = 1e-6 if value.dtype is torch.float64 else 1e-5
            assert torch.allclose(value, two[name], rtol=0, atol=atol, equal_nan=True), (scenario, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_on_which_a_sharded_model_raises_is_skipped_on_all_ranks(play):
    """In each of its passes, on one rank or both, also where ranks have other numbers of micro-batches."""
    steps = [[11, 9], [1, 0], [2, 0], [2, 5], [6, 3], [12, 0]]
    small = {"micro_batch_size": 3, "optimizer": {"name": "adamw", "lr": 0.01}}
    scenarios: list[dict[str, Any]] = [
        {"strategy": "er", "steps": steps, "raises": index, "settings": small, "skips_batches": True}
        for index in ("forward", "backward", "loss", "score")
    ]
    # Zeros of the first label raise too: those of the second stand in.
    scenarios.append(scenarios[2] | {"refused": 0})
    scenarios.append(scenarios[0] | {"raises": "within", "settings": {}})
    split = [each | {"settings": each["settings"] | {"replicas": 2, "sharding": "fsdp"}} for each in scenarios]
    for scenario, one, two in zip(scenarios, play(1, scenarios), play(2, split, 250), strict=True):
        del two["seconds"]
        assert one.keys() == two.keys(), scenario
        assert len(one["raised"]) >= 8
        for name, value in one.items():
            atol = 1e-6 if value.dtype is torch.float64 else 1e-5
            assert torch.allclose(value, two[name], rtol=0, atol=atol, equal_nan=True), (scenario, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_step_in_which_a_rank_runs_out_of_memory_is_repeated_by_all_with_the_same_result(play, sharding):
    scenarios: list[dict[str, Any]] = [
        {"strategy": strategy, "steps": UNEVEN, "settings": {}} for strategy in ("er", "der")
    ]
    scenarios.append({"strategy": "er", "steps": UNEVEN, "settings": {"micro_batch_size": 8}})
    ranks = [
        each | {"narrow_rank": rank, "narrow": 6, "settings": each["settings"] | {"replicas": 2, "sharding": sharding}}
        for each in scenarios
        for rank in (0, 1)
    ]
    alone, together = play(1, scenarios), play(2, ranks, 250)
    for index, (scenario, two) in enumerate(zip(ranks, together, strict=True)):
        for name, value in alone[index // 2].items():
            atol = 1e-6 if value.dtype is torch.float64 else 1e-5
            assert torch.allclose(value, two[name], rtol=0, atol=atol, equal_nan=True), (scenario, name)


def test_the_events_and_results_of_a_step_take_one_exchange_each_and_nothing_empty_is_sent(play):
    """Of three ranks, of which some have no event at times; the other messages are one header for each other rank."""
    settings = {"replicas": 3, "optimizer": {"name": "adamw", "lr": 0.01}}
    (found,) = play(3, [{"strategy": "er", "steps": UNEVEN, "counts": True, "settings": settings}])
    counts = {name.removeprefix("count."): int(value) for name, value in found.items() if name.startswith("count.")}
    assert (counts["scatter"], counts["gather"]) == (len(UNEVEN), len(UNEVEN))
    layouts = 6  # with and without old events, in turns; a header, and the layout
    assert counts["isend"] == 2 * (len(UNEVEN) + 2 * layouts + 3), "and to gather and to restore a checkpoint"
    assert (counts["send"], counts["recv"], counts["empty"]) == (0, 0, 0)
    assert counts["broadcast"] == 4 + 4 * 3, "of the checkpoint: weights, two moments and a count of each"


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_two_ranks_on_two_gpus_learn_what_one_learns_on_the_cpu(play):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    scenarios: list[dict[str, Any]] = [
        {"strategy": strategy, "steps": UNEVEN, "checkpoint_at": 3, "drift_at": 2, "settings": {"precision": "fp32"}}
        for strategy in ("none", "er", "der", "lwf")
    ]
    alone = play(1, scenarios)
    for sharding in ("none", "zero1", "fsdp"):
        settings = {"precision": "fp32", "replicas": 2, "device": "cuda", "sharding": sharding}
        some = [each for each in scenarios if sharding != "fsdp" or each["strategy"] != "lwf"]
        together = play(2, [each | {"settings": settings} for each in some])
        for scenario, one, two in zip(some, alone, together, strict=False):
            within = rtol(torch.float32, len(UNEVEN))  # weights are float64 here, losses float32
            for name in (name for name in one if name.startswith("model.")):
                assert torch.allclose(one[name], two[name].cpu(), rtol=within, atol=within), (sharding, scenario, name)


def test_ranks_pick_what_one_picks_that_sees_the_new_events_of_all(play):
    """Both have the same candidates for MIR, other new events, and more weight on those of the first."""
    steps = [[8, 20], [6, 30], [12, 20], [4, 40], [10, 30], [2, 40], [2, 20], [20, 50]]
    scenarios = [{"strategy": "mir", "steps": [each], "candidates": 1} for each in steps]
    twice = [each | {"candidates": 2, "settings": {"replicas": 2}} for each in scenarios]
    for one, two, (_, old) in zip(play(1, scenarios), play(2, twice), steps, strict=True):
        picked = one["old_R"].isfinite()
        assert int(picked.sum()) == old / 5
        assert torch.equal(two["old_R"].isfinite(), picked.repeat(2))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_with_a_part_of_the_weights_learn_what_one_learns_and_checkpoint_the_same(play):
    """Also where one rank has more micro-batches than the other, and goes on from a checkpoint."""
    scenarios: list[dict[str, Any]] = []
    for strategy, optimizer in (("er", "adamw"), ("er-ace", "adam"), ("der++", "rmsprop"), ("none", "adagrad")):
        steps = [[new, *[old] * len(STRATEGIES[strategy]().samples(2))] for new, old in UNEVEN]
        settings = {"optimizer": {"name": optimizer, "lr": 0.01}, "micro_batch_size": 3, "max_grad_norm": 0.1}
        scenarios.append({"strategy": strategy, "steps": steps, "checkpoint_at": 3, "settings": settings})
    scenarios.append({"strategy": "er", "steps": UNEVEN, "settings": {"activation_checkpointing": True}})
    split = [each | {"settings": each["settings"] | {"replicas": 2, "sharding": "fsdp"}} for each in scenarios]
    for scenario, one, two in zip(scenarios, play(1, scenarios), play(2, split, 250), strict=True):
        del two["seconds"]
        assert one.keys() == two.keys(), scenario
        for name, value in one.items():
            atol = 1e-6 if value.dtype is torch.float64 else 1e-5
            assert torch.allclose(value, two[name], rtol=0, atol=atol, equal_nan=True), (scenario, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_with_frozen_weights_learn_what_one_learns_and_checkpoint_the_trained_set(play):
    """Also where the frozen weights are sharded, and where ranks average what they train every few steps."""
    adamw = {"optimizer": {"name": "adamw", "lr": 0.01}, "micro_batch_size": 3}
    frozen = {"steps": UNEVEN, "checkpoint_at": 3, "frozen": True, "settings": adamw}
    scenarios = [frozen | {"strategy": strategy} for strategy in ("er", "lwf")]
    modes: list[dict[str, Any]] = [{}, {"sharding": "zero1"}, {"sharding": "fsdp"}]
    ranks = [
        each | {"settings": {**adamw, "replicas": 2, **mode}}
        for mode in modes
        for each in scenarios
        if (mode, each["strategy"]) != (modes[-1], "lwf")
    ]
    averaged = frozen | {"strategy": "er", "settings": {**adamw, "replicas": 3, "sync_every": 2}}
    alone = dict(zip(("er", "lwf"), play(1, scenarios), strict=True))
    for scenario, two in zip(ranks, play(2, ranks, 250), strict=True):
        one = alone[scenario["strategy"]]
        assert {name for name in two if name.startswith("model.")} == {"model.2.weight", "model.2.bias"}
        for name in two.keys() - {"seconds"}:
            atol = 1e-6 if two[name].dtype is torch.float64 else 1e-5
            assert torch.allclose(one[name], two[name], rtol=0, atol=atol, equal_nan=True), (scenario, name)
    (three,) = play(3, [averaged], 100)
    bases = [name for name in three if name.startswith("base.")]
    assert len(bases) == 2
    assert all(torch.equal(three[name], alone["er"][name]) for name in bases)


def test_a_drift_makes_a_strategy_consolidate_on_all_ranks(play):
    """EWC pulls at nothing, and is plain training, until it has consolidated."""
    drifts = {"steps": UNEVEN, "drift_at": 2, "settings": {"replicas": 2}}
    plain, held = play(2, [drifts | {"strategy": strategy} for strategy in ("none", "ewc")], 60)
    assert held["loss"].isfinite()
    assert not torch.allclose(plain["model.0.weight"], held["model.0.weight"], rtol=0, atol=1e-9)


def test_a_checkpoint_has_the_state_that_strategies_gather_from_all_ranks(play):
    """What EWC added up is what it would consolidate; LwF's teacher is the model that a version would have had."""
    scenario = {"steps": [[8]], "times": 4, "reports_drift": True, "settings": {"replicas": 2}}
    diverged = scenario | {"strategy": "lwf", "drift_at": 3, "settings": {"replicas": 2, "sync_every": 100}}
    held = scenario | {"strategy": "ewc"}
    summed, consolidated, taught = play(2, [held, held | {"drift_at": 3}, diverged])
    indices = range(len([name for name in consolidated if name.startswith("strategy.fisher")]))
    assert indices
    for index in indices:
        fisher = summed[f"strategy.sum.{index}"] / summed[f"strategy.sum.{len(indices)}"]
        assert torch.allclose(fisher, consolidated[f"strategy.fisher.{index}"], rtol=1e-9)
    for name in ("0.weight", "2.bias"):
        assert torch.allclose(taught[f"strategy.{name}"], taught[f"model.{name}"], rtol=1e-9)


def test_uneven_steps_do_not_hang(play):
    times = int(os.environ.get(LONG, "300")) // len(UNEVEN) + 1
    (found,) = play(
        2, [{"steps": UNEVEN, "times": times, "settings": {"replicas": 2}}], 600 if LONG in os.environ else 60
    )
    assert found["loss"].isfinite()


def test_compressed_and_rarer_exchange_leads_about_as_far(play):
    ways: list[dict[str, Any]] = [{}, *({"comm_hook": name} for name in ("fp16", "powersgd", "int8"))]
    ways += [{"comm_hook": "topk", "topk_fraction": 0.1}, {"sync_every": 4}]
    scenario = {"steps": [[16, 16]], "times": 61, "double": False, "width": 64}
    exact, *others = play(2, [scenario | {"settings": {"replicas": 2, **way}} for way in ways])
    for way, found in zip(ways[1:], others, strict=True):
        assert abs(found["loss"] - exact["loss"]) < 0.1 * exact["loss"], way
        assert not torch.equal(found["model.2.weight"], exact["model.2.weight"]), way


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"device": "cpu", "comm_hook": "bf16"}, "needs CUDA devices"), ({"device": "cuda"}, "sees no such device")],
)
def test_devices_that_ranks_cannot_have_are_refused_before_they_connect(settings, sentence, tmp_path):
    if settings["device"] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SettingsError, match=sentence):
        with join_group(RankAssignment(0, 2, tmp_path / "rendezvous"), LearnerSettings.model_validate(settings)):
            pass


def test_weights_that_have_diverged_are_averaged_in_versions_and_checkpoints(play):
    """With plain SGD, one separate step per rank, then averaged, is the step of the averaged gradient."""
    scenario = {"steps": [[8, 8]], "settings": {"replicas": 2, "sync_every": 100}}
    (found,), (exact,) = play(2, [scenario]), play(1, [scenario | {"settings": {}}])
    for name in ("model.0.weight", "model.2.bias"):
        assert torch.allclose(found[name], exact[name], rtol=0, atol=1e-12)


def test_weights_of_ranks_are_averaged_every_sync_every_steps(play, tmp_path):
    """A checkpoint after as many steps averages them too; before it, and without it, they stay different."""
    scenario: dict[str, Any] = {"steps": [[8, 8]], "times": 3}
    rare = scenario | {"settings": {"replicas": 2, "sync_every": 100}}
    often = scenario | {"settings": {"replicas": 2, "sync_every": 2}}
    at_two, never, checkpoint = play(2, [often, rare, rare | {"write_at": 2, "write_to": str(tmp_path)}])
    for name in ("model.0.weight", "model.2.weight"):
        assert torch.allclose(at_two[name], checkpoint[name], rtol=0, atol=1e-12)
        assert not torch.allclose(at_two[name], never[name], rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def of_two(play, tmp_path_factory):
    """A checkpoint by two ranks in the midst of their steps, and what comes out of those, which is the same without
    it."""
    path = str(tmp_path_factory.mktemp("of-two"))
    without, found = play(2, [NOISY, NOISY | {"write_at": 7, "write_to": path}])
    for name in without.keys() - {"seconds"}:
        assert torch.equal(found[name], without[name]), f"making a checkpoint changes {name}"
    return path, found


def test_ranks_go_on_from_a_checkpoint_as_if_they_had_never_ended(play, of_two):
    """Bit for bit, though their model throws dice of torch, Python and numpy, others on each rank."""
    path, found = of_two
    (resumed,) = play(2, [NOISY | {"go_on_from": path}])
    for name in found.keys() - {"begun", "seconds"}:
        assert torch.equal(resumed[name], found[name]), name


def test_a_checkpoint_restores_the_generators_of_each_rank_that_it_has(play, of_two, tmp_path):
    """With more ranks than it is of, and with one: those that it does not know go on from their seed."""
    one, (two, _) = str(tmp_path), of_two
    fewer, _ = play(1, [NOISY | {"go_on_from": two}, NOISY | {"write_at": 7, "write_to": one}])
    more, most = play(3, [NOISY | {"go_on_from": two}, NOISY | {"go_on_from": one}])
    known, alone = (rng_of(path) for path in (two, one))
    assert known.keys() == {"cpu", "rank-1"}
    assert alone.keys() == {"cpu"}
    assert torch.equal(more["rng.cpu"], known["cpu"])
    assert torch.equal(more["rng.rank-1"], known["rank-1"])
    assert torch.equal(more["rng.rank-2"], most["rng.rank-2"])
    assert torch.equal(fewer["rng.cpu"], known["cpu"])
    assert "rng.rank-1" not in fewer
    assert torch.equal(most["rng.cpu"], alone["cpu"])
    assert not torch.equal(most["rng.rank-1"], known["rank-1"])
    assert all(found["loss"].isfinite() for found in (fewer, more, most))


def rng_of(path):
    """Return what a checkpoint has of torch's generators on the CPU, and of other ranks."""
    found = Checkpoints(Path(path), "schema", 1).newest()
    assert found is not None
    return {name: value for name, value in found[1].tensors["rng"].items() if not name.startswith("cuda")}
