"""Leases, the share of the steps, and what becomes of challengers, without a model."""

import json
import math

import pytest
from pydantic import ValidationError

from anabranch.learner.extensions.search.pool import (
    CLOSE,
    FIRST_LEASE,
    LONGEST_LEASE,
    MARGIN,
    MOST_TAUGHT,
    NETWORK_LEASE,
    STEP_COST,
    TEACHING,
    ChallengerPool,
    SearchSpace,
)
from anabranch.learner.settings.search import (
    LR,
    MAX_GRAD_NORM,
    MOMENTUM,
    WEIGHT_DECAY,
    SearchSettings,
    search_conflicts,
)

GIVEN = {LR: 1e-4}
WIDTH, DEPTH = "model.args.width", "model.args.depth"


def pool_of(seed=0, **settings):
    return ChallengerPool(SearchSettings.model_validate(settings), GIVEN, seed)


def advance(pool, steps, difference=0.0):
    """Let all challengers differ by `difference` from the model, a little less in each second step."""
    for step in range(steps):
        pool.begin()
        for challenger in list(pool.live):
            if pool.observe(challenger, difference * (1 - step % 2 / 10)):
                pool.end(challenger, "better")


@pytest.mark.parametrize("share", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("difference", [0.0, -0.1])
def test_the_share_is_kept_in_the_long_run(share, difference):
    pool, steps = pool_of(share=share), 8_000
    advance(pool, steps, difference)
    saved_up, earned = 1024, steps * share / (1 - share) / STEP_COST
    assert 0.9 * earned <= pool.trained <= min(4 * steps, earned) + saved_up


def test_leases_double_until_the_longest():
    pool = pool_of(challengers=1)
    leases = set()
    for step in range(40_000):
        for challenger in pool.begin():
            leases.add(challenger.left)
        for challenger in list(pool.live):
            pool.observe(challenger, (-1) ** step * 0.1 + 1e-4)  # a little better, and never shown to be
        if pool.outcomes["undecided"]:
            break
    assert max(leases) <= LONGEST_LEASE
    assert FIRST_LEASE in leases
    assert pool.history[-1].steps in range(LONGEST_LEASE, 2 * LONGEST_LEASE + 1)


def test_a_worse_challenger_gives_its_lease_back():
    pool = pool_of(challengers=1)
    pool.begin()
    (challenger,) = pool.live
    while challenger in pool.live:
        pool.observe(challenger, -0.5)
    assert challenger.steps < FIRST_LEASE
    assert pool.outcomes == {"no_better": 1}
    assert pool.state()["_saved"] == 1024 - challenger.steps


def test_promising_challengers_go_on_with_their_weights_on_credit_that_is_paid_back():
    pool, begun = pool_of(), 0
    for step in range(1_600):
        begun += len(pool.begin())
        for challenger in list(pool.live):
            pool.observe(challenger, 0.002 + 0.05 * (-1) ** (step // 7) if challenger.steps else 0.01)
            challenger.better.logs = [3.0] * len(challenger.better.logs)
        if step == 4 * FIRST_LEASE - 1:
            assert (begun, pool.trained) == (4, 4 * 4 * FIRST_LEASE)  # twice what is saved up at the beginning
    assert pool.trained <= 1_600 / 4 + 1024 + 2048
    assert begun == 4  # none begins before it is paid back


@pytest.mark.parametrize(("log_wealth", "outcomes"), [(0.9, {"undecided": 1}), (1.1, {})])
def test_after_its_longest_lease_only_a_promising_challenger_goes_on(log_wealth, outcomes):
    pool = pool_of(challengers=1)
    (challenger,) = pool.begin()
    for step in range(LONGEST_LEASE):
        challenger.better.logs = [log_wealth + 0.1] * len(challenger.better.logs)  # the last bet loses less than 0.1
        assert pool.live == [challenger]
        pool.observe(challenger, 0.001 * (-1) ** step + 1e-5)
        challenger.better.logs = [log_wealth] * len(challenger.better.logs)
    assert pool.outcomes == outcomes
    assert pool.live == ([] if outcomes else [challenger])
    assert challenger.left == (0 if outcomes else LONGEST_LEASE)


def test_a_state_goes_on_the_same_way():
    first = pool_of(challengers=3)
    advance(first, 500, 0.01)
    second = pool_of(challengers=3)
    assert second.restore(json.loads(json.dumps(first.state())))
    for pool in (first, second):
        advance(pool, 500, 0.01)
    assert first.state() == second.state()


def test_what_was_found_stays_unless_the_user_changes_it():
    first = pool_of()
    first.take({LR: 0.02})
    advance(first, 10)
    state = json.loads(json.dumps(first.state()))
    same = pool_of()
    assert same.restore(state)
    assert same.values == {LR: 0.02}
    changed = ChallengerPool(SearchSettings(), {LR: 5e-4}, 0)
    assert not changed.restore(state)
    assert changed.values == {LR: 5e-4}
    assert not changed.challengers
    for other in ({"challengers": 1}, {"measure": "score"}):
        pool = pool_of(**other)
        assert not pool.restore(state)
        assert (pool.values, pool.challengers) == ({LR: 0.02}, [])


def test_the_last_copy_is_not_restored_where_there_are_fewer():
    first = pool_of(challengers=4)
    for challenger in first.begin()[:3]:
        first.end(challenger, "no_better")
    assert [each.slot for each in first.live] == [3]
    fewer = pool_of(challengers=2)
    fewer.restore(json.loads(json.dumps(first.state())))
    assert all(each.slot in range(2) for each in [*fewer.live, *fewer.begin()])


def test_no_lease_begins_or_goes_on_while_paused():
    pool = pool_of(challengers=1)
    for step in range(2 * FIRST_LEASE):
        pool.begin()
        for challenger in list(pool.live):
            pool.observe(challenger, (-1) ** step * 0.1 + 1e-4)  # a little better, and never shown to be
        pool.paused = True
    assert pool.trained == FIRST_LEASE
    (waits,) = pool.challengers
    pool.paused = False
    assert pool.begin() == [waits]


def test_without_memory_challengers_are_tried_as_seldom_as_they_may_train():
    pool = pool_of(challengers=4)
    for _ in range(200):
        for challenger in pool.begin():
            pool.end(challenger, "no_memory")
    assert pool.outcomes["no_memory"] <= (1024 + 200 / 4) / FIRST_LEASE


def test_no_challenger_begins_while_settings_are_pinned():
    pool = pool_of()
    pool.pinned = True
    advance(pool, 100)
    assert pool.trained == 0
    assert not pool.challengers


class TestNetworks:
    """Challengers with other arguments of the factory: taught first, and then compared by a margin."""

    @pytest.fixture
    def make(self):
        def pool(seed=0, **settings):
            chosen = {"challengers": 1, "space": {WIDTH: (4, 64)}, **settings}
            return ChallengerPool(SearchSettings.model_validate(chosen), {WIDTH: 16.0, LR: 1e-4, DEPTH: 1.0}, seed)

        return pool

    @staticmethod
    def advance(pool, steps, taught, compared):
        for step in range(steps):
            pool.begin()
            for challenger in list(pool.live):
                if challenger.teaching:
                    pool.observe_taught(challenger, taught)
                elif pool.observe(challenger, compared * (1 - step % 2 / 10)):
                    pool.end(challenger, "better")

    @pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
    @pytest.mark.parametrize("taught", [0.0, -2 * CLOSE])
    def test_the_share_is_kept_in_the_long_run(self, make, share, taught):
        pool, steps, saved_up = make(share=share), 12_000, 1024
        self.advance(pool, steps, taught, 0.0)
        earned = steps * share / (1 - share) / STEP_COST
        assert min(steps, earned - 512) <= pool.trained <= earned + saved_up

    def test_one_that_has_caught_up_is_compared_after_its_teaching(self, make):
        pool = make()
        (challenger,) = pool.begin()
        assert (challenger.network, challenger.left) == (True, NETWORK_LEASE)
        for _ in range(TEACHING):
            assert challenger.teaching
            pool.observe_taught(challenger, -CLOSE / 2)
        assert (challenger.teaching, challenger.steps, challenger.left) == (0, 0, NETWORK_LEASE)

    def test_one_that_does_not_catch_up_ends(self, make):
        pool = make(share=0.5)
        while not pool.history:
            self.advance(pool, 1, -2 * CLOSE, 1.0)
        (ended,) = pool.history
        assert (ended.outcome, ended.taught, ended.steps) == ("not_caught_up", MOST_TAUGHT, 0)

    def test_it_has_to_be_better_by_the_margin(self, make):
        for difference, outcome in ((MARGIN / 2, "no_better"), (2 * MARGIN, "better")):
            pool = make()
            self.advance(pool, TEACHING + NETWORK_LEASE, 0.0, difference)
            assert [each.outcome for each in pool.history] == [outcome] * len(pool.history)
            assert pool.history

    def test_the_network_of_an_alert_is_not_tried_again(self, make):
        pool = make(share=0.5)
        (challenger,) = pool.begin()
        challenger.teaching = 0
        pool.end(challenger, "better")
        self.advance(pool, 10_000, 0.0, 0.0)
        assert pool.alert is not None
        assert len(pool.history) > 10
        assert all(each.values != pool.alert.values for each in list(pool.history)[1:])

    def test_those_that_are_too_slow_are_tried_as_seldom_as_they_may_train(self, make):
        pool = make(challengers=4)
        for _ in range(200):
            for challenger in pool.begin():
                pool.end(challenger, "too_slow")
        assert pool.outcomes["too_slow"] <= (1024 + 200 / 4) / (NETWORK_LEASE + TEACHING)

    def test_a_state_goes_on_the_same_way(self, make):
        first = make(challengers=3, space={WIDTH: (4, 64), LR: (1e-6, 1.0)})
        self.advance(first, 700, -2 * CLOSE, 0.01)
        second = make(challengers=3, space={WIDTH: (4, 64), LR: (1e-6, 1.0)})
        assert second.restore(json.loads(json.dumps(first.state())))
        for pool in (first, second):
            self.advance(pool, 500, 0.0, 0.01)
        assert first.state() == second.state()

    @pytest.mark.parametrize("value", [1.0, 4.0, 16.0, 64.0, 100.0])
    def test_proposals_are_integers_in_their_ranges_and_others_than_the_models(self, value):
        ranges, values = {WIDTH: (4.0, 64.0), DEPTH: (1.0, 4.0)}, {WIDTH: value, DEPTH: 2.0}
        proposals = [proposal for _, proposal in SearchSpace(ranges, 3).around(values, 0)]
        assert {proposal[DEPTH] for proposal in proposals} == {1.0, 2.0, 3.0}
        assert proposals[0][WIDTH] > value or value >= 64.0  # the first is larger
        for proposal in proposals:
            assert proposal != values
            for key, (low, high) in ranges.items():
                assert proposal[key].is_integer()
                assert low <= proposal[key] <= high or proposal[key] == values[key]


def test_a_space_with_few_values_runs_out_of_proposals_and_goes_on():
    pool = ChallengerPool(SearchSettings(challengers=64, space={LR: (1e-4, 1.0)}), GIVEN, 0)
    assert 0 < len(pool.begin()) < 64
    advance(pool, 200)
    assert pool.history


@pytest.mark.parametrize("value", [1e-9, 1e-4, 1.0, 7.0])
def test_proposals_are_in_their_ranges_and_other_settings(value):
    ranges = {LR: (1e-6, 1.0), WEIGHT_DECAY: (0.0, 0.5)}
    values = {LR: value, WEIGHT_DECAY: 0.1}
    proposals = [proposal for _, proposal in SearchSpace(ranges, 3).around(values, 5)]
    assert proposals == [proposal for _, proposal in SearchSpace(ranges, 3).around(values, 5)]
    assert any(each[LR] != value and each[WEIGHT_DECAY] != 0.1 for each in proposals)
    lower, higher, *_ = SearchSpace(ranges, 3).around({LR: 1e-3, WEIGHT_DECAY: 0.1}, 0)
    assert lower[1][LR] < 1e-3 < higher[1][LR]
    for proposal in proposals:
        assert proposal != values
        for key, (low, high) in ranges.items():
            assert low <= proposal[key] <= high or proposal[key] == values[key]


def test_a_search_begins_with_settings_over_the_range_and_goes_on_around_the_models():
    ranges, values = {LR: (1e-6, 1.0), WEIGHT_DECAY: (0.0, 0.5)}, {LR: 1e-3, WEIGHT_DECAY: 0.1}
    spread = [proposal for _, proposal in SearchSpace(ranges, 3).spread(values, 0)]
    assert [each[LR] for each in spread if each[LR] != 1e-3] == pytest.approx([10**-2.25, 10**-1.5, 10**-3.75])
    assert {each[WEIGHT_DECAY] for each in spread} == {0.1, 0.25, 0.3125, 0.375, 0.1875}
    pool = pool_of(challengers=8)
    tried = [each.values[LR] for each in pool.begin()]
    assert tried[:4] == pytest.approx([10**-3, 10**-2.25, 10**-1.5, 10**-3.75])
    assert all(1e-5 <= each <= 1e-3 for each in tried[4:])
    pool.take({LR: 0.01})
    assert all(1e-3 <= each.values[LR] <= 0.1 for each in pool.begin())  # never spread again
    networks = {LR: (1e-6, 1.0), WIDTH: (4.0, 64.0)}
    assert not list(SearchSpace(networks, 3).spread({LR: 1e-3, WIDTH: 8.0}, 0))


@pytest.mark.parametrize(
    ("errors", "learns"), [((2.0, 1.0), True), ((2.0, 1.95), False), ((-0.5, -0.9), True), ((1, 3), False)]
)
def test_a_model_that_learns_is_replaced_only_by_what_is_better_for_a_first_lease(errors, learns):
    """The errors of the first and of all later steps, or scores with another sign."""
    pool = pool_of(challengers=1)
    for step in range(40):
        pool.level.add(errors[step > 0])
    (challenger,) = pool.begin()
    while not pool.observe(challenger, 0.5):
        assert challenger in pool.live
    assert (challenger.steps == FIRST_LEASE) == learns
    assert challenger.steps >= 10


def test_an_advantage_that_does_not_last_for_a_first_lease_promotes_nothing():
    pool = pool_of(challengers=1)
    for step in range(40):
        pool.level.add(0.5 if step else 1.0)
    (challenger,) = pool.begin()
    for step in range(FIRST_LEASE):
        assert not pool.observe(challenger, 0.5 if step < 30 else -0.2)
    assert challenger not in pool.live


def test_others_go_on_at_a_promotion_with_evidence_that_begins_again():
    pool = pool_of(challengers=3)
    first, second, third = pool.begin()
    for each in (first, second, third):
        pool.observe(each, 0.01)
    pool.promote(second)
    assert (pool.values, pool.live) == (second.values, [first, third])
    assert [(each.rank, each.steps, each.slot) for each in pool.live] == [(1, 0, 0), (2, 0, 2)]
    assert all(each.better.seen == each.worse.seen == 0 for each in pool.live)
    assert [each.outcome for each in pool.history] == ["promoted"]
    (begun,) = pool.begin()
    assert (begun.rank, begun.slot) == (3, 1)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"learner.batch_size": [1, 9]}, "learner.batch_size cannot be changed between two steps of one model"),
        ({"model.embedding": [8, 64]}, f"keys that can are {LR}"),
        ({WIDTH: [8, 64.5]}, f"{WIDTH} = [8, 64.5] is no range of integers"),
        ({WIDTH: [-1, 64]}, "is no range of integers"),
        ({WIDTH: [64, 8]}, "is no range of integers"),
        ({WIDTH: [1, math.inf]}, "is no range of integers"),
        ({LR: [0, 1]}, "is no range"),
        ({LR: [1, 0.1]}, "is no range"),
        ({MAX_GRAD_NORM: [1, math.inf]}, "is no range"),
        ({MOMENTUM: [0.5, 1.0]}, "momentum grows without end"),
        ({}, "at least 1 item"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_by_a_sentence(space, said):
    with pytest.raises(ValidationError, match=said.replace("[", "\\[")):
        SearchSettings.model_validate({"space": space})


@pytest.mark.parametrize(
    ("space", "before", "after", "expected"),
    [
        ({MOMENTUM: (0.5, 0.99)}, (None, 1.0), (0.9, 1.0), "the optimizer has none"),
        ({MAX_GRAD_NORM: (0.1, 10)}, (None, math.inf), (None, 1.0), "which is inf"),
    ],
)
def test_a_key_is_searched_only_where_the_learner_has_a_number_for_it(space, before, after, expected):
    search = SearchSettings(space=space)
    ((key, said),) = search_conflicts(search, *before)
    assert (key, expected in said) == ("space", True)
    assert not list(search_conflicts(search, *after))


@pytest.mark.parametrize(
    ("promote", "args", "deterministic", "expected"),
    [
        ("alert", {}, False, ("space", "[model].args has no integer width")),
        ("alert", {"width": "16"}, False, ("space", "[model].args has no integer width")),
        ("alert", {"width": True}, False, ("space", "[model].args has no integer width")),
        ("auto", {"width": 16}, False, ("promote", 'search.promote = "auto" does not go with model.args.width')),
        ("alert", {"width": 16}, True, ("space", "does not go with learner.deterministic = true")),
        ("alert", {"width": 16}, False, None),
    ],
)
def test_networks_are_searched_only_where_they_are_reported(promote, args, deterministic, expected):
    search = SearchSettings(space={WIDTH: (4, 64)}, promote=promote)
    said = list(search_conflicts(search, None, 1.0, args, deterministic=deterministic))
    assert [key for key, _ in said] == ([] if expected is None else [expected[0]])
    assert expected is None or expected[1] in said[0][1]
