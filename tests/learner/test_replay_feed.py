"""The feed of old events, with and without a store."""

from types import SimpleNamespace
from typing import Any

from learner.replay_feed import NoFeed, StoreFeed


def test_a_feed_with_a_store_goes_on_from_the_checkpoint_of_a_strategy_that_replays_nothing() -> None:
    part: Any = SimpleNamespace()
    feed = StoreFeed(part, part, part, part, batch_size=1, step_size=1, timer=part)
    feed.restore(NoFeed().state())
    assert feed.state() == {"debt": 0.0}
    NoFeed().restore({"debt": 0.5})
