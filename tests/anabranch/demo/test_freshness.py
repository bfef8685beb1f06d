"""Events are matched with the first reply that has learned them."""

import pytest

from anabranch.demo.freshness import Freshness


@pytest.fixture
def freshness():
    return Freshness()


def samples(freshness, *quantiles):
    return [freshness.seconds(quantile) for quantile in quantiles]


def test_without_samples_there_is_no_figure(freshness):
    freshness.sent("events:0", 5, 1.0)
    freshness.replied({"events:0": 4}, 2.0)
    assert freshness.seconds(0.5) is None


def test_an_event_is_as_fresh_as_the_first_reply_that_has_learned_it(freshness):
    freshness.sent("events:0", 5, 1.0)
    freshness.replied({"events:0": 4}, 1.5)
    freshness.replied({"events:0": 5}, 1.75)
    freshness.replied({"events:0": 9}, 3.0)
    assert samples(freshness, 0, 0.99) == [0.75, 0.75]


def test_partitions_are_matched_by_themselves(freshness):
    freshness.sent("events:0", 5, 1.0)
    freshness.sent("events:1", 5, 1.0)
    freshness.replied({"events:0": 8, "events:1": 4}, 2.0)
    assert samples(freshness, 0.99) == [1.0]
    freshness.replied({"events:1": 5}, 5.0)
    assert samples(freshness, 0, 0.99) == [1.0, 4.0]


def test_an_event_recorded_after_its_reply_counts_from_that_reply(freshness):
    freshness.replied({"events:0": 3}, 1.0)
    freshness.replied({"events:0": 10}, 2.0)
    freshness.replied({"events:0": 20}, 9.0)
    freshness.sent("events:0", 7, 1.5)
    assert samples(freshness, 0) == [0.5]


def test_a_reply_of_an_older_version_changes_nothing(freshness):
    freshness.replied({"events:0": 10}, 2.0)
    freshness.replied({"events:0": 3}, 3.0)
    freshness.sent("events:0", 3, 1.0)
    assert samples(freshness, 0) == [1.0]


def test_events_out_of_order_are_all_matched_and_quantiles_are_of_all(freshness):
    for offset in reversed(range(100)):
        freshness.sent("events:0", offset, 0.0)
    for offset in range(100):
        freshness.replied({"events:0": offset}, offset + 1.0)
    assert samples(freshness, 0, 0.5, 0.99, 1) == [1.0, 51.0, 100.0, 100.0]
