"""Who is sampled: never twice, never what has left, and each as often as its sampler says."""

import math
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.replay.policies import SAMPLERS, SamplerContext
from anabranch.replay.reservoir.event_table import EventTable, records_of
from anabranch.replay.sampling.base import Sampler

HOUR = timedelta(hours=1)
PLAIN = ["uniform", "class-balanced", "recent", "loss"]
"""Those that need no embeddings."""
SLOTS, LIMIT = 3000, 2500
each_sampler = pytest.mark.parametrize("name", PLAIN)


class Bench:
    """An index and a sampler over it. Which slots events get is random, seeded by `luck`."""

    def __init__(self, name, luck=0):
        self.name = name
        self._slots = np.random.default_rng(luck).permutation(SLOTS).astype(np.int32)
        self.event_table = EventTable(SLOTS, LIMIT)
        self.event_table.register([TopicPartition("events", 0)])
        self.sampler: Sampler = SAMPLERS[name](SamplerContext(self.event_table, SLOTS, 4, HOUR, None))
        self._next = 0

    def add(self, n, label=(0,), hours=(0,)):
        """Add n events of offsets that go on from the last ones, and return their slots."""
        slots, self._slots = self._slots[:n], self._slots[n:]
        zeros = np.zeros(n, np.int64)
        columns = {
            "offset": np.arange(self._next, self._next + n),
            "label": np.resize(label, n),
            "time_s": (np.resize(hours, n) * 3600).astype(np.uint32),
            **dict.fromkeys(("key_hash", "partition", "row"), zeros),
        }
        self._next += n
        self.event_table.append(slots, np.zeros(n), 0, records_of(columns))
        self.sampler.add(slots)
        return slots

    def drop(self, gone):
        """Let the events of some offsets leave."""
        left = self.event_table.keep(~np.isin(self.offsets(self.event_table.slots), gone))
        self._slots = np.concatenate([self._slots, left])
        self.sampler.remove(left)

    def sample(self, n, step=0):
        return self.sampler.sample(n, np.random.default_rng(step))

    def offsets(self, slots):
        return self.event_table.column("offset", slots)

    def positions(self, n, samples):
        """By position in a sample, how often each event was there."""
        counts = np.zeros((n, self._next), np.int64)
        for step in range(samples):
            counts[np.arange(n), self.offsets(self.sample(n, step).slots)] += 1
        return counts

    def restarted(self, luck):
        """Return what goes on from a checkpoint of this one, its events in other slots."""
        other, index, state = Bench(self.name, luck), self.event_table.copy(), self.sampler.state()
        state = {name: np.array(values) for name, values in state.items()}
        index["slot"], other._slots = other._slots[: len(index)], other._slots[len(index) :]
        other.event_table.restore(index, self.event_table.bases.tolist())
        other._next = self._next
        other.sampler.add(other.event_table.slots)
        other.sampler.restore(state)
        return other


