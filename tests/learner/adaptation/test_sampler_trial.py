"""The sampler that follows what is measured to do best, on simulated scores."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.adaptation.replay_ratio import MeasuredRatio, Tally
from learner.adaptation.sampler_trial import Look, MeasuredKind

KINDS = ("uniform", "class-balanced", "loss")
CHANCE = 0.05
ROUND = 6 * 40
"""Looks of a round in which the first of two other samplers is taken: each is tried between two trials."""
PAUSE = 250


def run(
    kind: MeasuredKind, score: Callable[[str, int], float], looks: int, chance: float = CHANCE, first: int = 0
) -> list[str | None]:
    """Return by which sampler events are drawn before each look, whose score follows from that."""
    found = []
    for look in range(first, first + looks):
        found.append(kind.now)
        assert kind.now is not None
        kind.learned(Look(score(kind.now, look), chance))
    return found


def of_its_own(**scores: float) -> Callable[[str, int], float]:
    return lambda name, _: scores.get(name.replace("-", "_"), 0.7)


def test_a_sampler_that_helps_is_taken_and_kept() -> None:
    kind = MeasuredKind(KINDS)
    used = run(kind, of_its_own(class_balanced=0.8), ROUND + PAUSE - 10)
    assert set(used) == set(KINDS), "not all were tried"
    assert set(used[ROUND:]) == {"class-balanced"}


def test_of_several_that_help_the_best_is_taken() -> None:
    kind = MeasuredKind(KINDS)
    assert run(kind, of_its_own(class_balanced=0.8, loss=0.9), ROUND + 100)[-1] == "loss"


@pytest.mark.parametrize("other", [0.5, 0.7, 0.7 + 0.9 * CHANCE])
def test_what_does_not_do_better_by_more_than_chance_changes_nothing(other: float) -> None:
    kind = MeasuredKind(KINDS)
    used = run(kind, of_its_own(class_balanced=other, loss=other), 40_000)
    assert used[-1] == "uniform"
    assert used.count("uniform") > 0.9 * len(used), "trials take too much of the time"


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(lambda look: look / 200, id="gets easier"),
        pytest.param(lambda look: -look / 200, id="gets harder"),
        *(pytest.param(lambda look, at=at: 0.2 * (look < at), id=f"breaks at {at}") for at in range(20, 220, 40)),
        *(pytest.param(lambda look, at=at: 0.2 * (look > at), id=f"settles at {at}") for at in range(20, 220, 40)),
    ],
)
def test_a_stream_that_changes_meanwhile_favours_none(stream: Callable[[int], float]) -> None:
    kind = MeasuredKind(KINDS)
    assert run(kind, lambda _, look: 0.7 + stream(look), ROUND)[-1] == "uniform"


def test_a_sampler_that_is_best_no_more_is_given_up_after_a_pause() -> None:
    kind = MeasuredKind(KINDS)
    assert run(kind, of_its_own(class_balanced=0.8), ROUND)[-1] == "class-balanced"
    used = run(kind, of_its_own(class_balanced=0.5), PAUSE + ROUND)
    assert set(used[: PAUSE - 10]) == {"class-balanced"}
    assert used[-1] == "uniform"


def test_trials_that_change_nothing_come_ever_more_rarely_and_at_once_when_replay_comes_on_again() -> None:
    kind = MeasuredKind(KINDS)
    tried = [name != "uniform" for name in run(kind, of_its_own(), 85_000)]
    begins = np.flatnonzero(np.diff(np.array(tried, int)) == 1)[::2]
    assert np.diff(begins).tolist() == [5 * 40 + PAUSE * 2**n for n in (0, 1, 2, 3, 4, 5, 6, 6, 6, 6)]
    assert not kind.compares
    kind.learned(None)
    assert "class-balanced" in run(kind, of_its_own(), ROUND)


def test_a_trial_that_replay_does_not_outlast_is_broken_off() -> None:
    kind = MeasuredKind(KINDS)
    assert run(kind, of_its_own(class_balanced=0.9), 60)[-1] == "class-balanced"
    kind.learned(None)
    assert (kind.now, kind.compares) == ("uniform", False)


@pytest.mark.parametrize("kinds", [(), ("uniform",)])
def test_without_a_choice_nothing_is_tried(kinds: tuple[str, ...]) -> None:
    kind = MeasuredKind(kinds)
    for _ in range(3000):
        kind.learned(Look(0.5, CHANCE))
        assert not kind.compares
    assert kind.now == (kinds[0] if kinds else None)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=400), st.integers(0, 399))
def test_it_goes_on_from_its_state(scores: list[float | None], at: int) -> None:
    looks = [None if score is None else Look(score, 0.01) for score in scores]
    whole, half = MeasuredKind(KINDS), MeasuredKind(KINDS)
    at = min(at, len(looks))
    for look in looks[:at]:
        whole.learned(look)
        half.learned(look)
    resumed = MeasuredKind(KINDS)
    resumed.restore(json.loads(json.dumps(half.state())))
    for look in looks[at:]:
        assert resumed.now == whole.now
        whole.learned(look)
        resumed.learned(look)
    assert resumed.state() == whole.state()


@pytest.mark.parametrize("state", [{}, {"best": None, "others": []}, {"best": "loss", "others": ["similar"]}])
def test_at_a_cut_of_other_samplers_it_begins_anew(state: dict[str, object]) -> None:
    kind = MeasuredKind(KINDS)
    before = kind.state()
    kind.restore(state)
    assert kind.state() == before


class TestInTheRatio:
    """What it hears there, and when."""

    def learn(self, ratio: MeasuredRatio, steps: range, *, drawn: bool = False) -> list[tuple[float, str | None]]:
        """Old events do badly until they are replayed, and best of all by class."""
        found = []
        for step in steps:
            found.append((ratio.now, ratio.kind))
            score = 0.2 if not ratio.now else 0.85 if ratio.kind == "class-balanced" else 0.6
            old = Tally(32, 32 * score, drawn=drawn) if ratio.probes(step) else None
            ratio.learned(Tally(32, 32 * 0.9), old)
        return found

    def test_what_does_best_is_drawn_by_once_replay_is_on_and_meanwhile_the_amount_stays(self) -> None:
        ratio = MeasuredRatio(0.5, KINDS, bounded=True)
        found = self.learn(ratio, range(1600))
        tried = [place for place, (_, kind) in enumerate(found) if kind != "uniform"]
        on = [place for place, (now, _) in enumerate(found) if now]
        assert tried[0] > on[0] + 200, "samplers were tried before replay was seen to help"
        amounts = {now for now, _ in found[tried[0] : tried[0] + 5 * 160]}
        assert len(amounts) == 1
        assert 0.99 < min(amounts) <= 1
        assert found[-1][1] == "class-balanced"
        assert found[-1][0] < min(amounts)

    def test_by_as_much_as_the_amount_would_have_sunk_meanwhile_it_sinks_afterwards(self) -> None:
        choice, none = MeasuredRatio(0.5, KINDS, bounded=True), MeasuredRatio(0.5, bounded=True)
        for step in range(1700):
            for ratio in (choice, none):
                old = Tally(32, 32 * (0.6 if ratio.now else 0.2)) if ratio.probes(step) else None
                ratio.learned(Tally(32, 32 * 0.9), old)
            if step == 1000:
                assert choice.now > none.now
        assert not choice.state()["held"]
        assert choice.now == pytest.approx(none.now)
        assert none.now < 0.9

    def test_by_events_that_the_sampler_itself_has_drawn_nothing_is_compared(self) -> None:
        ratio = MeasuredRatio(0.5, KINDS, bounded=True)
        found = self.learn(ratio, range(1600), drawn=True)
        assert {kind for _, kind in found} == {"uniform"}
        assert max(now for now, _ in found) == 1.0

    @pytest.mark.parametrize(("old_weight", "kind"), [(0.3, "uniform"), (0.9, "class-balanced")])
    def test_the_declared_weight_decides(self, old_weight: float, kind: str) -> None:
        """By class old events win 0.2, and new ones lose as much."""
        ratio = MeasuredRatio(old_weight, KINDS, bounded=True)
        for step in range(2000):
            by_class = 0.2 * (ratio.kind == "class-balanced")
            old = Tally(128, 128 * (0.1 if not ratio.now else 0.6 + by_class)) if ratio.probes(step) else None
            ratio.learned(Tally(128, 128 * (0.9 - by_class)), old)
        assert ratio.kind == kind

    @pytest.mark.parametrize("unit", [1e-3, 1.0, 1e6])
    def test_of_regression_a_gain_counts_beside_the_error_so_that_units_do_not_matter(self, unit: float) -> None:
        for error, kind in ((2.0, "loss"), (2.95, "uniform")):
            ratio = MeasuredRatio(0.5, KINDS, bounded=False)
            for step in range(2000):
                wrong = unit * (20 if not ratio.now else error if ratio.kind == "loss" else 3)
                ratio.learned(Tally(128, -128 * unit), Tally(128, -128 * wrong) if ratio.probes(step) else None)
            assert ratio.kind == kind

    def test_noise_changes_nothing_in_nearly_all_rounds(self) -> None:
        """Batches of ten; chance may favour another sampler once in twenty rounds or so."""
        dice, taken = np.random.default_rng(0), 0
        for _ in range(40):
            ratio = MeasuredRatio(0.5, KINDS, bounded=True)
            for step in range(1300):
                old = Tally(10, dice.binomial(10, 0.7 if ratio.now else 0.3)) if ratio.probes(step) else None
                ratio.learned(Tally(10, dice.binomial(10, 0.9)), old)
            taken += ratio.state()["kind"]["best"] != "uniform"
        assert taken <= 4


def test_a_state_stays_that_of_its_moment() -> None:
    kind = MeasuredKind(KINDS)
    run(kind, of_its_own(), 41)
    before = kind.state()
    copy = json.loads(json.dumps(before))
    run(kind, of_its_own(), 3 * 40)
    assert kind.state()["others"] != copy["others"], "no trial has ended"
    assert before == copy


@pytest.mark.parametrize("stage", ["before", "other", "after"])
def test_a_trial_of_which_a_cut_does_not_say_what_is_tried_is_begun_again(stage: str) -> None:
    kind = MeasuredKind(KINDS)
    kind.restore({**kind.state(), "best": "loss", "stage": stage, "others": []})
    used = run(kind, of_its_own(class_balanced=0.8), ROUND + 50)
    assert set(used) == set(KINDS)