def chi_square(counts, expected):
    """In standard deviations beyond its mean."""
    expected = expected * counts.sum() / expected.sum()
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.slow
@each_sampler
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), turns=st.integers(1, 15), restarts=st.booleans())
def test_no_event_comes_twice_or_after_it_has_left_and_a_restart_changes_no_sample(name, seed, turns, restarts):
    """Bit for bit: the same events in the same order with the same corrections, whatever slots they are in.

    The newest event stays: `recent` does not keep its time over a restart.
    """
    dice, one, two, held = np.random.default_rng(seed), Bench(name, 1), Bench(name, 2), set[int]()
    newest = (-1.0, -1)
    for turn in range(turns):
        n, labels, hours = int(dice.integers(0, 120)), dice.integers(-1, 4, 50), dice.integers(0, 3, 50) * 10.0**turn
        held |= set(range(one._next, one._next + n))
        times = np.resize(np.minimum(hours, 10**6), n).tolist()
        newest = max([newest, *((hour, one._next + index) for index, hour in enumerate(times))])
        gone = np.array([offset for offset in held if dice.random() < 0.3 and offset != newest[1]])
        held -= set(gone.tolist())
        losses = dice.exponential(size=LIMIT).astype(np.float32)
        losses[dice.random(LIMIT) < 0.1] = dice.choice([0.0, math.nan, math.inf, -1.0])
        requested = int(dice.integers(0, len(held) + 20))
        offsets, corrections = [], []
        for bench in (one, two):
            bench.add(n, labels, np.minimum(hours, 10**6))
            bench.drop(gone)
            choice = bench.sample(requested, turn)
            offsets.append(bench.offsets(choice.slots).tolist())
            corrections.append(None if choice.correction is None else choice.correction.tolist())
            bench.sampler.update_priorities(choice.slots, losses[: len(choice.slots)])
        assert offsets[0] == offsets[1]
        assert corrections[0] == corrections[1]
        assert len(offsets[0]) == len(set(offsets[0])) == min(requested, len(held))
        assert set(offsets[0]) <= held
        if corrections[0]:
            assert all(0 < each <= 1 for each in corrections[0])
        if restarts:
            two = two.restarted(turn)


class TestOrder:
    """A prefix of a sample is a fair sample: a step may use fewer events than were planned."""

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PLAIN)
    def test_equal_events_are_equally_frequent_at_every_position(self, name):
        """Four standard deviations are exceeded once in some ten thousand fair trials."""
        bench = Bench(name)
        bench.add(60, label=[0, 1, 2])
        positions = bench.positions(9, 3000)
        for index in (0, 1, 4, 8):
            assert abs(chi_square(positions[index], np.ones(60))) < 4.5, f"position {index}"

    def test_every_class_is_equally_frequent_at_every_position(self):
        bench = Bench("class-balanced")
        bench.add(300, label=[0] * 26 + [1] * 3 + [-1])
        for index in bench.positions(12, 2000)[[0, 1, 11]]:
            counts = np.bincount(bench.event_table.column("label", bench.event_table.slots) + 1, index, 3)
            assert abs(chi_square(counts, np.ones(3))) < 4.5


class TestEven:
    def test_each_class_comes_as_often_and_what_a_small_one_lacks_others_give(self):
        bench = Bench("class-balanced")
        bench.add(1000, label=[0])
        bench.add(100, label=[3])
        bench.add(30, label=[-1])
        bench.add(4, label=[1])
        for step in range(20):
            slots = bench.sample(64, step).slots
            counts = np.bincount(bench.event_table.column("label", slots) + 1, minlength=5)
            assert counts.tolist() == [20, 20, 4, 0, 20]
        counts = np.bincount(bench.event_table.column("label", bench.sample(66, 0).slots) + 1, minlength=5)
        assert sorted(counts.tolist()) == [0, 4, 20, 21, 21]

    @pytest.mark.slow
    def test_within_a_class_events_come_alike(self):
        bench = Bench("class-balanced")
        bench.add(40, label=[0, 0, 0, 1])
        counts = bench.positions(8, 4000).sum(axis=0)
        assert chi_square(counts[[offset for offset in range(40) if offset % 4 < 3]], np.ones(30)) < 4.5
        assert chi_square(counts[3::4], np.ones(10)) < 4.5


class TestRecent:
    @pytest.mark.slow
    def test_one_half_as_likely_for_each_half_life_that_it_is_older(self):
        """Enough samples to distinguish a factor of 1.8 or 2.2 from 2 in all of 4,000 trials."""
        bench = Bench("recent")
        bench.add(300, hours=np.repeat(np.arange(6), 50))
        counts = bench.positions(1, 5000)[0].reshape(6, 50).sum(axis=1)
        assert chi_square(counts, 2.0 ** np.arange(6)) < 4.5

    @pytest.mark.slow
    def test_no_span_of_time_is_too_long_or_too_far_back(self):
        """The scale moves; the oldest are as good as never sampled before the others are."""
        bench = Bench("recent")
        for hours in (300_000, 0, 301_000, 900_000, 5, 899_999):
            bench.add(10, hours=[hours])
        for step in range(100):
            offsets = bench.offsets(bench.sample(6, step).slots)
            assert set(offsets.tolist()) <= {*range(30, 40), *range(50, 60)}
        assert len(bench.sample(60, 1).slots) == 60
        counts = bench.positions(1, 3000)[0]
        assert chi_square(np.array([counts[30:40].sum(), counts[50:60].sum()]), np.array([2.0, 1.0])) < 4.5

    @pytest.mark.slow
    def test_a_time_of_the_far_future_is_erased_with_its_event(self):
        """Not at once, but with the next start: until then all others are as old as it makes them."""
        bench = Bench("recent")
        bench.add(1, hours=[1_000_000])
        poisoned = bench.sampler.state()["generation"]
        bench = Bench("recent")
        bench.add(100, hours=np.repeat([0, 1], 50))
        bench.sampler.restore({"positions": np.empty(0), "generation": poisoned})
        counts = bench.positions(1, 6000)[0].reshape(2, 50).sum(axis=1)
        assert chi_square(counts, np.array([1.0, 2.0])) < 4.5


@pytest.mark.slow
class TestLoss:
    def test_probability_and_correction_are_those_of_the_paper(self):
        """Enough samples to distinguish an exponent of 0.5 or 0.7 from 0.6, in 998 of 1,000 trials."""
        bench = Bench("loss")
        losses = np.geomspace(0.01, 50, 100).astype(np.float32)
        bench.sampler.update_priorities(bench.add(100), losses)
        weights = losses.astype(np.float64) ** 0.6
        assert chi_square(bench.positions(1, 8000)[0], weights) < 4.5
        choice = bench.sample(30)
        chosen = bench.offsets(choice.slots)
        expected = (100 * weights[chosen] / weights.sum()) ** -0.4
        assert choice.correction == pytest.approx(expected / expected.max(), rel=1e-6)

    def test_an_event_without_a_loss_gets_a_high_quantile_of_the_newest_losses(self):
        """Enough samples to distinguish 32 ** 0.6 from 1 and from 32 in all of 4,000 trials."""
        bench = Bench("loss")
        bench.sampler.update_priorities(bench.add(50), np.full(50, 32.0, np.float32))
        bench.sampler.update_priorities(bench.event_table.slots[10:50], np.full(40, 1.0, np.float32))
        bench.add(50)
        expected = np.array([*[8.0] * 10, *[1.0] * 40, *[8.0] * 50])
        assert chi_square(bench.positions(1, 5000)[0], expected) < 4.5

    @pytest.mark.parametrize("known", [2, 900])
    def test_one_outlier_says_nothing_of_events_that_come_after_it(self, known):
        bench = Bench("loss")
        slots = bench.add(known)
        losses = np.linspace(1.0, 2.0, known).astype(np.float32)
        losses[0] = 1e20
        bench.sampler.update_priorities(slots, losses)
        bench.sampler.update_priorities(
            slots[:1], np.array([1.0], np.float32)
        )  # it is learned, and its loss is small again
        bench.add(known)
        counts = bench.positions(1, 3000)[0]
        assert 1300 < counts[known:].sum() < 2100, "new events are sampled as others are, or a little sooner"

    def test_outliers_are_sampled_no_sooner_than_others_and_hard_events_are(self):
        bench = Bench("loss")
        slots, losses = bench.add(1000), np.full(1000, 0.1, np.float32)
        losses[:50], losses[50:60] = np.geomspace(1e9, 1e38, 50), 3200.0
        for _ in range(3):
            for some in np.array_split(np.random.default_rng(0).permutation(1000), 20):
                bench.sampler.update_priorities(slots[some], losses[some])
        counts = bench.positions(1, 4000)[0]
        assert chi_square(counts[:50], np.ones(50)) < 4.5
        weights = np.array([1.0, 32000**0.6, 1.0])
        sums = np.array([counts[:50].sum(), counts[50:60].sum(), counts[60:].sum()])
        assert chi_square(sums, weights * (50, 10, 940)) < 4.5

    def test_next_to_an_event_of_nearly_all_the_weight_others_are_sampled_in_proportion(self):
        bench = Bench("loss")
        slots = bench.add(101)
        bench.sampler.update_priorities(slots, np.array([1.0, *[1.0] * 50, *[32.0] * 50], np.float32))
        bench.sampler._weigh(slots[:1], 1e12)
        before = bench.sampler.state()
        first, second = bench.positions(2, 2000)
        assert first[0] == 2000
        assert chi_square(second[1:], np.array([1.0] * 50 + [8.0] * 50)) < 4.5
        after = bench.sampler.state()
        assert all(np.array_equal(before[name], after[name]) for name in before), "a sample changes no weight"

    def test_what_decides_for_new_events_is_bounded_and_outlives_a_restart(self):
        bench = Bench("loss")
        slots = bench.add(1000)
        for turn in range(10):
            bench.sampler.update_priorities(slots, np.full(1000, 32.0 if turn < 5 else 1.0, np.float32))
        assert bench.sampler.state()["newest"].nbytes == 4096
        other = bench.restarted(3)
        for each in (bench, other):
            each.add(1000)
        counts = other.positions(1, 1000)[0]
        assert abs(int(counts[1000:].sum()) - 500) < 80, "large losses of long ago decide no more"
        assert bench.offsets(bench.sample(50).slots).tolist() == other.offsets(other.sample(50).slots).tolist()

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_a_loss_that_is_no_number_changes_nothing(self, loss):
        bench = Bench("loss")
        slots = bench.add(20)
        bench.sampler.update_priorities(slots, np.arange(1, 21).astype(np.float32))
        before = bench.sampler.state()
        bench.sampler.update_priorities(slots[:7], np.full(7, loss, np.float32))
        after = bench.sampler.state()
        assert all(np.array_equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("loss", [0.0, -3.0, 1e-30])
    def test_an_event_without_any_loss_may_still_be_sampled(self, loss):
        bench = Bench("loss")
        bench.sampler.update_priorities(bench.add(20), np.full(20, loss, np.float32))
        assert chi_square(bench.positions(1, 2000)[0], np.ones(20)) < 4.5

    def test_one_huge_weight_leaves_room_for_the_others_in_a_sample(self):
        bench = Bench("loss")
        slots = bench.add(200)
        bench.sampler.update_priorities(slots, np.full(200, 1e-9, np.float32))
        bench.sampler._weigh(slots[:1], 3e38**0.6)
        choice = bench.sample(100)
        assert bench.offsets(choice.slots)[0] == 0
        assert len(set(choice.slots.tolist())) == 100
        assert choice.correction is not None
        assert np.isfinite(choice.correction).all()


@pytest.mark.parametrize("before", PLAIN)
@pytest.mark.parametrize("after", PLAIN)
def test_what_another_sampler_left_in_a_checkpoint_does_no_harm(before, after):
    one, two = Bench(before), Bench(after)
    one.sampler.update_priorities(one.add(30), np.arange(30).astype(np.float32))
    two.add(30)
    two.sampler.restore(one.sampler.state())
    assert len(set(two.sample(20).slots.tolist())) == 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("class-balanced", "needs schema.label.classes"),
        ("agreement", "needs model.embedding"),
        ("similar", "needs model.embedding"),
        ("diverse", "needs model.embedding"),
    ],
)
def test_a_sampler_that_lacks_what_it_needs_is_refused(name, message):
    with pytest.raises(SettingsError, match=message):
        SAMPLERS[name](SamplerContext(EventTable(10, 10), 10, None, HOUR, None))
